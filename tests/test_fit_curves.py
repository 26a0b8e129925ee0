"""Tests of `tools/fit_curves.py` and `tools/curve_files.py`: files of other frameworks, early points, power law, options."""

import json
import math

import numpy as np
import pytest
from curve_files import InputError, load
from fit_curves import early_transient, fit_run, format_run, linearized, main, plot_slopes, power_law, windows
from test_fit_report import records, with_aime, write
from test_fit_sigmoid import rounded_otherwise, run_of

from fit_sigmoid import curve, fit, format_report, sigmoid

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("quick_fits")]

# ----------------------------------------------------------------------------------------------------- a worked example


def test_power_law_by_hand():
    """A .6, D 20, B .5: at C = 10,000 the reward is .6 - 20 / 100 = .4."""
    C = np.linspace(5000, 50_000, 20)
    law = power_law(np.append(0, C), np.append(0.1, 0.6 - 20 / np.sqrt(C)))
    assert (law["A"], law["B"], law["D"]) == pytest.approx((0.6, 0.5, 20), rel=1e-3) and law["rmse"] < 1e-5
    assert power_law(C, 0.6 - 20 / np.sqrt(C), skip_below=20_000)["A"] == pytest.approx(0.6, rel=1e-3)
    with pytest.raises(ValueError, match="needs 4 points"):
        power_law([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4])


# ---------------------------------------------------------------------------------------------------------------- files


def test_load_reads_an_eval_file(tmp_path):
    rows = records()
    rows[3]["pass_rate"] = None
    x, C, R, n, last = load(write(tmp_path / "eval.jsonl", rows))
    assert (x, C[2], last) == ("tokens", 100_000, 19) and math.isnan(R[3]) and R[4] == rows[4]["pass_rate"]
    assert (n == 1024).all()
    assert load(rows, x="flops")[1][1] == 2e9 and load(rows, samples=77)[3][0] == 77
    assert load(rows, samples="n_prompts")[3][0] == 512 and load(rows, y="pass_at_k")[2][0] == 0.5


@pytest.mark.parametrize(
    ("extra", "x"),
    [({"device": "cpu"}, "tokens"), ({"device": "NVIDIA H100"}, "device_hours"), ({"device": None}, "device_hours")],
)
def test_default_compute(extra, x):
    assert load(records(**extra))[0] == x


def test_default_compute_without_device():
    rows = [{k: v for k, v in row.items() if k != "device"} for row in records()]
    assert load(rows)[0] == "device_hours"
    assert load([row | {"device_hours": 0.0} for row in rows])[0] == "tokens"
    assert load([{"step": 1, "pass_rate": 0.1}])[0] == "step"
    assert load([{"flops": 1, "step": 1, "pass_rate": 0.1}])[0] == "flops"


def test_a_data_set_of_the_evaluations(tmp_path, capsys):
    """The points of `fit_sigmoid.curve` on the same file; the first record has no such data set."""
    rows = with_aime(records())
    x, C, R, n, last = load(rows, data_set="aime")
    assert (x, last) == ("tokens", len(rows)) and (n == 120).all()
    assert C.tolist() == [row["tokens"] for row in rows[1:]]
    assert R.tolist() == [row["pass_rate"] / 2 for row in rows[1:]]
    path = write(tmp_path / "eval.jsonl", rows)
    assert fit_run(path, data_set="aime").report.fit.A == curve(path, data_set="aime").fit.A
    assert main([str(path), "--data-set", "other"]) == 2
    assert "eval.jsonl, line 1: no record has a data set 'other'" in capsys.readouterr().err


