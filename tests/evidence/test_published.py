"""evidence/published.py: what follows from what the papers print, and that two pages are theirs."""

import re
from pathlib import Path

import numpy as np
import published
import pytest
from figures import saturating_power
from published import BASE, CUTS, KHATRI, SIZES, TAN, K, curve, fits, inside, overtakes, paper_grid, read, usual

from fit_sigmoid import SigmoidFit, load, short, sigmoid

pytestmark = pytest.mark.medium

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_slopes_are_those_printed():
    """Tan et al., Qwen2.5 base on compute."""
    assert [round(K(*TAN, N), 3) for N in SIZES] == [0.005, 0.047, 0.096, 0.114]


@pytest.mark.parametrize(("slow", "text"), [("32k tokens", "28.1k"), ("batch 2048", "30.2k")])
def test_the_higher_ceiling_is_ahead_from_the_crossing_on(slow, text):
    """On both sides of it the curves say so."""
    at = overtakes(slow, BASE)
    assert curve(slow, at * 0.9) < curve(BASE, at * 0.9)
    assert curve(slow, at * 1.1) > curve(BASE, at * 1.1) and KHATRI[slow][0] > KHATRI[BASE][0]
    assert short(at) == text
    assert curve(BASE, 16e3) - curve(slow, 16e3) == pytest.approx(0.04, abs=0.005)


def test_laws_are_found_in_points_that_lie_on_them():
    """The grid: .6 and 100 + 10 * 403.03 are on it. The power law: a line in log C has no end.
    The usual fit: t with 36 degrees of freedom is 2.028, and A's scatter over 100 noisy runs is its standard error."""
    C = np.geomspace(500, 60_000, 40)
    truth = (0.4, 0.6, 1.5, 4130.3)
    assert paper_grid(C, sigmoid(C, *truth), 0.4) == pytest.approx((0.6, 1.5, 4130.3), rel=3e-3)
    assert saturating_power(C, 0.05 * np.log(C))[0] == 1
    R = sigmoid(C, *truth) + np.random.default_rng(0).normal(0, 0.005, (100, 40))
    A, half, ends = zip(*(usual(C, r, C[-1:] * 2) for r in R), strict=True)
    assert np.mean(half) == pytest.approx(2.028 * np.std(A, ddof=1), rel=0.2)
    assert np.mean(A) == pytest.approx(0.6, abs=2e-3)
    assert np.diff(ends, axis=1).mean() / 2 == pytest.approx(np.hypot(np.mean(half), 2.028 * 0.005), rel=0.1)


def test_the_range_of_nine_equal_runs():
    """Nine normal draws of sd 1 have a mean range of 2.970 (tables of control charts); the grid of .005 hardly shows. One
    in two such sets is no wider than .02 if the mean range is .0227."""
    mean, below = published.range_of_equal_runs(0.015, 9)
    assert mean == pytest.approx(2.970 * 0.015, rel=0.01) and below < 0.05
    assert 0.4 < published.range_of_equal_runs(0.0227 / 2.970, 9)[1] < 0.6


@pytest.mark.long
def test_the_pages_are_what_the_tool_writes(monkeypatch, tmp_path):
    """With the slow simulation taken out: nothing changes but the column that it fills."""
    was, figure1 = ((RESULTS / name).read_text() for name in ("published.md", "figure1.md"))
    monkeypatch.setattr(SigmoidFit, "ask_again", lambda _: np.inf)
    published.main(["--output", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure1.md", "figure1.png", "published.md"]
    assert (tmp_path / "published.md").read_text() == was
    new, fifth = (tmp_path / "figure1.md").read_text(), re.compile(r"^((?:\| [^|]+ ){4})\| [^|]+ ", re.M)
    assert fifth.sub(r"\1", new) == fifth.sub(r"\1", figure1) and new != figure1


@pytest.mark.parametrize(
    ("run", "cuts", "ends"),
    [
        ("dense", (15, 20, 25, 50), [(1328, 0.4021), (89367, 0.6402)]),
        ("moe", (16, 25), [(1241, 0.5177), (44162, 0.6959)]),
    ],
)
def test_what_the_figure_shows_later_lies_where_its_early_points_say(run, cuts, ends):
    """At every cut that is named 95 % of the later points. After no point is a ceiling identifiable that leaves out the
    later A."""
    C, R = read(run)
    assert [(C[i], R[i]) for i in (0, -1)] == ends and set(cuts) < set(CUTS[run])
    for cut in cuts:
        f = next(f for f in reversed(fits(run)) if f.C[-1] <= 1000 * cut)
        assert inside(f, C[f.n_points :], R[f.n_points :]) >= 0.95 * (C.size - f.n_points)
    A = fits(run)[-1].A
    assert [f.C[-1] for f in fits(run) if f.identifiable and not f.A_interval[0] <= A <= f.A_interval[1]] == []


def test_the_run_of_make_law_is_the_dense_run():
    """Its compute in whole GPU-hours."""
    x, C, R, _ = load(RESULTS / "paper_8B_run.jsonl")
    assert x == "device_hours" and np.array_equal([C, R], read("dense").round(4))
