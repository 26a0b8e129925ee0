"""Is your trainer's ScaleRL the paper's ScaleRL? 84 small cases put to your own functions.

PROBLEM. Trainers that offer the same losses differ in what surrounds them: which tokens a sum is divided by, what the
std is taken of, whether a group with equal rewards is really dead in float32. All of them train, and none says so.

IDEA. An oracle (oracle.py) computes what each case of conformance.json must give, from the papers' equations. You write
an adapter: an object with small methods that call your trainer's functions. Every method is optional.

    loss(part, step)                     what the trainer sends to backward() for the microbatch `part` of the optimizer
                                         step `step`, both a `Batch`: a scalar tensor
    advantages(rewards, group_ids, how, lengths)      (N,); how: prompt, batch or none; lengths: tokens of each row
    filter(rewards, group_ids)           (N,) bool: the rows that the zero-variance filter keeps
    penalty(lengths, max_length, cache_length)        (N,), DAPO's overlong penalty
    history(visits)                      prompts retired at a threshold of .9 after visits [(prompt, [0, 1, ...]), ...];
                                         save and load your state after each
    interrupt(ids, finish_reason, answer_budget, phrase_ids, end_ids)     of the thinking sampled so far: (forced ids,
                                         tokens that may follow, mask of all up to here), or None if nothing follows
    kl(logprobs, reference, estimator)   (N, T), to be minimised, by the estimator k1, k2 or k3; with its gradient
    logprobs(hidden, weight, targets)    of bfloat16 hidden states (M, H) and head (V, H), with FP32 logits
    generator_logprobs(...)              the same in your generator: FP32 on one side only is none
    stale(scores, versions, now)         (2, T): the ratio of each token of a completion, and its lag. `versions[t]`
                                         sampled it, `scores` (V, T) has the log-probs by each version, and the trainer
                                         is at version `now`

THE LOSS. `step` has the rows of all ranks, `part` those of one microbatch, and `part.parts` counts the microbatches of
its rank. Gradients are summed over microbatches and AVERAGED over ranks, as DDP and FSDP do it; multiply by
`part.ranks` to undo that average. What is compared is d(loss) / d(log-prob), token by token.

`part.loss` names what is asked for, with `part.options`: on_policy · cispo (cap 5) · clip (low, high: .2, .26) · gspo
(low, high) · tis (low, high, cap) · icepop (low, high) · dppo, deepseek, m2po (high). on_policy asks for averages, and
any loss answers it, because every ratio is 1. `part.average` is one of sample, prompt, token, constant. Other losses
are asked for with sample, then with token, then with prompt, until one is not refused. To refuse a loss, an average or
an option, raise NotImplementedError in that call.

Dropped rows (a group with equal rewards) are asked about only if there is a `filter`. They are then missing from `step`
and `part`. With `masks_dropped = True` in the adapter they are there, with an empty mask.

Log-probs, masks, rewards and advantages are float32, ids and lengths int64. Answers may be off by 2e-3 of the largest
expected number, log-probs by 1e-5. A verdict is

    agrees                      the papers' value
    another definition: NAME    another value that somebody uses on purpose, and which
    differs                     "x k": k times as large; else the worst number
    error                       the adapter raised, or returned what cannot be compared
    not offered                 the adapter has no such method, or it raised NotImplementedError

SIMPLIFIED. Functions and not loops are compared, so nothing here tests how old a token may get.

    python lab/conformance.py my_module:Adapter       a row a case that was answered, then how many were not
    python lab/conformance.py --json vectors.json     inputs and values, for what cannot import torch; cases of one name
                                                      are ways to ask one question

The exit code is 1 if a verdict is another definition, differs or error, but for what the papers leave open: ddof 1, and
whether an empty row counts.

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
>>> [(row.case, row.detail) for row in check(Mine()) if row.verdict == "differs"]
[('NaN in the padding', 'NaN or infinity in the gradient'), ('-1 beyond L_max', '-4 for -1')]
"""

import importlib
import json
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAB = Path(__file__).resolve().parent
sys.path.insert(0, str(LAB.parent))
from lab.oracle import Batch, bf16_head, expected_advantages, expected_gradient, mean_of_means, select, without_dropped