def test_csv_with_named_columns(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("gpu_hours;accuracy;samples\n0;0.2;100\n10;;100\n20;0.4;100\n")
    _, C, R, n, last = load(path, x="gpu_hours", y="accuracy", samples="samples")
    assert C.tolist() == [0, 10, 20] and math.isnan(R[1]) and R[2] == 0.4 and n.tolist() == [100] * 3 and last == 4
    assert load(path, x="gpu_hours", y="accuracy")[3] is None


GOOD = "tokens,pass_rate\n0,0.1\n10,0.15\n20,0.3\n30,0.4\n40,0.45\n50,0.47\n"


@pytest.mark.parametrize(("name", "text", "line", "words"), [
    ("a.csv", GOOD.replace("pass_rate", "accuracy"), 1, "no column 'pass_rate'; name another with --y"),
    ("a.csv", GOOD.replace("tokens", "hours"), 1, "there are: hours, pass_rate"),
    ("a.csv", GOOD.replace("20,", "-20,"), 4, "tokens is -20"),
    ("a.csv", GOOD.replace("20,", "inf,"), 4, "tokens is inf"),
    ("a.csv", GOOD.replace("0.3", "30"), 4, "pass_rate is 30; rewards lie in [0, 1]"),
    ("a.csv", GOOD.replace("0.3", "-0.3"), 4, "pass_rate is -0.3"),
    ("a.csv", GOOD.replace("0.3", "high"), 4, "'high'; write a number"),
    ("a.csv", GOOD + "0,0.2\n", 8, "0.2 at tokens = 0 but 0.1 on an earlier line; keep one"),
    ("a.csv", "tokens,pass_rate\n0,0.1\n10,0.2\n20,0.3\n", 4, "3 usable points"),
    ("a.csv", "", 1, "the file is empty"),
    ("a.csv", "tokens,pass_rate\n", 1, "there is no row, at most a header"),
    ("a.csv", "hours,rate\n1,0.1\n", 1, "no column 'device_hours', 'pass_rate'; name another with --x, --y, there are"),
    ("a.csv", GOOD.replace("0.3", "30"), 4, "--scale (0.01 for percent)"),
    ("a.csv", GOOD.replace("pass_rate", "a - pass_rate,b - pass_rate").replace(",0.", ",0.1,0."), 1,
     "2 columns end in 'pass_rate': a - pass_rate, b - pass_rate; give one in full with --y"),
    ("a.csv", "tokens,pass_rate\n" + "".join(f"{1763410000 + 600 * i},{0.1 + 0.05 * i}\n" for i in range(9)), 10,
     "compute that starts at 1.76341e+09 and ends at 1.76341e+09: subtract its start (--x-start first)"),
    ("a.jsonl", '{"tokens": 1, "pass_rate": 0.1}\n{"tokens": 2, "pass_\n', 2, "not JSON"),
    ("a.jsonl", '{"tokens": 1, "pass_rate": 0.1}\n[3]\n', 2, "not a JSON object"),
    ("a.jsonl", '{"tokens": 1, "pass_rate": 0.1, "n_prompts": 0, "n_samples": 2}\n', 1, "0 samples"),
    ("b.csv", None, 1, "not a readable text file"),
])  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, capsys, name, text, line, words):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f"{path}, line {line}: " in captured.err and words in captured.err


