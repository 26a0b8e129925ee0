"""lab/evidence/what_for.py: the pairs, their numbers by hand, and Holm's correction."""

import ablate
import numpy as np
import pytest
import what_for
from comparisons import COMPARISONS
from example_runs import example
from runs import LOGGED
from what_for import PAIRS

pytestmark = pytest.mark.medium


def test_holm_by_hand():
    """Three p values: .01 x 3, .04 x 2, .03 x 2. In their order .03, .06 and .04 x 1, which may not fall below .06."""
    assert what_for.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert what_for.holm([0.9, 0.6]) == pytest.approx([1.0, 1.0])


def test_every_pair_is_of_the_comparison_and_differs_in_what_it_undoes():
    variants = COMPARISONS["what-for"].variants
    assert len(PAIRS) == 8 and len({pair.without for pair in PAIRS.values()}) == 8
    for pair in PAIRS.values():
        setting, undone = variants[pair.recipe], variants[pair.without]
        assert undone.startswith(setting) and undone != setting
        assert pair.mechanism in LOGGED and pair.tested in what_for.MEASURES
    pairs = [*PAIRS.values(), what_for.CLIP_AGAIN]
    used = {pair.recipe for pair in pairs} | {pair.without for pair in pairs}
    # The earlier settings of retiring and of interruption, in which nothing was seen; and longer runs of the recipe.
    others = {
        "few-prompts",
        "few-prompts-uniform-sampling",
        "all-retire",
        "all-retire-uniform-sampling",
        "short-budget",
        "recipe-120-steps",
    }
    assert used | others == set(variants)


def test_a_row_by_hand():
    """The mechanism is 1 with the change and 3 without it; the end .1 lower for both seeds, so the interval is a point."""
    name, pair = next(iter(PAIRS.items()))
    rates = {pair.recipe: [0.1, 0.6, 0.8, 0.8], pair.without: [0.1, 0.6, 0.7, 0.7]}
    mechanism = {pair.recipe: np.full(4, 1.0), pair.without: np.full(4, 3.0)}
    groups = {
        variant: [example(variant, seed, rates[variant], **{pair.mechanism: mechanism[variant]}) for seed in (0, 1)]
        for variant in rates
    }
    cells = what_for.row(name, pair, groups, what_for.measured(pair, groups))
    assert cells["at work"] == "mean lag, updates 1, without 3"
    assert cells["end"].startswith("-0.100 [-0.100, -0.100]") and cells["tokens"].startswith("+0 % [+0, +0]")


def test_compute_at_evaluations_by_hand():
    """The clip's pair to .25: the recipe's first evaluation above it is that at 100 tokens, the other's at 200 and, of
    the second seed, never. A line between evaluations would have said 62.5 and 175."""
    pair = PAIRS["clip"]
    groups = {
        pair.recipe: [example(pair.recipe, seed, [0.1, 0.2, 0.4]) for seed in (0, 1)],
        pair.without: [example(pair.without, 0, [0.1, 0.1, 0.1, 0.2, 0.3]), example(pair.without, 1, [0.1, 0.1])],
    }
    assert what_for.at_evaluations("clip", groups).to_dict() == {0: pytest.approx(np.log(2))}
    assert what_for.row("clip", pair, groups, what_for.measured(pair, groups))["tokens"].startswith("+100 % ")


def test_what_is_printed_of_a_pair_is_in_words():
    """Both sides by name, no Markdown and no key of a column; compute to evaluations, 200 tokens against 100."""
    pair = PAIRS["clip"]
    clipped = {pair.recipe: 0.02, pair.without: 0.08}
    rates = {pair.recipe: [0.1, 0.2, 0.4, 0.4, 0.4], pair.without: [0.1, 0.1, 0.1, 0.2, 0.3]}
    groups = {v: [example(v, s, rates[v], clipped_positive=np.full(5, clipped[v])) for s in (0, 1)] for v in rates}
    lines = what_for.report("clip", groups).splitlines()
    assert lines[0].split() == ["CISPO", "GRPO's", "clip"] and lines[1].split() == ["runs", "2", "2"]
    assert lines[2].split() == ["tokens", "silenced", "by", "the", "clip", "0.02", "0.08"]
    assert lines[3].split()[-2:] == ["0.400", "0.250"]
    said = "sampled tokens to the first evaluation at 0.25 or above, GRPO's clip against CISPO: +100 % [+100, +100] (2 pairs)"
    assert lines[4:] == [said, "seen: 0 lies outside the interval"]
    assert (
        what_for.SIDES.keys() == PAIRS.keys() and {pair.mechanism for pair in PAIRS.values()} <= what_for.WORDS.keys()
    )


def test_ceilings_by_hand():
    """All three runs find it, and none of three: the exact interval of 3 in 3 begins at .025^(1/3) = .292. The law's
    curve with R0 = .1, A = .8, B = 2 and C_mid = 300 is at .240 after 150 tokens and at .3154 after 200, so .25 lies at
    157; after 750 and 800 tokens it is at .703 and .714."""
    groups = {"base": [example("base", seed) for seed in range(3)]}
    groups["flat"] = [example("flat", seed, [0.02, 0.01] * 8) for seed in range(3)]
    base, flat = what_for.ceilings(groups).to_numpy().tolist()
    assert base == ["base", "3 of 3", "[0.29, 1.00]", "157", "0.71"]
    assert flat[:3] == ["flat", "0 of 3", "[0.00, 0.71]"]


def test_a_pair_is_made_and_judged(monkeypatch, tmp_path, capsys):
    """Without runs of its own there is nothing to say; `ablate` gets both variants, seed by seed."""
    jobs = []
    monkeypatch.setattr(ablate, "make", lambda planned, at_once: jobs.extend(planned) or 1)
    name, pair = next(iter(PAIRS.items()))
    assert what_for.main([name, "--seeds", "2", "--output", str(tmp_path)]) == 1
    expected = [(variant, seed) for seed in ("seed-0", "seed-1") for variant in (pair.recipe, pair.without)]
    assert [(job.folder.parent.name, job.folder.name) for job in jobs] == expected
