"""Reading a run, the reports and pictures of `lab/law/curves.py` and `forecast.py`, and the latter's command line."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from curves import fit, load, mean_of_seeds, plot_fits, short, span
from forecast import curve, forecast, format_report, main, plot_curves

from fit_sigmoid import sigmoid

pytestmark = pytest.mark.medium


def records(n=19, every=50_000, n_prompts=512, seed=0, **extra):
    """Evaluations of a run of the built-in task's shape, as train.py writes them."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        p = float(sigmoid(i * every, 0.07, 0.97, 2.2, 330_000.0))
        row = {
            "step": 5 * i,
            "tokens": i * every,
            "flops": 2e9 * i,
            "device_hours": 0.01 * i,
            "pass_rate": rng.binomial(2 * n_prompts, p) / 2 / n_prompts,
            "n_prompts": n_prompts,
            "n_samples": 2,
            "pass_at_k": 0.5,
            "device": "cpu",
        }
        rows.append(row | extra)
    return rows


def write(path, rows, end="\n"):
    path.write_text("\n".join(map(json.dumps, rows)) + end)
    return path


@pytest.fixture
def figures(monkeypatch):
    """What is drawn, instead of files."""
    drawn = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: drawn.append(self))
    return drawn


def test_load_reads_a_file_its_folder_or_records(tmp_path):
    """Compute is tokens on a CPU, and else device-hours."""
    rows = records()
    rows[3]["pass_rate"] = None
    x, C, R, n = load(write(tmp_path / "eval.jsonl", rows))
    assert x == "tokens" and C.tolist() == [row["tokens"] for row in rows]
    assert (n == 1024).all()
    assert math.isnan(R[3]) and R[4] == rows[4]["pass_rate"]
    for source in (tmp_path, str(tmp_path), rows):
        for a, b in zip(load(source)[1:], (C, R, n), strict=True):
            assert np.array_equal(a, b, equal_nan=True)
    assert load(rows, x="flops")[1][1] == 2e9
    bare = [{k: v for k, v in row.items() if k not in ("device", "n_prompts")} for row in rows]
    assert load(bare)[0] == "device_hours" and load(bare)[3] is None
    assert load([row | {"device_hours": 0.0} for row in bare])[0] == "tokens"
    on_gpu = records(device="NVIDIA H100")
    assert load(on_gpu)[0] == "device_hours"
    assert load([*on_gpu, *rows])[0] == "device_hours"


def test_what_counts_as_an_evaluation(tmp_path):
    """A row that stands there twice is one, two that agree in the pass rate alone are two; a line that is still being
    written is none, though it ends in a brace, a last line without its end is one; before the first step compute is 0,
    whatever the clock says."""
    rows = [row | {"data_sets": {"aime": {"pass_rate": 0.1}}} for row in records()]
    rows[2]["pass_rate"] = rows[1]["pass_rate"]
    assert load([*rows, rows[4]])[2].tolist() == load(rows)[2].tolist() == [row["pass_rate"] for row in rows]
    path = write(tmp_path / "eval.jsonl", rows)
    whole = path.read_text()
    texts = {
        whole[:-20]: 18,
        whole[:-2]: 18,
        whole[:-1]: 19,
        whole + "\n\n": 19,
        "\ufeff" + whole: 19,
    }
    for text, n in texts.items():
        path.write_text(text, encoding="utf-8")
        assert load(path)[1].size == n
    late = [row | {"device_hours": row["device_hours"] + 5e-7, "device": "H100"} for row in rows]
    assert load(late)[1].tolist() == [0, *(row["device_hours"] for row in late[1:])]


def test_curve_fits_the_first_part_and_keeps_the_rest():
    rows = records()
    r = curve(rows, 0.5, "half")
    assert (r.name, r.x) == ("half", "tokens")
    assert r.forecast.fit.C.size == 10
    assert r.unseen.tolist() == [False] * 10 + [True] * 9
    C, R = np.array([[row["tokens"], row["pass_rate"]] for row in rows]).T
    by_hand = forecast(C[:10], R[:10], n_samples=1024)
    assert r.forecast.fit.A == by_hand.fit.A
    assert r.forecast.A_interval == by_hand.A_interval
    assert r.R.tolist() == R.tolist()
    assert curve(rows, x="flops", fit_until=1).forecast.fit.C[-1] == 18 * 2e9
    assert not curve(rows).unseen.any()


