"""isocompute.py: record points and the law by hand, published constants back, a grid whose best n is known."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from law_benchmark import recover_rollouts
from scipy.optimize import curve_fit

import isocompute
from isocompute import (
    Curve,
    Run,
    fit_grid,
    fit_n_star,
    fit_run,
    main,
    n_star,
    of_k,
    read,
    recommend,
    record_points,
)  # fmt: skip

EASY, HARD = (6.09, 4.75, 5.84, 2.73), (4.47, 7.23, 5.84, 2.79)  # Cheng et al.: L, s, log10 C0, b


@pytest.fixture
def few_draws(monkeypatch):
    """Ten of the bootstrap, where no interval is looked at."""
    monkeypatch.setattr(isocompute, "DRAWS", 10)


# ------------------------------------------------------------------------------------------------------ worked examples


def test_record_points_by_hand():
    """Bins of .02: .10 is in bin 5, .11 too, .125 in 6, .05 in 2, .12 in 6 (not higher), .20 in 10."""
    R = [0.10, 0.11, 0.125, 0.05, 0.12, 0.20]
    assert record_points(range(6), R).tolist() == [True, False, True, False, False, True]
    assert record_points([5, 4, 3, 2, 1, 0], R[::-1]).tolist() == [True, False, False, True, False, True]
    assert record_points(range(3), [0.04, 0.06, 0.08]).tolist() == [True] * 3  # .06 / .02 is 2.9999999999999996


def test_the_law_by_hand():
    """At C0 half of L is gained: 2^(6.09 / 2 + 2.73) = 54.8. Far below it 2^2.73 = 6.6, far above 2^8.82 = 452."""
    assert float(n_star(10**5.84, *EASY)) == pytest.approx(54.76, abs=0.01)
    assert float(n_star(1.0, *EASY)) == pytest.approx(6.63, abs=0.01)
    assert float(n_star(1e12, *EASY)) == pytest.approx(452, abs=0.5)


def test_average_best_and_worst_of_k_by_hand():
    """4 samples, 1 and 4 right, k = 2. Of 6 pairs 3 hold the one right sample, none two: best (.5 + 1) / 2, worst
    (0 + 1) / 2; the average is (.25 + 1) / 2."""
    assert of_k([1, 4], 4, 2) == {"average": 0.625, "best": 0.75, "worst": 0.5}
    assert of_k([1, 4], 4, 1) == {"average": 0.625, "best": 0.625, "worst": 0.625}


def test_of_k_of_many_samples():
    """2,500 of 5,000 samples, 3,000 of them right: all are right with a probability below the smallest number."""
    assert of_k([3000], 5000, 2500) == {"average": 0.6, "best": 1.0, "worst": 0.0}


def test_of_k_counts_every_subset():
    """Against all subsets of k samples, one by one."""
    for c, k in itertools.product(range(6), range(1, 6)):
        subsets = list(itertools.combinations([1] * c + [0] * (5 - c), k))
        found = of_k([c], 5, k)
        assert found["best"] == pytest.approx(np.mean([max(s) for s in subsets]))
        assert found["worst"] == pytest.approx(np.mean([min(s) for s in subsets]))


# ---------------------------------------------------------------------------------------------------------- curves, n*


@pytest.mark.parametrize("law", [EASY, HARD])
def test_published_constants_come_back(law):
    C = np.geomspace(1e4, 1e7, 25)
    found = fit_n_star(C, n_star(C, *law), [n_star(C, *law)])
    assert (found.L, found.s, found.log10_C0, found.b) == pytest.approx(law, rel=1e-6)
    assert found(10**5.84) == pytest.approx(2 ** (law[0] / 2 + law[3]))
    alone = fit_n_star(C, n_star(C, *law))  # needs no bootstrap, and then has no intervals
    assert alone.b == found.b and alone.intervals == {} and np.isnan(alone.interval(1e6)).all()


def curve(B_p: int, n: int, updates: int, law=EASY) -> Run:
    """A run whose reward at C is the higher the nearer (in log2) n is to n*(C)."""
    M = np.unique(np.round(np.geomspace(1, updates * max(1, updates // 60), 80)))
    C = B_p * n * M
    near = np.exp(-((np.log2(n) - np.log2(n_star(C, *law))) ** 2) / 18)
    return Run(B_p, n, M.tolist(), np.maximum.accumulate(0.9 * near * C / (C + 3e5)).tolist())


def test_one_run_is_fitted_through_its_records_or_all_that_stands():
    """Dips of .05 are no records; a collapse of .3 does not stand, and neither does the paper's way keep it."""
    C = np.geomspace(1e3, 1e6, 60)
    R = 0.1 + 0.7 / (1 + (3e4 / C) ** 1.5)
    collapsed = np.where(C > 5e5, R - 0.3, R)
    assert fit_run(Run(1, 1, C.tolist(), collapsed.tolist()))[:4] == pytest.approx((0.1, 0.7, 1.5, 3e4), rel=1e-3)
    R[10:50:10] -= 0.05
    found = fit_run(Run(1, 1, C.tolist(), R.tolist()), points="records")
    assert found[:4] == pytest.approx((0.1, 0.7, 1.5, 3e4), rel=1e-3)
    with pytest.raises(ValueError, match="has 1 points to fit \\(records\\)"):
        fit_run(Run(1, 1, [1, 2, 3, 4], [0.5, 0.4, 0.4, 0.4]), points="records")
    with pytest.raises(ValueError, match="points must be all or records"):
        fit_run(Run(1, 1, [1, 2, 3, 4], [0.5, 0.4, 0.4, 0.4]), points="some")


