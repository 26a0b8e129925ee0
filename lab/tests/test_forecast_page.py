"""lab/law/forecast.html. Its scripts "fit" and "logic" run under node and are held against the files whose names they
keep: fits, decisions and readers."""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import curves
import decide
import forecast as forecast_module
import numpy as np
import pandas as pd
import pytest
import read_logs
from forecast import CurveReport, forecast
from test_read_logs import READ, REWARD_NAMES, ROWS, STEPS, C, R, lines
from test_read_logs import csv as csv_of

from fit_sigmoid import sigmoid
from lab.live import build

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "lab" / "law" / "forecast.html"
HTML = PAGE.read_text()
LOGIC = "".join(re.findall(r'<script id="(?:fit|logic)">\n(.*?)</script>', HTML, re.S))
NODE = shutil.which("node")
if NODE is None and not os.environ.get("CI"):  # in CI (.ci/run, GitHub) it must be there
    pytest.skip("node is missing: lab/law/forecast.html is not tested here", allow_module_level=True)


def js(call: str, *inputs):
    """What the function `call` of the page returns for each input, with infinity and NaN as such."""
    code = f"""{LOGIC}
    const plain = (_, v) => typeof v === "number" && !Number.isFinite(v) ? String(v) : v;
    const call = {call};
    console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0, "utf8")).map((input) => {{
      try {{ return call(input); }} catch (error) {{ return error.message; }}
    }}), plain));"""
    return json.loads(subprocess.check_output([NODE, "-e", code], input=json.dumps(inputs), text=True))


# ------------------------------------------------------------------------------------------------------------ the file


def test_one_file_without_a_network_whose_links_lead_to_files():
    assert build.forecast_page() == HTML, "run python lab/live/build.py: lab/law/fit.js is not in the page"
    assert len(HTML.splitlines()) <= 720
    links = set(re.findall(r'<a href="([^"#]+)(?:#([^"]+))?"', HTML))
    assert len(links) > 6
    for file, anchor in links:
        text = (PAGE.parent / file).read_text().lower()
        assert not anchor or f"# {anchor.replace('-', ' ')}\n" in text or f"# {anchor}\n" in text, (file, anchor)
    addresses = set(re.findall(r"https?://[^\s\"'<`]+", HTML))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in HTML
    assert not re.search(r"<(script|img|link|iframe)[^>]*\b(src|href)=(?!\"data:)", HTML)


def published(name, *columns):
    """{run: its rows of these columns (N, columns)} of a file of lab/results."""
    rows = pd.read_csv(ROOT / "lab" / "results" / name)
    return {run: group[[*columns]].to_numpy(float) for run, group in rows.groupby("run", sort=False)}


# --------------------------------------------------------------------------------------------------------------- the fit


def real_curves():
    """(C, R, n or None) of 40 cuts of runs of ours, and of 16 of the paper's."""
    ours = published("curves.csv.gz", "tokens", "pass_rate", "n")
    paper = published("figure1.csv", "k_gpu_hours", "pass_rate")
    for i, name in enumerate(sorted(ours)[::9][:40]):
        points = ours[name]
        share = (0.2, 0.35, 0.5, 1)[i % 4]
        yield points[points[:, 0] <= share * points[-1, 0]].T
    for points in paper.values():
        for stop in range(6, 28, 3):
            yield *(points[:stop] * [1000, 1]).T, None


def simulated_curves(count):
    """Such curves with noise: of Eq. 1, some of which fall, stay flat, are straight, or collapse at the end."""
    rng = np.random.default_rng(0)
    for i in range(count):
        c = np.linspace(0 if i % 3 else 0.05, 1, rng.integers(7, 40))
        r = sigmoid(c, rng.uniform(0, 0.3), rng.uniform(0.4, 1), rng.uniform(0.6, 5), rng.uniform(0.1, 1.5))
        r = [r, r, r, r[::-1], 0 * r + 0.4, 0.1 + 0.6 * c, np.where(c > 0.7, r - 0.3, r)][i % 7]
        n = None if i % 2 else rng.choice([64, 512, 4096])
        noise = rng.normal(0, 0.01, c.size) if n is None else rng.binomial(n, np.clip(r, 0, 1)) / n - r
        yield 1e6 * c, np.clip(r + noise, 0, 1), None if n is None else np.full(c.size, float(n))


