"""evidence/figures.py and evidence/report.py: the numbers of a comparison and its page, worked by hand."""

import math
from pathlib import Path

import figures
import numpy as np
import pandas as pd
import pytest
import report
from comparisons import EQUAL, GRADED, Comparison, near
from figures import Compared
from made_curves import made

pytestmark = pytest.mark.medium

ONE = Comparison("first", {"base": "", "dapo": "--loss dapo"}, setting="--k 4")


def test_interval_and_difference_by_hand():
    """1, 2, 3: mean 2, sd 1, t(2 degrees, 97.5 %) = 4.3027: 2 -+ 4.3027 / sqrt 3 = 2 -+ 2.4841. Paired by seed:
    (5 - 4), (7 - 5), (9 - 6), while seeds 3 and 8 have no partner."""
    assert figures.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-4)
    mean, low, high = figures.interval([0.7])
    assert mean == 0.7 and math.isnan(low) and math.isnan(high)
    values = {("a", 0): 5.0, ("a", 1): 7.0, ("a", 2): 9.0, ("a", 3): 0.0} | dict(
        zip([("b", 0), ("b", 1), ("b", 2), ("b", 8)], [4.0, 5.0, 6.0, 1.0], strict=True)
    )
    table = pd.DataFrame({"final": values, "tokens": values})
    assert figures.differences(table, "a", "b", "final").to_dict() == {0: 1.0, 1: 2.0, 2: 3.0}
    assert figures.differences(table, "a", "b", "tokens").tolist() == pytest.approx(np.log([5 / 4, 7 / 5, 9 / 6]))
    assert figures.differences(table, "a", "none", "final").empty and math.isnan(figures.interval([])[0])


def test_compute_to_a_rate_by_hand():
    """.2 at 100, .6 at 300: .3 is reached at 100 + (.1 / .4) 200 = 150; the first crossing counts; .9 never is."""
    tokens, rates = [0, 100, 300, 400, 500], [0.1, 0.2, 0.6, 0.25, 0.7]
    assert figures.compute_to(tokens, rates, 0.3) == pytest.approx(150)
    assert figures.compute_to(tokens, rates, 0.6) == pytest.approx(300)
    assert figures.compute_to(tokens, rates, 0.05) == 0
    assert figures.compute_to(tokens, rates, 0.9) == figures.compute_to([], [], 0.9) == math.inf


def test_means_over_steps_by_hand():
    """Evaluations at steps 0, 8 and 12: 8 steps at 1 and 4 steps at 4 are 24 / 12. Nothing is logged of the second kind."""
    run = made(rates=[0.1, 0.2, 0.3], step=[0, 8, 12], lag=[np.nan, 1, 4])
    assert figures.over_steps(run, "lag") == 2.0
    assert math.isnan(figures.over_steps(run, "ess"))


def test_falls_by_hand():
    """.1 .3 .2 .5 .1 .6: below the best before by 0 0 .1 0 .4 0; the last two have the mean .35."""
    run = made(rates=[0.1, 0.3, 0.2, 0.5, 0.1, 0.6])
    assert figures.falls(run) == pytest.approx([0, 0, 0.1, 0, 0.4, 0])
    assert figures.final(run) == pytest.approx(0.35)
    assert [figures.fall_of(made(rates=[0.1, 0.5, low, 0.6])) for low in (0.41, 0.39)] == [None, 2]  # more than a tenth
    table = figures.figures_of({"a": [run]}, 0.7, "tokens", [])
    assert table.loc["a", 0]["final"] == pytest.approx(0.35)
    assert math.isnan(table.loc["a", 0]["tokens"])  # never reached


# ---- power and the paper


@pytest.mark.parametrize(
    "effect, paired, n", [(1.0, True, 10), (0.5, True, 34), (1.0, False, 17), (0.8, False, 26), (0.5, False, 64)]
)
def test_seeds_needed_are_those_of_the_tables(effect, paired, n):
    """Cohen 1988, table 2.4.1 for two groups (17, 26, 64 at d = 1, .8, .5) and the usual 10 and 34 for pairs: power .80
    at 5 %, two-sided; sd 3, so that the effect's unit matters."""
    assert figures.seeds_needed(3 * effect, 3.0, paired) == n
    assert figures.power(3 * effect, 3.0, n - 1, paired) < 0.8 <= figures.power(3 * effect, 3.0, n, paired)


