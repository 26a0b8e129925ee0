"""Does your trainer compute what the ScaleRL paper's recipe asks? 149 small cases put to its own functions.

PROBLEM. Trainers that offer the same losses differ in what surrounds them: which tokens a sum is divided by, what the
std is taken of, which rows a filter keeps. All of them train, and none says so.

IDEA. An oracle (oracle.py) computes what each case of conformance.json must give, from the papers' equations. You write
an adapter: an object with small methods that call your trainer's functions, as conformance.md describes them. Of a loss
d(loss) / d(log-prob) is compared, token by token, over microbatches and ranks. A verdict is

    agrees                      the papers' value, off by at most 2e-3 of the largest (log-probs: 1e-5)
    another definition: NAME    another value that somebody uses on purpose, and which
    differs                     "x k": k times as large; "as if": what a common slip gives; else the worst number
    error                       the adapter raised, gave no answer in a minute, or none that can be compared
    not offered                 the trainer has no such thing: the method raised NotImplementedError, or is None
    not asked                   the adapter has no such method

Most cases differ from a simpler one in the one thing that they are named for. Where the simpler one agrees, the report
ends with this one as a first cause: what follows from it deviates too.

Cases are of a class: `recipe`, what ScaleRL's paper asks; `other`, what other papers ask; `robustness`, rounding and
overflow, which never sets the exit code. That is 1 if a verdict of the first two is another definition, differs or
error, but for what the papers leave open: ddof 1, whether an empty row counts, which unbiased gradient a KL has.

SIMPLIFIED. Functions and not loops are compared, so nothing here tests how old a token may get.

    python lab/conformance.py my_module:Adapter       a row a case that was answered, then how many were not
    python lab/conformance.py --json vectors.json     inputs and values, for what cannot import torch; cases of one name
                                                      are ways to ask one question

>>> class Mine:
...     def loss(self, part, step):
...         if part.loss != "cispo" or part.average != "token":
...             raise NotImplementedError
...         rho = (part.logprobs - part.behaviour).exp()
...         weight = rho.detach().clamp(max=part.options["cap"])
...         token_loss = -weight * part.advantages[:, None] * part.logprobs
...         return (token_loss * part.mask).sum() / step.mask.sum() * part.ranks
...     def penalty(self, lengths, max_length, cache_length):  # it forgets its floor of -1
...         return (max_length - cache_length - lengths).clamp(max=0) / cache_length
>>> [row.verdict for row in check(Mine()) if row.topic == "penalty"]
['agrees', 'differs']
>>> [(row.kind, row.case, row.detail) for row in check(Mine()) if row.case == "-1 beyond L_max"]
[('other', '-1 beyond L_max', '-4 for -1')]
"""

import importlib
import json
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAB = Path(__file__).resolve().parent
sys.path.insert(0, str(LAB.parent))
from lab import oracle
from lab.oracle import Batch, expected_advantages, expected_gradient, mean_of_means, select, without_dropped

QUESTIONS = LAB / "conformance.json"
SECONDS = 60.0  # that an adapter may take for one case
AVERAGES = ("sample", "prompt", "token", "constant")
CLASSES = ("recipe", "other", "robustness")
NOT_ANSWERED = ("not offered", "not asked")
OPEN = ("ddof 1", "an empty row counts", "the gradient of k2")  # the papers say neither yes nor no
NO_DEVIATION = ("agrees", *NOT_ANSWERED, *(f"another definition: {name}" for name in OPEN))

HINTS = {  # what a detail begins with
    "x -": "the sign",
    "x ": "a count, a divisor, microbatches or ranks",
    "NaN": "an exp that overflows, 0 / 0, or what lies outside the mask",
}


@dataclass
class Case:
    """A question to the method of this name, and its answers."""

    method: str
    name: str
    source: str  # paper and equation; the mistake that the case catches
    inputs: list
    expected: Any
    also: dict[str, Any] = field(default_factory=dict)  # other definitions that are in use
    kind: str = "other"  # its class
    after: list[str] = field(default_factory=list)  # simpler cases, from which this one differs in what its name says


