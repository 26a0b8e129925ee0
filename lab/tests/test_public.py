"""Tests of lab/evidence/public.py: the table of the blind test."""

import numpy as np
import pandas as pd
import public
import pytest

from fit_sigmoid import sigmoid

pytestmark = pytest.mark.medium


def test_the_table_counts_what_stands_in_the_results():
    """Two of three curves answer: .5 and 1 inside, mean .75. One ceiling, [.5, .6], misses the level .62 by .02."""
    known = {
        "repo": "a/b",
        "kind": "training",
        "cut": 0.5,
        "outcome": "answer",
        "width": 0.1,
        "interval_score": 0.4,
        "inside": 0.5,
        "identifiable": True,
        "A_low": 0.5,
        "A_high": 0.6,
        "end_level": 0.62,
    }
    unknown = known | {"inside": 1.0, "identifiable": False}
    flat = known | {"outcome": "flat", "identifiable": False}
    second = known | {"kind": "second"}
    table = public.summary(pd.DataFrame([known, unknown, flat, second]))
    assert table.split("\n")[2:] == ["| training, 50% | 3 | 2 | 0.750 [0.75, 0.75] | 0.100 | 0.400 | 1 (1) |"]


def test_the_forecast_is_judged_by_the_later_points():
    """On a curve without noise every later point lies inside, so that the score is the mean width, about the median."""
    x = np.arange(1.0, 41.0)
    points = pd.DataFrame({"x": x, "y": sigmoid(x, 0.1, 0.7, 2.0, 5.0), "n": np.nan})
    row = public.judge(points, 0.5)
    assert row["inside"] == 1 and row["interval_score"] == pytest.approx(row["width"], rel=0.3)
    assert row["A_low"] <= 0.7 <= row["A_high"]
    assert public.judge(points.assign(y=0.4), 0.5)["outcome"] == "none"


def test_the_page_has_the_table_of_the_published_results_and_points_have_a_licence():
    table = public.summary(pd.read_csv(public.RESULTS / "public_results.csv.gz"))
    assert table in (public.RESULTS / "public.md").read_text()
    points = pd.read_csv(public.RESULTS / "public.csv.gz")
    assert set(points["licence"]) == {"Apache-2.0", "MIT"}
    assert points["y"].between(0, 1).all() and points["name"].nunique() == 32