def test_one_bad_evaluation_is_no_collapse():
    """Each reward counts as the mean of three: .5 .46 .46 .46 .5 stands, .6 .43 .27 .1 .1 does but for its first."""
    assert Run(1, 1, range(5), [0.5, 0.5, 0.38, 0.5, 0.5]).standing.all()
    assert Run(1, 1, range(5), [0.6, 0.6, 0.1, 0.1, 0.1]).standing.tolist() == [True, False, False, False, False]


def test_no_curve_falls():
    """The best curve that does not fall through a line from .5 to .45 is flat, at its mean."""
    found = fit_run(Run(1, 1, list(range(1, 21)), np.linspace(0.5, 0.45, 20).tolist()))
    assert found.gain == pytest.approx(0, abs=1e-3)
    assert found(np.array([1.0, 20.0])) == pytest.approx([0.475] * 2, abs=2e-3)


def test_the_gradient_of_a_curve():
    """Against central differences by R0, gain, log B and log C_mid."""
    curve, C = Curve(0.2, 0.5, 1.5, 3e4), np.geomspace(1e3, 1e6, 7)
    for i, gradient in enumerate(curve.gradient(C).T):
        ends = []
        for step in (1e-6, -1e-6):
            p = [0.2, 0.5, np.log(1.5), np.log(3e4)]
            p[i] += step
            ends.append(Curve(p[0], p[1], np.exp(p[2]), np.exp(p[3]))(C))
        assert gradient == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


def test_a_curve_has_the_covariance_that_scipy_gives_it():
    """Of the same least squares by `curve_fit`, which differentiates by finite differences."""
    rng, truth, C = np.random.default_rng(0), Curve(0.2, 0.5, 1.5, 3e4), np.geomspace(1e3, 1e6, 40)
    R = truth(C) + rng.normal(0, 0.02, 40)
    found = fit_run(Run(1, 1, C.tolist(), R.tolist()))
    p, covariance = curve_fit(lambda C, *p: Curve(*p[:2], *np.exp(p[2:]))(C), C, R, p0=(0.2, 0.5, 0.4, 10.3))
    assert p == pytest.approx([*found[:2], *np.log(found[2:4])], rel=1e-4)
    assert found.covariance == pytest.approx(covariance, rel=1e-2)


@pytest.mark.medium
def test_a_curve_knows_its_error():
    """Of 200 runs of 40 rewards with a noise of .02, the curve at the end of the run lies 1.96 standard errors from the
    truth in 95 %: 190, its standard error 3.1."""
    rng, truth, C = np.random.default_rng(4), Curve(0.2, 0.5, 1.5, 3e4), np.geomspace(1e3, 1e6, 40)
    covered = 0
    for _ in range(200):
        found = fit_run(Run(1, 1, C.tolist(), (truth(C) + rng.normal(0, 0.02, 40)).tolist()))
        [gradient] = found.gradient(C[-1:])
        covered += abs(found(C[-1:]) - truth(C[-1:]))[0] <= 1.96 * np.sqrt(gradient @ found.covariance @ gradient)
    assert 178 <= covered <= 198


