"""evidence/forecasts.py and evidence/law_report.py: how well the law held and what the logs knew, on runs made by hand."""

import math
from types import SimpleNamespace

import ablate
import curves
import figures
import forecasts
import law_report
import numpy as np
import pytest
from made_curves import made, rows

from fit_sigmoid import fit, sigmoid

pytestmark = pytest.mark.medium


def graded(seed=0, **given):
    """A run of 40 evaluations to 7 C_mid, with a ceiling of .8 unless given."""
    return made("baseline", seed, n=40, every=52.5, comparison="law", **given)


def test_a_run_that_keeps_the_law():
    """Exact: at a half, 3.5 C_mid, the end is 49/50 of the gain, .1 + .7 * .98 = .786, and the law says so. A ceiling is
    not known there yet: .7 * 4/53 = .053 remain by Eq. 1, and three times as much may."""
    run = graded()
    end = forecasts.forecast(run, 0.5)
    assert (end.best, end.measured) == pytest.approx((0.786, 0.786), abs=5e-4) and end.inside
    assert forecasts.noise_ratio(run) == pytest.approx(0, abs=1e-3)
    cells = dict(zip(law_report.SUM_HEAD, law_report.sum_row("half", 0.5, [run]), strict=True))
    assert cells["ceiling identifiable"] == "0 of 1" and cells["A holds .80"] == "–"  # of a data set that is not graded
    assert forecasts.errors(run, 0.5)["the form that fits best"] == pytest.approx(0, abs=1e-4)
    assert forecasts.holds(law_report.fitted(run, "tokens"), 0.8)
    assert not forecasts.holds(law_report.fitted(graded(A=0.7), "tokens"), 0.8)


def test_reach_is_measured_without_a_fit():
    """From .1 to a plateau of .5: half of the gain, .3, at 100 tokens. Half of 600 tokens are 3 C_mid, of 550 2.75."""
    long, short = (made(rates=[0.1, 0.2, 0.3, 0.4, *[0.5] * n]) for n in (9, 8))
    assert [forecasts.half_gain(run) for run in (long, short)] == pytest.approx([100, 100])
    assert [forecasts.reach_of(run, 0.5) for run in (long, short)] == pytest.approx([3, 2.75])


def test_a_cut_by_reach_by_hand(monkeypatch):
    """Half of the gain at 100 tokens, 24 evaluations to 1,200. At 5 C_mid ten are seen, to 500, and the one at 1,000 is
    asked for; at 6 all of 1,200 are needed; at 7 more, and at 1.5 three points are no fit. The fits are yes at 600, no
    at 700 and yes from 750 on: 900, said at 500, is 1.2 times what was needed."""
    run, seen = made(rates=[0.1, 0.2, 0.3, 0.4, *[0.5] * 20], every=50.0), []

    class Fit:
        A_interval, form, reason = (0.45, 0.52), "Weibull", ""
        predict = staticmethod(lambda C, form: 0.46 if form == "log-logistic" else 0.53)
        interval = staticmethod(lambda C, noise: np.array([[0.4], [0.6]]) if noise else np.array([[0.49], [0.51]]))
        ask_again = staticmethod(lambda: 900.0)

        def __init__(self, until):
            self.identifiable = round(until) == 600 or until > 749

    def fake(curve, axis, share):
        seen.append(share * 1150)
        return Fit(share * 1150)

    monkeypatch.setattr(forecasts, "fit_to", fake)
    assert forecasts.identifiable_from(run) == 750
    cut = forecasts.cut_at(run, 5)
    assert seen[-1] == pytest.approx(500) and cut["again"] == pytest.approx(1.2) and not cut["identifiable"]
    assert cut["inside"] and cut["A holds"] and cut["width"] == pytest.approx(0.02)
    assert forecasts.forecast_by(Fit(0), run, -4) == (0.53, 0.46, (0.49, 0.51), (0.4, 0.6), 0.5)
    assert forecasts.cut_at(run, 7) is forecasts.cut_at(run, 1.4) is None
    rows = [line.strip("| ").split(" | ") for line in law_report.reach_table([run]).splitlines()[2:]]
    assert rows[-1] == ["5 C_mid", "1", "1", "1", "0.020", "0.070", "0% (0 of 0)", "100% (1)"]


