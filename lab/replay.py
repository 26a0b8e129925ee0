"""One run says what another loss would have done: its recorded steps, replayed.

    python train.py --record_every 10 ...                 # keeps steps: weights, moments, the batch that trains next
    python lab/replay.py runs/demo --against dapo gspo lab.masks:icepop aggregation=token lag=0
    python lab/replay.py --model FOLDER --batch batch.jsonl --dataset rows.jsonl --against dapo     # of another trainer

PROBLEM. Two runs differ by luck more than by their loss, so a comparison takes many runs. But at a recorded step
everything is there to ask it of the same batch and the same weights.

IDEA. AdamW makes steps of about one size whatever the scale of a gradient: what counts is where they point.

    g*      direction in which the pass rate rises: the REINFORCE gradient of fresh completions of held-out problems,
            each reward minus the mean of the problem's others. Two halves of the problems give it twice, and the cosine
            of the two says how noisy it is.
    g       gradient that a variant makes of the recorded batch, by the code that trains (runtime/trainer.py)
    u       Adam's step for it, g / sqrt(v): v is .95 of the mean of g^2 in the variant's other batches and .05 of this
            one's, the shares of the past and of the present in AdamW's own v
    signal  <u, g*> / (|u| |g*|), averaged over batches       predicted tokens = the recipe's signal / the variant's

The sizes |u| and the noise of g* are about the same for all variants, so they leave the ratio alone. The interval
(95 %) comes from drawing batches, and parts of g*'s problems, anew. With fewer than four batches, or a model whose
gradients of all steps would take more than 8 GB, v is the run's own (moments/), and the signal is the cosine in that
metric; without moments it is the plain cosine.

A VARIANT is one or more changes joined by commas: a loss (`dapo`, `lab.masks:icepop`, `mine:loss`), or FLAG=VALUE of
the flags in replay_step.REPLAYED, by their first letters if you like (`normalize=prompt`). `lag=0` draws a fresh batch
of the same size with the recorded weights: what the run's lag costs. Flags of train.py that are given here replace the
run's own: `--engine torch`. How a step is kept: runtime/step_file.py.

NOT SEEN: stability, time, and whatever changes what is sampled. `fp32_head=false` changes the trainer's head only.
"""

import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from replay_step import PARTS, Replayer, Step, Variant, cosine, gradient, metric, read_step, recorded_steps, variant_of
from replay_tokens import coefficients, differences, shares, token_table, write_page

from generator import EngineFailed
from runtime.engine import choose_engine
from runtime.flags import Flags, UsageError, check_flags, parse_flags
from runtime.folder import Folder

NOISY, ENOUGH = 0.1, 0.3  # of the agreement of the halves of g*
LEAST_BATCHES = 4  # for a variant's own second moments
LARGEST = 8e9  # bytes of gradients that are in memory at once
DRAWS = 2000  # of the bootstrap
BETA2 = 0.95  # AdamW's
LEGEND = """
tokens: 1.8 means that the variant is predicted to sample 1.8 times the recipe's tokens until it solves as much.
silenced: the share of tokens to which the loss gives no gradient; lowered: those that weigh less than their rho, the
token's probability now over that when it was sampled."""


# ---------------------------------------------------------------------------------------------------------- the measure


def measure(replayer: Replayer, step: Step, variants: Sequence[Variant], options: Namespace, bar: tqdm) -> None:
    """g*, and the gradient of each variant. A step whose batch trains nothing has no gradients."""
    replayer.load(step)
    if replayer.batch(step.groups, step.rewards, replayer.recipe) is None:
        bar.update(1 + len(variants))
        return
    problems = replayer.run.task.held_out[: options.problems]
    step.stars = replayer.direction(step, problems, options.samples)
    weighting = metric(step.variance)
    halves = step.stars[::2].mean(0), step.stars[1::2].mean(0)
    step.agreement = cosine(*halves, weighting)
    bar.update()
    fresh = None
    for variant in variants:
        groups, rewards = step.groups, step.rewards
        if variant.fresh:
            groups, rewards = fresh = fresh or replayer.fresh_batch(step)
        trainer, batch = replayer.trainer_of(variant.flags), replayer.batch(groups, rewards, variant.flags)
        if batch is None:
            raise UsageError(f"step {step.number}: nothing is left for {variant.name} to train on; leave it out.")
        step.gradients[variant.name] = -gradient(trainer, batch)
        logprobs = trainer.score(batch.rows)
        step.shares[variant.name] = shares(batch, coefficients(trainer, batch, logprobs), logprobs)
        bar.update()
    step.norm = float(step.gradients[variants[0].name].double().norm())