@dataclass
class Row:
    """What came out of one case."""

    topic: str  # the method; of `loss` which loss
    case: str
    verdict: str
    detail: str
    source: str
    kind: str = "other"
    after: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------- the questions of the JSON


def ratio_step(average: str, question: dict) -> Batch:
    """A step of these ratios π / π_gen; each row is a group. A ratio below 0, or NaN, does not train.

    Where a case is not `fine`, log-probs are multiples of 1/32, which bfloat16 holds too."""
    rows = [[float(ratio) for ratio in row.split()] for row in question["ratios"].split("|")]
    rho = torch.tensor(rows, dtype=torch.float64)  # (N, T)
    grid = 2.0**20 if question.get("fine") else 32.0

    def log(ratio: Tensor) -> Tensor:
        return (ratio.log() * grid).round() / grid

    logprobs = torch.full_like(rho, question.get("log_pi", -3.0))
    behaviour = logprobs - log(rho.abs())
    old = logprobs  # the batch's first update
    if question["old"]:  # π_old / π_gen
        old = behaviour + log(torch.tensor(question["old"], dtype=torch.float64))
    A = torch.tensor(question["advantages"])
    ids = torch.tensor(question.get("group_ids", range(len(rho))))
    loss, options, layout = question["loss"], question["options"], [[list(range(len(rho)))]]
    return Batch(logprobs, behaviour, old, (rho > 0).float(), A, ids, layout, loss, options, average)


def average_step(average: str, question: dict) -> Batch:
    """On-policy rows with this mask, with A = 1 each."""
    width = max(map(len, question["mask"]))
    mask = torch.tensor([[float(bit) for bit in row.ljust(width, "0")] for row in question["mask"]])
    logprobs = torch.full_like(mask, -3.0, dtype=torch.float64)
    ids = torch.tensor(question["group_ids"])
    step = Batch(logprobs, logprobs, logprobs, mask, torch.ones(len(mask)), ids, question["layout"], average=average)
    return replace(step, dropped=question["dropped"])


def loss_case(question: dict, source: str, step: Batch, kind: str) -> Case:
    """A question to `loss`, with the other definitions in use."""
    asked = without_dropped(step)
    counted = expected_gradient(asked, empty_counts=True)
    microbatches = [rows for parts in step.layout for rows in parts]
    of_ranks = [joined(parts) for parts in step.layout]
    of_all_ranks = [joined(parts) for parts in zip(*step.layout, strict=True)]
    also = {
        "an empty row counts" + " as a token" * (step.average == "token"): counted,
        "the mean of the ranks' means": mean_of_means(asked, of_ranks),
        "the mean of the microbatches' means": mean_of_means(asked, microbatches),
        "the mean of the means of all ranks' microbatches": mean_of_means(asked, of_all_ranks),
        "divided once more by the number of microbatches": expected_gradient(asked) / microbatches_of(asked)[:, None],
    }
    if step.dropped:
        also = {"dropped rows stay in the average": counted}
    if step.loss in ("cispo", "clip", "gspo"):
        also["π / π_old"] = expected_gradient(replace(asked, behaviour=step.old))
    if step.loss == "cispo":
        also["cap 1 + 5"] = expected_gradient(replace(step, options={"cap": 6.0}))
        also["a lower bound of .8"] = expected_gradient(replace(step, options=step.options | {"floor": 0.8}))
        also["a product of two caps"] = expected_gradient(replace(step, loss="two caps"))
    if step.loss == "clip":
        also["a dual clip of 3"] = expected_gradient(replace(step, options=step.options | {"dual": 3.0}))
    expected = expected_gradient(asked)
    if step.loss == "gspo":  # which Eq. 5 averages over sequences: who has another average only is asked with that
        also = {f"its {step.average} average": expected} | also
        expected = expected_gradient(replace(asked, average="sample"))
    after = [name.format(average=step.average) for name in question["after"]]
    return Case("loss", question["name"], source, [step], expected, also, kind, after)