def test_runs_that_fall_or_never_learn_are_counted_and_left_out(monkeypatch):
    monkeypatch.setattr(law_report, "REACHES", (3.0,))
    monkeypatch.setattr(forecasts, "identifiable_from", lambda curve: math.inf)
    falls = graded(1, rates=[*graded().points["pass_rate"][:33], *[0.4] * 8])
    text = law_report.by_reach([graded(), falls, graded(2, rates=[0.1] * 41)])
    assert "1 runs of the graded task" in text and "| 3 C_mid | 1 | 1 | 1 |" in text
    assert "Left out: 1 (law 1) that fall and 1 (law 1) that never rise." in text
    assert law_report.by_comparison([falls, made(comparison="one"), falls]) == "3 (law 2, one 1)"


def test_a_run_that_falls_is_counted():
    """To .2 after its first half: the law's error is .786 - .2. Of two runs one is inside."""
    falls = graded(1, rates=[*graded().points["pass_rate"][:21], *[0.2] * 20])
    assert not forecasts.forecast(falls, 0.5).inside
    assert forecasts.errors(falls, 0.5)["Eq. 1"] == pytest.approx(0.586, abs=2e-3)
    cells = dict(zip(law_report.SUM_HEAD, law_report.sum_row("half", 0.5, [graded(), falls]), strict=True))
    assert cells["runs"] == "2" and cells["end inside its 95 % interval"] == "1 of 2"
    assert cells["mean error [95 %]"].startswith("+0.293") and cells["mean error [95 %]"].endswith("]")  # t = 12.7
    assert law_report.sum_row("all", 1.0, [falls])[3:6] == ["–"] * 3
    short = made("baseline", 2, n=4, every=525.0, comparison="law")  # two points and the start are no curve
    assert law_report.sum_row("half", 0.5, [graded(), falls, short])[4].startswith("+0.293")
    assert law_report.sum_row("half", 0.5, [short])[4] == "–"


def test_the_same_seeds_with_both_engines():
    """Two seeds of three have both. vLLM's stop at 1,575 tokens of 2,100 and need a tenth more for everything:
    C_mid 330 for 300, .5 at 1.155 C_mid (.4 of .7), and .7706 for .7755 at 1,575 (that is .77549)."""
    torch = [graded(seed) for seed in (0, 1, 2)]
    vllm = [made("pipeline-8", seed, n=30, every=52.5, comparison="schedules", C_mid=330.0) for seed in (1, 2)]
    head, _, *lines = law_report.engines_table(torch, vllm).splitlines()
    assert head == "| 2 seeds, to 1.57k tokens | torch | vLLM | apart [95 %] |"
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert cells[0][:3] == ["A", "0.8", "0.8"] and cells[1][:3] == ["C_mid", "300", "330"]
    assert [float(x) for x in cells[2][1:3]] == pytest.approx([346, 381], abs=3)  # on straight lines
    assert cells[1][3].startswith("+10 % [") and cells[2][3].startswith("+10 % [")
    assert cells[3][1:3] == ["0.775", "0.771"] and cells[3][3].startswith("-0.005 [")
    assert law_report.engines_table(torch, []) == law_report.engines_table(torch[:1], vllm) == ""


def test_inside_is_of_an_evaluation_not_of_the_curve():
    """The curve's interval is .49 to .51, that of an evaluation .45 to .55."""
    ends = [forecasts.Forecast(0.5, 0.5, (0.49, 0.51), (0.45, 0.55), R) for R in (0.44, 0.46, 0.55, 0.56)]
    assert [end.inside for end in ends] == [False, True, True, False]


def test_the_plateau_is_the_mean_of_the_last_eight():
    """.77 and .79 in turns: .78. What came before does not count."""
    run = made(rates=[0.1, *[0.0] * 31, *[0.77, 0.79] * 4])
    intervals = (0.779, 0.781), (0.781, 0.8), (0.7, 0.779)
    held = [forecasts.holds(SimpleNamespace(A_interval=i), forecasts.plateau(run)) for i in intervals]
    assert held == [True, False, False]
    falls = graded(1, rates=[*graded().points["pass_rate"][:33], *[0.4] * 8])
    assert law_report.sum_row("half", 0.5, [run, falls])[-1] == "1 of 2"