@pytest.mark.long
def test_the_envelope_takes_the_best_n_that_reached_each_c():
    """A small n that is better early and a large one that is better late; neither counts outside its own run. A run of
    three rewards has no curve, and is named."""
    M = np.arange(1, 200)
    early = Run(1, 4, M.tolist(), (0.5 * M * 4 / (M * 4 + 20)).tolist())
    late = Run(1, 16, M.tolist(), (0.9 * M * 16 / (M * 16 + 200)).tolist())
    grid = fit_grid([early, late, Run(1, 64, [1, 2, 3], [0.1, 0.2, 0.3])])
    C, n = grid.C, grid.best_n
    assert C[0] == pytest.approx(16) and C[-1] == pytest.approx(199 * 4)  # where both were
    # .5 C / (C + 20) = .9 C / (C + 200) at C = 205
    assert {int(x) for x in n[C < 180]} == {4} and {int(x) for x in n[C > 235]} == {16}
    assert grid.dropped == ["B_p 1, n 64 has 3 points to fit (all), and a curve needs 4"]
    low, high = grid.law.interval(1e6)  # exact curves, but of 16, of steps of 4, the law takes 16 / 4^.43 to 16 * 4^.43
    assert 8.8 < low < 10 and 26 < high < 29.1
    with pytest.raises(ValueError, match="at least two values of n; here: n = 4 only"):
        fit_grid([early])
    with pytest.raises(ValueError, match="here: no n"):
        fit_grid([])
    with pytest.raises(ValueError, match="points must be all or records"):
        fit_grid([early, late], "best")
    with pytest.raises(ValueError, match="no run's reward rises"):
        fit_grid([Run(1, n, M.tolist(), (0.5 - 0.0001 * M).tolist()) for n in (4, 16)])
    with pytest.raises(ValueError, match="n\\* is 4 at every C"):
        fit_grid([early, Run(1, 16, M.tolist(), (0.1 * M / (M + 20)).tolist())])


def test_a_curve_counts_for_nothing_after_its_run_collapsed():
    """n = 4 climbs to .9 by C = 400 and is dead from then on; n = 16 climbs slowly to .5 at C = 3,200. Without the
    collapse n = 4 would be the better one everywhere."""
    M = np.arange(1, 201)
    rewards = np.where(M <= 100, 0.9 * M * 4 / (M * 4 + 50), 0.05)
    alive = Run(1, 16, M.tolist(), (0.5 * M * 16 / (M * 16 + 50)).tolist())
    grid = fit_grid([Run(1, 4, M.tolist(), rewards.tolist()), alive, Run(1, 64, M.tolist(), (0.4 * M / 200).tolist())])
    assert {int(n) for n in grid.best_n[grid.C < 390]} == {4} and 4 not in grid.best_n[grid.C > 1.1 * 400]


@pytest.mark.long
def test_seeds_share_a_curve_and_gaps_are_not_compared():
    """Two seeds of n = 4, .02 above and below, are fitted as one. Of C from 16 to 256,000 only that counts at which two n
    were: n = 4 ends at 796, n = 16 at 3,184, and n = 256 and 1,024 begin at 128,000."""
    M = np.arange(1, 200)
    reward = 0.5 * M * 4 / (M * 4 + 20)
    seeds = [Run(1, 4, M.tolist(), (reward + off).tolist()) for off in (0.02, -0.02)]
    late = Run(1, 16, M.tolist(), (0.9 * M * 16 / (M * 16 + 200)).tolist())
    far = [Run(1, n, [32_000 / n * i for i in range(4, 9)], [0.1, 0.2, 0.3, 0.4, 0.5]) for n in (256, 1024)]
    grid = fit_grid([*seeds, late, *far])
    assert [(same[0].n, len(same)) for same, _ in grid.curves] == [(4, 2), (16, 1), (256, 1), (1024, 1)]
    assert grid.curves[0][1](np.array([20.0])) == pytest.approx([0.25], abs=1e-3)
    assert np.isfinite(grid.reward).all() and not ((grid.C > 1.1 * 796) & (grid.C < 128_000 / 1.1)).any()
    assert grid.C[-1] == pytest.approx(256_000)


