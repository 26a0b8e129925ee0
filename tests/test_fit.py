"""Tests of `tools/fit.py`: the logs of other frameworks, what is refused."""

import json
import subprocess
import time
from pathlib import Path

import fit as fit_curves
import numpy as np
import pytest
from fit import main

import fit_sigmoid
import forecast
from fit_sigmoid import sigmoid

pytestmark = pytest.mark.medium

C = 50_000.0 * np.arange(20)
R = sigmoid(C, 0.1, 0.8, 2.0, 200_000.0).round(5)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(head, *columns, by=","):
    return "".join(by.join(map(str, row)) + "\n" for row in [head, *zip(*columns, strict=True)])


ROWS = [{"step": 5 * i, "tokens": C[i], "pass_rate": R[i], "n_prompts": 50, "n_samples": 2} for i in range(20)]
TRL = [{"step": 5 * i, "eval_reward": r, "eval_rewards/judge/mean": r, "epoch": 0.1} for i, r in enumerate(R)]
NAMES = "val-core/openai/gsm8k/reward/mean@1", "val-core/openai/gsm8k/acc/best@4"
VERL = [{"step": 5 * i, "data": dict(zip(NAMES, (r, 1.0), strict=True))} for i, r in enumerate(R)]
OTHERS = [{"step": 1, "loss": 0.5}, {"step": 5, "loss": 0.4}]  # of training
STEPS = 5.0 * np.arange(20)

# ---- what is read: (text, columns) -> (name of x, C, samples)