def test_report_holds_the_numbers():
    rows = records()
    rows[14]["pass_rate"] = None  # neither seen nor unseen
    r = curve(rows, 0.52, "half")
    f = r.forecast
    low, high = f.interval(900_000)[:, 0]
    a, b = f.interval(900_000, noise=True)[:, 0]
    least, most = f.interval(r.C[10:], noise=True)
    inside = sum((least <= r.R[10:]) & (r.R[10:] <= most))  # that of a missing rate is False
    later = [f.interval(5e6, noise=noise)[:, 0] for noise in (False, True)]
    verdict = "inside" if a <= r.R[-1] <= b else "OUTSIDE"
    others = ", ".join(f"{form} {p:.2g}" for form, p in f.likelihood.items() if form != f.form)
    assert format_report(r, 5e6).split("\n") == [
        f"half, forecast from its first 52%: 10 points up to 450k sampled tokens, {450_000 / f.fit.C_mid:.1f} C_mid",
        f"best guess at 900k    {f.numbers(9e5)}",
        f"best guess at 5M      {f.numbers(5e6)}",
        f"A     ceiling         {f.fit.A:.3f}  [{f.A_interval[0]:.3f}, {f.A_interval[1]:.3f}] not known yet",
        f"{'':22}{f.reason}; ask again at {short(f.ask_again())}",
        f"B     efficiency      {f.fit.B:.2f}   {span(f.fit.B_interval)}",
        f"C_mid half the gain   {short(f.fit.C_mid)}   {span(f.fit.C_mid_interval)}",
        f"R0    before RL       {f.fit.R0:.3f}",
        f"shape of the rise     {f.form}; how well others fit beside it (1: as well): {others}",
        f"the end, forecast     {a:.3f} to {b:.3f} in 95 % of cases; the curve [{low:.3f}, {high:.3f}]",
        f"the end, measured     {r.R[-1]:.3f}, {verdict}; of 8 evaluations {inside} inside",
        f"{'at 5M':22}an evaluation {span(later[1], 3)}, the curve {span(later[0], 3)}",
    ]
    r.R[-1] = b + 0.001
    assert f"OUTSIDE; of 8 evaluations {inside - 1} inside" in format_report(r)
    known = format_report(curve(records(n=40, n_prompts=20_000), name="all"))
    assert "] known\nB " in known and "not known" not in known and "the end" not in known
    assert "\nat 3.9M " in known  # nothing was asked for: twice the compute of 1.95M
    assert format_report(curve(records(n=3), name="few")).startswith(
        "few: no forecast: too few points: 3, with 2 different"
    )


def test_the_known_ceiling_of_a_run_is_held_or_missed(tmp_path):
    """A run of the graded task ends at .80 by construction; these rise to .97. Another task has no known ceiling."""
    write(tmp_path / "eval.jsonl", records(n=40, n_prompts=20_000))
    for dataset, words in (("graded", "MISSES the known 0.80"), ("discover", "")):
        (tmp_path / "config.json").write_text(json.dumps({"dataset": dataset}))
        text = format_report(curve(tmp_path))
        assert words in text and ("the known" in text) == bool(words)
    r = curve(tmp_path)._replace(known=0.97)
    assert "holds the known 0.97" in format_report(r)


def test_a_jump_is_called_one():
    """From one level to another between two points: any steep B fits. A slow rise has no such hint."""
    rates = np.repeat([0.25, 0.4], 10) + np.resize([-0.01, 0.01], 20)
    rows = [row | {"pass_rate": rate} for row, rate in zip(records(n=20), rates, strict=True)]
    hint = "at its limit: one jump, which noise may make"
    lines = format_report(curve(rows)).split("\n")
    assert [line[0] for line in lines if hint in line] == ["B"]
    assert hint not in format_report(curve(records()))


def test_short_and_span():
    pairs = {
        0: "0",
        0.5: "0.5",
        999: "999",
        1234: "1.23k",
        1_234_567: "1.23M",
        5e9: "5G",
        1.5e12: "1.5T",
        2e15: "2P",
        3e18: "3E",
        math.inf: "inf",
    }
    assert {v: short(v) for v in pairs} == pairs
    assert span((0.5, 1e6)) == "[0.5, 1M]" and span((0.5, 2), 3) == "[0.500, 2.000]"