def test_power_law_by_hand():
    """A .6, D 20, B .5: at C = 10,000 the reward is .6 - 20 / 100 = .4. The point at 0 does not count."""
    c = np.linspace(5000, 50_000, 20)
    A, D, B = figures.saturating_power(np.append(0, c), np.append(0.1, 0.6 - 20 / np.sqrt(c)))
    assert (A, D, B) == pytest.approx((0.6, 20, 0.5), rel=1e-4)
    assert np.isnan(figures.saturating_power(np.arange(4.0), np.arange(4.0) / 10)).all()


def test_power_law_runs_to_the_bound_on_early_data_and_the_sigmoid_does_not():
    """The paper's argument: from 1.5k to 50k GPU-hours the power law says A = 1."""
    c = np.linspace(1500, 50_000, 40)
    r = sigmoid(c, 0.25, 0.645, 1.7, 9000.0)
    at_bound, D_found, B_found = figures.saturating_power(c, r)
    assert at_bound == 1 and fit(c, r).A == pytest.approx(0.645, abs=1e-3)
    from scipy.optimize import curve_fit

    (D, B), _ = curve_fit(lambda x, D, B: 1 - D * x**-B, c / c[-1], r, p0=(0.4, 0.1))  # with A at its bound
    assert (D_found / c[-1] ** B_found, B_found) == pytest.approx((D, B), rel=1e-4)


def test_the_simpler_rules_by_hand():
    """R = .9 - .8 / C^.5 in units of 50 tokens: the power law finds its own curve. That the pass rate stays: the mean at
    C = 19 and 20, minus the end. With three points and the start there is no power law."""
    rates = [0.1, *(0.9 - 0.8 / math.sqrt(i) for i in range(1, 41))]
    run = made(rates=rates)
    assert forecasts.errors(run, 0.5)["power law"] == pytest.approx(0, abs=1e-3)
    stays = 0.9 - 0.4 * (1 / math.sqrt(19) + 1 / math.sqrt(20))
    assert forecasts.errors(run, 0.5)["the pass rate stays"] == pytest.approx(stays - rates[-1])
    assert math.isnan(forecasts.errors(made(n=7), 0.5)["power law"])


def test_the_noise_ratio_by_hand():
    """Noise of twice the binomial sd, in turns up and down so that no curve follows it, gives a ratio near 2."""
    p = graded().points["pass_rate"]
    noise = 2 * np.sqrt(p * (1 - p) / 1024) * (-1) ** np.arange(p.size)
    assert forecasts.noise_ratio(graded(rates=p + noise)) == pytest.approx(2, abs=0.1)


def test_seeds_needed_by_hand():
    """A of .78, .80, .82 has sd .02: an effect of one sd needs 17 seeds in each of two groups. A variant with .79, .80,
    .81 differs by .01, .00, -.01, sd .01: two sd need 5 seeds in pairs (Student's t; four see it in 3 of 4 cases)."""
    ceilings = {"baseline": (0.78, 0.80, 0.82), "other": (0.79, 0.80, 0.81)}
    groups = {name: [graded(seed, A=A) for seed, A in enumerate(some)] for name, some in ceilings.items()}
    lines = [line.strip("| ").split(" | ") for line in law_report.power_table(groups).splitlines()[2:4]]
    assert [float(sd) for *_, sd, _ in lines] == pytest.approx([0.02, 0.01], abs=1e-3)
    assert [needed for *_, needed in lines] == ["17", "5"]


