"""lab/evidence/tables.py: the numbers of a comparison and the verdicts on the paper, worked by hand."""

import math

import claims
import numpy as np
import pages
import pandas as pd
import pytest
import tables
from claims import equal, higher, less_steep, lower
from comparisons import COMPARISONS, Comparison
from example_runs import example
from runs import members

pytestmark = pytest.mark.medium


def numbers_of(name, **columns):
    """One column of what `measure` returns; the seeds count from 0."""
    return pd.DataFrame({name: {(variant, seed): x for variant, xs in columns.items() for seed, x in enumerate(xs)}})


def test_interval_and_difference_by_hand():
    """1, 2, 3: mean 2, sd 1, t(2 degrees, 97.5 %) = 4.3027: 2 -+ 4.3027 / sqrt 3 = 2 -+ 2.4841. Paired by seed:
    (5 - 4), (7 - 5), (9 - 6), while seed 3 of a has no partner."""
    assert tables.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert tables.interval([0.7]) == pytest.approx((0.7, math.nan, math.nan), nan_ok=True)
    assert math.isnan(tables.interval([])[0])
    numbers = numbers_of("end", a=[5, 7, 9, 0], b=[4, 5, 6]).join(numbers_of("tokens", a=[5, 7, 9, 0], b=[4, 5, 6]))
    assert tables.differences(numbers, "a", "b", "end").to_dict() == {0: 1, 1: 2, 2: 3}
    relative = tables.differences(numbers, "a", "b", "tokens")
    assert relative.tolist() == pytest.approx(np.log([5 / 4, 7 / 5, 9 / 6]))


def test_compute_to_a_rate_by_hand():
    """.2 at 100, .6 at 300: .3 is reached at 100 + (.1 / .4) 200 = 150; the first crossing counts; .9 never is."""
    tokens = np.array([0, 100, 300, 400, 500])
    rates = np.array([0.1, 0.2, 0.6, 0.25, 0.7])
    assert tables.compute_to(tokens, rates, 0.3) == pytest.approx(150)
    assert tables.compute_to(tokens, rates, 0.6) == pytest.approx(300)
    assert tables.compute_to(tokens, rates, 0.05) == 0
    assert math.isnan(tables.compute_to(tokens, rates, 0.9))


def test_falls_and_ends_by_hand():
    """.1 .3 .2 .4 .05 .45: below the best before by 0 0 .1 0 .35 0; the last two have the mean .25; .5 is never reached."""
    run = example(rates=[0.1, 0.3, 0.2, 0.4, 0.05, 0.45])
    assert tables.depths(run.rates) == pytest.approx([0, 0, 0.1, 0, 0.35, 0])
    numbers = tables.measure({"a": [run]}).loc["a", 0]
    expected = [0.25, 0.35, math.nan]
    assert numbers[["end", "fell", "tokens"]].tolist() == pytest.approx(expected, nan_ok=True)


def test_the_shared_ceiling():
    """Ceilings of .80 and .81: both are fitted again with .805, and B is about the true 2. A ceiling that is not
    identifiable (two C_mid of data) is not in the mean."""
    short = example("short", A=0.6, n=12)
    numbers = tables.measure({"a": [example(A=0.80, n=36)], "b": [example(A=0.81, n=36)], "short": [short]})
    assert numbers["A"].isna().tolist() == [False, False, True]
    points = short.points
    again = tables.forecast(points["tokens"], short.rates, n_samples=points["n"], A=numbers["A"].mean()).fit
    assert numbers.loc["short", 0][["B", "C_mid"]].tolist() == [again.B, again.C_mid]
    assert numbers["B"][:2].tolist() == pytest.approx([2.0, 2.0], abs=0.1)


@pytest.mark.parametrize(("n", "effect"), [(10, 1.0), (34, 0.5)])
def test_power_is_that_of_the_tables(n, effect):
    """Ten pairs see an effect of one standard deviation, 34 half of one: power .80 at 5 %, two-sided."""
    assert claims.power(3 * effect, 3.0, n - 1) < 0.8 <= claims.power(3 * effect, 3.0, n)
    assert claims.visible(3.0, n) == pytest.approx(3 * effect, rel=0.05)