def test_titles_are_short_and_stay_different(figures):
    for names in (("runs/a", "logs/b.jsonl"), ("a/seed-0", "b/seed-0")):
        plot_curves([[curve(records(), 0.5, name=name)] for name in names], "none.png")
    titles = [axes.get_title().split(",")[0] for one in figures for axes in one.axes]
    assert titles == ["runs/a", "logs/b.jsonl", "a/seed-0", "b/seed-0"]
    dots, later, line = figures[0].axes[0].lines[:3]
    assert line.get_xdata().max() <= dots.get_xdata().max()  # the fit is drawn only as far as it was fitted
    assert (len(dots.get_xdata()), len(later.get_xdata()), later.get_markerfacecolor()) == (10, 9, "white")


ROW = records(1)[0]
LATE = [row | {"tokens": row["tokens"] + 1_000_000, "step": 1} for row in records()]
BAD = {  # the arguments, {}: the file below, and words of the message
    "percent of compute": ("{} --fit-until 50", ROW, "share of the compute in (0, 1], not 50"),
    "no share": ("{} --fit-until nan", ROW, "not nan"),
    "0": ("{} --fit-until 0", ROW, "not 0"),
    "at -1": ("{} --predict-at 5 -1", ROW, "need compute >= 0"),
    "at inf": ("{} --predict-at inf", ROW, "need compute >= 0"),
    "missing": ("{}.none", ROW, "No such file"),
    "empty": ("{}", "", "none of the 0 rows has"),
    "deep": ("{}", "[" * 100_000 + "\n", "recursion"),
    "large": ("{}", json.dumps(ROW | {"pass_rate": 10**400}), "too large"),
    "list": ("{}", ROW | {"pass_rate": [0.1]}, "list"),
    "words": ("{}", ROW | {"pass_rate": "high"}, "high"),
    "number": ("{}", "5\n", "int"),
    "text": ("{}", "step 1\n", "line 1"),
    "binary": ("{}", b"\x89PNG\xff\xfe", "decode"),
    "columns": ("{}", {"tokens": 1, "accuracy": 0.1}, "none of the 1 rows has pass_rate"),
    "x": ("{} --x samples", ROW, "none of the 1 rows has samples"),
    "percents": ("{}", ROW | {"pass_rate": 30}, "divide percents by 100"),
    "negative": ("{}", ROW | {"tokens": -1, "step": 1}, "need compute >= 0"),
    "few": ("{}", ROW, "too few points: 1,"),
    "late": ("{}", LATE, "compute starts at 1e+06"),
    "plot": ("{} --plot {}/a.png", records(), "a.png"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence_with_its_place(tmp_path, capsys, what):
    argv, content, words = BAD[what]
    path = tmp_path / "eval.jsonl"
    if isinstance(content, (str, bytes)):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    else:
        write(path, content if isinstance(content, list) else [content])
    assert main(argv.replace("{}", str(path)).split()) == 2
    out, err = capsys.readouterr()
    place = "--predict-at" if "at" in what.split() else path
    assert words in err and err.count("\n") == 1 and err.startswith(f"forecast.py: {place}"), err
    assert out == "" or what == "plot"


def test_two_runs_on_the_command_line(tmp_path, capsys):
    """Tables of two runs, each fitted twice, a prediction and the picture."""
    pytest.importorskip("matplotlib")
    files = [str(write(tmp_path / f"{i}.jsonl", records(n=40, seed=i, n_prompts=20_000))) for i in range(2)]
    assert main([*files, "--fit-until", "0.2", "0.9", "--predict-at", "1e21", "--plot", str(tmp_path / "c.png")]) == 0
    out = capsys.readouterr().out.split("\n\n")
    assert len(out) == 5 and "ceiling" in out[4]
    assert [part.split(",")[0] for part in out[:4]] == [files[0]] * 2 + [files[1]] * 2
    assert all("at 1e+03E" in part for part in out[:4])
    assert "of 4 evaluations" in out[1]
    assert (tmp_path / "c.png").stat().st_size > 5000
    repeated = str(write(tmp_path / "eval.jsonl", [*records()[:2], *records()]))
    assert main([repeated, "--x", "flops"]) == 0
    assert re.search(f"{tmp_path}: 19 points up to .* FLOPs, ", capsys.readouterr().out)


FLAT = [row | {"pass_rate": 0.4 + 0.01 * (i % 2)} for i, row in enumerate(records())]


def test_a_run_that_does_not_rise_has_a_verdict_and_is_no_bad_input(tmp_path, capsys):
    """Each of two such runs; and where the last share is flat or too short, the fit of the other one is kept."""
    files = [str(write(tmp_path / f"{i}.jsonl", FLAT)) for i in range(2)]
    assert main(files) == 0
    first, second, _ = capsys.readouterr().out.split("\n\n")
    for file, text in zip(files, (first, second), strict=True):
        assert text.startswith(f"{file}: no forecast: the pass rate does not rise beyond its noise")
    path = write(tmp_path / "eval.jsonl", [*FLAT[:8], *records()[8:]])
    for share, words in (("0.3", "the pass rate does not rise"), ("0.1", "too few points: 2,")):
        assert main([str(path), "--fit-until", "1", share]) == 0
        whole, part = capsys.readouterr().out.split("\n\n")
        assert "\nA     ceiling " in whole and f": no forecast: {words}" in part


@pytest.mark.parametrize(("late", "words"), [(0.1, "the run collapsed"), (0.6, "the last 3 points lie below")])
def test_a_run_that_collapses_or_falls_has_its_verdict_first_and_no_band(figures, late, words):
    """A band from 0 to 1 would read as if anything had been forecast."""
    rows = records()
    for row in rows[-3:]:
        row["pass_rate"] = late
    r = curve(rows, name="fallen")
    fit = r.forecast.fit
    verdict, *numbers = format_report(r, 5e6).split("\n")
    assert verdict == f"fallen: no forecast: {r.forecast.reason}" and words in verdict
    expected = f"Eq. 1 alone           A {fit.A:.3f}, B {fit.B:.2f}, C_mid {short(fit.C_mid)}, R0 {fit.R0:.3f}"
    assert numbers == ([expected] if late == 0.6 else [])  # a rise as a whole, or none
    plot_curves([[r]], "none.png")
    (axes,) = figures[0].axes
    assert axes.get_title().endswith("no forecast") and not axes.collections


def test_mean_of_seeds_by_hand():
    """At C = 15 the line from (10, .3) to (20, .5) is at .4, and the other run at .6: mean .5, sd .2 / sqrt(2), over sqrt(2)
    .1, times Student's 12.706 for two runs."""
    seeds = [SimpleNamespace(C=[0, 10, 20], R=[0.1, 0.3, 0.5]), SimpleNamespace(C=[0, 15, 20], R=[0.1, 0.6, 0.6])]
    mean, low, high = mean_of_seeds(seeds, np.array([0.0, 15.0]))
    assert mean.tolist() == pytest.approx([0.1, 0.5])
    assert low.tolist() == pytest.approx([0.1, 0.5 - 1.2706], abs=1e-4)
    assert high.tolist() == pytest.approx([0.1, 0.5 + 1.2706], abs=1e-4)


def test_seeds_are_drawn_as_a_mean_and_a_single_run_as_its_fit(figures):
    """Three seeds of one variant and two single runs: three names, each where it was measured."""
    fits = []
    for i in range(5):
        x, C, R, n = load(records(n=20 + i, seed=i))
        fits.append(fit(C, R, n_samples=n))
    plot_fits({"a": fits[:3], "b": fits[3:4], "seedless": fits[4:]}, x, "none.png")
    (axes,) = figures[0].axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == "a: mean of 3 seeds" and len(labels) == 3
    assert labels[1].startswith("b: A [0.9") and labels[2].startswith("seedless: A [0.9")
    assert axes.get_xscale() == "log" and len(axes.collections) == 3
    seeds, mean, dots, curve = axes.lines[:3], axes.lines[3], axes.lines[4], axes.lines[5]
    assert [line.get_xdata().max() for line in seeds] == [950_000, 1_000_000, 1_050_000]
    assert mean.get_xdata()[[0, -1]] == pytest.approx([50_000, 950_000])  # where all three were measured
    assert len(dots.get_xdata()) == 22 and dots.get_marker() == "o"
    assert np.abs(np.interp(dots.get_xdata(), *curve.get_data()) - dots.get_ydata()).max() < 0.06
