"""Tests of `fit_sigmoid.py`, section 7: reading a run, the report, the picture, the command line."""

import json
import math

import numpy as np
import pytest
from test_fit_sigmoid import run_of

from fit_sigmoid import curve, fit, format_report, load, main, plot_curves, sigmoid

pytestmark = pytest.mark.medium


def records(n=19, every=50_000, n_prompts=512, seed=0, **extra):
    """Evaluations of a run of the built-in task's shape, as train.py writes them."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        p = float(sigmoid(i * every, 0.07, 0.97, 2.2, 330_000.0))
        rate = rng.binomial(2 * n_prompts, p) / 2 / n_prompts
        measured = {"step": 5 * i, "tokens": i * every, "flops": 2e9 * i, "device_hours": 0.01 * i, "pass_rate": rate}
        rows.append(measured | {"n_prompts": n_prompts, "n_samples": 2, "pass_at_k": 0.5, "device": "cpu"} | extra)
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ------------------------------------------------------------------------------------------------------ worked examples


def test_load_reads_an_eval_file(tmp_path):
    rows = records()
    rows[3]["pass_rate"] = None
    x, C, R, n = load(write(tmp_path / "eval.jsonl", rows))
    assert (x, C[2]) == ("tokens", 100_000) and math.isnan(R[3]) and R[4] == rows[4]["pass_rate"]
    assert (n == 1024).all()
    assert (load(tmp_path)[1] == C).all()  # the folder of a run
    assert load(rows, x="flops")[1][1] == 2e9
    bare = [{k: v for k, v in row.items() if k not in ("device", "n_prompts")} for row in rows]
    assert load(bare)[0] == "device_hours" and load(bare)[3] is None
    assert load([row | {"device_hours": 0.0} for row in bare])[0] == "tokens"
    assert load(records(device="NVIDIA H100"))[0] == "device_hours"
    with pytest.raises(ValueError, match="record 2: tokens is -1"):
        load([rows[0], rows[1] | {"tokens": -1}])


def with_aime(rows):
    """The same records with a data set `aime` of 30 problems, half as often solved; the first record has none."""
    aime = [{"pass_rate": row["pass_rate"] / 2, "n_prompts": 30, "n_samples": 4} for row in rows]
    return [rows[0], *(row | {"data_sets": {"aime": of}} for row, of in zip(rows[1:], aime[1:], strict=True))]


def test_a_data_set_has_a_curve_of_its_own(tmp_path, capsys):
    """Its pass rates and numbers of samples, at the compute of the evaluation; a record without it is left out."""
    rows = with_aime(records())
    x, C, R, n = load(rows, data_set="aime")
    assert x == "tokens" and C.tolist() == [row["tokens"] for row in rows[1:]] and (n == 120).all()
    assert R.tolist() == [row["pass_rate"] / 2 for row in rows[1:]]
    assert load(rows)[2].tolist() == [row["pass_rate"] for row in rows]
    path = str(write(tmp_path / "eval.jsonl", rows))
    assert main([path, "--data-set", "aime"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}, aime: ")
    assert main([path, "--data-set", "other"]) == 2
    assert "no record has a data set 'other'" in capsys.readouterr().err


def test_report_holds_the_numbers():
    r = curve(records(), fit_until=0.5, cuts=())
    text, p = format_report(r), r.predictions[0]
    low, high = r.fit.A_interval
    for piece in (
        f"{r.fit.A:.3f}", f"[{low:.3f}, {high:.3f}]", f"{r.fit.B:.2f}", "measured", "10 fitted, 9 unseen",
        f"{r.unseen_rmse:.4f} unseen", f"{p.pass_rate:.3f}  curve", f"measured {p.measured:.3f}, inside", r.fit.reason,
    ):  # fmt: skip
        assert piece in text
    r.predictions[0] = p._replace(measured=p.evaluation[1] + 0.001)
    assert "OUTSIDE" in format_report(r)


def test_curve_splits_by_compute_and_scores_the_rest():
    rows = records()
    r = curve(rows, fit_until=0.5, predict_at=[1.8e6, 5e6], cuts=())
    assert (r.x, r.fit_until, r.fit.n_points, r.unseen_points) == ("tokens", 450_000, 10, 9)  # 450k itself is fitted
    unseen = np.array([[row["tokens"], row["pass_rate"]] for row in rows[10:]])
    miss = r.fit.predict(unseen[:, 0]) - unseen[:, 1]
    assert r.unseen_rmse == pytest.approx(math.sqrt(np.mean(miss**2)))
    by_hand = fit([q["tokens"] for q in rows[:10]], [q["pass_rate"] for q in rows[:10]], n_samples=1024, cuts=())
    assert r.fit.A == by_hand.A
    assert [p.C for p in r.predictions] == [900_000, 1_800_000, 5_000_000]
    assert r.predictions[0].measured == rows[-1]["pass_rate"] and math.isnan(r.predictions[1].measured)
    low, high = r.fit.interval(unseen[:, 0], noise=True, n_samples=1024)
    assert r.unseen_covered == np.mean((low <= unseen[:, 1]) & (unseen[:, 1] <= high))
    assert r.predictions[0].evaluation == pytest.approx((low[-1], high[-1]))
    assert r.predictions[0].curve[0] > r.predictions[0].evaluation[0]


# ------------------------------------------------------------------------------------ a run, its report and its picture


def test_unseen_points_are_judged_with_their_noise():
    """Evaluations of 40 samples scatter far beyond the curve's own interval, and lie in that of an evaluation."""
    rows = records(n=120, every=20_000, n_prompts=20)
    r = curve(rows, fit_until=0.5, cuts=())
    C, R = np.array([[row["tokens"], row["pass_rate"]] for row in rows[60:]]).T
    low, high = r.fit.interval(C)
    assert np.mean((low <= R) & (R <= high)) < 0.75 < 0.85 <= r.unseen_covered


