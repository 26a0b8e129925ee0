"""lab/evidence/law.py: how well the law held, on runs made by hand."""

from types import SimpleNamespace

import law
import numpy as np
import pytest
from example_runs import example

pytestmark = pytest.mark.medium


def graded(seed=0, **options):
    """A run of 40 evaluations to 7 C_mid, with a ceiling of .8 unless another is given."""
    return example("baseline", seed, n=40, every=52.5, comparison="law", **options)


def test_a_run_that_keeps_the_law_and_one_that_falls():
    """At a half, 3.5 C_mid, the end is 49/50 of the gain, .1 + .7 * .98 = .786, and the law says so. A ceiling is not
    known there yet: .7 * 4/53 = .053 remain by Eq. 1, and three times as much may. The other falls to .2, an error of
    .586: a mean of .293. Of a run with two points and the start there is no fit, and so no error."""
    falls = graded(1, rates=[*graded().rates[:21], *[0.2] * 20])
    judged = [law.judge(run, 0.5) for run in (graded(), falls)]
    assert [result["error"] for result in judged] == pytest.approx([0, 0.586], abs=2e-3)
    assert [result["inside"] for result in judged] == [True, False]
    assert not judged[0]["identifiable"]
    row = law.cut_row("half", 0.5, [graded(), falls, example("baseline", 2, n=4, every=525.0)])
    assert row["end inside its 95 % interval"] == "2 of 3"
    assert row["mean error [95 %]"].startswith("+0.2930 [")
    assert law.cut_row("all", 1.0, [graded()])["mean error [95 %]"] == "–"
    assert law.cut_row("all", 1.0, [graded(A=0.7)])["A holds .80"] == "0 of 1"
    assert law.cut_row("all", 1.0, [graded()], known=False)["A holds .80"] == "–"


def test_reach_is_measured_without_a_fit():
    """From .1 to a plateau of .5: half of the gain, .3, at 100 tokens. Half of 600 tokens are 3 C_mid, of 550 2.75."""
    long, short = (example(rates=[0.1, 0.2, 0.3, 0.4, *[0.5] * n]) for n in (9, 8))
    assert [law.half_gain(run) for run in (long, short)] == pytest.approx([100, 100])
    assert [law.reach_of(run, 0.5) for run in (long, short)] == pytest.approx([3, 2.75])


def test_a_cut_by_reach_by_hand(monkeypatch):
    """Half of the gain at 100 tokens, 24 evaluations to 1,150. At 5 C_mid ten are seen, to 500, and the one at 1,000 is
    asked for; at 7 more than all are needed, and at 1.4 three points are no fit. The fits are yes at 600, no at 700 and
    yes from 750 on: 900, said at 500, is 1.2 times what was needed."""
    run = example(rates=[0.1, 0.2, 0.3, 0.4, *[0.5] * 20])
    shares = []

    def fake(run, axis, share):
        shares.append(share)
        until = share * 1150
        return SimpleNamespace(
            identifiable=round(until) == 600 or until > 749,
            A_interval=(0.45, 0.52),
            interval=lambda C, noise=False: np.array([[0.4], [0.6]]) if noise else np.array([[0.49], [0.51]]),
            ask_again=lambda: 900.0,
        )

    monkeypatch.setattr(law, "fit_to", fake)
    assert law.identifiable_from(run) == 750
    cut = law.cut_at(run, 5)
    assert shares[-1] * 1150 == pytest.approx(500)
    assert [cut[name] for name in ("inside", "holds", "identifiable")] == [True, True, False]
    assert [cut[name] for name in ("again", "width")] == pytest.approx([1.2, 0.02])
    assert law.cut_at(run, 7) is law.cut_at(run, 1.4) is None
    *_, last = law.reach_table([run]).to_numpy().tolist()
    assert last == ["5 C_mid", 1, 1, 1, "0.020", "0.070", "0% (0 of 0)", "100% (1)"]


def test_outcomes():
    """Never more than .1 above the first; more than .1 below the best before; neither."""
    runs = [example(rates=rates) for rates in ([0.04, 0.13, 0.0], [0.04, 0.15, 0.0], [0.1, 0.5, 0.41])]
    assert [law.outcome(run) for run in runs] == ["never rises", "falls", "stands"]


def test_the_plateau_is_the_mean_of_the_last_eight():
    """.77 and .79 in turns: .78. What came before does not count."""
    run = example(rates=[0.1, *[0.0] * 31, *[0.77, 0.79] * 4])
    intervals = [(0.779, 0.781), (0.781, 0.8), (0.7, 0.779)]
    results = [law.holds(SimpleNamespace(A_interval=ends), law.plateau(run)) for ends in intervals]
    assert results == [True, False, False]


def test_the_noise_ratio_by_hand():
    """Noise of twice the binomial sd, in turns up and down so that no curve follows it, gives a ratio near 2."""
    p = graded().rates
    noise = 2 * np.sqrt(p * (1 - p) / 1024) * (-1) ** np.arange(p.size)
    assert law.noise_ratio(graded(rates=p + noise)) == pytest.approx(2, abs=0.1)
    assert law.noise_ratio(graded()) < 1e-3


def test_which_ceilings_are_known():
    flags = ("--dataset graded --k 8", "--dataset graded --difficulty easy", "--dataset graded --eval_temperature 0.0")
    assert [law.has_known_ceiling(example(flags=text)) for text in flags] == [True, False, False]
    assert law.is_graded(example(flags=flags[1]))
    assert not law.is_graded(example(flags="--dataset a.jsonl"))
