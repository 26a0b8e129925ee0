"""lab/law/stability.py: what goes down, two chances by hand, what a log must have, and its constants fitted again."""

import gzip
import json
import math
import re

import numpy as np
import pandas as pd
import pytest
import stability
from scipy.optimize import minimize
from stability import chance, first_steps, goes_down

from lab.evidence.runs import RESULTS
from runtime import recorder
from runtime.flags import Flags


def log(folder, steps=10, config=None, **changes):
    """A run's folder whose steps have a rate of 1e-3, a lag of 4 and an ESS of .75; None leaves a column out."""
    row = {"lr": 1e-3, "lag_mean": 4.0, "ess": 0.75} | changes
    row = {name: value for name, value in row.items() if value is not None}
    rows = [{"config": {}}, *({"step": i + 1} | row for i in range(steps))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "rates, down",
    [
        ([0.1, 0.5, 0.39], True),  # .11 below the best
        ([0.1, 0.5, 0.41, 0.6], False),
        ([0.1, 0.5, 0.3, 0.8], True),  # it recovers, and counts
        ([0.1, 0.15, 0.2], True),  # never more than .1 above its first
        ([0.1, 0.21], False),
    ],
)
def test_what_goes_down(rates, down):
    assert goes_down(rates) is down


def test_chances_by_hand():
    """Half at `half`; at twice it with a slope of 1, 1 / (1 + 1/2); with a slope of 2, 1 / (1 + 1/4). 5 % is odds of
    1 to 19, so with a slope of 2 at 1 / sqrt(19) of `half`."""
    assert chance(3.0, 3.0, 5.0) == 0.5 and chance(0.0, 3.0, 5.0) == 0
    assert chance(6.0, 3.0, 1.0) == pytest.approx(2 / 3) and chance(6.0, 3.0, 2.0) == pytest.approx(0.8)
    assert stability.safe(3.0, 2.0) == pytest.approx(3 / 19**0.5)
    for lag in (1.0, 7.0):
        rate = stability.safe_rate(lag)
        assert stability.safe_lag(rate) == pytest.approx(lag)
        assert chance(rate * lag**stability.EXPONENT, stability.HALF, stability.SLOPE) == pytest.approx(0.05)


def test_the_first_steps_by_hand(tmp_path):
    """sigma = sqrt(-log .75) = .536; at a lag of 4, .134 nats an update. Flags that hold a lag of 16 say what it will
    be; later steps do not count; a log-ratio rms stands in for the ESS."""
    first = first_steps(log(tmp_path))
    assert first == pytest.approx((1e-3, 4.0, math.sqrt(-math.log(0.75)) / 4))
    log(tmp_path, config={"k": 16, "min_ready": 480, "batch_prompts": 32})
    assert first_steps(tmp_path).lag == 16 and first_steps(tmp_path).drift == pytest.approx(first.drift)
    assert first_steps(tmp_path, lag=2.0, rate=5e-4)[:2] == (5e-4, 2.0)
    table = tmp_path / "log.csv"
    table.write_text("step,learning_rate,lag,log_ratio_rms,note\n" + "1,1e-6,2,0.2,a\n" * 10 + "11,9,9,9,b\n")
    (tmp_path / "config.json").unlink()
    assert first_steps(table) == pytest.approx((1e-6, 2.0, 0.1))


def test_what_is_printed(tmp_path, capsys):
    """x = 1e-3 * 4^.472 = 1.924e-3, so 1 / (1 + (2.235 / 1.924)^6.67) = .27; .134 * 2 = .268: 1 / (1 + (.259 /
    .268)^5.58) = .55."""
    assert stability.main([str(log(tmp_path))]) == 0
    printed = capsys.readouterr().out
    assert "a rate of 0.001 at a lag of 4.0" in printed
    assert "goes down in 27% of runs" in printed and "goes down in 55% of runs" in printed