def test_the_evaluation_before_the_first_step_is_at_compute_0():
    """A clock that ran 2 ms before training: else log C of that point would be a lever of 15 e-folds."""
    rows = [row | {"device_hours": row["tokens"] / 1e6 + 5e-7, "step": i} for i, row in enumerate(records())]
    r = curve(rows, x="device_hours", cuts=())
    assert r.C[0] == 0 and r.C[1] > 0 and r.fit.R0_source == "measured"


def test_report_of_a_run_too_short_to_fit(tmp_path):
    r = curve(records(n=3), fit_until=0.5, plot=tmp_path / "curve.png")
    text = format_report(r)
    assert "no fit" in text and "usable points" in text and "nan" not in text
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_three_runs_of_the_tasks_shape_are_covered():
    """Prediction from the first half: the last evaluation lies in its interval on three seeds."""
    for seed in range(3):
        r = curve(records(seed=seed), fit_until=0.5, cuts=())
        p = r.predictions[0]
        assert p.evaluation[0] <= p.measured <= p.evaluation[1] and r.unseen_covered >= 0.8


@pytest.mark.long
@pytest.mark.usefixtures("quick_fits")
def test_plots_show_every_group_of_points(tmp_path):
    """Pixels of the dashed extrapolation, the band and the markers: the picture with them differs from one without."""
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("matplotlib.image")
    rows = records()
    half, full = tmp_path / "half.png", tmp_path / "full.png"
    r = curve(rows, fit_until=0.5, skip_below=120_000, plot=half, cuts=())
    curve(rows, plot=full, cuts=())
    a, b = image.imread(half), image.imread(full)
    assert a.shape == b.shape == (690, 1125, 4) and np.abs(a - b).max() > 0.5
    bare, flat = tmp_path / "bare.png", tmp_path / "flat.png"
    plot_curves([r.fit, fit(*run_of())], bare)  # fits instead of reports
    plot_curves([fit(*run_of()[:1], np.full(41, 0.4))], flat)
    assert np.abs(image.imread(bare) - image.imread(flat)).max() > 0.5


# ----------------------------------------------------------------------------------------------------- the command line


@pytest.mark.long
@pytest.mark.usefixtures("quick_fits")
def test_bad_input_is_one_sentence_with_its_place(tmp_path, capsys):
    good, rows = write(tmp_path / "eval.jsonl", records()), records()
    gpu, few = write(tmp_path / "gpu.jsonl", records(device="H100")), write(tmp_path / "few.jsonl", records(n=3))
    bad = write(tmp_path / "bad.jsonl", [*rows[:4], rows[4] | {"pass_rate": 30.0}])
    other = write(tmp_path / "other.jsonl", [{"tokens": 1, "accuracy": 0.1}])
    torn, empty = tmp_path / "torn.jsonl", write(tmp_path / "empty.jsonl", [])
    torn.write_text(good.read_text()[:-20])
    for argv, words in (
        ([tmp_path / "none.jsonl"], "No such file"), ([torn], "line 19"), ([bad], "record 5: tokens is 200000, pass_rate 30"),
        ([other], "none of the 1 records has pass_rate"), ([empty], "none of the 0 records"), ([few], "3 usable points"),
        ([good, gpu], f"compute is device_hours, but tokens in {good}"),
        ([good, "--plot", tmp_path / "none" / "a.png"], "No such file"),
    ):  # fmt: skip
        assert main([str(a) for a in argv]) == 2
        out, err = capsys.readouterr()
        place = gpu if argv[-1] == gpu else argv[0]
        assert out == "" and words in err and err.count("\n") == 1 and err.startswith(f"fit_sigmoid.py: {place}")


@pytest.mark.long
def test_two_runs_on_the_command_line(tmp_path, capsys):
    """Tables of two equal runs, a prediction, the picture and the comparison."""
    files = [str(write(tmp_path / f"{i}.jsonl", records(n=40, seed=i, n_prompts=20_000))) for i in range(2)]
    assert main([*files, "--fit-until", "0.9", "--predict-at", "1e21", "--plot", str(tmp_path / "c.png")]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in ("at 1e+21", "4 unseen", "ceilings agree within 0.02"))
    assert (tmp_path / "c.png").stat().st_size > 5000


@pytest.mark.usefixtures("quick_fits")
def test_a_repeated_or_equal_zero_is_no_error(tmp_path):
    rows = records()
    assert main([str(write(tmp_path / "eval.jsonl", [rows[0], *rows]))]) == 0