QUESTIONS = LAB / "conformance.json"
# the last two are left open by the papers
NO_DEVIATION = ("agrees", "not offered", "another definition: ddof 1", "another definition: an empty row counts")

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


@dataclass
class Row:
    """What came out of one case."""

    topic: str  # the method; of `loss` which loss
    case: str
    verdict: str
    detail: str
    source: str


# ------------------------------------------------------------------------------------------- the questions of the JSON


def ratio_step(average: str, question: dict) -> Batch:
    """A step of these ratios π / π_gen, with π = .05; each row is a group. A ratio below 0, or NaN, does not train."""
    rows = [[float(ratio) for ratio in row.split()] for row in question["ratios"].split("|")]
    rho = torch.tensor(rows, dtype=torch.float64)  # (N, T)
    logprobs = torch.full_like(rho, math.log(0.05))
    behaviour = logprobs - rho.abs().log()
    old = logprobs  # the batch's first update
    if question["old"]:  # π_old / π_gen
        old = behaviour + torch.tensor(question["old"]).log()
    A = torch.tensor(question["advantages"])
    ids = torch.arange(len(rho))
    loss, options = question["loss"], question["options"]
    return Batch(logprobs, behaviour, old, (rho > 0).float(), A, ids, [[ids.tolist()]], loss, options, average)


def average_step(average: str, question: dict) -> Batch:
    """On-policy rows of 10 places with this mask, with A = 1 each."""
    mask = torch.tensor([[float(bit) for bit in row.ljust(10, "0")] for row in question["mask"]])
    logprobs = torch.full_like(mask, -1.0, dtype=torch.float64)
    ids = torch.tensor(question["group_ids"])
    step = Batch(logprobs, logprobs, logprobs, mask, torch.ones(len(mask)), ids, question["layout"], average=average)
    return replace(step, dropped=question["dropped"])


def loss_case(name: str, source: str, step: Batch) -> Case:
    """A question to `loss`, with the other definitions in use."""
    masked = without_dropped(step)
    counted = expected_gradient(masked, empty_counts=True)
    also = {"an empty row counts": counted, "the mean of the microbatches' means": mean_of_means(masked)}
    if step.dropped:
        also = {"dropped rows stay in the average": counted}
    if step.loss == "cispo":
        also["cap 1 + 5"] = expected_gradient(replace(step, options={"cap": 6.0}))
        also["a lower bound of .8"] = expected_gradient(replace(step, options=step.options | {"floor": 0.8}))
        also["a product of two caps"] = expected_gradient(replace(step, loss="two caps"))
    if step.loss == "clip":
        also["a dual clip of 3"] = expected_gradient(replace(step, options=step.options | {"dual": 3.0}))
    return Case("loss", name, source, [step], expected_gradient(masked), also)


def advantage_case(question: dict, how: str, definitions: list[str]) -> Case:
    """A question to `advantages`, with the other definitions in use."""
    inputs = [question["rewards"], question["group_ids"], how, question["lengths"]]
    also = {definition: expected_advantages(*inputs, definition) for definition in definitions}
    return Case("advantages", question["name"], question["source"], inputs, expected_advantages(*inputs), also)


def all_cases() -> list[Case]:
    """84 questions. Cases of one name are ways to ask the same, each asked if the one before it is refused."""
    questions = json.loads(QUESTIONS.read_text())
    cases = []
    for question in questions["losses"]:
        for average in ("sample", "token", "prompt"):
            cases.append(loss_case(question["name"], question["source"], ratio_step(average, question)))
    for average in ("sample", "prompt", "token", "constant"):
        paper = "2503.20783" if average == "constant" else "2510.13786 section 3.2"
        for question in questions["averages"]:
            source = f"{paper}; {question['mistake']}"
            cases.append(loss_case(f"{average} average: {question['name']}", source, average_step(average, question)))
    for question in questions["advantages"]:
        cases += [advantage_case(question, how, questions["definitions"]) for how in question["how"]]
    inputs, exact, rounded = bf16_head()
    source = "2510.13786 section 3.2; the product is rounded to bfloat16"
    for method, name in (
        ("logprobs", "FP32 product of bfloat16 factors"),
        ("generator_logprobs", "the same in the generator"),
    ):
        cases.append(Case(method, name, source, inputs, exact, {"bfloat16 logits": rounded}))
    return [*cases, *(Case(**question) for question in questions["others"])]