def on_page(call, curves):
    return js(call, *({"C": c.tolist(), "R": r.tolist(), "n": None if n is None else n.tolist()} for c, r, n in curves))


def compare_fits(curves):
    """A, R0, B, C_mid, the form, the sentence of the verdict, all intervals, and the bands of curve and evaluation."""
    call = """({ C, R, n }) => {
      const f = fit(C, R, n), end = C.at(-1), at = [0, end / 3, end, 1.2 * end, 20 * end];
      return { ...f, best: 0, allowed: Object.keys(f.allowed), at: at.map((c) => predict(f, c, f.form)),
        number: one_number(f, predict(f, 2 * end)), place: place_of(f, 2 * end) ?? [NaN, NaN, NaN],
        band: at.map((c) => interval(f, c)), noisy: at.map((c) => interval(f, c, true)) };
    }"""
    reasons = []
    for (c, r, n), outputs in zip(curves, on_page(call, curves), strict=True):
        f, at = forecast(c, r, n_samples=n), np.array([0, c[-1] / 3, c[-1], 1.2 * c[-1], 20 * c[-1]])
        reasons.append(f.reason)
        assert (outputs["reason"], outputs["form"]) == (f.reason, f.form)
        assert sorted(outputs["allowed"]) == sorted(f.allowed)
        for name in ("R0", "A", "B", "C_mid", "dispersion"):
            close(outputs[name], getattr(f.fit, name), rel=1e-4)
        for name in ("A", "B", "C_mid"):
            close(outputs["intervals"][name], getattr(f.fit, f"{name}_interval"), rel=1e-4)
        close(outputs["at"], f.predict(at, f.form), abs=1e-5)
        close(outputs["number"], f.number(2 * c[-1]), abs=1e-5)
        close(outputs["place"], decide.place_of(f, 2 * c[-1]) or [math.nan] * 3, abs=1e-5)
        close(np.array(outputs["band"], dtype=float).T, f.interval(at), abs=1e-5)
        close(np.array(outputs["noisy"], dtype=float).T, f.interval(at, noise=True), abs=1e-5)
    return reasons


def close(outputs, expected, **tolerance):
    assert np.array(outputs, dtype=float) == pytest.approx(np.array(expected, dtype=float), nan_ok=True, **tolerance)


def test_the_constants_are_those_of_the_law():
    of_fit = ["DOUBT", "MAX_WIDTH", "B_RANGE", "A_SLACK", "MIN_SD", "PRIOR_DOF"]
    of_forecast = ["REMAINS", "AHEAD", "FLAT", "FALL", "SAME"]
    (outputs,) = js(f"() => [{', '.join(of_fit + of_forecast)}, MOST_AGAIN, APART, RIGHT]", 0)
    expected = [getattr(curves, name) for name in of_fit]
    expected += [getattr(forecast_module, name) for name in (*of_forecast, "MOST")]
    assert outputs == json.loads(json.dumps([*expected, decide.APART, read_logs.RIGHT]))
    assert js("() => NO_SCORE.source", 0) == [read_logs.NO_SCORE.replace("/", r"\/")]


@pytest.mark.medium
def test_the_fit_is_that_of_curves_on_52_curves():
    """There are curves of each verdict among them, one whose points are all alike, and one of twelve points at each
    compute, which have no order."""
    c, rng = np.repeat(np.arange(1.0, 13.0), 12), np.random.default_rng(0)
    r = rng.binomial(64, sigmoid(c, 0.05, 0.9, 2.0, 4.0)) / 64
    more = [(c, np.sort(r.reshape(12, 12)).ravel(), None), (C, 0 * C, None)]
    reasons = compare_fits([*[*real_curves(), *simulated_curves(44)][::2], *more])
    assert len(reasons) == 52
    assert reasons.count("") >= 2
    for words in ("the run falls", "collapsed", "does not rise", "ceilings from", "too few", "all alike"):
        assert any(words in reason for reason in reasons), words


