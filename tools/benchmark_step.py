"""Seconds of an engine's step with 1 to 512 requests inside it: what it costs without any, and what each of them adds.

    python tools/benchmark_step.py

tools/plan.py takes the two as --engine_step. All requests enter together and end together: what long ones take beyond
short ones, divided by the tokens between, is a step without prefill.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
from benchmark_pacer import Lengths, nothing_solved, short_prompts
from measuring import Figure, Report, benchmark_parser, parse, positive, take_turns, timed
from safetensors.torch import load_file
from subjects import generator_of, random_model

from runtime.flags import parse_flags

SHORT, LONG = 16, 80  # tokens


def step_seconds(generator: Any, requests: int) -> float:
    """Of the engine, with so many requests inside it."""
    prompt = next(short_prompts()).prompt_ids

    def sample(tokens: int) -> None:
        """`requests` completions of `tokens` tokens."""

        def begin(engine: Any) -> Any:
            return engine.together(lambda: [engine.sample(prompt, tokens, "step") for _ in range(requests)])

        generator.ask(begin)

    return (timed(lambda: sample(LONG)) - timed(lambda: sample(SHORT))) / (LONG - SHORT)


def line(requests: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(base, per request) of the straight line through the steps, whose relative errors are alike."""
    per_request, base = np.polyfit(requests, seconds, 1, w=1 / np.array(seconds))
    return float(base), float(per_request)


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 8, 64, 256, 512], help="inside the engine")
    args = parse(parser, argv)
    report = Report(args)
    task = SimpleNamespace(train=[next(short_prompts())], held_out=[], stop_ids=[], score=nothing_solved)
    flags = parse_flags(["--rollouts", "1", "--max_num_seqs", str(max(args.requests))], "")
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), "0.2M", ends=False)
        weights = load_file(f"{model}/model.safetensors")
        with generator_of(flags, model, weights, task, short_prompts(), Lengths()) as generator:
            cases = {str(n): lambda n=n: step_seconds(generator, n) for n in args.requests}
            found = take_turns(cases, args.repeats)
    report.add({f"a step with {n} requests": turns for n, turns in found.items()}, "s")
    lines = [line(args.requests, turn) for turn in zip(*found.values(), strict=True)]
    report.figures = [
        Figure("a step without requests, s", [base for base, _ in lines]),
        Figure("each request, s", [per_request for _, per_request in lines]),
        Figure("requests that cost as much as a step without any", [base / each for base, each in lines]),
    ]
    report.close()


if __name__ == "__main__":
    main()
