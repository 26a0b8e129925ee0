"""The pictures of docs/: what the concept files compute, drawn in one style that can be read in gray.

python evidence/pictures.py [--output docs/pictures]
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fit_sigmoid
import losses
from pipeline_rl import Pacer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Okabe and Ito's colors for the color-blind, from dark to light; lines also differ in dashes, bars in hatches.
COLORS = ("#000000", "#0072B2", "#D55E00", "#E69F00", "#9ad0f3")
DASHES, HATCHES = ("-", "--", "-.", ":", (0, (5, 1))), ("", "//", "..", "xx")
STYLE = {"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False}


def lines(axes: "Axes", x: ArrayLike, ys: Mapping[str, ArrayLike]) -> None:
    """One line for each name."""
    for (name, y), color, dash in zip(ys.items(), COLORS, DASHES, strict=False):
        axes.plot(x, y, color=color, ls=dash, lw=2, label=name)


def factor(loss: Callable, rho: Tensor, sign: int) -> Tensor:
    """(N,) what stands before A grad log pi of a row of one token at each ratio, from autograd."""
    now = rho.log()[:, None].requires_grad_()  # (N, 1)
    token_loss, _ = loss(now, torch.zeros_like(now), torch.full_like(rho, sign), torch.ones_like(now))
    return torch.autograd.grad(-token_loss.sum(), now)[0][:, 0] / sign


def gradient_factor(figure: "Figure") -> None:
    """Each loss, both signs of the advantage."""
    rho = torch.logspace(-2, 3, 2001, base=2, dtype=torch.float64)
    # The trainer's old log-probs are those of now, as under PipelineRL: all of rho lies in TIS's second factor.
    own = lambda now, *rest: losses.tis(now, *rest, old_logprobs=now.detach())  # noqa: E731
    shown = {"CISPO, cap 5": losses.cispo, "DAPO, .8 to 1.26": losses.dapo, "GRPO, .8 to 1.2": losses.grpo}
    shown |= {"TIS, cap 2": own, "GSPO, .997 to 1.004": losses.gspo}
    for axes, sign in zip(figure.subplots(1, 2, sharey=True), (1, -1), strict=True):
        lines(axes, rho, {name: factor(loss, rho, sign) for name, loss in shown.items()})
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["1/4", "1/2", "1", "2", "4", "8"])
        axes.set(title=f"A {'> 0, more' if sign > 0 else '< 0, less'} of this token", xlabel="ratio ρ = π / π_gen")
    figure.axes[0].set_ylabel("factor before A ∇log π")
    figure.axes[0].legend()
    axes.text(4.8, 5.8, "DAPO, GRPO, GSPO:\nno limit", ha="right")


# ------------------------------------------------------------------------------------------------------------- schedule


class WhicheverIsFirst(Pacer):
    """What pipeline_rl.py warns of: the trainer takes the groups that finished first, whatever their numbers."""

    @property
    def ready(self) -> int:
        return sum(group is not None for group in self._groups.values())

    def take(self, count: int) -> list | None:
        finished = sorted((g for g in self._groups.values() if g), key=lambda group: group.finished)[:count]
        if len(finished) < count:
            return None
        self.training += count
        return [self._groups.pop(group.number) for group in finished]


def schedule(pacer: Pacer, slow: int, end: int) -> list[SimpleNamespace]:
    """The first `end` ticks of an engine with a slot for each group that may be outstanding. Group 0 has `slow` tokens
    and the others 4 to 6, one a tick; a step takes 4 ticks. Each group: its start, versions of its tokens, `trained`
    (when its step begins) and `lag` (of its oldest token there)."""
    groups: list[SimpleNamespace] = []
    version, live_at = 0, math.inf
    for tick in range(end):
        if tick == live_at:
            version, live_at = version + 1, math.inf
            pacer.release(pacer.take_size)
        if live_at == math.inf and (taken := pacer.take(pacer.take_size)):
            for group in taken:
                group.trained, group.lag = tick, version - group.versions[0]
            live_at = tick + 4
        while pacer.may_admit():
            number = pacer.admit()
            length = 4 + number * 7 % 3 if number else slow
            groups.append(SimpleNamespace(number=number, start=tick, length=length, versions=[], trained=None))
        for group in groups:
            if len(group.versions) < group.length:
                group.versions.append(version)
                if len(group.versions) == group.length:
                    group.finished = tick + 1
                    pacer.finish(group)
    return groups


def gantt(figure: "Figure", slow: int = 26, end: int = 40) -> None:
    """A slow group under `pipeline`, k = 1, and if the trainer took whichever finished first."""
    titles = {Pacer: "pipeline with k = 1: groups train in the order of admission"}
    titles |= {WhicheverIsFirst: "if whichever finishes first trained first: group 0 is too old"}
    for axes, (kind, title) in zip(figure.subplots(2, 1, sharex=True), titles.items(), strict=True):
        groups = schedule(kind(2, 1), slow, end)
        for group in groups:
            y = group.number
            for version in sorted(set(group.versions)):
                ticks = [group.start + i for i, v in enumerate(group.versions) if v == version]
                shade = 0.92 - 0.11 * version
                axes.barh(y, len(ticks), left=ticks[0], height=0.8, color=str(max(shade, 0)), edgecolor="black", lw=0.5)
                color = "black" if shade > 0.45 else "white"
                axes.text(ticks[0] + len(ticks) / 2, y, version, ha="center", va="center", fontsize=7, color=color)
            if group.trained is not None:
                axes.plot([group.finished, group.trained], [y, y], "k:", lw=1)
                axes.plot(group.trained, y, "D", color=COLORS[2] if group.lag > 1 else "white", mec="black", ms=5)
                axes.text(group.trained + 0.6, y, f"lag {group.lag}", va="center", fontsize=7)
        axes.set(title=title, ylabel="group", xlim=(0, end), ylim=(len(groups) - 0.4, -0.6), yticks=range(len(groups)))
    axes.set_xlabel(
        "time. A bar's number is the version that sampled; dotted, the group waits; diamond, its step begins"
    )


# ------------------------------------------------------------------------------------------------- averages and the std


def token_weights(figure: "Figure") -> None:
    """Completions of 10 and 100 tokens of one prompt, 50 and 50 of another."""
    lengths, group_ids = torch.tensor([10, 100, 50, 50]), torch.tensor([0, 0, 1, 1])
    mask = torch.arange(100) < lengths[:, None]  # (4, 100)
    token, share = figure.subplots(1, 2)
    for i, how in enumerate(("prompt", "sample", "token", "constant")):
        per_token = losses.aggregation_weights(mask, group_ids, how, 100)
        for axes, height in ((token, 1000 * per_token.amax(1)), (share, per_token.sum(1) / per_token.sum())):
            x, look = np.arange(4) + 0.2 * i - 0.3, {"color": COLORS[i + 1], "hatch": HATCHES[i], "edgecolor": "black"}
            axes.bar(x, height, 0.18, label=how, lw=0.5, **look)
            axes.set_xticks(range(4), ["10", "100", "50", "50"])
    token.set_title("weight of one token, in thousandths")
    share.set_title("share of the batch that a completion has")
    token.legend(title="average")
    figure.supxlabel("tokens of a completion: 10 and 100 of one prompt, 50 and 50 of another", fontsize=9)


def dead_groups(figure: "Figure") -> None:
    """Twenty groups of two, of which some have equal rewards."""
    alive = np.arange(20, 1, -1)
    std, steps = [], []
    for n in alive:
        rewards = torch.tensor([1.0, -1.0] * n + [1.0, 1.0] * (20 - n))  # (40,)
        ids = torch.arange(20).repeat_interleave(2)
        kept, mask = slice(0, 2 * n), torch.ones(40, 1)
        raw = losses.normalize_advantages(rewards, ids, "none")
        A, A_kept = (losses.normalize_advantages(r, i)[0] for r, i in ((rewards, ids), (rewards[kept], ids[kept])))
        w, w_kept = (losses.aggregation_weights(m, i)[0, 0] for m, i in ((mask, ids), (mask[kept], ids[kept])))
        std.append([raw[kept].std(correction=0), raw.std(correction=0)])
        steps.append([1, A / A_kept, w / w_kept, A * w / A_kept / w_kept])
    left, right = figure.subplots(1, 2)
    lines(left, 1 - alive / 20, dict(zip(("dropped", "left in"), np.array(std).T, strict=True)))
    names = ("dropped", "left in the std", "left in the average", "left in both")
    lines(right, 1 - alive / 20, dict(zip(names, np.array(steps).T, strict=True)))
    left.set_title("std of the batch")
    right.set_title("step of the other groups, relative to dropping")
    for axes in (left, right):
        axes.set(xlabel="share of groups with equal rewards", ylim=(0, None))
        axes.legend()


# ------------------------------------------------------------------------------------------------ rounding, and the cut


def bfloat16(figure: "Figure") -> None:
    """The numbers that there are between 19.5 and 20.5, and what becomes of two logits."""
    axes = figure.subplots()
    held = torch.linspace(19.5, 20.5, 4001).bfloat16().float().unique()
    axes.hlines(0, 19.45, 20.55, color="black", lw=1)
    axes.plot(held, 0 * held, "k|", ms=16)
    for x in held.tolist():
        axes.text(x, -0.4, f"{x:g}", ha="center")
    became = []
    for z, color, marker, program in ((20.06, COLORS[1], "o", "one program"), (20.065, COLORS[2], "s", "the other")):
        became.append(float(torch.tensor(z).bfloat16()))
        axes.annotate("", (became[-1], 0.1), (z, 0.75), arrowprops={"arrowstyle": "->", "color": color, "lw": 1.5})
        axes.plot(z, 0.8, marker, color=color, ms=6, label=f"{program} has {z:g}, which becomes {became[-1]:g}")
    axes.set(ylim=(-0.6, 1.3), xlim=(19.45, 20.55))
    rho = [f"{math.exp(x):.3f}" for x in (0.005, became[1] - became[0])]
    axes.set_title(f"All bfloat16 numbers from 19.5 to 20.5. A ratio of e^.005 = {rho[0]} becomes e^.125 = {rho[1]}.")
    axes.legend(loc="upper left")
    axes.axis("off")


def moving_cut(figure: "Figure") -> None:
    """What a run's first points say of its last evaluation, by how many there are."""
    shares = np.arange(0.1, 1, 0.05)
    runs = {"graded": "law.jsonl", "chain": "chain.jsonl"}
    for axes, (task, file) in zip(figure.subplots(1, 2, sharey=True), runs.items(), strict=True):
        for share in shares:
            r = fit_sigmoid.curve(DOCS / "results" / file, share)
            if not r.fit.best:
                axes.plot(share, 0.03, "kx", ms=5, label="no fit")
                continue
            name, fill = ("ceiling identifiable", COLORS[1]) if r.fit.identifiable else ("not yet", "white")
            axes.plot([share] * 2, r.fit.interval(r.C[-1], noise=True)[:, 0], color=COLORS[1], lw=2)
            axes.plot(share, r.fit.predict(r.C[-1], r.fit.form), "o", color=COLORS[1], mfc=fill, ms=6, label=name)
        axes.axhline(r.R[-1], color="black", ls="--", lw=1, label="measured")
        axes.set(title=f"task {task}", xlabel="share of the compute that is fitted", ylim=(0, 1.03))
    figure.axes[0].set_ylabel("forecast of the last evaluation")
    handles, names = figure.axes[0].get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    figure.axes[0].legend(once.values(), once, loc="lower right", ncols=2)