# ---------------------------------------------------------------------------------------------------------- the harness


def gradient(adapter: Any, step: Batch) -> Tensor:
    """(N, T) of -d(loss) / d(log π): summed over microbatches, averaged over ranks."""
    if step.dropped and not hasattr(adapter, "filter"):
        raise NotImplementedError
    absent = [] if getattr(adapter, "masks_dropped", False) else step.dropped
    layout = [[[row for row in rows if row not in absent] for rows in parts] for parts in step.layout]
    leaf = step.logprobs.float().requires_grad_()
    step = replace(
        without_dropped(step),
        logprobs=leaf,
        behaviour=step.behaviour.float(),
        old=step.old.float(),
        ranks=len(layout),
    )
    everything = select(step, [row for row in range(len(leaf)) if row not in absent])
    total = torch.zeros_like(leaf)
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
    if case.method == "kl":
        leaf = inputs[0].requires_grad_()
        terms = adapter.kl(*inputs)
        return torch.cat([terms, *torch.autograd.grad(terms.sum(), leaf)])
    return getattr(adapter, case.method)(*inputs)


def check(adapter: Any) -> list[Row]:
    """One row a question. Never raises what the adapter raises."""
    rows: dict[str, Row] = {}
    for case in all_cases():
        if case.name in rows and rows[case.name].verdict != "not offered":
            continue
        topic = case.inputs[0].loss if case.method == "loss" else case.method
        verdict, detail = "not offered", ""
        try:
            if hasattr(adapter, case.method):
                verdict, detail = judge(case, ask(adapter, case))
        except NotImplementedError:
            pass
        except (Exception, SystemExit) as error:
            verdict = "error"
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
        rows[case.name] = Row(topic, case.name, verdict, detail, case.source)
    return list(rows.values())


def judge(case: Case, answer: Any) -> tuple[str, str]:
    """(verdict, detail)."""
    if case.method in ("history", "interrupt"):
        if isinstance(answer, tuple | set):
            answer = list(answer)
        return ("agrees", "") if answer == case.expected else ("differs", f"{answer} for {case.expected}")
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
    squares = float(expected.square().sum())
    factor = float((actual * expected).sum()) / squares if squares else 0.0
    if factor and equal(expected * factor):
        return "differs", f"x {factor:.3g}"
    worst = int((actual - expected).abs().argmax())
    return "differs", f"{actual.flatten()[worst]:.3g} for {expected.flatten()[worst]:.3g}"


def is_deviation(row: Row) -> bool:
    """Whether the papers say otherwise."""
    return row.verdict not in NO_DEVIATION


def hint(row: Row) -> str:
    """Where to look for a deviation, by what came out; the case's own mistake only where that says nothing."""
    if not is_deviation(row) or row.verdict == "error":
        return ""
    paper, _, mistake = row.source.rpartition("; ")
    guesses = [guess for start, guess in HINTS.items() if row.detail.startswith(start)] or [f"made for: {mistake}"]
    words = "; ".join(filter(None, [paper, *(guesses[:1] if row.verdict == "differs" else [])]))
    return f"   [{words}]" if words else ""


def main(argv: list[str]) -> int:
    """Exit code: 0 no deviation, 1 some, or nothing that agrees, 2 no such adapter."""
    if argv[:1] == ["--json"] and len(argv) == 2:
        text = json.dumps([vars(case) for case in all_cases()], default=as_data)
        Path(argv[1]).write_text(text.replace(", NaN", ", null"))  # JSON has no NaN
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
    rows = check(adapter)
    for row in rows:
        if row.verdict != "not offered":
            print(f"{row.topic:10} {row.case:50} {row.verdict} {row.detail}".rstrip() + hint(row))
    counts = Counter(row.verdict.split(":")[0] for row in rows)
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    asked = Counter(row.topic for row in rows)
    answered = Counter(row.topic for row in rows if row.verdict != "not offered")
    print("answered: " + ", ".join(f"{topic} {answered[topic]} of {n}" for topic, n in asked.items()))
    return 1 if any(map(is_deviation, rows)) or not counts["agrees"] else 0


def as_data(value: Any) -> Any:
    """A step as a dict, a tensor as lists."""
    return value.float().tolist() if isinstance(value, Tensor) else asdict(value)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