@pytest.mark.medium
def test_when_to_ask_again_is_what_forecast_says():
    """Where there are more points than it computes with, they are averaged first: the last two curves."""
    c = np.linspace(0, 1.5, 230)
    r = sigmoid(c, 0.1, 0.8, 2, 1) + np.random.default_rng(0).normal(0, 0.02, c.size)
    many = [(c, np.clip(r, 0, 1), n) for n in (None, np.full(c.size, 64.0))]
    curves = [*[*real_curves()][::18], *many]
    expected = [forecast(c, r, n_samples=n).ask_again() for c, r, n in curves]
    close(on_page("({ C, R, n }) => ask_again(fit(C, R, n))", curves), expected, rel=1e-9)
    assert np.isfinite(expected[:-2]).sum() > 2
    assert np.isfinite(expected[-2:]).all()


PLACES = r"\b\d\.\d{3}\b"


@pytest.mark.medium
def test_the_winner_is_that_of_decide():
    """Of neighbors in a list of curves: the same sentence, its numbers to a thousandth."""
    curves = [*[*real_curves()][::9], *simulated_curves(8)]
    pairs = list(itertools.pairwise(curves))
    call = "([C, ...runs]) => winner(runs.map(([name, C, R, n]) => ({ name, f: fit(C, R, n) })), C)"
    inputs, expected = [], []
    for pair in pairs:
        at = 4 * min(c[-1] for c, _, _ in pair)
        runs = [[name, *(v if v is None else v.tolist() for v in run)] for name, run in zip("ab", pair, strict=True)]
        inputs.append([at, *runs])
        reports = [
            CurveReport(name, "x", c, r, c < 0, forecast(c, r, n_samples=n))
            for name, (c, r, n) in zip("ab", pair, strict=True)
        ]
        expected.append(decide.winner(reports, at))
    for outputs, sentence in zip(js(call, *inputs), expected, strict=True):
        assert re.sub(PLACES, "", outputs) == re.sub(PLACES, "", sentence)
        places = [[float(number) for number in re.findall(PLACES, text)] for text in (outputs, sentence)]
        assert places[0] == pytest.approx(places[1], abs=1.1e-3)
    for words in ("a ends higher than b", "b ends higher than a", "may end alike", "ask again at", "has no forecast"):
        assert any(words in sentence for sentence in expected), words


# ---------------------------------------------------------------------------------------------------------------- logs

OWN = """({ text, y, x, scale, samples, first }) => {
  const log = read_log(text), outputs = guess(log), named = (name) => log.columns.find((c) => c === name || c.endsWith("/" + name) || c.endsWith(" - " + name));
  return pick(log, { x: x ? named(x) : outputs.x, y: y ? named(y) : outputs.y, scale, samples, first });
}"""


def own(text, **more):
    return {"text": text, "y": "", "x": "", "scale": 1.0, "samples": "", "first": False} | more


def test_the_logs_of_many_frameworks_are_read_as_by_tools_fit():
    inputs = [
        own(
            text,
            **{name: more[name] for name in ("y", "x") if name in more},
            scale=0.01 if "range" in more else 1.0,
            samples=more["samples"] if more.get("samples", "").isdigit() else "",
            first="x_start" in more,
        )
        for text, more, *_ in READ.values()
    ]
    for (name, (_, more, _, c, n)), outputs in zip(READ.items(), js(OWN, *inputs), strict=True):
        assert isinstance(outputs, dict), (name, outputs)
        assert outputs["C"] == pytest.approx(c), name
        assert outputs["R"] == pytest.approx(R), name
        assert more.get("y") != "mean@1" or "evaluations: val-core/openai/gsm8k/reward/mean@1 " in outputs["notes"][0]
        if more.get("samples") != "n_prompts":  # a column, which the page has no field for
            assert outputs["n"] == (None if n is None else [n] * 20), name