@pytest.mark.slow
def test_the_best_n_is_recovered_from_noisy_runs():
    """200 grids of nine runs, evaluations of 500 problems, laws of the published range: of 1,000 intervals of n* 93 to
    97 % hold. No fit fails."""
    found = recover_rollouts(200, np.random.default_rng(0), "all")
    covered = [value for name, value in found.items() if name.endswith("covered")]
    assert 0.93 <= np.mean(covered) <= 0.97


@pytest.mark.long
def test_the_recipe_finds_the_best_n():
    """Ten values of n on runs whose best n follows the published law; the plan spends the budget."""
    runs = [curve(32, 2**i, 4000) for i in range(1, 10)]
    budget = 1e6
    plan = recommend(runs, budget)
    assert abs(np.log2(plan.n) - np.log2(float(n_star(budget, *EASY)))) <= 1.5
    assert plan.B_p == 32 and plan.B_p * plan.n * plan.M <= budget < plan.B_p * plan.n * (plan.M + 1)
    assert any("95 % interval" in line for line in plan.rests_on)
    large = recommend([curve(32, n, 4000) for n in (2, 8, 32)], budget)  # n* of the law is above 32 there
    assert any("the largest n that was tried, 32, is the best" in line for line in large.rests_on)
    plan = recommend([*runs, curve(32, 24, 4000)], budget)
    assert any("n = 24 is no power of two" in line for line in plan.rests_on) and plan.n & (plan.n - 1) == 0


def test_a_single_rollout_is_never_proposed(few_draws):
    """n = 1 is the best of 1, 2 and 4 up to C = 200, but a group of one has no advantage, and train.py refuses it."""
    M = np.arange(1, 400)
    runs = [Run(1, n, M.tolist(), (top * M * n / (M * n + half)).tolist())
            for n, top, half in ((1, 0.5, 10), (2, 0.4, 15), (4, 0.7, 100))]  # fmt: skip
    plan = recommend(runs, 20)
    assert plan.grid.law(20) < 1.5 and (plan.n, plan.M) == (2, 10)


@pytest.mark.long
def test_an_unstable_batch_is_not_recommended(few_draws):
    runs = [curve(32, n, 4000) for n in (4, 16, 64)]
    fallen = curve(8, 16, 4000)
    fallen = Run(8, 16, fallen.updates, [*fallen.rewards[:-1], 0.0])
    assert not fallen.standing.all() and recommend([*runs, fallen], 1e6).B_p == 32
    with pytest.raises(ValueError, match="no B_p is stable"):
        recommend([Run(r.B_p, r.n, r.updates, [*r.rewards[:-1], 0.0]) for r in runs], 1e6)
    falling = [Run(r.B_p, r.n, r.updates, [*r.rewards[:-1], 0.0]) for r in runs]
    few = [Run(2, n, [1, 2], [0.1, 0.2]) for n in (4, 16)]  # no curve, so B_p 2 was not tried
    assert recommend([*runs, *few], 1e6).B_p == 32
    with pytest.raises(ValueError, match="1e\\+06 completions is less than one update of 1000000 x"):
        recommend([*falling, curve(10**6, 16, 4000)], 1e6)


# ------------------------------------------------------------------------------------------------ bad input and commands


