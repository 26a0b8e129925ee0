"""lab/evidence/tables.py: tables worked by hand, and the pages are what it makes from the published curves."""

import math

import pandas as pd
import pytest
import tables
from comparisons import COMPARISONS, STATEMENTS, Comparison, Statement
from example_runs import example
from runs import members

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def published():
    return members()


def marked(page, name):
    """What stands in the page between its marks."""
    return page.read_text().partition(f"<!-- refit {name} -->\n")[2].partition("\n<!-- end -->")[0]


@pytest.mark.slow
@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_a_page_has_what_the_curves_give(page, published):
    """All marked tables, digit by digit."""
    blocks = tables.PAGES[page](published)
    assert page.read_text().count("<!-- refit ") == len(blocks) > 0
    for name, block in blocks.items():
        assert marked(page, name) == block, name


def test_some_rows_of_the_long_pages_are_made_again(published):
    """Of the pages whose tables take minutes: a comparison, and the first rows of RESULTS.md and of the law."""
    table = tables.compare(COMPARISONS["batch-rule"], published["batch-rule"], ("B", "end", "elsewhere"))
    page = (tables.RESULTS / "comparisons.md").read_text()
    assert tables.without_repeats(table) in page
    rows = [tables.finding(s, published[s.comparison]) for s in STATEMENTS if s.measure not in ("A", "B")]
    rows += [tables.cut_row("law, half", 0.5, tables.runs_in(published, "law"))]
    text = (tables.LAB / "RESULTS.md").read_text() + (tables.RESULTS / "law.md").read_text()
    for row in rows:
        assert tables.markdown(pd.DataFrame([row])).splitlines()[-1] in text


SAME, OPPOSITE, NOT_VISIBLE = "**same here**", "**opposite here**", "**not visible here**"


def test_three_words_for_a_statement():
    """Equal: within .02. Lower: beyond it. A difference of which a part lies elsewhere is not visible, nor are two
    pairs."""
    for (low, high), *words in (
        ((-0.01, 0.01), SAME, OPPOSITE),
        ((-0.02, 0.02), SAME, NOT_VISIBLE),  # the margin itself belongs to both
        ((-0.03, 0.01), NOT_VISIBLE, NOT_VISIBLE),
        ((-0.09, -0.03), OPPOSITE, SAME),
        ((math.nan, math.nan), NOT_VISIBLE, NOT_VISIBLE),
    ):
        assert [tables.verdict(low, high, between, 3) for between in ((-0.02, 0.02), (-math.inf, -0.02))] == words
        assert tables.verdict(low, high, (-0.02, 0.02), 2) == NOT_VISIBLE
    assert tables.verdict(0, 1, None, 9) == "–"


def test_a_table_by_hand():
    """Base has A = .60, .64 and .68, dapo .10 more at each seed, all measured to 6 C_mid, where 36/37 of the gain is
    reached: the difference at the end is .1 * 36/37 = .097. Tokens to .5 are C_mid sqrt(s / (1 - s)) with s = .4 / (A -
    .1): 600, 507 and 449, dapo 424, 387 and 359: log ratios -.347, -.270 and -.224, mean -.280: -24 %. `late` is against
    dapo, and `none` has no runs."""
    base = [example("base", seed, A=0.6 + 0.04 * seed, n=36) for seed in range(3)]
    dapo = [example("dapo", seed, A=0.7 + 0.04 * seed, n=36) for seed in range(3)]
    c = Comparison("first", dict.fromkeys(("base", "dapo", "late", "none"), ""), against={"late": "dapo"})
    groups = {"base": base, "dapo": dapo, "late": dapo[:1]}
    frame = tables.compare(c, groups, but=()).set_index("variant")
    assert frame["against"].tolist() == ["–", "base", "dapo"]
    assert frame["seeds"].tolist() == [3, 3, 1]
    assert frame.loc["base", "Δend"] == "–"
    assert frame.loc["dapo", "Δend"].startswith("**+0.097 [+0.09")
    assert frame.loc["dapo", "Δtokens to .5"].startswith("**-24 % [")
    assert frame.loc["late", "Δend"] == "+0.000"
    assert "Δhours to .5" not in frame
    row = tables.finding(Statement("one", "dapo", "base", "A", "lower", (-math.inf, -0.02)), groups)
    assert row["here"].startswith("ΔA +0.1") and (row["pairs"], row["verdict"]) == (3, OPPOSITE)
    both = Statement("one", "base dapo", "late", "stands", "–")
    assert tables.finding(both, groups)["here"] == "6 of 6 stand, 1 of 1; p 1"


def test_which_ceilings_are_known():
    flags = ("--dataset graded --k 8", "--dataset graded --difficulty easy", "--dataset graded --eval_temperature 0.0")
    assert [tables.is_whole(example(flags=text)) for text in flags] == [True, False, False]
    assert tables.is_graded(example(flags=flags[1])) and not tables.is_graded(example(flags="--dataset a.jsonl"))


def test_a_page_gets_its_tables(tmp_path):
    """Between its marks and nowhere else, whatever the table holds; a mark without a table stays. A column in which all
    rows agree is named once."""
    frame = pd.DataFrame({"v": ["a", "b"], "seeds": [7, 7], "x": ["\\1", "2"]})
    table = tables.without_repeats(frame)
    assert table == "| v | x |\n|---|---|\n| a | \\1 |\n| b | 2 |\n\nIn all rows: seeds 7."
    page = tmp_path / "page.txt"
    page.write_text("# A\n<!-- refit law -->\nold\n<!-- end -->\nmine\n<!-- refit logs -->\nkept\n<!-- end -->\n")
    tables.fill(page, {"law": table, "findings": "no mark"})
    expected = f"# A\n<!-- refit law -->\n{table}\n<!-- end -->\nmine\n<!-- refit logs -->\nkept\n<!-- end -->\n"
    assert page.read_text() == expected