def microbatches_of(step: Batch) -> Tensor:
    """(N,): how many the rank of a row has."""
    counts = torch.ones(len(step.mask))
    for parts in step.layout:
        counts[joined(parts)] = len(parts)
    return counts


def mistakes(step: Batch) -> Iterator[tuple[str, Tensor]]:
    """Gradients that nobody means: common slips in a loss."""
    mask = step.mask
    late = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    early = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    rounded = step.behaviour.bfloat16().double()
    for name, changes in {
        "the mask came one token late": {"mask": late},
        "the mask came one token early": {"mask": early},
        "what lies before the last token of a row trained": {"mask": mask.flip(1).cummax(1).values.flip(1)},
        "the generator's log-probs came in bfloat16": {"behaviour": rounded},
        "there were no ratio": {"loss": "on_policy"},
        "the ratio were π_gen / π": {"logprobs": step.behaviour, "behaviour": step.logprobs},
        **{f"the average were that of {average}": {"average": average} for average in AVERAGES},
    }.items():
        yield name, expected_gradient(replace(step, **changes))
    whole = expected_gradient(replace(step, mask=torch.ones_like(mask)))
    yield "padding and forced tokens counted in the divisor", mask * whole
    if step.loss == "cispo":
        cap = step.options["cap"]
        none_above = replace(step, loss="icepop", options={"high": cap})
        yield "a token above the cap had no gradient", expected_gradient(none_above)
        below = (step.logprobs - step.behaviour).exp() < cap
        with_ratio = torch.where(below, 1 + step.logprobs, 1.0) * expected_gradient(step)
        yield "the ratio had a gradient", with_ratio
    if step.loss == "clip":
        both = {"low": 1 - step.options["low"], "high": 1 + step.options["high"]}
        yield "the clip ignored the sign of A", expected_gradient(replace(step, loss="icepop", options=both))
    if step.loss in ("icepop", "dppo", "deepseek", "m2po"):
        signs = torch.where(step.advantages < 0, -1.0, 1.0)
        factors = expected_gradient(replace(step, advantages=signs))
        yield "masked tokens left the average", expected_gradient(replace(step, mask=mask * (factors != 0)))


def joined(parts: Iterable[list[int]]) -> list[int]:
    return [row for rows in parts for row in rows]


def advantage_case(question: dict, how: str, definitions: list[str]) -> Case:
    """A question to `advantages`, or of a batch with its prompts to `prepare`, with the other definitions in use."""
    if "prompts" in question:
        method, expect, columns = "prepare", oracle.expected_batch, ("rewards", "prompts", "group_ids", "truncated")
        inputs = [*(question[name] for name in columns), how]
    else:
        method, expect = "advantages", expected_advantages
        inputs = [question["rewards"], question["group_ids"], how, question["lengths"]]
    also = {definition: expect(*inputs, definition) for definition in definitions}
    name, source, kind = (question[key] for key in ("name", "source", "kind"))
    return Case(method, name, source, inputs, expect(*inputs), also, kind, question["after"])