def test_pooled_sd_by_hand():
    """1, 3 and 2, 4, 6 and 5: squares about their own means 2 + 8 + 0, degrees of freedom 1 + 2 + 0."""
    assert claims.pooled_sd([[1, 3], [2, 4, 6], [5.0], []]) == pytest.approx(math.sqrt(10 / 3))
    assert math.isnan(claims.pooled_sd([[1.0]]))


def test_what_could_be_seen_leaves_out_runs_that_fall():
    """Differences of .01 and .03, and of .05: pooled sd .0141. A run that falls, at -.6, does not count."""
    numbers = numbers_of("end", a=[0.5, 0.6], b=[0.51, 0.63], c=[0.55, 0.0])
    numbers = numbers.join(numbers_of("fell", a=[0, 0], b=[0, 0], c=[0, 0.7]))
    assert tables.spread(numbers, {"b": "a", "c": "a"}, "end") == pytest.approx(math.sqrt(0.0002))
    assert math.isnan(claims.visible(1.0, 1))
    assert math.isnan(claims.visible(math.nan, 5))


SAME, OPPOSITE, NOT_VISIBLE = "same here", "opposite here", "not visible here"
CLAIMS = equal("Figure 7"), lower("", "Table 1", "yes"), higher("", "Table 1", "yes")


def test_three_words_for_the_paper():
    """Equal: within .02. Lower and higher: beyond it. A difference of which a part lies elsewhere is not visible."""
    for (low, high), *words in (
        ((-0.01, 0.01), SAME, OPPOSITE, OPPOSITE),
        ((-0.02, 0.02), SAME, NOT_VISIBLE, NOT_VISIBLE),  # the margin itself belongs to both
        ((-0.03, 0.01), NOT_VISIBLE, NOT_VISIBLE, OPPOSITE),
        ((-0.09, -0.03), OPPOSITE, SAME, OPPOSITE),
        ((0.005, 0.03), NOT_VISIBLE, OPPOSITE, NOT_VISIBLE),
        ((0.03, 0.05), OPPOSITE, OPPOSITE, SAME),
        ((math.nan, math.nan), NOT_VISIBLE, NOT_VISIBLE, NOT_VISIBLE),
    ):
        assert [claims.verdict(low, high, claim) for claim in CLAIMS] == words, (low, high)
        assert {claims.verdict(low, high, claim, enough=False) for claim in CLAIMS} == {NOT_VISIBLE}
        assert claims.verdict(low, high, lower("", "Figure 2")) == NOT_VISIBLE  # the task could not show it
    assert claims.verdict(-0.3, -0.1, less_steep("", "Figure 4")) == SAME
    assert claims.verdict(-0.3, 0.1, less_steep("", "Figure 4")) == NOT_VISIBLE


def test_no_interval_is_two_things_at_once():
    """No interval is *same here* of two of equal, lower and higher."""
    ends = np.linspace(-0.06, 0.06, 25)
    for low in ends:
        for high in ends[ends > low]:
            assert [claims.verdict(low, high, claim) for claim in CLAIMS].count(SAME) <= 1


def test_the_same_runs_are_judged_once():
    """Whatever the comparison and the variant are called, a set of runs has one verdict; and each claim has a source."""
    published = members()
    judged = []
    for name, c in COMPARISONS.items():
        groups = published.get(name, {})
        assert all(claim.source for claim in c.paper.values())
        judged += [frozenset(run.name for run in groups[variant]) for variant in c.paper if variant in groups]
    assert len(judged) > 20
    assert len(set(judged)) == len(judged)


def test_a_held_ceiling_that_a_run_excludes():
    """A shared ceiling of .7 lies outside the intervals of both runs, of .6 and of .8: they have no B and no C_mid."""
    numbers = tables.measure({"a": [example(A=0.6, n=36)], "b": [example(A=0.8, n=36)]})
    assert numbers["A"].tolist() == pytest.approx([0.6, 0.8], abs=0.01)
    assert numbers[["B", "C_mid"]].isna().all(axis=None)
    assert tables.difference_cell(numbers, "b", "a", "B") == "–"


