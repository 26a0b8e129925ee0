"""evidence/staleness.py: outcomes, the map and the table of survivors, by hand."""

import numpy as np
import pandas as pd
import pytest
import staleness
from figures import outcome
from made_curves import made
from retired import reviews

RISES, FALLS, FLAT = [0.1, 0.4, 0.7, 0.75], [0.1, 0.6, 0.7, 0.3], [0.1, 0.15, 0.05, 0.0]


def runs(variant, *rates):
    return [made(variant, seed, rates=np.array(some), ess=[np.nan, 0.9, 0.9, 0.9]) for seed, some in enumerate(rates)]


def test_outcomes():
    """A fall is from the best before by more than .1, wherever the run ends; one that never gained .1 cannot fall."""
    found = runs("v", RISES, FALLS, FLAT, [0.1, 0.7, 0.55, 0.75])
    assert [outcome(run) for run in found] == ["stands", "falls", "never rises", "falls"]
    assert staleness.counted(found) == "1 stands, 2 fall, 1 never rises"


def test_the_map_by_hand():
    groups = {
        "lag-8-lr-8e-4": runs("a", RISES, FALLS),
        "lag-8-lr-2e-3": runs("b", RISES),
        "lag-8-lr-4e-4": runs("c", RISES, RISES),
        "lag-1-lr-8e-4": runs("d", RISES),
        "lag-16-lr-4e-4": runs("e", FLAT),
    }
    lines = staleness.map_table(groups, 0.7).split("\n")
    assert lines[0] == "| lag held at | rate 4e-4 | rate 8e-4 | rate 2e-3 |"
    assert lines[2] == "| 1 | – | 1 stands; 0.72; 100; 0.90 | – |"  # the end is the mean of the last two evaluations
    one, two = "1 stands; 0.72; 100; 0.90", "2 stand; 0.72; 100; 0.90"
    assert lines[3] == f"| 8 | {two} | 1 stands, 1 falls; 0.61; 100; 0.90 | {one} |"
    assert lines[4].startswith("| 16 | 1 never rises; 0.03; –; 0.90 |")


def test_survivors():
    """Of seven and seven, 7 against 2 that stand: Fisher's p is 2 C(9, 7) / C(14, 7) = 72 / 3432 = .021."""
    groups = {"recipe": runs("recipe", *[RISES] * 7), "other": runs("other", *[RISES] * 2, *[FALLS] * 5)}
    recipe, other = staleness.survivors_table(groups, 0.5).split("\n")[2:]
    assert recipe == "| recipe | 7 stand | – | 0.72 | 0.90 | 66.7 [66.7, 66.7] |"
    assert other.startswith("| other | 2 stand, 5 fall | 0.021 |")
    assert pytest.approx(0.021, abs=5e-4) == 72 / 3432


def test_the_page_has_what_was_run():
    text = staleness.page({"stress": {"scalerl": runs("scalerl", RISES, RISES)}})
    assert "## The recipe without one ingredient" in text and "## Lag and" not in text and "## Masks" not in text


def test_entropy_at_equal_pass_rate():
    """.5 is first reached at the third evaluation, whose steps had an entropy of .2; .8 never."""
    run = made("v", rates=np.array([0.1, 0.4, 0.6, 0.5, 0.7]), entropy=[np.nan, 0.4, 0.2, 0.3, 0.1])
    assert staleness.entropy_at(run, 0.5) == 0.2 and np.isnan(staleness.entropy_at(run, 0.8))
    assert staleness.entropy_table({"v": [run]}, (0.4, 0.8)).split("\n")[2] == "| v | 1 | 0.4 | – (0 of 1) | 0.25 |"


def test_parts_of_the_ratio_end_before_the_fall():
    """The fall is at the fourth evaluation: the .9 of its steps does not count, nor does what comes after the last
    three of the run that stands: (.2 + .3 + .4) / 3 = .3."""
    some = {name: [np.nan, 1.0, 1.0, 1.0, 1.0] for name in ("mismatch", "ess")}
    stands = made("a", rates=np.array([0.1, 0.4, 0.6, 0.7, 0.75]), staleness=[np.nan, 0.1, 0.2, 0.3, 0.4], **some)
    falls = made("a", seed=1, rates=np.array([0.1, 0.4, 0.6, 0.2, 0.1]), staleness=[np.nan, 0.1, 0.3, 0.9, 0.9], **some)
    stand, fall = staleness.parts_table({"stand": [stands], "fall": [falls]}, "runs that").split("\n")[2:]
    assert stand == "| stand | 1 | 1 (1 to 1) | 0.3 (0.3 to 0.3) | 1 (1 to 1) |"
    assert fall == "| fall | 1 | 1 (1 to 1) | 0.2 (0.2 to 0.2) | 1 (1 to 1) |"


def test_reviews_are_what_comes_after_a_prompt_retires():
    """Prompt a: 8 of 16, then 16 and 16 of 16, 40 of 48 in all, so that it stays; b retires in step 1 with 15 of 16 and
    comes again in steps 21 and 22, twenty and twenty-one steps later."""
    steps = {0: [["a", 8, 16]], 1: [["a", 16, 16], ["b", 15, 16]], 21: [["a", 16, 16], ["b", 12, 16]]}
    steps[22] = [["b", 16, 16]]
    found = list(reviews([{"step": step, "groups": groups} for step, groups in steps.items()], 0.9))
    assert found == [(21, 20, 12, 16), (22, 21, 16, 16)]
    frame = pd.DataFrame([("seed-0", *row) for row in found], columns=["run", "step", "age", "right", "rollouts"])
    lines = staleness.retired_table(frame).split("\n")
    assert lines[2:4] == ["| 1 to 20 | 1 | 0.75 | 0 |", "| 21 to 50 | 1 | 1 | 1 |"]