def all_cases() -> list[Case]:
    """149 questions. Cases of one name are ways to ask the same, each asked if the one before it is refused."""
    questions = json.loads(QUESTIONS.read_text())
    cases = []
    for average in AVERAGES:
        paper = "2503.20783" if average == "constant" else "2510.13786 section 3.2"
        for question in questions["averages"]:
            if average in question.get("averages", average):
                after = [f"{average} average: {name}" for name in question["after"]]
                after += [f"sample average: {question['name']}"] * (average != "sample")
                named = {"name": f"{average} average: {question['name']}", "after": after}
                kind = "recipe" if average == "prompt" else "other"
                source = f"{paper}; {question['mistake']}"
                cases.append(loss_case(named, source, average_step(average, question), kind))
    for question in questions["losses"]:
        for average in ("sample", "token", "prompt"):
            step = ratio_step(average, question)
            cases.append(loss_case(question, question["source"], step, question["kind"]))
    for question in questions["splits"]:
        for average, layout in product(question["averages"], questions["layouts"]):
            if average not in layout.get("averages", average):
                continue
            step = average_step(average, layout)
            behaviour = step.logprobs - 3 / 32  # a ratio of 1.1
            old = behaviour if question["old"] else step.logprobs
            loss, options = question["loss"], question["options"]
            near = replace(step, behaviour=behaviour, old=old, loss=loss, options=options)
            simpler = ["2 microbatches", "2 ranks"] + ["groups cut across ranks"] * (average == "prompt")
            after = question["after"] + [f"{average} average: {name}" for name in simpler]
            source = "an average of this loss alone"
            cases.append(loss_case(question | {"after": after}, source, near, question["kind"]))
    for question in questions["advantages"]:
        cases += [advantage_case(question, how, questions["definitions"]) for how in question["how"]]
    for question in questions["batches"]:
        cases += [advantage_case(question, how, questions["batch definitions"]) for how in question["how"]]
    inputs, exact, rounded = oracle.bf16_head()
    hidden, weight, targets = inputs
    whole = [hidden.round(), weight.round(), targets]
    of_whole = (whole[0].double() @ whole[1].double().T).log_softmax(-1)[targets, targets]
    for method, of in (("logprobs", ""), ("generator_logprobs", " of the generator")):
        simple = f"FP32 softmax{of}, of logits that bfloat16 holds"
        source = "2510.13786 section 3.2; "
        cases.append(Case(method, simple, source + "the softmax is rounded", whole, of_whole, kind="recipe"))
        name, mistake = f"FP32 product{of}, of bfloat16 factors", source + "the product is rounded to bfloat16"
        also = {"bfloat16 logits": rounded}
        cases.append(Case(method, name, mistake, inputs, exact, also, "recipe", [simple]))
    return [*cases, *(Case(**question) for question in questions["others"])]


# ---------------------------------------------------------------------------------------------------------- the harness


