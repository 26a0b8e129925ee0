"""lab/evidence/runs.py: what is measured of a run, and the rule that tells two variants apart, worked by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import runs
from example_runs import example

pytestmark = pytest.mark.medium


def numbers_of(name, **columns):
    """One column of what `measure` returns; the seeds count from 0."""
    return pd.DataFrame({name: {(variant, seed): x for variant, xs in columns.items() for seed, x in enumerate(xs)}})


def test_interval_and_difference_by_hand():
    """1, 2, 3: mean 2, sd 1, t(2 degrees, 97.5 %) = 4.3027: 2 -+ 4.3027 / sqrt 3 = 2 -+ 2.4841. Paired by seed:
    (5 - 4), (7 - 5), (9 - 6), while seed 3 of a has no partner."""
    assert runs.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert runs.interval([0.7]) == pytest.approx((0.7, math.nan, math.nan), nan_ok=True)
    assert math.isnan(runs.interval([])[0])
    numbers = numbers_of("end", a=[5, 7, 9, 0], b=[4, 5, 6]).join(numbers_of("tokens", a=[5, 7, 9, 0], b=[4, 5, 6]))
    assert runs.differences(numbers, "a", "b", "end").to_dict() == {0: 1, 1: 2, 2: 3}
    relative = runs.differences(numbers, "a", "b", "tokens")
    assert relative.tolist() == pytest.approx(np.log([5 / 4, 7 / 5, 9 / 6]))


def test_holm_by_hand():
    """Three p values: .01 x 3, .04 x 2, .03 x 2. In their order .03, .06 and .04 x 1, which may not fall below .06."""
    assert runs.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert runs.holm([0.9, 0.6]) == pytest.approx([1.0, 1.0])


def test_compute_to_a_rate_by_hand():
    """.2 at 100, .6 at 300: .3 is reached at 100 + (.1 / .4) 200 = 150; the first crossing counts; .9 never is."""
    tokens = np.array([0, 100, 300, 400, 500])
    rates = np.array([0.1, 0.2, 0.6, 0.25, 0.7])
    assert [runs.compute_to(tokens, rates, rate) for rate in (0.3, 0.6, 0.05)] == pytest.approx([150, 300, 0])
    assert math.isnan(runs.compute_to(tokens, rates, 0.9))


def test_falls_and_ends_by_hand():
    """.1 .3 .2 .4 .05 .45: below the best before by 0 0 .1 0 .35 0; the last two have the mean .25; .5 is never reached.
    A run that never rises by more than .1, or falls by more, does not stand."""
    run = example(rates=[0.1, 0.3, 0.2, 0.4, 0.05, 0.45])
    assert runs.depths(run.rates) == pytest.approx([0, 0, 0.1, 0, 0.35, 0])
    numbers = runs.measure({"a": [run]}).loc["a", 0]
    assert numbers["end"] == pytest.approx(0.25) and numbers["fell"] and math.isnan(numbers["tokens"])
    outcomes = [[0.04, 0.13, 0.0], [0.04, 0.15, 0.0], [0.1, 0.5, 0.41]]
    assert [runs.stands(example(rates=rates)) for rates in outcomes] == [False, False, True]


def test_the_shared_ceiling():
    """Ceilings of .80 and .81: both are fitted again with .805, and B is about the true 2. A ceiling that is not
    identifiable (two C_mid of data) is not in the mean."""
    groups = {"a": [example(A=0.80, n=36)], "b": [example(A=0.81, n=36)], "short": [example("short", A=0.6, n=12)]}
    assert runs.ceilings(groups).isna().tolist() == [False, False, True]
    assert runs.steepness(groups).tolist()[:2] == pytest.approx([2.0, 2.0], abs=0.1)


def test_a_shared_ceiling_that_a_run_excludes():
    """A shared ceiling of .7 lies outside the intervals of both runs, of .6 and of .8: they have no B."""
    groups = {"a": [example(A=0.6, n=36)], "b": [example(A=0.8, n=36)]}
    assert runs.ceilings(groups).tolist() == pytest.approx([0.6, 0.8], abs=0.01)
    numbers = pd.DataFrame({"B": runs.steepness(groups)})
    assert numbers["B"].isna().all() and runs.difference_cell(numbers, "b", "a", "B") == "–"


@pytest.mark.parametrize(
    ("values", "name", "text"),
    [
        ((-0.000427, -0.0053, 0.0045), "A", "-0.000 [-0.005, +0.004]"),
        ((1.27, 0.752, 1.78), "B", "+1.27 [+0.75, +1.78]"),
        (np.log([1.388, 1.22, 1.587]), "flops", "+39 % [+22, +59]"),
        (np.log([4.18, 0.765, 22.8]), "tokens", "4.18 times [0.765, 22.8]"),
        ((0.004, math.nan, math.nan), "end", "+0.004"),  # one seed
        ((math.nan,) * 3, "end", "–"),
    ],
)
def test_differences_as_text(values, name, text):
    assert runs.as_text(values, name) == text


# --------------------------------------------------------------------------------------------------------- the law


def graded(seed=0, **options):
    """A run of 40 evaluations to 7 C_mid, with a ceiling of .8 unless another is given."""
    return example("baseline", seed, n=40, every=52.5, comparison="law", **options)


def test_a_run_that_keeps_the_law_and_one_that_falls():
    """At a half, 3.5 C_mid, the end is 49/50 of the gain, .1 + .7 * .98 = .786, and the law says so. A ceiling is not
    known there yet: .7 * 4/53 = .053 remain by Eq. 1, and three times as much may. The other falls to .2, an error of
    .586."""
    falls = graded(1, rates=[*graded().rates[:21], *[0.2] * 20])
    judged = [runs.judge(run, 0.5) for run in (graded(), falls)]
    assert [result["error"] for result in judged] == pytest.approx([0, 0.586], abs=2e-3)
    assert [result["inside"] for result in judged] == [True, False]
    assert not judged[0]["identifiable"]


def test_reach_is_measured_without_a_fit():
    """From .1 to a plateau of .5, the mean of the last eight: half of the gain, .3, at 100 tokens. Half of 600 tokens
    are 3 C_mid, of 550 2.75."""
    long, short = (example(rates=[0.1, 0.2, 0.3, 0.4, *[0.5] * n]) for n in (9, 8))
    assert runs.plateau(example(rates=[0.1, *[0.0] * 31, *[0.77, 0.79] * 4])) == pytest.approx(0.78)
    assert [runs.half_gain(run) for run in (long, short)] == pytest.approx([100, 100])
    assert [runs.reach_of(run, 0.5) for run in (long, short)] == pytest.approx([3, 2.75])


def test_a_cut_by_reach_asks_for_twice_the_compute():
    """C_mid is 300 by construction and 297 as measured. At 3 of it, 892 tokens, the last point that is seen is that at
    840, and the one at 1680 is asked for, where the law has .1 + .7 * 31.36 / 32.36 = .778. At 4 more than all are
    needed."""
    cut = runs.cut_at(graded(), 3)
    assert cut["inside"] and cut["holds"] and not cut["identifiable"]
    falls = graded(rates=[*graded().rates[:32], 0.3, *graded().rates[33:]])
    assert not runs.cut_at(falls, 3)["inside"]
    assert runs.cut_at(graded(), 4) is None and runs.cut_at(graded(), 0.4) is None
