"""What a split of GPUs would do, before any of them is rented: seconds a step, who waits for whom, and the lag.

    python tools/plan.py --model_parameters 8.2e9 --trainers 16 --engines 64 --lengths 8000,0.6 --longest 14336 \\
        --batch_prompts 48 --rollouts 16 --k 8

The real `pipeline_rl.Pacer` paces engines and trainers that are simulated (simulated_cluster.py). Without measurements
a roofline gives their speed: P parameters cost 2 P FLOPs a token in an engine and 6 P in training, of which an MFU is
reached; each step of an engine also reads all weights, and for each of its requests the keys and values.

    seconds of an engine's step = 2 P / (bandwidth · use)
        + requests · (kv_bytes_per_token · mean context / bandwidth + 2 P / peak) / use
    tokens/s of a trainer = MFU · peak / (6 P)

The shares and the lag come out of ratios of these speeds, so a plan is as good as they are: --engine_step and
--trainer_tokens take measured ones. docs/gpu.md compares plans with measured runs.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measuring import above_zero, positive, table
from simulated_cluster import Plan, Setting, simulate


def mean_context(setting: Setting, prompt: int) -> float:
    """Tokens that a running request has behind it, over all its tokens."""
    rng = random.Random(0)
    lengths = [setting.draw_length(rng) for _ in range(10_000)]
    return prompt + sum(x * x for x in lengths) / sum(lengths) / 2


def with_speeds(setting: Setting, args: argparse.Namespace) -> Setting:
    """The setting with the speeds that were measured, or those of the roofline."""
    weights, bandwidth, peak = 2 * args.model_parameters, args.bandwidth_tb * 1e12, args.peak_tflops * 1e12
    cache = args.kv_bytes_per_token * mean_context(setting, args.prompt)
    step = args.engine_step or (weights / bandwidth / args.use, (cache / bandwidth + weights / peak) / args.use)
    rate = args.trainer_tokens or args.mfu * peak / (6 * args.model_parameters)
    push = args.push_seconds or weights / (args.link_gb * 1e9)
    return replace(setting, base=step[0], per_request=step[1], trainer_rate=rate, push_seconds=push)


def best_split(setting: Setting) -> Setting:
    """The split of the same number of GPUs that has the shortest step, of nine: 10 %, 20 % ... 90 % of them train."""
    total = setting.trainers + setting.engines
    splits = [
        replace(setting, trainers=trainers, engines=total - trainers)
        for trainers in sorted({round(total * tenths / 10) for tenths in range(1, 10)} - {0, total})
    ]
    possible = [split for split in [setting, *splits] if split.slots >= split.rollouts]
    return min(possible, key=lambda split: simulate(split).step_seconds)


def cases(asked: Setting) -> dict[str, Setting]:
    """What is compared with what was asked for, by name."""
    name, capacity = f"{asked.schedule} {asked.k}", (asked.k + 1) * asked.batch_prompts
    found = {name: asked}
    plain = replace(asked, schedule="pipeline", min_ready=0, max_ready=0)
    if asked.k and asked.schedule == "pipeline":
        found[f"{name}, --max_ready {capacity}"] = replace(asked, max_ready=capacity)
    best = min(found.values(), key=lambda setting: simulate(setting).step_seconds)
    found["the faster one, best split"] = best_split(best)
    if asked.k:
        whole_rounds = -(-asked.steps // asked.k) * asked.k
        found[f"ppo_off_policy {asked.k}"] = replace(plain, schedule="ppo_off_policy", steps=whole_rounds)
    return found | {"on-policy (pipeline 0)": replace(plain, k=0)}


def row(label: str, setting: Setting, plan: Plan, cache: float) -> list[str]:
    """A line of the table; cache: bytes of keys and values that a running request has on average."""
    requests = plan.slots_busy * setting.max_num_seqs
    return [
        label, f"{setting.trainers} + {setting.engines}", f"{plan.step_seconds:.3g}", f"{plan.trainer_busy:.2f}",
        f"{plan.generator_busy:.2f}", f"{requests:.0f} ({requests * cache / 1e9:.0f} GB)",
        f"{plan.lag_mean:.2f} / {plan.lag_max}",
        f"{plan.step_seconds * (setting.trainers + setting.engines) / 3.6:,.0f}",
    ]  # fmt: skip


def two_numbers(text: str) -> tuple[float, float]:
    """A,B for argparse; the second may be 0."""
    first, comma, second = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"must be two numbers, A,B, not {text!r}")
    return above_zero(first), 0.0 if second.strip() == "0" else above_zero(second)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    job = made.add_argument_group("job", "default: the paper's 8B model; --lengths is a guess").add_argument
    job("--trainers", type=positive, default=16, help="GPUs that train (16)")
    job("--engines", type=positive, default=64, help="GPUs that sample, one engine each (64)")
    job("--schedule", choices=["pipeline", "ppo_off_policy"], default="pipeline")
    job("--k", type=int, default=8, help="steps off-policy (8)")
    job("--batch_prompts", type=positive, default=48, help="B (48)")
    job("--rollouts", type=positive, default=16, help="G (16)")
    job("--min_ready", type=int, default=0, help="as in train.py (0)")
    job("--max_ready", type=int, default=0, help="as in train.py (0)")
    job("--max_num_seqs", type=positive, default=512, help="requests inside each engine at most (512)")
    job("--lengths", type=two_numbers, default=(8000.0, 0.6), metavar="MEAN,SIGMA",
        help="tokens of a completion, standard deviation of their logarithm; 0: all alike (8000,0.6)")  # fmt: skip
    job("--longest", type=positive, default=14336, help="tokens at which a completion is cut (14336)")
    job("--prompt", type=positive, default=200, help="tokens of a prompt (200)")
    job("--trained_share", type=above_zero, default=1.0, help="of the tokens, after the zero-variance filter (1)")
    job("--steps", type=positive, default=45, help="that are counted (45)")
    machine = made.add_argument_group("machines", "default: Qwen3-8B on H100 SXM (NVIDIA's data sheet)").add_argument
    machine("--model_parameters", type=above_zero, default=8.2e9)
    machine("--kv_bytes_per_token", type=above_zero, default=147456, help="2 · layers · KV heads · head size · 2 bytes")
    machine("--peak_tflops", type=above_zero, default=989, help="bfloat16, dense, of one GPU (989)")
    machine("--bandwidth_tb", type=above_zero, default=3.35, help="TB/s of one GPU's memory (3.35)")
    machine("--use", type=above_zero, default=0.5, help="share of both that an engine reaches, a guess (0.5)")
    machine("--mfu", type=above_zero, default=0.3, help="share of the peak that training reaches, a guess (0.3)")
    machine("--link_gb", type=above_zero, default=25, help="GB/s at which weights reach the engines, a guess (25)")
    measured = made.add_argument_group("measured instead").add_argument
    measured("--engine_step", type=two_numbers, metavar="BASE,PER_REQUEST", help="seconds of an engine's step")
    measured("--trainer_tokens", type=above_zero, help="tokens/s of one trainer")
    measured("--push_seconds", type=above_zero, help="of an update")
    return made


def main(argv: Sequence[str] | None = None) -> dict[str, Plan]:
    """Prints the table and returns the plans of its lines."""
    made = parser()
    args = made.parse_args(argv)
    given = {name: value for name, value in vars(args).items() if name in Setting.__dataclass_fields__}
    asked = with_speeds(Setting(mean=args.lengths[0], sigma=args.lengths[1], **given), args)
    if asked.rollouts > asked.slots:
        made.error(f"--rollouts {asked.rollouts} do not fit {asked.slots} slots; raise --max_num_seqs or --engines")
    try:
        asked.pacer()
    except ValueError as error:
        made.error(f"--k, --min_ready, --max_ready: {error}")
    settings = cases(asked)
    plans = {label: simulate(setting) for label, setting in settings.items()}
    print(
        f"an engine's step: {1e3 * asked.base:.3g} ms and {1e3 * asked.per_request:.3g} ms a request; trainers: "
        f"{asked.trainer_rate * asked.trainers:,.0f} tokens/s; an update: {asked.push_seconds:.2g} s\n"
    )
    head = ["schedule", "trainers + engines", "s a step", "trainers busy", "engines busy", "requests an engine",
            "lag mean / max", "GPU-hours / 1,000 steps"]  # fmt: skip
    cache = args.kv_bytes_per_token * mean_context(asked, args.prompt)
    print(table(head, [row(label, settings[label], plan, cache) for label, plan in plans.items()]))
    return plans


if __name__ == "__main__":
    main()