def test_what_n_seeds_see_is_seen_in_four_of_five_simulated_cases():
    """An effect of that size, 20,000 times: Student's own test at 5 % rejects in 80 %, with a sampling error of .3 %;
    without an effect in 5 %."""
    from scipy.optimize import brentq
    from scipy.stats import ttest_1samp, ttest_ind

    rng, n = np.random.default_rng(0), 4
    x, y = rng.normal(size=(2, 20_000, n))
    pairs = ttest_1samp(2 * x + figures.visible(2.0, n), 0, axis=1)
    between = brentq(lambda effect: figures.power(effect, 2.0, n, paired=False) - 0.8, 0, 50)
    groups = ttest_ind(2 * x + between, 2 * y, axis=1)
    assert [np.mean(found.pvalue < 0.05) for found in (pairs, groups)] == pytest.approx([0.8, 0.8], abs=0.012)
    assert figures.power(0.0, 1.0, n, True) == pytest.approx(0.05, abs=1e-4)
    assert math.isnan(figures.visible(1.0, 1)) and math.isnan(figures.visible(math.nan, 5))


def test_pooled_sd_by_hand():
    """1, 3 and 2, 4, 6 and 5: squares about their own means 2 + 8 + 0, degrees of freedom 1 + 2 + 0."""
    assert figures.pooled_sd([[1, 3], [2, 4, 6], [5.0], []]) == pytest.approx(math.sqrt(10 / 3))
    assert math.isnan(figures.pooled_sd([[1.0]]))


def test_three_words_for_the_paper():
    """The paper: equal within .02; .075 lower, give or take .02; lower by an amount that it does not say."""
    lower = (-math.inf, 0.0)
    for (low, high), equal, much, some in (
        ((-0.01, 0.01), "reproduced", "refuted", "cannot"),
        ((-0.03, 0.01), "cannot", "refuted", "cannot"),
        ((-0.06, 0.01), "cannot", "cannot", "cannot"),  # holds 0, and a value of the paper
        ((-0.09, -0.03), "refuted", "reproduced", "reproduced"),
        ((-0.05, -0.03), "refuted", "refuted", "reproduced"),  # lower, but not as much
        ((0.03, 0.04), "refuted", "refuted", "refuted"),
        ((0.005, 0.03), "cannot", "refuted", "refuted"),  # not 0, and perhaps within the margin
        ((math.nan, math.nan), "cannot", "cannot", "cannot"),
    ):
        for span, word in ((EQUAL[1:], equal), (near(-0.075)[1:], much), (lower, some)):
            assert figures.against_paper(low, high, *span).startswith(word), (low, high, span)
            assert figures.against_paper(low, high, *span, enough=False) == figures.UNSEEN


def test_the_shared_ceiling():
    """Ceilings .80 and .81 agree: both are refitted with .805 (to the fit's precision), and B is about the true 2. Of .6
    and .8, `compare` names the higher one; the refits use the mean, .7."""
    runs = {str(A): [made(A=A, n=36)] for A in (0.80, 0.81, 0.60)}
    two = {name: runs[name] for name in ("0.8", "0.81")}
    shared, said, refits = figures.share_ceiling(two, "tokens")
    assert shared == pytest.approx(0.805, abs=2e-3) and "agree" in said
    assert [f.A for f in refits] == [shared] * 2
    assert [f.B for f in refits] == pytest.approx([2.0, 2.0], abs=0.1)
    assert figures.figures_of(two, 0.5, "tokens", refits)["C_mid shared"].tolist() == pytest.approx([300, 300], abs=8)
    assert figures.share_ceiling({"0.8": runs["0.8"]}, "tokens")[0] is None
    shared, said, _ = figures.share_ceiling({"0.8": runs["0.8"], "0.6": runs["0.6"]}, "tokens")
    assert shared == pytest.approx(0.7, abs=5e-3) and "0.8 seed 0 is highest" in said