def find_signals(steps: Sequence[Step], names: Sequence[str]) -> None:
    """The signal of each variant at each step, for each part of g*, by the rule of the module docstring."""
    for name in names:
        squares = sum(step.gradients[name].square() for step in steps)
        for step in steps:
            g, star = step.gradients[name], step.stars.mean(0)
            if len(steps) >= LEAST_BATCHES:
                others = (squares - g.square()).clamp_min(0) / (len(steps) - 1)
                u = g * metric(BETA2 * others + (1 - BETA2) * g.square())
                sizes = len(u) ** 0.5 * float(star.norm())  # the mean square of u is about 1
            else:
                weighting = metric(step.variance)
                u = weighting * g
                sizes = float((g @ u).sqrt() * (star @ (weighting * star)).sqrt())
            step.signals[name] = (step.stars @ u / max(sizes, 1e-30)).tolist()


def measured(steps: Sequence[Step], names: Sequence[str]) -> dict[str, list[list]]:
    """Of each variant and step, what is averaged: [signals (PARTS,), share silenced, share lowered]."""
    return {name: [[step.signals[name], *step.shares[name]] for step in steps] for name in names}


def with_others(values: dict[str, list[list]], files: Sequence[Path]) -> dict[str, list[list]]:
    """The same with the steps of other runs, from their replay.json. Raises UsageError."""
    try:
        tables = [{row["variant"]: row["steps"] for row in json.loads(path.read_text())} for path in files]
        return {name: sum((table[name] for table in tables), own) for name, own in values.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--also: no replay.json with the same variants ({type(error).__name__}: {error}).") from error


def predict(values: dict[str, list[list]]) -> list[dict]:
    """For each variant, the first of which is the recipe: its mean signal and the tokens it is predicted to need, as a
    multiple of the recipe's, with the interval that holds 95 % of the bootstrap."""
    signals = {name: np.array([step[0] for step in steps]) for name, steps in values.items()}  # (steps, PARTS) each
    recipe = next(iter(signals.values()))
    count, random = len(recipe), np.random.default_rng(0)
    drawn_steps = random.integers(count, size=(DRAWS, count, 1))
    drawn_parts = random.integers(PARTS, size=(DRAWS, count, PARTS))
    rows = []
    for name, own in signals.items():
        draws = own[drawn_steps, drawn_parts].mean((1, 2)) / recipe[drawn_steps, drawn_parts].mean((1, 2))
        low, high = np.quantile(draws, [0.025, 0.975])
        silenced, lowered = np.mean([step[1:] for step in values[name]], 0)
        row = {"variant": name, "signal": own.mean(), "of_recipe": own.mean() / recipe.mean()}
        row |= {"tokens": tokens(row["of_recipe"]), "low": tokens(high), "high": tokens(low)}
        rows.append(row | {"silenced": silenced, "lowered": lowered, "steps": values[name]})
    return rows


def tokens(of_recipe: float) -> float:
    """A variant whose step does not go uphill never arrives."""
    return 1 / of_recipe if of_recipe > 0 else np.inf


# --------------------------------------------------------------------------------------------------------- what is said


def report(rows: Sequence[dict]) -> str:
    """The table."""
    width = max(len(row["variant"]) for row in rows) + 2
    lines = [f"{'variant':{width}}signal  of the recipe's  tokens (95 % interval)  silenced  lowered"]
    for row in rows:
        interval = f"{row['tokens']:.2f} ({row['low']:.2f} to {row['high']:.2f})".replace("inf", "never")
        shares = f"{row['silenced']:8.1%}  {row['lowered']:7.1%}"
        remark = "  no difference told" if row["low"] < 1 < row["high"] else ""
        signal = f"{row['signal']:6.3f}  {row['of_recipe']:15.3f}"
        lines.append(f"{row['variant']:{width}}{signal}  {interval:22}  {shares}{remark}")
    return "\n".join([*lines, LEGEND])


def draw(rows: Sequence[dict], steps: Sequence[Step], path: Path) -> None:
    """Predicted tokens with their intervals, and the signal against the step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 1.5 + 0.3 * max(8, len(rows))), layout="constrained")
    for place, row in enumerate(rows):
        at, low, high = (min(row[key], 10.0) for key in ("tokens", "low", "high"))
        left.plot([low, high], [place, place], color="tab:blue")
        left.plot([at], [place], "o", color="tab:blue")
        own = [np.mean(step[0]) for step in row["steps"]]
        right.plot([step.number for step in steps], own[: len(steps)], marker=".", label=row["variant"])
    left.set_xscale("log")
    left.axvline(1, color="gray", linewidth=0.8)
    left.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    left.invert_yaxis()
    left.set_xlabel("predicted tokens, relative to the recipe's")
    right.set_xlabel("step")
    right.set_ylabel("signal")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def noise(step: Step) -> str:
    """How many times as many completions would give halves that agree by ENOUGH: the square of a half's noise falls as
    one over their number."""
    agreement = min(max(step.agreement, 0.01), 0.99)
    more = (1 / agreement - 1) / (1 / ENOUGH - 1)
    text = f"step {step.number}: the halves of g* agree by {step.agreement:.2f} only, too little to tell, so it is left"
    return f"{text} out; about {np.ceil(more):.0f} times the completions would do (--samples, --problems)"


# ------------------------------------------------------------------------------------------------------------- the run


def read_arguments(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """(our options, flags of train.py)."""
    parser = ArgumentParser(prog="replay.py", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--model", type=Path, help="another trainer's step: its model folder")
    parser.add_argument("--batch", type=Path, help="another trainer's step: its batch.jsonl")
    parser.add_argument("--against", nargs="+", required=True, help="variants")
    parser.add_argument("--at", nargs="+", default=[], help="steps, as 15 18 or 15:45:3; default: all recorded ones")
    parser.add_argument("--also", nargs="+", type=Path, default=[], help="replay.json of other runs: more steps")
    parser.add_argument("--problems", type=int, default=256, help="held-out problems of g*")
    parser.add_argument("--samples", type=int, default=12, help="fresh completions of each")
    parser.add_argument("--show", type=int, default=0, help="tokens that the first variant weighs most differently")
    parser.add_argument("--page", type=Path, help="an HTML page: completions, each token colored by its weight")
    run = [] if not argv or argv[0].startswith("-") else [argv[0]]
    options, rest = parser.parse_known_args(argv[len(run) :])
    options.run = Path(run[0]) if run else None
    if bool(run) == bool(options.model and options.batch):
        raise UsageError("give the folder of a run, or both --model and --batch.")
    if options.samples < 2 or options.problems < PARTS:
        raise UsageError(f"--samples must be at least 2, and --problems at least {PARTS}.")
    return options, rest


def refuse(message: str) -> None:
    raise UsageError(message)


def what_to_replay(options: Namespace, rest: list[str]) -> tuple[Flags, list[tuple[Path, Path]]]:
    """The recipe's flags, and (model folder, batch.jsonl) of each step. Raises UsageError."""
    if options.run:
        steps = [(folder, folder / "batch.jsonl") for folder in recorded_steps(options.run, options.at)]
        try:
            flags = parse_flags(["--resume", str(options.run), *rest], "")
        except UsageError as error:
            raise UsageError(str(error).replace("--resume ", "")) from error
    else:
        if not {"--dataset", "--task"} & {word.partition("=")[0] for word in rest}:
            raise UsageError("--model needs --dataset or --task: fresh completions take problems and a judge.")
        steps = [(options.model, options.batch)]
        flags = parse_flags(["--model", str(options.model), *rest], "")
    check_flags(flags)
    choose_engine(flags)
    if flags.kl_coef:
        raise UsageError("a KL penalty cannot be replayed: the model that it looks back to is not kept.")
    return flags, steps


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, 1 where g* is too noisy everywhere, 2 for what cannot work."""
    try:
        options, rest = read_arguments(argv)
        flags, files = what_to_replay(options, rest)
        variants = [Variant("recipe", flags), *(variant_of(text, flags) for text in options.against)]
        with tempfile.TemporaryDirectory() as empty, closing(Replayer(flags, files[0][0], empty)) as replayer:
            return replay(replayer, files, variants, options)
    except (UsageError, EngineFailed) as error:
        print(f"replay.py: {error}", file=sys.stderr)
        return 2


def replay(replayer: Replayer, files: Sequence, variants: Sequence[Variant], options: Namespace) -> int:
    """Measures, prints the table, and writes replay.png and replay.json beside the recorded steps."""
    steps = [read_step(folder, batch, replayer.names) for folder, batch in files]
    names = [variant.name for variant in variants]
    size = 4 * (len(variants) + PARTS) * sum(shape.numel() for shape in replayer.names.values())
    if size > LARGEST:
        raise UsageError(f"the gradients of one step would take {size / 1e9:.0f} GB; give fewer variants.")
    one_by_one = size * len(steps) > LARGEST
    with tqdm(total=len(steps) * (1 + len(variants)), unit="gradient") as bar:
        for step in steps:
            measure(replayer, step, variants, options, bar)
            if one_by_one and step.stars is not None:
                find_signals([step], names)
                step.forget_gradients()
    useful = [step for step in steps if step.stars is not None and step.agreement >= NOISY]
    for step in steps:
        if step.stars is None:
            print(f"step {step.number}: all groups have equal rewards, so it is left out")
        elif step not in useful:
            print(noise(step))
    if all(step.stars is None for step in steps):
        raise UsageError("no batch has a group with unequal rewards, so no gradient.")
    if not useful:
        return 1
    if not one_by_one:
        find_signals(useful, names)
    output = files[0][1].parent.parent if options.run else options.batch.parent
    values = measured(useful, names)
    (output / "replay.json").write_text(json.dumps(predict(values)))
    rows = predict(with_others(values, options.also))
    print(f"{summary(useful, options)}\n\n{report(rows)}\n")
    draw(rows, useful, output / "replay.png")
    print(f"picture: {output / 'replay.png'}; this run's numbers: {output / 'replay.json'}")
    if options.show or options.page:
        step = useful[len(useful) // 2]
        replayer.load(step)
        table = token_table(replayer, step, [variant for variant in variants if not variant.fresh])
        print(differences(table, options.show))
        if options.page:
            write_page(table, options.page)
            print(f"page, for a browser: {options.page}")
    return 0


def summary(steps: Sequence[Step], options: Namespace) -> str:
    """What was replayed, and whether its own gradients are the run's."""
    first, last, agreements = steps[0], steps[-1], [step.agreement for step in steps]
    text = f"{len(steps)} steps, {first.number} to {last.number}, lag {np.mean([step.lag for step in steps]):.1f}"
    text += f": pass rate {first.pass_rate:.2f} to {last.pass_rate:.2f}"
    text += f", halves of g* agree by {min(agreements):.2f} to {max(agreements):.2f}"
    if options.run:
        logged = {r["step"]: r.get("grad_norm") for r in Folder(options.run).read("metrics.jsonl") if "step" in r}
        norms = [(logged.get(step.number + 1), step.norm) for step in steps]
        gaps = [abs(own / of_run - 1) for of_run, own in norms if of_run]
        text += f"; norms of its own gradients differ from the run's by {max(gaps, default=np.nan):.0e}"
    if len(steps) < LEAST_BATCHES:
        text += "\nFew batches predict badly: three were wrong where ten were right."
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