def speed_and_falls(figure: "Figure") -> None:
    """Published runs, up to seven seeds each. Left: sampling and training at once, or in turns, on one clock. Right:
    stale tokens at a high learning rate, with CISPO's upper bound and with DISPO's four."""
    rows = pd.read_csv(DOCS / "results" / "curves.csv.gz").query("state == 'finished'")
    looks = ((COLORS[1], "-"), (COLORS[2], "--"))
    panels = {
        "speed, seven seeds each": {
            "PipelineRL": "schedules/pipeline-8",
            "in turns of 8 updates": "schedules/ppo-off-policy-8",
        },
        "stability: a lag of 8, a learning rate of 1e-3": {"DISPO": "survivors/dispo", "CISPO": "survivors/cispo-5"},
    }
    for axes, (title, folders), x in zip(figure.subplots(1, 2, sharey=True), panels.items(), ("s", "k"), strict=True):
        for (name, folder), (color, dash) in zip(folders.items(), looks, strict=True):
            for seed in range(7):
                run = rows.query(f"run == '{folder}/seed-{seed}'")
                C = run["device_hours"] * 1800 if x == "s" else run["tokens"] / 1000  # two cores: 1,800 s a device-hour
                axes.plot(C, run["pass_rate"], color=color, ls=dash, lw=1.0, label=name if seed == 0 else None)
        axes.set(xlabel="seconds" if x == "s" else "thousand sampled tokens", ylim=(-0.03, 1), title=title)
        axes.legend(loc="upper left", ncols=2)
        axes.set_xlim(0)
    figure.axes[0].set(ylabel="pass rate", xlim=(0, 100))


HEIGHTS = {
    gradient_factor: 3.4,
    speed_and_falls: 2.9,
    gantt: 6.0,
    token_weights: 3.0,
    dead_groups: 3.0,
    bfloat16: 2.0,
    moving_cut: 3.2,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    import matplotlib
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", default=DOCS / "pictures", type=Path, metavar="FOLDER")
    folder = parser.parse_args(argv).output
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for draw, height in HEIGHTS.items():
            figure = Figure(figsize=(8.5, height), layout="constrained")
            draw(figure)
            figure.savefig(folder / f"{draw.__name__}.png", dpi=100)


if __name__ == "__main__":
    main()