def test_refit_writes_every_page_and_names_what_is_left_out(tmp_path, monkeypatch):
    """A file made by hand: two seeds of the baseline, and one that failed. The pages name what is left out, and a row of
    runs that are refitted alone is in them. Without a variant there is nothing to compare."""
    flags, cliff = (curves.differing(ablate.resolved(ablate.COMPARISONS[name].setting)) for name in ("law", "chain"))
    runs = [graded(0, flags=flags), graded(1, flags=flags, A=0.79, entropy=np.linspace(0.5, 0.1, 41))]
    runs += [made("baseline", 2, n=2, comparison="law", state="failed (exit code 1)", flags=flags)]
    runs += [made("chain", 0, n=40, comparison="chain", flags=cliff)]
    runs += [made("chain", 1, n=2, comparison="chain", state="unfinished", flags=cliff)]
    greedy = flags | {"eval_temperature": "0.0"}  # in a table of their own, and in no other
    runs += [made("baseline", seed, n=40, every=52.5, comparison="law-greedy", flags=greedy) for seed in range(3)]
    monkeypatch.setattr(forecasts, "identifiable_from", lambda curve: math.inf)  # forty fits a run
    file = tmp_path / "curves.csv.gz"
    curves.write_rows(rows(*runs), file)
    assert ablate.main(["all", "--curves", str(file), "--results", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.glob("*.md")} == {"law", "logs"}
    text = (tmp_path / "law.md").read_text()
    assert "Left out: baseline seed 2 (failed (exit code 1)), chain seed 1 (unfinished)." in text
    rows_of = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(("| law", "| chain"))]
    greedy_rows = [f"law-greedy, {name}" for name in law_report.FITTED]
    assert [row[:2] for row in rows_of[3:6]] == [[name, "3"] for name in greedy_rows]
    assert "Of 2 runs on the whole task 0 fall" in (tmp_path / "logs.md").read_text()
    assert rows_of[-1][0] == "chain, half" and rows_of[-1][-2:] == ["–", "1 of 1"]  # no known ceiling
    found = curves.curves_of(curves.read_rows(file))
    of_law = [run for run in found if run.finished and run.comparison == "law"]
    assert rows_of[:3] == law_report.sum_rows(of_law, about="law, ")
    assert (tmp_path / "law.png").read_bytes()[:4] == b"\x89PNG"


# ---- what the logs know


def signal_run(ess, fall_at=None, truncated=()):
    """Twelve evaluations after the start; at `fall_at` the pass rate drops to .1."""
    rates = np.linspace(0.1, 0.7, 13)
    rates[fall_at or 13 :] = 0.1
    return made(rates=rates, ess=[np.nan, *ess], truncated=[0.06 * (i in truncated) for i in range(13)])


def test_alarms_by_hand():
    """An ESS of .89 at evaluation 2, and the fall at 9, seven later; a fall at 5 with the first low ESS announces
    nothing; a calm run at .90 is not below .9, one at .79 is a false alarm of .9 and of .8. 6 % truncated at 4 are above
    5 and not above 10 %. A run that never gains more than .1, from .04 to .13, is neither an alarm nor a calm run."""
    announced = signal_run([0.95, 0.89, *[0.95] * 10], fall_at=9, truncated=[4])
    late = signal_run([*[0.95] * 4, 0.6, *[0.95] * 7], fall_at=5)
    calm, false = signal_run([0.9] * 12), signal_run([*[0.95] * 11, 0.79])
    dead = made("dead", 1, rates=[0.04, 0.13, *[0.0] * 11], ess=[np.nan, *[0.5] * 4, *[0.9] * 8])
    text = law_report.logs_page([announced, late, calm, false, dead])
    assert "Of 4 runs on the whole task 2 (one 2) fall" in text
    assert "Left out: 1 (one 1) that never gain more than that." in text
    for row in (
        "ESS below 0.9 | 1 of 2 | 7 (7 to 7) | 1 of 2",
        "ESS below 0.8 | 0 of 2 | – | 1 of 2",
        "ESS below 0.7 | 0 of 2 | – | 0 of 2",
        "truncated above 5% | 1 of 2 | 5 (5 to 5) | 0 of 2",
        "truncated above 10% | 0 of 2 | – | 0 of 2",
    ):
        assert f"| {row} |" in text
    assert "Of 1 runs on the whole task 0 fall" in law_report.logs_page([calm])
    assert figures.outcome(made(rates=[0.04, 0.15, 0.0])) == "falls"