PRINTED = {
    "TRL": "".join(f"{{'eval_loss': 0.1, 'eval_reward': {r}, 'epoch': {i / 10}}}\n 10%|# | 1/20\n" for i, r in enumerate(R)),
    "TRL, strings": "".join(f"{{'eval_reward': '{r}', 'x': None, 'step': '{i}'}}\n" for i, r in enumerate(R)),
    "verl": "".join(f"(Task pid=7) step:{5 * i} - actor/lr:1e-06 - val-core/gsm8k/reward/mean@1:{r} - x:np.float64(2.0)\n"
                    for i, r in enumerate(R)),
    "TRL, behind a bar, beside what a model wrote": "".join(
        f"\r{i}%|# | {i}/20 [00:10<00:20, 1.2s/it]{{'loss': 0.0, 'reward_std': 0.1, 'reward': {r}, 'epoch': {i / 10}}}\n"
        "Answer: 1\n" for i, r in enumerate(R)) + "{'train_runtime': 610.1, 'train_loss': 0.1}\n",
    "a column of zeros, and pass@4": csv_of(("step", "val_mean_reward", "val_pass@4", "val_accuracy"), STEPS, 0 * R, R / 2, R),
    "two columns without names": "".join(f"{c} {r}\n" for c, r in zip(C, R, strict=True)),
    "quotes": '"my, tokens","the ""acc"""\n' + "".join(f'"{c}",{r}\n' for c, r in zip(C, R, strict=True)),
    "NaN": lines([*ROWS[:3], ROWS[3] | {"pass_rate": float("nan")}, *ROWS[3:]]),
}  # fmt: skip


def test_printed_logs_and_bare_columns_are_read_without_a_choice():
    outputs = js(OWN, *(own(text) for text in PRINTED.values()))
    expected = [np.arange(20) / 10, np.arange(20), STEPS, np.arange(20) / 10, STEPS, C, C, C]
    for name, run, c in zip(PRINTED, outputs, expected, strict=True):
        assert isinstance(run, dict), (name, run)
        assert run["C"] == pytest.approx(c), name
        assert run["R"] == pytest.approx(R), name


def test_a_name_that_only_looks_like_a_rate_of_success_is_not_chosen():
    tables = [csv_of(("step", right, wrong), STEPS, R, R / 2) for right, wrong in REWARD_NAMES]
    chosen = js("(text) => guess(read_log(text)).y", *tables)
    assert chosen == [right for right, _ in REWARD_NAMES]


def test_a_record_that_stands_there_twice_counts_once():
    """And of a last line that is being written nothing counts; a clock that ran before step 0 has trained nothing."""
    rows = [ROWS[0] | {"tokens": 700.0}, *ROWS[1:], ROWS[3], ROWS[3] | {"n_prompts": 51}, ROWS[4] | {"pass_rate": None}]
    (outputs,) = js(OWN, own(lines(rows) + '{"step": 100, "tokens": 1e6, "pass'))
    assert sorted(outputs["C"]) == sorted([*C, C[3]])
    assert max(outputs["n"]) == 102


BAD = [  # (text, more, words of the sentence)
    ("", {}, "nothing to read"),
    ("hello", {}, "no log that is known"),
    ("tokens,pass_rate\n", {}, "no rows"),
    (lines(ROWS[:3]) + '{"tokens": 1, "pass_\n' + lines(ROWS[3:]), {}, "Line 4 is not JSON"),
    (lines(ROWS[:3]) + "[3]\n", {}, "Record 4"),
    ('{"log_history": []}', {}, "no records"),
    (csv_of(("tokens", "a", "b"), C, R, R), {}, "Choose the column of the reward"),
    (csv_of(("tokens", "pass_rate"), C, 100 * R), {}, "choose “in percent”"),
    (csv_of(("tokens", "pass_rate"), C, 2 * R - 1), {}, "choose “from −1 to 1”"),
    (csv_of(("tokens", "pass_rate"), -C, R), {}, "at least 0"),
    (csv_of(("tokens", "pass_rate"), 1e9 + C, R), {}, "Compute counts from the first row"),
    (csv_of(("tokens", "pass_rate"), C, R).replace("0.1\n", "high\n", 1), {}, "“high” in the column pass_rate is no number"),
    (csv_of(("tokens", "pass_rate"), C, R), {"samples": "many"}, "number above 0, not “many”"),
    (csv_of(("tokens", "pass_rate"), [*C, *C], [*R, *R / 2]), {}, "These are several runs: tokens goes back 1 times"),
    (csv_of(("tokens", "pass_rate"), np.repeat(C, 2), np.linspace(0, 0.9, 40)), {}, "is repeated in 20 of 40 records"),
    (csv_of(("tokens", "pass_rate"), [0, *C[1:], 0, *(C[1:] + 7)], [*R, *R]), {}, "These are several runs"),
]  # fmt: skip


