"""tools/published.py: what follows from the printed constants, and that docs/published.md is the page it writes."""

import re
from pathlib import Path

import numpy as np
import published
import pytest
from published import CHENG, KHATRI, PAGE, SIZES, TAN, K, curve, overtakes, range_of_equal_runs, window_A

pytestmark = pytest.mark.medium

DOCUMENT = (Path(__file__).parent.parent / "docs" / "published.md").read_text()


def test_slopes_are_those_printed():
    """Tan et al., Qwen2.5 base on compute."""
    constants = TAN["Qwen2.5 base, compute"][0]
    assert [round(K(*constants, N), 3) for N in SIZES] == [0.005, 0.014, 0.025, 0.047, 0.070, 0.096, 0.114]


@pytest.mark.parametrize(("slow", "low", "high"), [("32k tokens", 34_500, 40_500), ("batch 2048", 38_000, 45_500)])
def test_the_higher_ceiling_is_ahead_from_the_crossing_on(slow, low, high):
    """At R0 of .2 and .3; and on both sides of it the curves say so."""
    fast = "8B, batch 768, 14k tokens"
    for R0 in (0.2, 0.3):
        at = overtakes(slow, fast, R0)
        assert low < at < high
        assert curve(slow, R0, at * 0.9) < curve(fast, R0, at * 0.9)
        assert curve(slow, R0, at * 1.1) > curve(fast, R0, at * 1.1) and KHATRI[slow][0] > KHATRI[fast][0]


def test_a_power_law_finds_another_ceiling_in_every_window():
    """1.0, the bound, from 1.5k on, and near the sigmoid's .645 only when fitted late."""
    sigmoid, power = window_A(0.3, 1500, 50_000)
    assert (sigmoid, power) == pytest.approx((0.645, 1.0), abs=1e-3)
    assert window_A(0.3, 30_000, 60_000)[1] == pytest.approx(0.65, abs=0.005)


def test_the_range_of_nine_equal_runs():
    """Nine normal draws of sd 1 have a mean range of 2.970 (tables of control charts); the grid of .005 hardly shows. One
    in two such sets is no wider than .02 if the mean range is .0227."""
    mean, below = range_of_equal_runs(0.015, 9)
    assert mean == pytest.approx(2.970 * 0.015, rel=0.01) and below < 0.05
    assert 0.4 < range_of_equal_runs(0.0227 / 2.970, 9)[1] < 0.6


def test_the_page_is_what_the_tool_writes():
    """All of its fixed text, and the tables that cost nothing to make again."""
    for text in re.split(r"\{\w+\}", PAGE):
        assert text.strip("\n") in DOCUMENT
    # easy at C0: 2^(6.09 / 2 + 2.73) = 54.8; far above 2^8.82 = 452, of which 444 at 10^7
    assert "| easy | 7 | 7 | 13 | 55 | 118 | 379 | 444 |" in DOCUMENT
    assert f"| hard | {2 ** (4.47 / (1 + np.exp(7.23 * 1.34)) + 2.79):.0f} |" in DOCUMENT and CHENG["hard"][0] == 4.47
    assert "| Qwen2.5 base, compute, intra | 0.005 | 0.014 | 0.025 | 0.047 | 0.070 | 0.096 | 0.114 |" in DOCUMENT


@pytest.mark.long
def test_the_tool_writes_page_and_pictures(monkeypatch, tmp_path):
    """With the slow simulations taken out."""
    none = dict.fromkeys(("sd of A", "identifiable", "median error", "covered", "width"), 0.0)
    monkeypatch.setattr(published, "extrapolate", lambda *_: none)
    monkeypatch.setattr(published, "window_A", lambda *_: (0.6, 0.7))
    assert published.main(["--output", str(tmp_path)]) == 0
    files = ["published.md", "published_laws.png", "published_runs.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert "| 1.5k to 50k | 0.645 | 1 | 0.6 | 0.70 |" in (tmp_path / "published.md").read_text()