def test_what_waits_in_the_queue_by_hand():
    """A step takes 50 tokens; 1,000 are sampled by step 10, so 500 wait. Half of the gain at 1,000 tokens is at 500."""
    step = np.array([0, 10, 20, 30, 40])
    tokens = np.array([0, 1000, 1500, 2000, 2500])
    run = example(rates=[0.1, 0.5, 0.6, 0.7, 0.75], step=step, tokens=tokens)
    assert tables.waiting(run) == 500
    assert tables.measure({"a": [run]}).loc["a", 0][["tokens", "trained"]].tolist() == [1000, 500]


def test_a_table_by_hand():
    """Base has A = .60, .64 and .68, dapo .10 more at each seed, all measured to 6 C_mid, where 36/37 of the gain is
    reached: the difference at the end is .1 * 36/37 = .097. Tokens to .5 are C_mid sqrt(s / (1 - s)) with s = .4 / (A -
    .1): 600, 507 and 449, dapo 424, 387 and 359: log ratios -.347, -.270 and -.224, mean -.280: -24 %. The paper has
    a lower A. `late` is against dapo, and `none` has no runs."""
    base = [example("base", seed, A=0.6 + 0.04 * seed, n=36) for seed in range(3)]
    dapo = [example("dapo", seed, A=0.7 + 0.04 * seed, n=36) for seed in range(3)]
    c = Comparison(
        "first",
        dict.fromkeys(("base", "dapo", "late", "none"), ""),
        against={"late": "dapo"},
        paper={"dapo": lower(" by .075", "Table 1", "yes"), "none": equal("Figure 7")},
    )
    numbers = tables.measure({"base": base, "dapo": dapo, "late": dapo[:1]})
    frame = tables.compare(c, numbers).set_index("variant")
    assert frame["against"].tolist() == ["–", "base", "dapo"]
    assert frame["seeds"].tolist() == [3, 3, 1]
    assert frame.loc["base", "Δend"] == "–"
    assert frame.loc["dapo", "Δend"].startswith("**+0.097 [+0.09")
    assert frame.loc["dapo", "Δtokens to .5"].startswith("**-24 % [")
    assert frame.loc["late", "Δend"] == "+0.000"
    assert "Δhours to .5" not in frame
    (row,) = tables.findings(c, numbers).to_dict("records")
    assert (row["against"], row["the paper"], row["source"], row["pairs"]) == ("base", "A lower by .075", "Table 1", 3)
    assert row["here"].startswith("+0.1")
    assert row["verdict"] == "**opposite here**"
    two_pairs = numbers.drop([("base", 2)])
    (row,) = tables.findings(c, two_pairs).to_dict("records")
    assert (row["pairs"], row["verdict"]) == (2, "**not visible here**")
    assert tables.difference_cell(two_pairs, "dapo", "base", "end").startswith("+0.097 [+0.09")


@pytest.mark.parametrize(
    ("values", "name", "text"),
    [
        ((-0.000427, -0.0053, 0.0045), "A", "-0.000 [-0.005, +0.004]"),
        ((1.27, 0.752, 1.78), "B", "+1.27 [+0.75, +1.78]"),
        (np.log([1.388, 1.22, 1.587]), "C_mid", "+39 % [+22, +59]"),
        (np.log([4.18, 0.765, 22.8]), "tokens", "4.18 times [0.765, 22.8]"),
        ((0.004, math.nan, math.nan), "end", "+0.004"),  # one seed
        ((math.nan,) * 3, "end", "–"),
    ],
)
def test_differences_as_text(values, name, text):
    assert tables.as_text(values, name) == text


def test_a_page_gets_its_tables(tmp_path):
    """Between its marks and nowhere else, whatever the table holds; a mark without a table stays. A column in which all
    rows agree is named once."""
    frame = pd.DataFrame({"v": ["a", "b"], "seeds": [7, 7], "x": ["\\1", "2"]})
    table = pages.without_repeats(frame)
    assert table == "| v | x |\n|---|---|\n| a | \\1 |\n| b | 2 |\n\nIn all rows: seeds 7."
    page = tmp_path / "page.txt"
    page.write_text("# A\n<!-- refit law -->\nold\n<!-- end -->\nmine\n<!-- refit logs -->\nkept\n<!-- end -->\n")
    pages.fill(page, {"law": table, "findings": "no mark"})
    expected = f"# A\n<!-- refit law -->\n{table}\n<!-- end -->\nmine\n<!-- refit logs -->\nkept\n<!-- end -->\n"
    assert page.read_text() == expected