def test_spaces_in_a_header(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text(GOOD.replace(",", " , "))
    x, C, R, *_ = load(path)
    assert x == "tokens" and C.tolist() == [0, 10, 20, 30, 40, 50] and R[1] == 0.15


def wandb(path, run, rows):
    """As wandb exports a chart: the run's name in front of the column's, and columns of its least and greatest next to it."""
    lines = [f'"Step","{run} - eval/acc","{run} - eval/acc__MIN","{run} - eval/acc__MAX"']
    lines += [f'"{row["step"]}","{row["pass_rate"]}","0","1"' for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_wandb_exports_are_compared(tmp_path, capsys):
    """One --y for both files, whose columns bear two names; Step is found without --x."""
    files = [str(wandb(tmp_path / f"{i}.csv", f"run-{i}", records(n=40, seed=i, n_prompts=20_000))) for i in range(2)]
    assert main([*files, "--y", "eval/acc", "--predict-at", "2x"]) == 0
    out = capsys.readouterr().out
    assert "Step up to 195" in out and "ceilings agree within 0.02" in out
    x, C, R, n, _ = load(files[0], y="eval/acc", samples="eval/acc__MAX")
    assert (x, C[1], R[1]) == ("Step", 5, records(n=40, n_prompts=20_000)[1]["pass_rate"]) and (n == 1).all()
    assert load(files[0], y="run-0 - eval/acc__MIN")[2].max() == 0  # asked for in full


def test_a_tensorboard_export_in_percent(tmp_path, capsys):
    """Wall time in seconds since 1970 and percent: with the start subtracted and the scale, the run that it is."""
    rows = records(n=40, n_prompts=20_000)
    path = tmp_path / "tb.csv"
    path.write_text(
        "Wall time,Step,Value\n"
        + "".join(f"{1763410000.5 + row['tokens'] / 1000},{row['step']},{100 * row['pass_rate']}\n" for row in rows)
    )
    f = fit_run(path, x="Wall time", scale=0.01, x_start="first").report.fit
    plain = fit([row["tokens"] / 1000 for row in rows], [row["pass_rate"] for row in rows])
    assert (f.A, f.B, f.C_mid, f.R0) == pytest.approx((plain.A, plain.B, plain.C_mid, plain.R0), rel=1e-4)
    assert f.R0_source == "measured" and f.identifiable
    argv = [str(path), "--scale", "0.01"]
    assert main([*argv, "--x", "Wall time"]) == 2 and "--x-start first" in capsys.readouterr().err
    assert main([*argv, "--x", "Wall time", "--x-start", "1763410000.5"]) == 0
    assert f"[{f.A_interval[0]:.3f}, {f.A_interval[1]:.3f}] identifiable" in capsys.readouterr().out
    assert main(argv) == 0 and "Step up to 195" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- early points


def test_early_transient_is_found_and_measured():
    C, R = run_of(n=40, seed=1)
    R[1:4] -= [0.05, 0.04, 0.04]
    t = early_transient(C, R)
    assert t.skip_below == C[4] and t.n_points == 3 and t.p_value < 1e-3
    assert t.offset == pytest.approx(-0.043, abs=0.015)
    assert t.A_before == fit(C, R).A and t.A_after == pytest.approx(fit(C, R, skip_below=C[4]).A, abs=1e-6)


@pytest.mark.parametrize("n_samples", [None, 4000])
def test_a_clean_start_is_not_cut(n_samples):
    for seed in range(3):
        C, R = run_of(n=24, seed=seed)
        t = early_transient(C, R, n_samples=n_samples)
        assert t.skip_below == 0.0 and t.p_value > 0.01


@pytest.mark.parametrize("n", [0, 3, 5, 8])
def test_early_transient_on_few_points(n):
    C, R = run_of(n=20)
    assert early_transient(C[:n], R[:n]).skip_below == 0.0


def test_rounding_finds_no_early_transient():
    """Exact data, of six points (a single cut is tried) and of twenty: p is 1 but for rounding."""
    for n in (6, 20):
        C = np.linspace(16_000 / n, 16_000, n)
        for again in rounded_otherwise(C, sigmoid(C, 0.3, 0.6, 1.8, 2500.0), seed=n):
            t = early_transient(*again)
            assert t.p_value == pytest.approx(1.0, abs=1e-3) and t.skip_below == 0


# ---------------------------------------------------------------------------------------- power law, windows and slopes


def test_power_law_runs_to_the_bound_on_early_data_and_the_sigmoid_does_not():
    """The paper's argument: from 1.5k to 50k GPU-hours the power law says A = 1."""
    C = np.linspace(1500, 50_000, 40)
    R = sigmoid(C, 0.25, 0.645, 1.7, 9000.0)
    assert power_law(C, R)["A"] > 0.8 and fit(C, R).A == pytest.approx(0.645, abs=1e-3)


def test_windows_take_the_points_between():
    C, R = run_of(n=40, end=100_000, truth=(0.25, 0.65, 1.6, 9000.0))
    table = windows(C, R, n_samples=np.full(41, 3000))
    assert [(a, b) for a, b, _ in table] == [(1500, 50_000), (0, 100_000), (0, 50_000), (5000, 50_000)]
    assert [f.n_points for *_, f in table] == [21, 41, 21, 20] and all(f.points.C[0] == 0 for *_, f in table)
    assert windows(C, R, shares=[(0, 0.5)])[0][2].A == fit(C[:21], R[:21]).A


def test_linearized_is_a_line_of_slope_B(tmp_path):
    C = np.linspace(0, 16_000, 41)
    f = fit(C, sigmoid(C, 0.3, 0.6, 1.8, 2500.0))
    log_C, log_F, left_out = linearized(f)
    slope, offset = np.polyfit(log_C, log_F, 1)
    assert slope == pytest.approx(1.8, rel=1e-3) and offset == pytest.approx(0, abs=0.05)
    assert (left_out, log_C.size) == (0, 40)
    noisy = fit(*run_of(sd=0.01, end=60_000))
    log_C, _, left_out = linearized(noisy)
    assert left_out == np.sum((noisy.points.R[1:] <= noisy.R0) | (noisy.points.R[1:] >= noisy.A)) > 0
    assert log_C.size + left_out == 40
    plot_slopes([f, noisy], ["exact", "noisy"], tmp_path / "slopes.png")
    assert (tmp_path / "slopes.png").stat().st_size > 10_000


# ----------------------------------------------------------------------------------------------------- the command line


def test_early_points_are_cut_only_where_asked():
    rows = records(n=40)
    for i in (1, 2, 3):
        rows[i]["pass_rate"] += 0.3
    auto, by_hand, plain = (fit_run(rows, skip_below=cut) for cut in ("auto", 200_000, 0))
    assert auto.transient.skip_below == 200_000
    assert [run.report.fit.points.left_out["skipped"] for run in (auto, by_hand, plain)] == [3, 3, 0]
    assert "consider --skip-below 200000" in format_run(plain) and "consider" not in format_run(fit_run(records()))
    assert fit_run(rows, A_max=0.9).report.fit.A <= 0.9
    assert fit_run(rows, predict_at=["2x"]).report.predictions[1].C == 3_900_000
    with pytest.raises(InputError, match="records, line 1"):
        fit_run([])


def test_record_points_by_hand(tmp_path, capsys):
    """In bins of .02 the rewards lie in 5, 10, 7, 15, 14, 15, 20, 22, 22, 23, 24: those at 2, 4, 5 and 8 are no higher than
    one before. Those after 70 % of the compute are predicted, and stay."""
    rewards = [0.10, 0.20, 0.15, 0.30, 0.29, 0.305, 0.40, 0.45, 0.44, 0.47, 0.48]
    path = tmp_path / "run.csv"
    path.write_text("tokens,pass_rate\n" + "".join(f"{c},{r}\n" for c, r in enumerate(rewards)))
    report = fit_run(path, records=True).report
    assert report.fit.points.C.tolist() == [0, 1, 3, 6, 7, 9, 10] and report.fit.points.left_out["no record"] == 4
    report = fit_run(path, records=True, fit_until=0.7).report
    assert report.fit.points.C.tolist() == [0, 1, 3, 6, 7] and report.unseen_points == 3
    assert fit_run(path).report.fit.n_points == 11
    assert main([str(path), "--records"]) == 0 and "4 no record" in capsys.readouterr().out
    assert main([str(path)]) == 0 and "no record" not in capsys.readouterr().out


def test_the_report_is_that_of_fit_sigmoid(tmp_path):
    path = write(tmp_path / "eval.jsonl", records())
    assert format_run(fit_run(path, fit_until=0.5)) == format_report(curve(path, fit_until=0.5))


def test_bad_options_are_one_sentence(tmp_path, capsys):
    path = write(tmp_path / "eval.jsonl", records())
    other = write(tmp_path / "gpu.jsonl", records(device="H100"))
    few = write(tmp_path / "few.jsonl", records(n=4))
    binary = tmp_path / "weights.bin"
    binary.write_bytes(bytes(range(256)))
    for argv, words in (
        ([path, "--predict-at", "5M"], "'5M'"),
        ([path, "--skip-below", "soon"], "'soon'"),
        ([path, other], "choose one with --x"),
        ([binary], "not a readable text file"),
        ([path, "--fit-until", "0.1"], "usable points"),
        ([path, "--samples", "many"], "no column 'many'"),
        ([path, "--samples", "nan"], "--samples is nan; give a number > 0"),
        *(([path, "--fit-until", v], f"--fit-until is {v}; give a share") for v in ("50.0", "nan", "-1.0")),
        *(([path, "--predict-at", v], f"--predict-at '{v}': give compute >= 0") for v in ("nan", "-1")),
        *(([path, "--skip-below", v], f"--skip-below '{v}': give compute >= 0") for v in ("nan", "-1")),
        *(([path, "--R0", v], f"--R0 is {v}; give a rate from 0") for v in ("2.0", "nan", "-1.0")),
        *(([path, "--A-max", v], f"--A-max is {v}; give a number > 0") for v in ("-1.0", "0.0", "nan", "inf")),
        *(([path, "--scale", v], f"--scale is {v}; give a number > 0") for v in ("0.0", "nan")),
        ([path, "--R0", "0.6", "--A-max", "0.5"], "--R0 is 0.6; give a rate from 0 to --A-max"),
        ([path, "--x-start", "soon"], "--x-start is soon; give a number or 'first'"),
        ([path, "--x-start", "nan"], "--x-start is nan"),
        ([path, "--x-start", "60000"], "tokens is -10000 after --x-start 60000"),
        ([path, "--A-range", "0.3", "0.9"], "give --method paper_grid with it"),
        ([path, "--A-range", "0.9", "0.3", "--method", "paper_grid"], "give 0 <= LOW < HIGH"),
        ([path, "--plot", tmp_path / "none" / "a.png"], "name a .png in a folder that exists"),
        ([path, "--slopes", tmp_path / "none" / "a.png"], "name a .png in a folder that exists"),
        ([path, "--plot", tmp_path / "a.xyz"], "'xyz' is not supported"),
        ([few, "--power-law"], "--power-law needs 4 points at C > 0"),
    ):
        assert main([str(a) for a in argv]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1
    with pytest.raises(SystemExit) as stop:
        main([str(path), "--method", "magic"])
    assert stop.value.code == 2


def test_command_line_json_and_options(tmp_path, capsys):
    path = write(tmp_path / "eval.jsonl", records())
    assert main([str(path), "--json", "--windows", "--power-law", "--x", "step", "--predict-at", "2x"]) == 0
    result = json.loads(capsys.readouterr().out)
    run = result["runs"][0]
    assert run["x"] == "step" and run["unseen_rmse"] is None and run["predictions"][1]["C"] == 180
    assert run["fit"]["A_interval"][0] < run["fit"]["A"] and "curves" not in run["fit"]
    assert len(result[f"windows of {run['name']}"]) == 4 and result[f"power law of {run['name']}"]["A"] <= 1
    assert main([str(path), *"--windows --power-law --R0 0.07 --method paper_grid --A-range 0.9 0.99".split()]) == 0
    text = capsys.readouterr().out
    assert "windows of compute" in text and "A - D / C^B" in text and "0.070" in text and "given" in text