def gradient(adapter: Any, step: Batch) -> Tensor:
    """(N, T) of -d(loss) / d(log π): summed over microbatches, averaged over ranks."""
    absent = [] if getattr(adapter, "masks_dropped", False) else step.dropped
    layout = [[[row for row in rows if row not in absent] for rows in parts] for parts in step.layout]
    leaf = step.logprobs.float().requires_grad_()
    step = replace(
        without_dropped(step),
        logprobs=leaf,
        behaviour=step.behaviour.float(),
        old=step.old.float(),
        ranks=len(layout),
        layout=layout,
    )
    everything = select(step, [row for row in range(len(leaf)) if row not in absent])
    total = torch.zeros_like(leaf)
    if hasattr(adapter, "gradient"):
        total[everything.rows] = torch.as_tensor(adapter.gradient(everything)).float()
        return total
    for parts in layout:
        for rows in parts:
            loss = adapter.loss(select(step, rows, parts=len(parts)), everything)
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise TypeError(f"loss must return a tensor that has a gradient, not {loss!r:.40}")
            (part,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            total -= part / len(layout)
    return total


def ask(adapter: Any, case: Case) -> Any:
    """What the adapter answers. Lists of numbers become tensors, but for histories and token ids."""
    if case.method == "loss":
        return gradient(adapter, case.inputs[0])
    inputs = case.inputs
    if case.method not in ("history", "interrupt"):
        inputs = [torch.tensor(x) if isinstance(x, list) else x for x in inputs]
    method = getattr(adapter, case.method)
    if case.method in ("kl", "kl_sampled"):
        leaf = inputs[0].requires_grad_()
        terms = method(*inputs)
        return torch.cat([terms, *torch.autograd.grad(terms.sum(), leaf)])
    if case.method == "prepare":
        advantages, trains = (torch.as_tensor(column).float() for column in method(*inputs))
        return torch.stack([torch.where(trains > 0, advantages, 0.0), trains])
    return method(*inputs)


def in_time(function: Callable[[], Any]) -> Any:
    """What the function returns or raises; TimeoutError after `SECONDS`. Its thread is then left to itself."""
    results: queue.Queue = queue.Queue()

    def run() -> None:
        try:
            results.put((function(), None))
        except (Exception, SystemExit) as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no answer in {SECONDS:g} s; this method is not asked again") from None
    if error:
        raise error
    return result


def check(adapter: Any) -> list[Row]:
    """One row a question. Never raises what the adapter raises."""
    rows: dict[str, Row] = {}
    hanging: dict[str, Exception] = {}  # methods that gave no answer in time
    for case in all_cases():
        if case.name in rows and rows[case.name].verdict not in NOT_ANSWERED:
            continue
        step = case.inputs[0] if case.method == "loss" else None
        method = "gradient" if step and hasattr(adapter, "gradient") else case.method
        verdict, detail = "not asked", ""
        try:
            needed = [method, "filter"] if step and step.dropped else [method]
            if all(hasattr(adapter, name) for name in needed):
                if None in (getattr(adapter, name) for name in needed):
                    raise NotImplementedError
                if method in hanging:
                    raise hanging[method]
                verdict, detail = judge(case, in_time(partial(ask, adapter, case)))
        except NotImplementedError:
            verdict = "not offered"
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError):
                hanging[method] = error
            verdict = "error"
            detail = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        topic = step.loss if step else method
        rows[case.name] = Row(topic, case.name, verdict, detail, case.source, case.kind, case.after)
    return list(rows.values())


def judge(case: Case, answer: Any) -> tuple[str, str]:
    """(verdict, detail)."""
    if case.method in ("history", "interrupt"):
        if isinstance(answer, tuple | set):
            answer = list(answer)
        expected = case.expected
        if isinstance(answer, list) and expected and None in expected:  # this case asks for a part of the answer
            pairs = [pair for pair in zip(answer, expected, strict=True) if pair[1] is not None]
            answer, expected = (list(part) for part in zip(*pairs, strict=True))
        return ("agrees", "") if answer == expected else ("differs", f"{answer} for {expected}")
    actual = torch.as_tensor(answer).detach().double()
    expected = torch.as_tensor(case.expected).double()
    if actual.shape != expected.shape:
        return "error", f"shape {tuple(actual.shape)} for {tuple(expected.shape)}"
    if not actual.isfinite().all():
        return "differs", "NaN or infinity" + " in the gradient" * (case.method == "loss")
    tolerance = 1e-5 if "logprobs" in case.method else 2e-3  # of the largest expected value

    def equal(values: Tensor) -> bool:
        return float((actual - values).abs().max()) <= tolerance * (float(expected.abs().max()) or 1.0)

    if equal(expected):
        return "agrees", ""
    for name, values in case.also.items():
        if equal(torch.as_tensor(values).double()):
            return f"another definition: {name}", ""
    if case.method == "loss":
        step = without_dropped(case.inputs[0])
        for name, values in mistakes(replace(step, average="sample") if step.loss == "gspo" else step):
            if equal(values):
                return "differs", f"as if {name}"
    squares = float(expected.square().sum())
    factor = float((actual * expected).sum()) / squares if squares else 0.0
    if factor and equal(expected * factor):
        return "differs", f"x {factor:.3g}"
    worst = int((actual - expected).abs().argmax())
    return "differs", f"{actual.flatten()[worst]:.3g} for {expected.flatten()[worst]:.3g}"