def test_bad_input():
    for words, call in (
        ("at least 5", lambda: fit_n_star([1, 2], [1, 2], [])),
        ("n\\* is 8 at every C", lambda: fit_n_star([1, 2, 3, 4, 5], [8] * 5, [])),
        ("k must be from 1 to 4", lambda: of_k([1], 4, 5)),
        ("this at most 10000", lambda: of_k([1], 10**9, 10**9)),
        ("B_p 4, n 8: rewards must lie in", lambda: Run(4, 8, range(3), [0.1, math.nan, 0.3])),
        ("rewards must lie in .* divide percents by 100", lambda: Run(4, 8, range(3), [10, 20, 30])),
        ("updates must be .* sort them", lambda: Run(4, 8, [2, 1, 0], [0.3, 0.2, 0.1])),
        *(("updates must be numbers", lambda M=M: Run(4, 8, [M, 1], [0.1, 0.2])) for M in (-1, math.nan, -math.inf)),
        ("as many as rewards", lambda: Run(4, 8, [0, 1], [0.1])),
        *(("whole numbers from 1 on", lambda n=n: Run(4, n, [0, 1], [0.1, 0.2])) for n in (0, 4.5, math.nan, 10**400)),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.long
def test_command_line(few_draws, tmp_path, capsys):
    runs = [curve(32, n, 600) for n in (4, 16, 64, 256)]
    folders = [str(tmp_path / str(run.n)) for run in runs]
    for run, folder in zip(runs, map(Path, folders), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"batch_prompts": run.B_p, "rollouts": run.n}))
        rows = [{"step": m, "pass_rate": r} for m, r in zip(run.updates, run.rewards, strict=True)]
        (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        counts = [{"step": m, "n_samples": 2, "correct": [2] * round(50 * r) + [1] * 20 + [0] * (80 - round(50 * r))}
                  for m, r in zip(run.updates, run.rewards, strict=True)]  # fmt: skip
        (folder / "eval_counts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in counts))
    assert main([*folders, "--budget", "1e6", "--plot", str(tmp_path / "grid.png")]) == 0
    assert "B_p = 32 prompts" in capsys.readouterr().out and (tmp_path / "grid.png").stat().st_size > 10_000
    # both of two right in half of the pass rate, one of two in .2 more, of all problems
    [worst], [best] = (read(folders[2], y, 0, Counter()) for y in ("worst", "best"))
    assert worst.rewards[-1] == pytest.approx(round(50 * runs[2].rewards[-1]) / 100)
    assert best.rewards[-1] == pytest.approx(worst.rewards[-1] + 0.2)
    assert main([*folders, "--budget", "1e6", "--y", "worst"]) == 0
    capsys.readouterr()
    assert main([folders[0], "--budget", "1e6"]) == 2 and "two values of n" in capsys.readouterr().err
    assert main([*folders, "--budget", "1", "--y", "reward"]) == 2 and "has no 'reward'" in capsys.readouterr().err
    assert main([*folders, "--budget", "1", "--y", "best", "--k", "3"]) == 2
    assert "k must be from 1 to 2" in capsys.readouterr().err
    assert main([*folders, "--budget", "1e6", "--k", "2"]) == 2
    assert "--k goes with --y best or --y worst" in capsys.readouterr().err
    rows = [f"32,{run.n},{m},{r}" for run in runs for m, r in zip(run.updates, run.rewards, strict=True)]
    (tmp_path / "grid.csv").write_text("\n".join(["B_p,n,step,pass_rate", *rows]))
    assert main([str(tmp_path / "grid.csv"), "--budget", "1e6"]) == 0
    out = capsys.readouterr().out
    assert "4 runs, n from 4 to 256" in out and "the smallest n that was tried, 4, is the best at some C" in out
    assert main([str(tmp_path / "grid.csv"), "--budget", "1e6", "--y", "worst"]) == 2
    assert "has no 'worst', but B_p, n, step, pass_rate; average, best and worst need" in capsys.readouterr().err
    (tmp_path / "seeds.csv").write_text(
        "\n".join(["B_p,n,step,pass_rate,run", *(f"{r},{i}" for r in rows for i in (0, 1))])
    )
    assert main([str(tmp_path / "seeds.csv"), "--budget", "1e6"]) == 0
    assert "8 runs, n from 4 to 256" in capsys.readouterr().out


GRID = "B_p,n,step,pass_rate\n" + "".join(
    f"1,{n},{m},{top * m * n / (m * n + mid)}\n"
    for n, top, mid in ((4, 0.5, 20), (16, 0.9, 200))
    for m in range(1, 200)
)  # n = 4 is better below C = 205, n = 16 above


@pytest.mark.long
@pytest.mark.parametrize(("text", "budget", "words"), [
    (GRID.replace("pass_rate", "reward"), "700", "grid.csv has no 'pass_rate', but B_p, n, step, reward; --y names"),
    (GRID.replace("step", "updates"), "700", "has no 'step', but B_p, n, updates, pass_rate; B_p, n and step are needed"),
    (GRID + "1,16,200,85\n", "700", "grid.csv: row 399: pass_rate is 85, and a reward lies in [0, 1]; divide percents"),
    (GRID + "1,0,200,0.5\n", "700", "row 399: B_p 1, n 0, step 200 must be whole numbers from 1, 1 and 0 on"),
    (GRID + "1,8.5,200,0.5\n", "700", "row 399: B_p 1, n 8.5, step 200 must be"),
    (GRID + "1,16,-1,0.5\n", "700", "row 399: B_p 1, n 16, step -1 must be"),
    (GRID + "1,16,200,high\n", "700", "row 399: pass_rate 'high' is no number; leave unknown cells empty"),
    (GRID + "1,16,199,0.8\n", "700", "row 399: B_p 1, n 16 has two rewards at step 199; add a column run"),
    (GRID, "3", "a budget of 3 completions lies below what the runs compare, 16 to 796"),
    (GRID, "nan", "a budget of nan completions is no finite number"),
    (GRID, "inf", "a budget of inf completions is no finite number"),
    (GRID.replace("1,16,", "2,4,"), "700", "at least two values of n; here: n = 4 only"),
    ("B_p,n,step,pass_rate\n1,4,1,0.5\n", "700", "two values of n; here: no n; B_p 1, n 4 has 1 points to fit"),
    ("", "700", "grid.csv: it has no row"), ("B_p,n,step,pass_rate\n", "700", "grid.csv: it has no row"),
])  # fmt: skip
def test_bad_files_and_budgets_are_one_sentence(few_draws, text, budget, words, tmp_path, capsys):
    (tmp_path / "grid.csv").write_text(text)
    assert main([str(tmp_path / "grid.csv"), "--budget", budget]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""


FLAGS, DEEP = {"batch_prompts": 4, "rollouts": 8}, '{"step": ' + "[" * 100_000
STEPS = "".join(json.dumps({"config": FLAGS | more}) + "\n" for more in ({}, {"dynamic_sampling": False}))
EVAL = "".join(json.dumps({"step": 10 * i, "pass_rate": i / 10}) + "\n" for i in range(5))
COUNTS = '{"step": 1, "n_samples": %s, "correct": [1]}\n'
OTHER = "run: --dynamic_sampling, or other --batch_prompts or --rollouts at a resume: leave it out"


@pytest.mark.parametrize(("files", "words"), [
    ({}, "at least two values of n; here: n = 8 only"),  # nothing is wrong with the folder
    ({"config.json": json.dumps(FLAGS | {"dynamic_sampling": True})}, OTHER),
    ({"metrics.jsonl": STEPS.replace("false", "true")}, OTHER), ({"metrics.jsonl": STEPS.replace("4", "16", 1)}, OTHER),
    ({"metrics.jsonl": STEPS.replace("8", "16", 1)}, OTHER),
    ({"metrics.jsonl": '{"config": ' + DEEP}, "run: maximum recursion"), ({"config.json": DEEP}, "run: maximum recursion"),
    ({"eval.jsonl": DEEP}, "run: maximum recursion"),
    ({"eval.jsonl": EVAL + '{"step": 1%s, "pass_rate": 0.5}' % ("0" * 400)}, "run: row 6: step 1000"),
    ({"eval.jsonl": EVAL.replace("40", "1e308")}, "run: B_p 4, n 8: updates must be numbers from 0 on"),
    ({"eval_counts.jsonl": COUNTS % 10**9}, "this at most 10000"), ({"eval_counts.jsonl": COUNTS % 10**400}, "at most 10000"),
    ({"eval.jsonl": '{"\\u001b]0;x\\n": 1}'}, "but \\x1b]0;x\\n, B_p, n; B_p, n and step are needed"),
])  # fmt: skip
def test_bad_folders_are_one_sentence(files, words, tmp_path, capsys, monkeypatch):
    """Among them runs whose steps did not sample B_p n completions each: C would be another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    whole = {"config.json": json.dumps(FLAGS), "eval.jsonl": EVAL, "metrics.jsonl": STEPS + '{"step": 1}\n{"st'}
    for name, text in (whole | files).items():
        (tmp_path / "run" / name).write_text(text)
    assert main(["run", "--budget", "700", *(["--y", "best"] if "eval_counts.jsonl" in files else [])]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_what_is_left_out_is_counted(few_draws, tmp_path, capsys):
    """A missing reward, a row without an end, an evaluation before training, a run of two rewards, an n of 12."""
    (tmp_path / "grid.csv").write_text(GRID + "1,12,0,0.01\n1,12,1,0.1\n1,12,2,0.1\n1,4,200,\n1,16,200")
    assert main([str(tmp_path / "grid.csv"), "--budget", "700"]) == 0
    out = capsys.readouterr().out
    assert (
        "rows left out: {'no number': 2}" in out
        and "398 of 401 rewards are fitted (all); 1 at C = 0 and 0 after a collapse are not" in out
    )
    assert "left out: B_p 1, n 12 has 2 points to fit (all), and a curve needs 4" in out