def test_bad_input_is_a_sentence():
    outputs = js(OWN, *(own(text, **more) for text, more, _ in BAD))
    for (text, _, words), message in zip(BAD, outputs, strict=True):
        assert words in str(message), text[:40]


def test_many_points_are_averaged_and_said_to_be():
    """The mean of all and the number of samples stay as they were."""
    c = np.arange(10_000.0)
    r = sigmoid(c, 0.1, 0.8, 2, 2000).round(4)
    (outputs,) = js(OWN, own(csv_of(("tokens", "pass_rate"), c, r), samples="10"))
    n = np.array(outputs["n"])
    assert len(n) <= 300
    assert n.sum() == 100_000
    assert outputs["C"][0] == 0
    assert (n @ outputs["R"]) / n.sum() == pytest.approx(r.mean())
    assert "averaged" in " ".join(outputs["notes"])


# ------------------------------------------------------------------------------------------------------------ the page

STAND_INS = """
// Every element keeps what is set; whatever else is asked of it is an element, too, or a call that returns one.
const elements = {}, timers = [];
const element = (start = {}) => new Proxy(Object.assign(() => element(), start), {
  get: (known, name) => name in known ? known[name] : name === Symbol.toPrimitive ? () => "" : element(),
});
const at = (id) => elements[id] ??= element({
  clientWidth: 800, textContent: "", checked: false, listeners: [], querySelectorAll: () => [], value: VALUES[id] ?? "",
  addEventListener(kind, call) { this.listeners.push(call); },
  replaceChildren(first, ...others) { this.value = [first, ...others].find((option) => option?.chosen)?.value ?? first?.value; },
});
const document = { getElementById: at, createElementNS: () => element(), createElement: () => element() };
class Option { constructor(text, value, _, chosen) { Object.assign(this, { text, value, chosen }); } }
const addEventListener = () => {}, clearTimeout = () => {};
const setTimeout = (call) => timers.push(call), settle = () => { while (timers.length) timers.shift()(); };
const move = (section, id, value) => { Object.assign(at(id), value); at(section).listeners.forEach((call) => call({})); settle(); };
"""


def test_the_dials_move_and_bad_logs_are_answered():
    """The whole page, over stand-ins for what a browser has: every dial changes what is said, a log that is pasted is
    fitted, and a bad one is answered in a sentence and leaves nothing of the log before."""
    script = re.findall(r"<script>\n(.*?)</script>", HTML, re.S)[-1].replace('"use strict";', "")
    values = dict(re.findall(r'<input type="range" id="(\w+)"[^>]* value="([^"]+)"', HTML))
    values |= dict(re.findall(r'<select id="(\w+)"><option value="([^"]+)"', HTML)) | {"cut": 8}
    call = f"""(text) => {{
      const VALUES = {json.dumps(values)}, said = (name) => at(name + "-said").textContent;
      {STAND_INS} {script} settle();
      const before = said("forecast");
      move("keep", "keep", {{}}), move("run", "run", {{ value: 2 }});
      const kept = said("forecast");
      move("keep", "keep", {{}}), move("run", "run", {{ value: 0 }});
      move("cut", "cut", {{ value: 31 }});
      const after = said("forecast");
      take(text), settle();
      const pasted = said("forecast");
      take("hello"), settle();
      return [before, after, pasted, said("forecast"), at("columns").hidden && log === null, kept];
    }}"""
    ((before, after, pasted, bad, empty, kept),) = js(call, csv_of(("tokens", "pass_rate"), C, R))
    assert before and before != after
    assert re.match(r"Best guess at 4.01M: 0\.79\d\. By Eq\. 1 ", after) and "winner" not in after
    assert "identifiable: 0.79" in after
    assert re.search(r"No winner at 1.08M, the runs may end alike: ours, a lag .* falls 0\.7.* \(kept\) 0\.7", kept), (
        kept
    )
    assert "20 evaluations" in pasted
    assert "no log that is known" in bad
    assert empty