def test_the_report_by_hand():
    """Two seeds. Base has A = .60 and .64, dapo .10 more at each seed, all measured to 6 C_mid, where 36/37 of the gain
    is reached: the difference at the end is .1 * 36/37 = .097 at both seeds, so it is distinguishable although the two
    intervals over seeds overlap widely. Tokens to .5 are C_mid sqrt(s / (1 - s)) with s = .4 / (A - .1): 600 and 507,
    dapo 424 and 387: log ratios -.347 and -.270, mean -.309, which is -27 %; sd .0545, -+ 12.7 * .0545 / sqrt 2 = .49:
    not distinguishable. The paper's difference in A is -.075, and ours are near +.1 at either seed, but two pairs of
    ceilings are no verdict, and three are one: refuted."""
    c = Comparison("first", {"base": "", "dapo": "--loss dapo", "late": "--k 2"}, "--k 4", paper={"dapo": near(-0.075)})
    groups = {
        v: [made(v, s, A=0.60 + 0.04 * s + extra, n=36) for s in range(2)] for v, extra in (("base", 0), ("dapo", 0.1))
    }
    compared = Compared("one", c, groups, ["dapo seed 2 (unfinished)"])
    text, rows = report.page(compared), report.paper_rows(compared)
    ends = [[figures.final(run) for run in runs] for runs in groups.values()]
    assert np.subtract(*ends) == pytest.approx([-0.097] * 2, abs=1e-3)
    assert "4 finished runs in the setting `--k 4`: *base*; *dapo* `--loss dapo`." in text
    assert "Left out: dapo seed 2 (unfinished). Variants without a finished run: late." in text
    [dapo] = [line.split(" | ") for line in text.splitlines() if line.startswith("| dapo | base |")]
    assert "| base | base |" not in text
    assert dapo[2].startswith("**+0.") and dapo[5].startswith("**+0.0") and dapo[5].endswith("**")
    assert dapo[6].startswith("-26 % [")  # on straight lines
    [paper] = rows
    assert paper[-1] == "**cannot be seen at this size**" and dapo[7] == f"A -0.095 to -0.055: {paper[-1]} |"
    more = {v: [*groups[v], made(v, 2, A=A, n=36)] for v, A in (("base", 0.68), ("dapo", 0.781))}
    assert report.paper_rows(Compared("one", c, more, []))[0][-1] == "**refuted**"
    assert paper[2:4] == ["A where identifiable", "-0.095 to -0.055"] and paper[5] == "2"
    mean, low, high = figures.interval(ends[0])
    [base] = [line for line in text.splitlines() if line.startswith("| base |")]
    assert f" | {mean:.3g} | " in base and "![one](one.png)" in text
    assert "In all rows: seeds 2; " in text and "seeds |" not in text
    _, first, end, C_mid, A, sentence = report.in_short(compared).splitlines()
    assert first.startswith("dapo against base: ") and end.split()[-3:] == dapo[5].strip("*").split()
    assert f"{mean:.3g} [{low:.3g}, {high:.3g}]" in end and A.split()[0] == "A" and C_mid.split()[0] == "C_mid"
    assert sentence.startswith("  It can be seen: pass rate at the end higher")


def test_data_sets_apart_and_the_papers_figures():
    """A set on Eq. 1 with a ceiling of .4 beside one of .8: C_mid 300 and B 2 for both. A logistic at 800, the end, is
    1 / (1 + (3/8)^2) = .877 of the gain, and at 400, half of it, 1 / (1 + (3/4)^2) = .64."""
    c = Comparison("two", {"base": ""}, sets=("easy", "hard"), published={"base": (0.61, 1.97)})
    easy, hard = made(A=0.8).rates, made(A=0.4).rates
    run = made(rates=(easy + hard) / 2, set_1=easy, set_2=hard, flags={"dataset": "a,b"})
    compared = Compared("two", c, {"base": [run]}, [])
    head, _, *rows = (row.strip("| ").split(" | ") for row in report.sets_table(compared).split("\n")[:5])
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["data set"] for row in cells] == ["all trained on", "easy", "hard"]
    for row, gain in zip(cells[1:], (0.7, 0.3), strict=True):
        last, before = (1 / (1 + (300 / C) ** 2) for C in (800, 750))
        assert float(row["end"]) == pytest.approx(0.1 + gain * (last + before) / 2, abs=6e-4)
        assert float(row["gained in the second half"]) == pytest.approx(gain * ((last + before) / 2 - 0.64), abs=6e-4)
    assert "| 0.610, 1.97 |" in report.variant_table(compared).split("\n")[2]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (((-0.000427, -0.0053, 0.0045),), "-0.000 [-0.005, +0.004]"),
        (((1.27, 0.752, 1.78), 2), "+1.27 [+0.75, +1.78]"),
        ((np.log([1.388, 1.22, 1.587]), 3, True), "+39 % [+22, +59]"),
        ((np.log([4.18, 0.765, 22.8]), 3, True), "4.18 times [0.765, 22.8]"),
        (((0.004, math.nan, math.nan),), "+0.004"),  # one seed
        (((math.nan,) * 3,), "–"),
    ],
)
def test_differences_have_the_digits_that_their_intervals_support(given, text):
    assert report.difference_text(*given) == text


