"""evidence/curves.py: run folders become rows, and rows become curves again."""

import gzip
import json

import curves
import numpy as np
import pytest
from made_curves import made, rows

from runtime.flags import UsageError


def run_folder(output, name, evals=(), steps=(), finished=True, **config):
    """A run that train.py left."""
    folder = output / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(curves.THEN | {"output_dir": str(folder)} | config))
    for file, records in (("eval.jsonl", evals), ("metrics.jsonl", [{"config": {}}, *steps])):
        (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    if finished:
        (folder / "finished.json").write_text("{}")
    return folder


def evaluation(step, pass_rate):
    compute = {"step": step, "tokens": 1000 * step, "device_hours": 0.0123456789 * step, "flops": 123456 * step}
    return compute | {"pass_rate": pass_rate, "n_prompts": 512, "n_samples": 2, "truncated": 0.5}


def test_a_row_by_hand(tmp_path):
    """Evaluations at steps 0, 2 and 3. Steps 1 and 2 have lags 1 and 2 (largest 3 and 4), entropies .5 and .3, and one
    probe of two, at 2e-7. They keep 128 and 0 of the 32 * 16 = 512 rollouts: an eighth. Step 3 has no probe."""
    step = {"rows": 128, "lag_mean": 1.0, "lag_max": 3, "ess": 0.9, "entropy": 0.5, "interrupted": 0.25}
    step |= {"truncated": 0.0, "capped_positive": 0.01, "capped_negative": 0.02}
    steps = [
        step | {"step": 1, "logprob_gap": 2e-7, "mismatch_rms": 1e-7, "staleness_rms": 0.03},
        {"step": 2, "lag_mean": 2.0, "lag_max": 4, "entropy": 0.3, "interrupted": 0.75, "truncated": 0.1},
        step | {"step": 3, "rows": 512},
    ]
    evals = [evaluation(0, 0.0), evaluation(2, 100 / 1024), evaluation(3, 0.5)]
    folder = run_folder(tmp_path, "law/dapo-0.26/seed-12", evals, steps, loss="dapo", lr=7e-4)
    counts = {"step": 2, "n_samples": 2, "correct": [0, 1, 2, 2]}  # three of four have a right one, two no wrong one
    (folder / "eval_counts.jsonl").write_text(json.dumps(counts) + "\n")
    found = curves.collect(tmp_path)
    assert tuple(found) == curves.COLUMNS
    zero, first, second = found.to_dict("records")
    of_the_run = ["law/dapo-0.26/seed-12", "law", "dapo-0.26", "12", "--loss dapo --lr 0.0007", "finished"]
    assert [first[name] for name in curves.OF_THE_RUN] == of_the_run
    measured = ["2", "2000", "0.0246914", "2.469e+05", "0.09766", "1024"]
    assert [first[name] for name in curves.OF_THE_EVALUATION] == measured
    logged = {"lag": "1.5", "lag_max": "4", "ess": "0.9", "gap": "2e-07", "entropy": "0.4", "interrupted": "0.5"}
    logged |= {"truncated": "0.05", "kept": "0.125", "clipped_positive": "0.01", "clipped_negative": "0.02"}
    logged |= {"mismatch": "1e-07", "staleness": "0.03"}
    assert {name: first[name] for name in curves.LOGGED} == logged
    assert (first["best"], first["worst"], second["best"]) == ("0.75000", "0.50000", "")
    assert second["gap"] == "" and second["kept"] == "1" and second["lag_max"] == "3"
    assert all(zero[name] == "" for name in curves.LOGGED) and zero["pass_rate"] == "0.00000"


def test_data_sets_apart(tmp_path):
    """Two sets of 256 problems, right twice in 1,024 and six times: `n` counts both. A third set has no column."""
    record = evaluation(0, 8 / 1024) | {"pass_rate_of": {"a": 2 / 512, "b": 6 / 512, "c": 1.0}}
    run_folder(tmp_path, "two/both/seed-0", [record], dataset="a.jsonl,b.jsonl")
    (run,) = curves.curves_of(curves.collect(tmp_path))
    for column, rate in (("set_1", 2 / 512), ("set_2", 6 / 512)):
        apart = curves.of_set(run, column)
        assert apart.rates == pytest.approx([rate], abs=1e-5) and apart.points["n"] == 512
    assert run.rates == pytest.approx([8 / 1024], abs=1e-5)


def test_runs_that_failed_or_did_not_end_are_named(tmp_path, capsys):
    """One failed after an evaluation, one before it wrote a file, one was stopped by Ctrl-C, one is under way, and one
    was stopped by Ctrl-C before train.py could catch it (Popen's code for a signal is its negative number)."""
    one = [evaluation(0, 0.1)]
    for seed in range(4):
        run_folder(tmp_path, f"law/a/seed-{seed}", one, finished=seed == 3)
    codes = {"law/a/seed-0": 1, "law/a/seed-1": 130, "law/b/seed-0": 2, "law/b/seed-1": -2}
    records = [{"folder": "law/a/seed-0", "exit_code": 130}, *({"folder": f, "exit_code": c} for f, c in codes.items())]
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    file = tmp_path / "new" / "curves.csv.gz"
    assert curves.main([str(tmp_path), "--output", str(file)]) == 0
    states = {curve.run: curve.state for curve in curves.curves_of(curves.read_rows(file))}
    expected = ["failed (exit code 1)", "unfinished", "unfinished", "finished", "failed (exit code 2)", "unfinished"]
    runs = [*(f"law/a/seed-{i}" for i in range(4)), "law/b/seed-0", "law/b/seed-1"]
    assert states == dict(zip(runs, expected, strict=True))
    said = capsys.readouterr().out
    assert all((run in said) == (state != "finished") for run, state in states.items())
    assert "failed (exit code 2): law/b/seed-0, 0 evaluations" in said and "6 runs, 1 of them finished" in said


def test_the_same_rows_are_the_same_bytes(tmp_path):
    """In whatever order they come: neither date nor name is in the header. Seed 10 comes after seed 2."""
    some = rows(made(seed=10), made(seed=2))
    one, two = tmp_path / "one.csv.gz", tmp_path / "two.csv.gz"
    curves.write_rows(some, one)
    curves.write_rows(some[::-1], two)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes()[3:8] == bytes(5)  # flags (no name) and the modification time, RFC 1952
    assert [curve.seed for curve in curves.curves_of(curves.read_rows(two))] == [2, 10]


def test_a_curve_comes_back(tmp_path):
    """To five digits of the pass rate; what is not logged is NaN."""
    run = made("dapo", 3, lag=np.linspace(0, 3, 17), flags={"loss": "dapo"})
    curves.write_rows(rows(run), tmp_path / "c.csv.gz")
    (back,) = curves.curves_of(curves.read_rows(tmp_path / "c.csv.gz"))
    of_it = ("one/dapo/seed-3", "one", "dapo", 3, {"loss": "dapo"})
    assert (back.run, back.comparison, back.variant, back.seed, back.flags) == of_it
    assert back.points["pass_rate"] == pytest.approx(run.points["pass_rate"], abs=5e-6)
    assert back.points["lag"] == pytest.approx(run.points["lag"], rel=1e-3) and np.isnan(back.points["ess"]).all()
    third = {"step": 16, "tokens": 100, "device_hours": 0.1, "flops": 1000, "n": 1024}
    assert {name: back.points[name][2] for name in third} == third


def zipped(columns):
    return gzip.compress((",".join(columns) + "\n").encode(), mtime=0)


@pytest.mark.parametrize(
    "content, said",
    [
        (zipped(("Step", *curves.COLUMNS[1:])), "other columns"),
        (zipped(curves.COLUMNS[::-1]), "other columns"),
        (b"run,seed\n", "no readable"),
        (gzip.compress(b"run\n" * 99, mtime=0)[:-9], "no readable"),
    ],
)
def test_another_file_is_refused_in_one_sentence(content, said, tmp_path):
    file = tmp_path / "c.csv.gz"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said) as error:
        curves.read_rows(file)
    assert str(error.value).count(". ") == 0 and str(file) in str(error.value)


def test_runs_of_an_earlier_day_stay(tmp_path, capsys):
    """Their folders may be gone; a run that is there again is taken from its folder."""
    file = tmp_path / "c.csv.gz"
    curves.write_rows(rows(made("base", 0), made("base", 1)), file)
    run_folder(tmp_path / "runs", "one/base/seed-1", [evaluation(0, 0.25)])
    assert curves.main([str(tmp_path / "runs"), "--output", str(file)]) == 0
    assert [curve.points["step"].size for curve in curves.curves_of(curves.read_rows(file))] == [17, 1]
    assert "2 runs, 2 of them finished, 1 kept from before" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert curves.main([str(tmp_path), "--output", str(tmp_path / "c.csv.gz")]) == 2
    assert "holds no COMPARISON/VARIANT/seed-N" in capsys.readouterr().err and not (tmp_path / "c.csv.gz").exists()