def first_causes(rows: list[Row]) -> list[Row]:
    """Deviations that no simpler case shares, robustness too."""
    after = {row.case: row.after for row in rows}
    wrong = {row.case for row in rows if row.verdict not in NO_DEVIATION}

    def simpler(case: str) -> set[str]:
        return {name for near in after.get(case, []) for name in (near, *simpler(near))}

    return [row for row in rows if row.case in wrong and not wrong & simpler(row.case)]


def is_deviation(row: Row) -> bool:
    """Whether the papers say otherwise."""
    return row.kind != "robustness" and row.verdict not in NO_DEVIATION


def hint(row: Row) -> str:
    """Where to look for a deviation, by what came out; the case's own mistake only where that says nothing."""
    if row.verdict in (*NO_DEVIATION, "error"):
        return ""
    paper, _, mistake = row.source.rpartition("; ")
    guesses = [guess for start, guess in HINTS.items() if row.detail.startswith(start)] or [f"made for: {mistake}"]
    words = "; ".join(filter(None, [paper, *(guesses[:1] if row.verdict == "differs" else [])]))
    return f"   [{words}]" if words else ""


def main(argv: list[str]) -> int:
    """Exit code: 0 no deviation, 1 some, or nothing that agrees, 2 no such adapter."""
    if argv[:1] == ["--json"] and len(argv) == 2:
        text = json.dumps([vars(case) for case in all_cases()], default=as_data)
        try:
            Path(argv[1]).write_text(text.replace(", NaN", ", null"))  # JSON has no NaN
        except OSError as error:
            print(f"conformance.py: {error}", file=sys.stderr)
            return 2
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 0
    sys.path.insert(0, "")
    try:
        module, name = argv[0].split(":")
        adapter = getattr(importlib.import_module(module), name)()
    except (Exception, SystemExit) as error:
        print(f"conformance.py: {argv[0]} is no MODULE:CLASS that can be made ({error!r})", file=sys.stderr)
        return 2
    by_settings = {"nearest": check(adapter)}
    if hasattr(adapter, "settings"):
        adapter.settings = "default"
        by_settings["default"] = check(adapter)
    rows = by_settings["nearest"]
    for columns in zip(*by_settings.values(), strict=True):
        row = columns[0]
        if row.verdict not in NOT_ANSWERED:
            print(f"{row.kind:10} {row.topic:10} {row.case:56} {row.verdict} {row.detail}".rstrip() + hint(row))
        if (columns[-1].verdict, columns[-1].detail) != (row.verdict, row.detail):
            print(f"{'':10} by default {row.case:56} {columns[-1].verdict} {columns[-1].detail}".rstrip())
    for settings, column in by_settings.items():
        for kind, counts in score(column).items():
            print(f"{settings:8} {kind:10} " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    asked = Counter(row.topic for row in rows)
    answered = Counter(row.topic for row in rows if row.verdict not in NOT_ANSWERED)
    print("answered: " + ", ".join(f"{topic} {answered[topic]} of {n}" for topic, n in asked.items()))
    for row in first_causes(rows):
        mistake = row.source.rpartition("; ")[2]
        agree = " and ".join(other.case for other in rows if other.case in row.after and other.verdict == "agrees")
        print(f"first cause: {row.case}: {row.verdict} {row.detail}".rstrip(), end="")
        print(f"; made for: {mistake}" + f"; simpler, and agrees: {agree}" * bool(agree))
    return 1 if any(map(is_deviation, rows)) or not any(row.verdict == "agrees" for row in rows) else 0


def score(rows: list[Row]) -> dict[str, Counter]:
    """How many of each class have which verdict."""
    return {kind: Counter(row.verdict.split(":")[0] for row in rows if row.kind == kind) for kind in CLASSES}


def as_data(value: Any) -> Any:
    """A step as a dict, a tensor as lists."""
    return value.float().tolist() if isinstance(value, Tensor) else asdict(value)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
