"""lab/law/isocompute.py: record points and the law by hand, published constants back, a grid whose best n is known."""

import itertools
import math

import isocompute
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isocompute import Curve, Run, fit_curve, fit_grid, fit_n_star, fit_run, n_star, of_k, recommend, record_points
from scipy.optimize import curve_fit
from simulated_laws import recover_rollouts

EASY, HARD = (6.09, 4.75, 5.84, 2.73), (4.47, 7.23, 5.84, 2.79)  # Cheng et al.: L, s, log10 C0, b
M = np.arange(1, 200)
rewards = st.lists(st.floats(0, 1), min_size=4, max_size=30)


@pytest.fixture
def few_draws(monkeypatch):
    """Ten of the bootstrap, where no interval is looked at."""
    monkeypatch.setattr(isocompute, "DRAWS", 10)


def rise(n, top, half, updates=M, B_p=1):
    """A run whose reward is top C / (C + half)."""
    C = B_p * n * updates
    return Run(B_p, n, updates.tolist(), (top * C / (C + half)).tolist())


TWO = [rise(4, 0.5, 20), rise(16, 0.9, 200)]  # n = 4 is better below C = 205, n = 16 above


def on_law(B_p, n, updates, law=EASY):
    """A run whose reward at C is the higher the nearer (in log2) n is to n*(C)."""
    steps = np.unique(np.round(np.geomspace(1, updates * max(1, updates // 60), 80)))
    C = B_p * n * steps
    near = np.exp(-((np.log2(n) - np.log2(n_star(C, *law))) ** 2) / 18)
    return Run(B_p, n, steps.tolist(), np.maximum.accumulate(0.9 * near * C / (C + 3e5)).tolist())


def fallen(run):
    return Run(run.B_p, run.n, run.updates, [*run.rewards[:-1], 0.0])


def test_record_points_by_hand():
    """Bins of .02: .10 is in bin 5, .11 too, .125 in 6, .05 in 2, .12 in 6 (not higher), .20 in 10."""
    assert record_points(range(6), [0.10, 0.11, 0.125, 0.05, 0.12, 0.20]).tolist() == [1, 0, 1, 0, 0, 1]
    assert record_points(range(3), [0.56, 0.58, 0.6]).tolist() == [True] * 3  # .58 / .02 is 28.999999999999996


@given(rewards, st.randoms())
def test_record_points_rise_bin_by_bin_in_any_order(R, random):
    keep = record_points(range(len(R)), R)
    bins = np.floor(np.array(R) / 0.02 + 1e-9)
    assert keep[0]
    assert (np.diff(bins[keep]) > 0).all()
    assert bins.max() == bins[keep].max()
    order = random.sample(range(len(R)), len(R))
    assert record_points(order, np.array(R)[order]).tolist() == keep[order].tolist()


def test_the_law_by_hand():
    """At C0 half of L is gained: 2^(6.09 / 2 + 2.73) = 54.8. Far below it 2^2.73 = 6.6, far above 2^8.82 = 452."""
    assert n_star([10**5.84, 1, 1e12], *EASY) == pytest.approx([54.76, 6.63, 452], rel=1e-3)


def test_average_best_and_worst_of_k_by_hand():
    """4 samples, 1 and 4 right, k = 2. Of 6 pairs 3 hold the one right sample, none two: best (.5 + 1) / 2, worst
    (0 + 1) / 2; the average is (.25 + 1) / 2. Of 2,500 of 5,000, 3,000 of them right, all are right never."""
    assert of_k([1, 4], 4, 2) == {"average": 0.625, "best": 0.75, "worst": 0.5}
    assert of_k([3000], 5000, 2500) == {"average": 0.6, "best": 1.0, "worst": 0.0}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 6))
def test_of_k_counts_every_subset(correct, k):
    """Against all subsets of k of 6 samples, one by one."""
    subsets = np.array(
        [list(itertools.combinations([1] * c + [0] * (6 - c), k)) for c in correct]
    )  # (prompts, sets, k)
    expected = {"average": subsets.mean(), "best": subsets.max(-1).mean(), "worst": subsets.min(-1).mean()}
    assert of_k(correct, 6, k) == pytest.approx(expected)


@pytest.mark.parametrize("law", [EASY, HARD])
def test_published_constants_come_back(law):
    """Also from the points in another order. Without `again` there are no intervals."""
    C = np.geomspace(1e4, 1e7, 25)
    result = fit_n_star(C, n_star(C, *law), [n_star(C, *law)])
    assert result[:4] == pytest.approx(law, rel=1e-6)
    assert result.draws == pytest.approx(np.array([law]), rel=1e-4)
    assert result(10**5.84) == pytest.approx(2 ** (law[0] / 2 + law[3]))
    assert result.interval(1e6) == pytest.approx([result(1e6)] * 2, rel=1e-4)
    alone = fit_n_star(C[::-1], n_star(C[::-1], *law))
    assert alone.b == pytest.approx(result.b)
    assert np.isnan(alone.interval(1e6)).all()


def test_one_run_is_fitted_through_its_records_or_all_that_stands():
    """Dips of .05 are no records; a collapse of .3 does not stand, and neither does the paper's way keep it."""
    C = np.geomspace(1e3, 1e6, 60)
    truth = Curve(0.1, 0.7, 1.5, 3e4)
    collapsed = truth(C) - 0.3 * (C > 5e5)
    dips = truth(C)
    dips[10:50:10] -= 0.05
    for R, points in (collapsed, "all"), (dips, "records"):
        assert fit_run(Run(1, 1, C.tolist(), R.tolist()), points=points)[:4] == pytest.approx(truth[:4], rel=1e-3)


def test_one_bad_evaluation_is_no_collapse():
    """Each reward counts as the mean of three: .5 .46 .46 .46 .5 stands, .6 .43 .27 .1 .1 does but for its first."""
    assert Run(1, 1, range(5), [0.5, 0.5, 0.38, 0.5, 0.5]).standing.all()
    assert Run(1, 1, range(5), [0.6, 0.6, 0.1, 0.1, 0.1]).standing.tolist() == [True, False, False, False, False]


@settings(max_examples=6)
@given(rewards, st.integers(1, 10**4))
def test_no_curve_falls_and_the_unit_of_compute_changes_nothing(R, unit):
    """Through any rewards the curve rises within [0, 1], is no worse than their mean, and has C_mid in C's unit."""
    C = np.arange(1.0, len(R) + 1)
    y = np.array(R)
    a = fit_curve(C, y, 0, 1)
    b = fit_curve(unit * C, y, 0, 1)
    fitted = a(np.geomspace(1e-3, 1e6, 50))
    assert (np.diff(fitted) >= -1e-12).all()
    assert fitted.min() >= -1e-9
    assert fitted.max() <= 2 + 1e-9
    squares = np.sum((a(C) - y) ** 2)
    assert squares <= np.sum((y.mean() - y) ** 2) + 1e-6
    assert np.sum((b(unit * C) - y) ** 2) == pytest.approx(squares, rel=0.02, abs=1e-4)


def test_the_gradient_and_covariance_of_a_curve():
    """The gradient against central differences by R0, gain, log B and log C_mid; the covariance against that of scipy's
    `curve_fit`, which differentiates by finite differences."""
    truth = Curve(0.2, 0.5, 1.5, 3e4)
    p = np.array([0.2, 0.5, np.log(1.5), np.log(3e4)])
    C = np.geomspace(1e3, 1e6, 40)

    def at(C, *p):
        return Curve(*p[:2], *np.exp(p[2:]))(C)

    for step, gradient in zip(1e-6 * np.eye(4), truth.gradient(C).T, strict=True):
        assert gradient == pytest.approx((at(C, *p + step) - at(C, *p - step)) / 2e-6, abs=1e-8)
    R = truth(C) + np.random.default_rng(0).normal(0, 0.02, 40)
    curve = fit_run(Run(1, 1, C.tolist(), R.tolist()))
    p, covariance = curve_fit(at, C, R, p0=(0.2, 0.5, 0.4, 10.3))
    assert p == pytest.approx([*curve[:2], *np.log(curve[2:4])], rel=1e-4)
    assert curve.covariance == pytest.approx(covariance, rel=1e-2)


@pytest.mark.long
def test_the_envelope_takes_the_best_n_that_reached_each_c():
    """A small n that is better early and a large one that is better late; neither counts outside its own run."""
    grid = fit_grid(TWO)
    C = grid.C
    assert C[[0, -1]] == pytest.approx([16, 199 * 4])  # where both were
    # .5 C / (C + 20) = .9 C / (C + 200) at C = 205
    assert (grid.best_n[C < 180] == 4).all()
    assert (grid.best_n[C > 235] == 16).all()
    low, high = grid.law.interval(1e6)  # exact curves, but of 16, of steps of 4, the law takes 16 / 4^.43 to 16 * 4^.43
    assert 8.8 < low < 10
    assert 26 < high < 29.1


def test_a_curve_counts_for_nothing_after_its_run_collapsed(few_draws):
    """n = 4 climbs to .9 by C = 400 and is dead from then on; n = 16 climbs slowly to .5 at C = 3,200. Without the
    collapse n = 4 would be the better one everywhere. The order of the runs changes nothing."""
    M = np.arange(1, 201)
    rewards = np.where(M <= 100, rise(4, 0.9, 50, M).rewards, 0.05)
    dead = Run(1, 4, M.tolist(), rewards.tolist())
    runs = [dead, rise(16, 0.5, 50, M), Run(1, 64, M.tolist(), (0.4 * M / 200).tolist())]
    grid = fit_grid(runs)
    assert (grid.best_n[grid.C < 390] == 4).all()
    assert 4 not in grid.best_n[grid.C > 1.1 * 400]
    other = fit_grid(runs[::-1])
    assert other.best_n.tolist() == grid.best_n.tolist()
    assert other.law(300) == grid.law(300)


@pytest.mark.long
def test_seeds_share_a_curve_and_gaps_are_not_compared(few_draws):
    """Two seeds of n = 4, .02 above and below, are fitted as one. Of C from 16 to 256,000 only that counts at which two n
    were: n = 4 ends at 796, n = 16 at 3,184, and n = 256 and 1,024 begin at 128,000."""
    seeds = [Run(1, 4, M.tolist(), [R + off for R in rise(4, 0.5, 20).rewards]) for off in (0.02, -0.02)]
    far = [Run(1, n, [32_000 / n * i for i in range(4, 9)], [0.1, 0.2, 0.3, 0.4, 0.5]) for n in (256, 1024)]
    grid = fit_grid([*seeds, rise(16, 0.9, 200), *far])
    assert [(same[0].n, len(same)) for same, _ in grid.curves] == [(4, 2), (16, 1), (256, 1), (1024, 1)]
    assert grid.curves[0][1](np.array([20.0])) == pytest.approx([0.25], abs=1e-3)
    assert np.isfinite(grid.reward).all()
    assert not ((grid.C > 1.1 * 796) & (grid.C < 128_000 / 1.1)).any()
    assert grid.C[-1] == pytest.approx(256_000)


@pytest.mark.slow
def test_the_best_n_is_recovered_from_noisy_runs():
    """200 grids of nine runs, evaluations of 500 problems, laws of the published range: of 1,000 intervals of n* 93 to
    97 % hold. No fit fails."""
    assert 0.93 <= recover_rollouts(200, np.random.default_rng(0)).mean() <= 0.97


@pytest.mark.long
def test_the_recipe_finds_the_best_n():
    """Ten values of n on runs whose best n follows the published law; the plan spends the budget."""
    budget = 1e6
    plan = recommend([on_law(32, 2**i, 4000) for i in range(1, 10)], budget)
    assert abs(np.log2(plan.n / n_star(budget, *EASY))) <= 1.5
    assert plan.B_p == 32 and plan.B_p * plan.n * plan.M <= budget < plan.B_p * plan.n * (plan.M + 1)
    large = recommend([on_law(32, n, 4000) for n in (2, 8, 32)], budget)  # n* of the law is above 32 there
    assert "the largest n that was tried, 32, is the best" in large.rests_on[-1]


def test_a_single_rollout_is_never_proposed(few_draws):
    """n = 1 is the best of 1, 2 and 4 up to C = 200, but a group of one has no advantage, and train.py refuses it."""
    steps = np.arange(1, 400)
    plan = recommend([rise(1, 0.5, 10, steps), rise(2, 0.4, 15, steps), rise(4, 0.7, 100, steps)], 20)
    assert plan.grid.law(20) < 1.5
    assert (plan.n, plan.M) == (2, 10)


@pytest.mark.long
def test_an_unstable_batch_is_not_recommended(few_draws):
    runs = [on_law(32, n, 4000) for n in (4, 16, 64)]
    assert not fallen(runs[0]).standing.all()
    assert recommend([*runs, fallen(on_law(8, 16, 4000))], 1e6).B_p == 32
    with pytest.raises(ValueError, match="no B_p is stable"):
        recommend([*map(fallen, runs)], 1e6)
    with pytest.raises(ValueError, match="1e\\+06 completions is less than one update of 1000000 x"):
        recommend([*map(fallen, runs), on_law(10**6, 16, 4000)], 1e6)


def test_what_is_left_out_is_counted(few_draws):
    """An evaluation before training, and what lies after a collapse. A budget beyond the runs and an n at the edge of the
    grid are named."""
    early = Run(1, 16, [0, *TWO[1].updates], [0.01, *TWO[1].rewards])
    plan = recommend([TWO[0], early, fallen(rise(16, 0.9, 200, B_p=2))], 1600)
    text = "; ".join(plan.rests_on)
    assert "595 of 598 rewards are fitted (all); 1 at C = 0 and 2 after a collapse are not" in text
    assert "the budget is 2.0 times the largest C" in text
    assert "the smallest n that was tried, 4, is the best" in text
    assert (plan.B_p, plan.n, plan.M) == (1, 16, 100)


NAN = math.nan
FLAT = [Run(1, n, M.tolist(), (0.5 - 0.0001 * M).tolist()) for n in (4, 16)]
BAD_INPUT = [
    ("at least 5", lambda: fit_n_star([1, 2], [1, 2])),
    ("n\\* is 8 at every C", lambda: fit_n_star([1, 2, 3, 4, 5], [8] * 5)),
    ("k must be from 1 to 4", lambda: of_k([1], 4, 5)),
    ("no count below 0 or above 4", lambda: of_k([5], 4, 2)),
    ("B_p 4, n 8: rewards must lie in", lambda: Run(4, 8, range(3), [0.1, NAN, 0.3])),
    ("rewards must lie in .* divide percents by 100", lambda: Run(4, 8, range(3), [10, 20, 30])),
    ("updates must rise", lambda: Run(4, 8, [-0.5, 1], [0.1, 0.2])),
    ("updates must rise", lambda: Run(4, 8, [NAN, 1], [0.1, 0.2])),
    ("updates must rise", lambda: Run(4, 8, [1, 1], [0.1, 0.2])),
    ("as many as rewards", lambda: Run(4, 8, [0, 1], [0.1])),
    ("whole numbers from 1 on", lambda: Run(4, 0, [0, 1], [0.1, 0.2])),
    ("whole numbers from 1 on", lambda: Run(4, 4.5, [0, 1], [0.1, 0.2])),
    ("whole numbers from 1 on", lambda: Run(4, 10**400, [0, 1], [0.1, 0.2])),
    (
        "has 1 points to fit \\(records\\)",
        lambda: fit_run(Run(1, 1, [1, 2, 3, 4], [0.5, 0.4, 0.4, 0.4]), points="records"),
    ),
    ("points must be all or records", lambda: fit_run(rise(1, 0.5, 9), points="some")),
    ("at least two values of n, not of .4", lambda: fit_grid([rise(4, 0.5, 20)])),
    ("not of ..$", lambda: fit_grid([])),
    ("no run's reward rises", lambda: fit_grid(FLAT)),
    ("two values of n that reach the same C", lambda: fit_grid([rise(4, 0.5, 20, M[:9]), rise(4096, 0.5, 20)])),
    ("a budget of 3 completions lies below what the runs compare, 16 to 796", lambda: recommend(TWO, 3)),
    ("is no finite number", lambda: recommend(TWO, NAN)),
    ("is no finite number", lambda: recommend(TWO, math.inf)),
]


@pytest.mark.parametrize(("words", "call"), BAD_INPUT)
def test_bad_input(few_draws, words, call):
    with pytest.raises(ValueError, match=words):
        call()