READ = {
    "ours": (lines(ROWS), {}, "tokens", C, 100),
    "ours, another x and a number of samples": (lines(ROWS), {"x": "step", "samples": "77"}, "step", STEPS, 77),
    "a column of samples": (lines(ROWS), {"samples": "n_prompts"}, "tokens", C, 50),
    "a data set of ours": (
        lines([row | {"pass_rate": 1.0, "data_sets": {"aime": {"pass_rate": row["pass_rate"], "n_prompts": 30,
               "n_samples": 4}}} for row in ROWS]), {"y": "aime/pass_rate"}, "tokens", C, 120),
    "trainer_state.json of TRL": (
        json.dumps({"best_metric": None, "global_step": 95, "log_history": [*OTHERS, *TRL]}, indent=2), {}, "step", STEPS, None),
    "verl": (lines([{"step": 1, "data": {"actor/loss": 1.0}}, *VERL]), {"y": "mean@1", "samples": "1319"}, "step", STEPS, 1319),
    "ours, with a sample that looks like verl's console": (
        lines([row | {"sample": "at step:3 - x:1"} for row in ROWS]), {}, "tokens", C, 100),
    "what verl prints": (
        "".join(f"(pid=1) step:{5 * i} - perf/all:tokens:{C[i]} - val-core/openai/gsm8k/reward/mean@1:{r!r}\n(pid=1) INFO\n"
                for i, r in enumerate(R.tolist())),
        {"x": "all:tokens", "y": "mean@1"}, "perf/all:tokens", C, None),
    "a spreadsheet": ("\ufeff" + csv(("gpu hours ", "acc"), C, R, by=";"), {"x": "gpu hours", "y": "acc"}, "gpu hours", C, None),
    "wandb": (csv(("Step", "run-1 - eval/acc", "run-1 - eval/acc__MIN"), STEPS, R, 0 * R),
              {"y": "eval/acc"}, "Step", STEPS, None),
    "padded cells, one of them empty": (csv(("tokens", "pass_rate"), C, R, by=", ") + "7,  \n", {}, "tokens", C, None),
    "tabs, quotes and empty cells": (
        csv(("tokens", "grad", "pass_rate", "loss", "name"), C, [""] * 20, R, R / 2, ['"a"'] * 20, by="\t"), {}, "tokens", C, None),
    "two columns of one name: the last": (csv(("tokens", "pass_rate", "pass_rate"), C, 0 * R, R), {}, "tokens", C, None),
    "TensorBoard, percent, seconds since 1970": (
        csv(("Wall time", "Step", "Value"), 1763410000 + C / 1000, STEPS, 100 * R), {"x": "Wall time", "scale": 0.01, "x_start": "first"}, "Wall time",
        C / 1000, None),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_one_run_in_the_files_of_many_frameworks(tmp_path, name):
    text, columns, x, there, samples = READ[name]
    (tmp_path / "log").write_text(text)
    name_of_x, c, r, n = fit_curves.load(tmp_path / "log", **columns)
    assert name_of_x == x and c == pytest.approx(there) and r == pytest.approx(R)
    assert n is None if samples is None else n.tolist() == [samples] * 20


BOTH = {"step": 1, "pass_rate": 0.1, "tokens": 5.0, "device_hours": 2.0}
COMPUTE = [(BOTH | {"device": "cpu"}, "tokens"), (BOTH | {"device": "NVIDIA H100"}, "device_hours")]
COMPUTE += [(BOTH, "device_hours"), (BOTH | {"device_hours": 0.0}, "tokens")]
COMPUTE += [({"flops": 1, "step": 1, "pass_rate": 0.1}, "flops")]


@pytest.mark.parametrize(("row", "x"), COMPUTE)
def test_default_compute(tmp_path, row, x):
    (tmp_path / "log").write_text(lines([row]))
    assert fit_curves.load(tmp_path / "log")[0] == x


def test_a_record_that_stands_there_twice_counts_once(tmp_path):
    """Two evaluations of one step that agree are two; a clock that ran before step 0 has trained nothing; a last line
    that is being written is no record, and an empty reward no evaluation."""
    again = ROWS[3] | {"n_prompts": 51}
    rows = [ROWS[0] | {"tokens": 700.0}, *ROWS[1:], ROWS[3], again, ROWS[4] | {"pass_rate": None}]
    (tmp_path / "log").write_text(lines(rows) + '{"step": 100, "tokens": 1e6, "pass')
    _, c, _, n = fit_curves.load(tmp_path / "log")
    assert c.tolist() == [*C, C[3]] and n[-1] == 102
    (tmp_path / "log").write_text(lines(rows).rstrip("\n"))  # whole, but for the end of its line
    assert fit_curves.load(tmp_path / "log")[1].size == 21


def test_the_report_is_that_of_forecast(tmp_path, capsys):
    files = [tmp_path / "eval.jsonl", tmp_path / "b.jsonl"]
    for file, A in zip(files, (1, 0.9), strict=True):
        file.write_text(lines([row | {"pass_rate": A * row["pass_rate"]} for row in ROWS]))
    argv = [str(files[0]), "--fit-until", "0.5", "1", "--predict-at", "2e6"]
    assert main(argv) == 0 and main([*map(str, files), "--plot", str(tmp_path / "a.png")]) == 0
    ours = capsys.readouterr().out
    assert forecast.main(argv) == 0
    assert ours.startswith(capsys.readouterr().out.replace(f"{tmp_path}:", f"{files[0]}:"))
    fits = [forecast.curve(file).forecast.fit for file in files]
    assert ours.endswith("\n" + fit_sigmoid.compare(*fits, names=[str(file) for file in files]).verdict + "\n")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


# ---- what is refused


GOOD = csv(("tokens", "pass_rate"), C, R)
BAD = [  # (text of the file, more of the command line, words of the sentence)
    (GOOD, "--fit-until 50", "share of the compute in (0, 1], not 50"),
    (GOOD, "--fit-until 0.1", "usable points"),
    (GOOD, "--predict-at nan", "--predict-at: need compute >= 0"),
    (GOOD, "--predict-at -1", "--predict-at: need compute >= 0"),
    (GOOD, "--scale nan", "--scale is a number above 0"),
    (GOOD, "--scale 0", "--scale is a number above 0"),
    (GOOD, "--samples -5", "n_samples > 0"),
    (GOOD, "--samples many", "no columns are called many: name one with --samples; there are pass_rate, tokens"),
    (GOOD, "--x-start soon", "soon"),
    (GOOD, "--x-start 60000", "need compute >= 0"),
    (GOOD, "--plot none/a.png", "--plot: "),
    (GOOD, "--plot a.xyz", "xyz"),
    (GOOD.replace("pass_rate", "acc"), "", "no columns are called pass_rate: name one with --y; there are acc, tokens"),
    (GOOD.replace("tokens", "hours"), "", "name one with --x; there are hours, pass_rate"),
    (
        csv(("tokens", "a/acc", "b/acc"), C, R, R),
        "--y acc",
        "2 columns are called acc: name one with --y; there are a/a",
    ),
    (csv(("tokens", "pass_rate"), C, 100 * R), "", "--scale 0.01"),
    (csv(("tokens", "pass_rate"), 1e9 + C, R), "", "(--x-start first)"),
    (csv(("tokens", "pass_rate"), C[:2], R[:2]), "", "2 usable points"),
    (GOOD.replace("0.1\n", "high\n", 1), "", "pass_rate has what is no number: could not convert string to float"),
    ("", "", "name one with --y; there are none at all"),
    ("tokens,pass_rate\n", "", "name one with --y"),
    (lines(ROWS[:3]) + '{"tokens": 1, "pass_\n' + lines(ROWS[3:]), "", "line 4 is not JSON"),
    (lines(ROWS[:3]) + "[3]\n", "", "has no attribute"),
    ('{"log_history": []}', "", "name one with --y"),
    ("\x00\x01", "", "a.log"),
]


def test_thirty_thousand_rows_are_read_in_seconds(tmp_path):
    """It took half a minute to find the rows that stand there twice."""
    (tmp_path / "log").write_text("tokens,pass_rate\n" + "".join(f"{i},0.{i % 7}\n" for i in range(30_000)))
    start = time.process_time()
    assert fit_curves.load(tmp_path / "log")[1].size == 30_000
    assert time.process_time() - start < 5


@pytest.mark.parametrize("text", ["\x1b[31mx,y\n1,2\n", '{"\\u001b[31mx": 1, "y": 2}\n'])
def test_names_of_columns_reach_the_terminal_without_their_escapes(tmp_path, capsys, text):
    (tmp_path / "a.log").write_text(text)
    assert main([str(tmp_path / "a.log")]) == 2
    assert "there are ?[31mx, y\n" in capsys.readouterr().err


def test_make_takes_a_log_of_any_name_and_cleans_no_runs(tmp_path):
    """A name with a semicolon is no second command."""
    root = Path(fit_sigmoid.__file__).parent
    (tmp_path / "Makefile").write_text((root / "Makefile").read_text())
    for name in (
        "runs/a/eval.jsonl",
        ".venv/bin/python",
        "requirements.txt",
        "requirements-cpu.txt",
        ".venv/installed",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/bin/sh\nprintf "<%s>" "$@"')
        (tmp_path / name).chmod(0o755)
    output = subprocess.check_output(
        ["make", "-s", "fit", "LOG=x;touch y z.csv", "FLAGS=--y acc"], cwd=tmp_path, text=True
    )
    assert output == "<tools/fit.py><x;touch y z.csv><--y><acc>" and not (tmp_path / "y").exists()
    subprocess.check_output(["make", "clean"], cwd=tmp_path)
    assert (tmp_path / "runs/a/eval.jsonl").exists() and not (tmp_path / ".venv").exists()


def test_percent_signs(tmp_path):
    """They need no --scale."""
    (tmp_path / "a.csv").write_text("tokens,acc\n0,5%\n100,20 %\n200,\n300,0.4\n")
    _, C, R, _ = fit_curves.load(tmp_path / "a.csv", y="acc")
    assert C.tolist() == [0, 100, 300] and R == pytest.approx([0.05, 0.2, 0.4])


@pytest.mark.parametrize(("text", "more", "words"), BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, text, more, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.log").write_text(text)
    assert main(["a.log", *more.split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("fit.py: ") and words in err


def test_files_that_are_none_or_of_another_compute_are_refused(tmp_path, capsys):
    (tmp_path / "a.csv").write_text(GOOD)
    (tmp_path / "b.csv").write_text(GOOD.replace("tokens", "step"))
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)))
    other = "b.csv: compute is step, but tokens in"
    for names, words in ("none.csv", "No such file"), ("weights.bin", "can't decode"), ("a.csv b.csv", other):
        assert main([str(tmp_path / name) for name in names.split()]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err