def test_columns_that_do_not_differ_are_said_once():
    rows = [["a", 7, 0.1], ["b", 7, 0.2]]
    columns = "| v | x |\n| --- | --- |\n| a | 0.1 |\n| b | 0.2 |"
    assert report.told_apart(["v", "seeds", "x"], rows) == f"{columns}\n\nIn all rows: seeds 7."
    assert report.told_apart(["v", "seeds"], [["a", 7]]) == report.table(["v", "seeds"], [["a", 7]])


def test_a_page_says_what_differs_from_the_usual_setting():
    """Which docs/results/README.md has in full. Seeds that are not the first ones are named."""
    assert f"    {GRADED}\n" in (Path(__file__).parents[2] / "docs/results/README.md").read_text()
    assert report.setting_of(Comparison("x", {})).endswith("README.md)")
    changed = Comparison("x", {}, f'{GRADED} --k 2 --interruption_phrase "time up"')
    assert report.setting_of(changed).endswith(" with `--k 2 --interruption_phrase 'time up'`")
    groups = {name: [made(name, seed, rates=[0.1, 0.2]) for seed in (0, last)] for name, last in (("a", 1), ("b", 3))}
    text = report.variant_table(Compared("x", Comparison("x", {"a": "", "b": ""}, ""), groups, []))
    assert "| a | 2 |\n| b | 2 (0, 3) |\n" in text


def test_what_cannot_be_seen_is_said():
    """Differences of .01 and -.01 at two seeds: mean 0, and an interval of about a tenth on either side. One seed claims
    nothing, however large its difference."""
    ceilings = {"base": (0.7, 0.7), "dapo": (0.69, 0.71)}
    groups = {name: [made(name, seed, A=A) for seed, A in enumerate(some)] for name, some in ceilings.items()}
    short = report.in_short(Compared("one", ONE, groups, []))
    assert "It cannot be seen: no interval leaves out 0; 2 seeds could see 0." in short and "can be seen:" not in short
    compared = Compared("one", ONE, {"base": [made(A=0.5)], "dapo": [made("dapo", A=0.9)]}, [])
    assert report.paper_rows(compared) == [] and "**" not in report.page(compared)
    assert "It cannot be seen: one seed has no interval." in report.in_short(compared)


def test_the_smallest_visible_difference_by_hand():
    """Two variants, each with the pairs that it has: differences of .01 and .03 (seeds 0, 1) and of .05 (seed 0) have a
    pooled sd of .0141; two pairs then need sqrt(.0002) * 11.55 = .163 (11.55: the textbook's t of one degree)."""
    c = Comparison("x", {"a": "", "b": "--k 1", "c": "--k 2"}, "")
    ends = {("a", 0): 0.5, ("a", 1): 0.6, ("b", 0): 0.51, ("b", 1): 0.63, ("c", 0): 0.55}
    groups = {v: [made(v, s, rates=[0.1, end, end]) for (w, s), end in ends.items() if v == w] for v in "abc"}
    assert Compared("x", c, groups, []).spread("final") == pytest.approx(math.sqrt(0.0002))
    assert figures.visible(math.sqrt(0.0002), 2) == pytest.approx(0.1633, abs=1e-3)
    groups["c"].append(made("c", 1, rates=[0.1, 0.7, 0.0]))  # falls, and so its difference of -.6 does not count
    assert Compared("x", c, groups, []).spread("final") == pytest.approx(math.sqrt(0.0002))
    fallen = {"a": groups["c"][-1:], "b": groups["c"][-1:]}
    assert math.isnan(Compared("x", c, fallen, []).spread("final"))


def test_pairs_follow_against():
    """`c` is compared with `b`; a variant whose baseline has no finished run with none, and the first with none."""
    c = Comparison("x", {"a": "", "b": "--k 1", "c": "--k 2", "d": "--k 3"}, against={"c": "b"})
    for found, against in (("abcd", {"b": "a", "c": "b", "d": "a"}), ("bcd", {"c": "b"})):
        assert Compared("x", c, {name: [made(name)] for name in found}, []).against == against


def test_a_page_gets_its_tables(tmp_path, capsys):
    """Between its marks and nowhere else, whatever the table holds; a mark without a table is named and stays."""
    page = tmp_path / "page.txt"
    page.write_text("# A\n<!-- refit law -->\nold\nold\n<!-- end -->\nmine\n<!-- refit logs -->\nkept\n<!-- end -->\n")
    for table in ("| new \\1 |", "| newer |"):
        report.fill(page, {"law": table, "findings": "| no mark |"})
        assert page.read_text() == (
            f"# A\n<!-- refit law -->\n{table}\n<!-- end -->\nmine\n<!-- refit logs -->\nkept\n<!-- end -->\n"
        )
    assert "nothing to put under logs" in capsys.readouterr().out
