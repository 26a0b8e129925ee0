"""What a split of GPUs would do, before any of them is rented: seconds a step, who waits for whom, and the lag.

    python tools/plan.py --model_parameters 8.2e9 --trainers 16 --engines 64 --lengths 8000,0.6 --longest 14336 \\
        --batch_prompts 48 --rollouts 16 --k 8
    python tools/plan.py --like runs/demo                # what a finished run measured, beside the plan of it

The real `pipeline_rl.Pacer` paces engines and trainers that are simulated (simulated_cluster.py). Without measurements
a roofline gives their speed: P parameters cost 2 P FLOPs a token in an engine and 6 P in training, of which an MFU is
reached; each step of an engine also reads all weights, and for each of its requests the keys and values.

    seconds of an engine's step = 2 P / (bandwidth · use)
        + requests · (kv_bytes_per_token · mean context / bandwidth + 2 P / peak) / use
    tokens/s of a trainer = MFU · peak / (6 P) · completion / (prompt + completion)

The shares and the lag come out of ratios of these speeds, so a plan is as good as they are: --engine_step and
--trainer_tokens take measured ones, and --like takes all of them from a run, with its completion lengths. docs/gpu.md
compares plans with measured runs.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measuring import above_zero, positive, table
from simulated_cluster import Plan, Setting, lognormal, simulate

from pipeline_rl import Pacer
from runtime.run_folder import Folder

CPU_STEP = 85.0, 1.0  # what a step costs without requests : what each adds; the built-in model in vLLM on a CPU


def estimated(args: argparse.Namespace) -> Setting:
    """The job and the machines of the command line, with the speeds that were measured, or those of the roofline."""
    groups = (args.steps + 2 * args.k + 4) * args.batch_prompts
    lengths = lognormal(*args.lengths, args.longest, args.rollouts, groups)
    weights, bandwidth, peak = 2 * args.model_parameters, args.bandwidth_tb * 1e12, args.peak_tflops * 1e12
    cache = args.kv_bytes_per_token * mean_context(lengths, args.prompt)
    step = weights / bandwidth / args.use, (cache / bandwidth + weights / peak) / args.use
    completion = sum(map(sum, lengths)) / sum(map(len, lengths))  # tokens, mean
    rate = args.mfu * peak / (6 * args.model_parameters) * completion / (args.prompt + completion)
    return Setting(
        args.batch_prompts, args.k, lengths, args.trainers or 16, args.engines, args.max_num_seqs,
        engine_step=args.engine_step or step, schedule=args.schedule, steps=args.steps,
        trainer_rates=[(args.trainer_tokens or rate) / args.trained_share],
        push_seconds=args.push_seconds or weights / (args.link_gb * 1e9),
    )  # fmt: skip


def mean_context(lengths: Sequence[Sequence[int]], prompt: int) -> float:
    """Tokens that a running request has behind it, over all its tokens."""
    flat = [length for group in lengths for length in group]
    return prompt + sum(x * x for x in flat) / sum(flat) / 2


def like(folder: Folder, engine_step: tuple[float, float], trainers: int) -> tuple[Setting, Plan]:
    """(the job of a run with the speeds that were measured in it; what came of it), evaluations and warm-up left out.

    The trainers' speed is that while they did not wait, step by step. The engines' follows from Little's law: a token
    takes (requests inside) / (tokens/s) seconds; of `engine_step` only the ratio counts. Raises ValueError.
    """
    records, groups = folder.read("metrics.jsonl"), folder.read("groups.jsonl")
    rows = [record for record in records if "step" in record]
    if not rows or "requests" not in rows[-1]:
        raise ValueError(f"{folder.path} is not the folder of a run, or of one whose logs lack `requests`")
    config = next(record["config"] for record in reversed(records) if "config" in record)
    setting = Setting(
        config["batch_prompts"], config["k"], [lengths for group in groups for lengths in group["lengths"]], trainers,
        engines=config["data_parallel"], max_num_seqs=config["max_num_seqs"], engine_step=engine_step, trainer_rates=[],
        push_seconds=0, trainer_waits=False, schedule=config["schedule"],
        queue={"min_ready": config["min_ready"], "max_ready": config["max_ready"] or None},
    )  # fmt: skip
    take = 1 if setting.schedule == "pipeline" else setting.k  # steps between two updates
    evaluated = {record["step"] // take for record in folder.read("eval.jsonl")}  # during the take that follows
    trained: Counter[int] = Counter()  # tokens of each step
    for group in groups:
        trained[group["step"] + 1] += sum(map(sum, group["lengths"]))
    rows = [
        row | {"sampled": row["tokens"] - before["tokens"], "trained": trained[row["step"]]}
        for before, row in itertools.pairwise(rows)
        if row["step"] > setting.warm_up and (row["step"] - 1) // take not in evaluated
    ]
    if not rows:
        raise ValueError(f"{folder.path} has no step without an evaluation after the first {setting.warm_up}")

    def total(name: str, weight: str = "") -> float:
        return sum(row[name] * (row[weight] if weight else 1) for row in rows)

    seconds = total("seconds")
    measured = Plan(
        step_seconds=seconds / len(rows),
        trainer_busy=1 - total("trainer_idle") / seconds,
        generator_busy=1 - (total("generator_idle") + total("sync_seconds")) / seconds,
        requests=total("requests", "seconds") / seconds / setting.engines,
        lag_mean=total("lag_mean", "trained") / total("trained"),
        lag_max=max(row["lag_max"] for row in rows),
        tokens=total("sampled") / seconds,
    )
    setting = replace(
        setting, steps=len(rows), push_seconds=total("sync_seconds") / len(rows) * take,
        trainer_rates=[row["trained"] / (row["seconds"] - row["trainer_idle"]) / trainers for row in rows],
    )  # fmt: skip
    for _ in range(4):  # until a token takes as long as it took
        found, (base, per_request) = simulate(setting), setting.engine_step
        slower = measured.requests / measured.tokens * found.tokens / found.requests
        setting = replace(setting, engine_step=(base * slower, per_request * slower))
    return setting, measured


def best_split(setting: Setting) -> Setting:
    """The split of the same number of GPUs that has the shortest step, of nine: 10 %, 20 % ... 90 % of them train."""
    total = setting.trainers + setting.engines
    splits = [
        replace(setting, trainers=trainers, engines=total - trainers)
        for trainers in sorted({round(total * tenths / 10) for tenths in range(1, 10)} - {0, total})
    ]
    possible = [x for x in [setting, *splits] if x.max_num_seqs * x.engines >= len(x.lengths[0])]
    return min(possible, key=lambda split: simulate(split).step_seconds)


def cases(asked: Setting) -> dict[str, Setting]:
    """What was asked for and what is compared with it, by name."""
    found = {f"{asked.schedule} {asked.k}": asked, "the best split": best_split(asked)}
    plain = replace(asked, schedule="pipeline", queue={})
    if asked.k:
        whole_rounds = -(-asked.steps // asked.k) * asked.k
        found[f"ppo_off_policy {asked.k}"] = replace(plain, schedule="ppo_off_policy", steps=whole_rounds)
    return found | {"on-policy (pipeline 0)": replace(plain, k=0)}


def row(label: str, setting: Setting, plan: Plan) -> list[str]:
    """A line of the table."""
    return [
        label, f"{setting.trainers} + {setting.engines}", f"{plan.step_seconds:.3g}", f"{plan.trainer_busy:.2f}",
        f"{plan.generator_busy:.2f}", f"{plan.requests:.0f}", f"{plan.lag_mean:.2f} / {plan.lag_max}",
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
    job("--trainers", type=positive, help="GPUs that train (16; with --like 1)")
    job("--engines", type=positive, default=64, help="GPUs that sample, one engine each (64)")
    job("--schedule", choices=["pipeline", "ppo_off_policy"], default="pipeline")
    job("--k", type=int, default=8, help="steps off-policy (8)")
    job("--batch_prompts", type=positive, default=48, help="B (48)")
    job("--rollouts", type=positive, default=16, help="G (16)")
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
    measured("--like", type=Path, metavar="RUN", help="a run's folder: plan it by its own flags, lengths and speeds")
    measured("--engine_step", type=two_numbers, metavar="BASE,PER_REQUEST",
             help="seconds of an engine's step; of those of --like the ratio only")  # fmt: skip
    measured("--trainer_tokens", type=above_zero, help="of completions, tokens/s of one trainer")
    measured("--push_seconds", type=above_zero, help="of an update")
    return made


def main(argv: Sequence[str] | None = None) -> dict[str, Plan]:
    """Prints the table and returns the plans of its lines."""
    made = parser()
    args = made.parse_args(argv)
    if not args.like and args.rollouts > args.max_num_seqs * args.engines:
        made.error(f"--rollouts {args.rollouts} do not fit the engines' slots; raise --max_num_seqs or --engines")
    try:
        Pacer(args.batch_prompts, args.k, schedule=args.schedule)
        if args.like:
            asked, measured = like(Folder(args.like), args.engine_step or CPU_STEP, args.trainers or 1)
        else:
            asked, measured = estimated(args), None
    except ValueError as error:
        made.error(f"{'--like' if args.like else '--k'}: {error}")
    settings = cases(asked)
    plans = {label: simulate(setting) for label, setting in settings.items()}
    base, per_request = asked.engine_step
    print(
        f"an engine's step: {1e3 * base:.3g} ms and {1e3 * per_request:.3g} ms a request; trainers: "
        f"{harmonic_mean(asked.trainer_rates) * asked.trainers:,.0f} tokens/s; an update: {asked.push_seconds:.2g} s"
    )
    if not args.like:
        cache = args.kv_bytes_per_token * mean_context(asked.lengths, args.prompt) / 1e9
        print(f"keys and values of a request, on average: {cache:.2g} GB")
    head = ["schedule", "trainers + engines", "s a step", "trainers busy", "engines busy", "requests an engine",
            "lag mean / max", "GPU-hours / 1,000 steps"]  # fmt: skip
    rows = [row("measured", asked, measured)] if measured else []
    print("\n" + table(head, rows + [row(label, settings[label], plan) for label, plan in plans.items()]))
    return plans


if __name__ == "__main__":
    main()