@pytest.mark.parametrize(
    "changes, options, message",
    [
        ({"lr": None}, [], "no rate, under none of the names lr, learning_rate, actor/lr: log the optimizer's rate"),
        ({"lag_mean": None}, [], "no lag, under none of the names lag_mean, lag: log `lag_mean`"),
        ({"steps": 9}, [], "9 steps, and the first 10 are needed"),
        ({}, ["--lag", "0"], "--lag must be above 0 and finite, not 0.0"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, changes, options, message):
    assert stability.main([str(log(tmp_path, **changes)), *options]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1 and not output.out


def test_a_log_without_sizes_or_on_policy_has_the_rate_alone(tmp_path, capsys):
    for changes in ({"ess": None}, {"lag_mean": 0.0, "ess": 1.0}):
        assert stability.main([str(log(tmp_path, **changes))]) == 0
        assert "by its first steps: the log has no lag above 0, or neither" in capsys.readouterr().out


def test_the_core_warns_by_the_same_rule(tmp_path):
    """The same constants, and the same x on both sides of the limit."""
    assert (recorder.EARLY_STEPS, recorder.EARLY_DRIFT) == (stability.EARLY_STEPS, stability.EARLY_DRIFT)
    flags = Flags(k=16, min_ready=240)
    for ess in (0.83, 0.84):
        first = first_steps(log(tmp_path, config=vars(flags), ess=ess))
        beyond = first.drift * math.sqrt(first.lag) > stability.EARLY_DRIFT
        steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert bool(list(recorder.early_warning(steps, flags))) is beyond is (ess == 0.83)


@pytest.fixture(scope="module")
def published():
    """One row a run of the published curves: its flags, whether it goes down, ESS and lag of its first interval."""
    with gzip.open(RESULTS / "curves.csv.gz") as file:
        curves = pd.read_csv(file, low_memory=False)
    rows = []
    for run, points in curves.groupby("run"):
        points = points.sort_values("tokens")
        first = points.iloc[1] if len(points) > 1 else points.iloc[0]
        down = goes_down(points.pass_rate.tolist()) if points.pass_rate.notna().all() else True
        rows.append((run, points.variant.iloc[0], str(first["flags"]), down, first.ess, first.lag))
    return pd.DataFrame(rows, columns=["run", "variant", "flags", "down", "ess", "lag"])


def logistic(*columns, down):
    """Coefficients of the most likely logistic curve, the constant first, with a weak pull of the others towards 0."""
    X = np.column_stack([np.ones(len(down)), *columns])

    def loss(c):
        return np.logaddexp(0, np.where(down, -X @ c, X @ c)).sum() + 0.005 * (c[1:] ** 2).sum()

    return minimize(loss, np.zeros(X.shape[1])).x


def test_the_constants_are_those_of_the_map(published):
    cells = published[published.run.str.startswith("staleness/")]
    found = cells.variant.str.extract(r"lag-(\d+)-lr-(.+)").astype(float)
    lag, rate, down = found[0].to_numpy(), found[1].to_numpy(), cells.down.to_numpy()
    assert len(cells) == 84 and down.sum() == 28
    c = logistic(np.log(rate), np.log(lag), down=down)
    assert c[2] / c[1] == pytest.approx(stability.EXPONENT, abs=0.005)
    assert math.exp(-c[0] / c[1]) == pytest.approx(stability.HALF, rel=0.01)
    assert c[1] == pytest.approx(stability.SLOPE, rel=0.03)
    x = np.sqrt(-np.log(cells.ess)) / cells.lag * np.sqrt(lag)
    c = logistic(np.log(x), down=down)
    assert math.exp(-c[0] / c[1]) == pytest.approx(stability.DRIFT_HALF, rel=0.02)
    assert c[1] == pytest.approx(stability.DRIFT_SLOPE, rel=0.03)


def test_no_published_run_that_stood_would_have_been_warned(published):
    """By the means of its first interval between evaluations, ten steps in most of them."""
    standing = published[~published.down & published.ess.notna() & (published.lag > 0)]
    warned = []
    for run in standing.itertuples():
        flags = {name: re.search(rf"--{name} (\d+)", run.flags) for name in ("k", "min_ready", "batch_prompts")}
        k, ready, batch = (int(m[1]) if m else x for m, x in zip(flags.values(), (8, 0, 32), strict=True))
        options = Flags(k=k, min_ready=ready, batch_prompts=batch)
        if list(recorder.early_warning([{"ess": run.ess, "lag_mean": run.lag}], options)):
            warned.append(run.run)
    assert len(standing) > 500 and not warned


def test_the_blind_runs_say_what_the_pages_say():
    """off_the_map.csv against the predictions that were committed: outcomes, cells, log-losses, the first steps."""
    runs = pd.read_csv(RESULTS / "off_the_map.csv")
    page = (RESULTS / "off_the_map.md").read_text()
    rows = re.findall(r"^\| (\S+).*? \| [\de.-]+ \| \d+ \| (\.\d+) \| \.\d+ to \.\d+ \| (\.\d+) \|$", page, re.M)
    chances = {name: (float(root), float(inverse)) for name, root, inverse in rows}
    assert len(runs) == 60 and set(runs.cell) == chances.keys() and len(chances) == 12
    assert [goes_down([float(x) for x in rates.split()]) for rates in runs.rates] == (runs.down == 1).tolist()
    shares = runs.groupby("cell").down.mean()
    sides = [(share > 0.5) == (chances[cell][0] > 0.5) for cell, share in shares.items() if share != 0.5]
    assert (sum(sides), len(sides)) == (9, 12)
    likely = np.array(
        [[p if down else 1 - p for p in chances[c]] for c, down in zip(runs.cell, runs.down, strict=True)]
    )
    assert -np.log(likely).mean(0) == pytest.approx([0.77, 0.74], abs=0.005)
    score = np.sqrt(-np.log(runs.first_ess)) / runs.first_lag * np.sqrt(runs.lag)
    down, stand = score[runs.down == 1].to_numpy(), score[runs.down == 0].to_numpy()
    assert (down[:, None] > stand).mean() == pytest.approx(0.725, abs=0.005)
    assert ((down > stability.EARLY_DRIFT).sum(), (stand > stability.EARLY_DRIFT).sum()) == (2, 0)
