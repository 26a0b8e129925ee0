"""lab/evidence/runs.py: run folders become rows, and rows become curves again."""

import json

import numpy as np
import pandas as pd
import pytest
import runs


def run_folder(output, name, evals=(), steps=(), exit_code=0, **config):
    """A run that ablate.py made."""
    folder = output / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(runs.THEN | {"output_dir": str(folder)} | config))
    for file, records in (("eval.jsonl", evals), ("metrics.jsonl", [{"config": {}}, *steps])):
        (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    folder.with_suffix(".json").write_text(json.dumps({"flags": [], "exit_code": exit_code}))
    return folder


def evaluation(step, pass_rate):
    compute = {"step": step, "tokens": 1000 * step, "device_hours": 0.0123456789 * step, "flops": 123456 * step}
    return compute | {"pass_rate": pass_rate, "n_prompts": 512, "n_samples": 2, "truncated": 0.5}


def test_a_row_by_hand(tmp_path):
    """Evaluations at steps 0, 2 and 3. Steps 1 and 2 have lags 1 and 2 (largest 3 and 4), entropies .5 and .3, and one
    probe of two, at 2e-7. They keep 128 and 0 of the 32 * 16 = 512 rollouts: an eighth. Step 3 has no probe, and a line
    that is still being written does not count."""
    step = dict(rows=128, lag_mean=1.0, lag_max=3, ess=0.9, entropy=0.5, interrupted=0.25, truncated=0.0)
    step |= dict(capped_positive=0.01, capped_negative=0.02)
    steps = [
        step | {"step": 1, "logprob_gap": 2e-7, "mismatch_rms": 1e-7, "staleness_rms": 0.03},
        {"step": 2, "lag_mean": 2.0, "lag_max": 4, "entropy": 0.3, "interrupted": 0.75, "truncated": 0.1},
        step | {"step": 3, "rows": 512},
    ]
    apart = {"data_sets": {name: {"pass_rate": rate} for name, rate in (("a", 2 / 512), ("b", 6 / 512), ("c", 1.0))}}
    correct = {"correct": [0, 1, 2, 2]}  # of two samples: three of four prompts have a right one, two no wrong one
    evals = [evaluation(0, 0.0), evaluation(2, 100 / 1024) | correct, evaluation(3, 0.5) | apart]
    folder = run_folder(tmp_path, "law/dapo-0.26/seed-12", evals, steps, loss="dapo", lr=7e-4)
    with (folder / "eval.jsonl").open("a") as file:
        file.write('{"step": 3, "n_sam')
    rows = runs.collect(tmp_path)
    assert tuple(rows) == runs.COLUMNS
    zero, first, second = rows.to_dict("records")
    of_the_run = ["law/dapo-0.26/seed-12", "law", "dapo-0.26", "12", "--loss dapo --lr 0.0007", "finished"]
    assert [first[name] for name in runs.OF_THE_RUN] == of_the_run
    measured = ["2", "2000", "0.0246914", "2.469e+05", "0.09766", "1024", "0.75000", "0.50000", "", ""]
    assert [first[name] for name in runs.MEASURED] == measured
    logged = ["1.5", "4", "0.9", "2e-07", "0.4", "0.5", "0.05", "0.125", "0.01", "0.02", "1e-07", "0.03"]
    assert [first[name] for name in runs.LOGGED] == logged
    assert [second[name] for name in ("best", "gap", "kept", "lag_max")] == ["", "", "1", "3"]
    assert (second["set_1"], second["set_2"]) == ("0.00391", "0.01172")
    assert {zero[name] for name in runs.LOGGED} == {""}
    assert zero["pass_rate"] == "0.00000"


@pytest.mark.parametrize(
    ("code", "state"),
    [(0, "finished"), (1, "failed (exit code 1)"), (None, "unfinished"), (130, "unfinished"), (-2, "unfinished")],
)
def test_the_state_of_a_run(tmp_path, code, state):
    """Popen's code for a signal is its negative number. A run that failed before it was evaluated has a row."""
    run_folder(tmp_path, "law/a/seed-0", exit_code=code)
    (run,) = runs.runs_of(runs.collect(tmp_path)).values()
    assert run.state == state
    assert run.rates.size == 0


def test_published_runs_stay_and_come_back(tmp_path, capsys):
    """Of two runs that are published one is made again. Seed 10 comes after seed 2. What is not logged is NaN, the same
    rows are the same bytes in any order, and a run that failed is in no comparison."""
    results = tmp_path / "results"
    results.mkdir()
    run_folder(tmp_path / "old", "one/base/seed-2", [evaluation(0, 0.1), evaluation(1, 0.123456)])
    run_folder(tmp_path / "old", "one/base/seed-10", [evaluation(0, 0.25)])
    runs.write_rows(runs.collect(tmp_path / "old"), results / "curves.csv.gz")
    listed = [("one", "base", 2, "one/base/seed-2"), ("two", "same", 2, "one/base/seed-2")]
    pd.DataFrame(listed, columns=[*runs.MEMBER, "run"]).to_csv(results / "runs.csv", index=False)
    run_folder(tmp_path / "new", "one/base/seed-10", [evaluation(0, 0.5)])
    run_folder(tmp_path / "new", "one/dapo/seed-0", exit_code=1)
    runs.publish(tmp_path / "new", results)
    assert "failed (exit code 1): one/dapo/seed-0, 0 evaluations" in capsys.readouterr().out
    groups = runs.members(results)
    assert groups.keys() == {"one", "two"}
    assert groups["one"].keys() == {"base"}
    two, ten = groups["one"]["base"]
    assert (two.seed, ten.seed, ten.rates) == (2, 10, [0.5])
    assert groups["two"]["same"][0].name == two.name
    assert two.rates == pytest.approx([0.1, 0.12346], abs=1e-9)
    assert np.isnan(two.points["ess"]).all()
    rows = runs.read_rows(results / "curves.csv.gz")
    runs.write_rows(rows[::-1], tmp_path / "again.csv.gz")
    assert (tmp_path / "again.csv.gz").read_bytes() == (results / "curves.csv.gz").read_bytes()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(SystemExit) as error:
        runs.main([str(tmp_path)])
    assert error.value.code == 2
