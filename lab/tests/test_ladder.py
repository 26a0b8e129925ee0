"""lab/ladder: from rung 0 the diffs make recipe.py, each rung runs, and what is not there is named."""

import math
import random
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab" / "ladder"))

import by_flags
import evidence
import publish
import run
import rungs

from torch_engine import TorchEngine

RECIPE = (ROOT / "recipe.py").read_text()


def test_the_diffs_lead_from_rung_0_to_the_recipe():
    """Each of at most 15 lines, and none without a change."""
    text = rungs.source(0)
    assert 'schedule="ppo_off_policy"' in text and "grpo(" in text and "has_variance" not in text
    for rung in range(1, 9):
        diff = rungs.diff_of(rung)
        assert 0 < sum(line[0] in "+-" for line in diff.splitlines()) <= 15
        text = rungs.applied(text, diff)
        assert text == rungs.source(rung)
    assert text == RECIPE


def test_a_diff_that_does_not_fit_says_so():
    with pytest.raises(ValueError, match="recipe.py has changed"):
        rungs.applied(RECIPE, "-a line that is not there\n+another\n")


@pytest.fixture
def small(monkeypatch, tmp_path, model):
    """The settings with a tiny untrained model, groups of four, eight held-out problems, and a coin as the judge, so that most groups
    have a gradient: what a rung computes, without its warm start."""
    coin = random.Random(0)

    def make(usual, seed):
        task = usual(seed, 8)
        task.first_model = lambda cache, report: model
        task.score = lambda problem, completions: [(coin.choice([1.0, -1.0]), True) for _ in completions]
        return task

    def engine(folder, *args, **options):
        assert folder == str(model)  # the task's first model, not recipe.py's
        return TorchEngine(folder, *args, **options)

    for name, setting in rungs.SETTINGS.items():
        names = setting.names | {"TorchEngine": engine, "G": 4}
        changed = setting._replace(names=names, task=lambda seed, held_out, usual=setting.task: make(usual, seed))
        monkeypatch.setitem(rungs.SETTINGS, name, changed)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(rungs, "OUT", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("rung", range(9))
def test_each_rung_runs(rung, small):
    """Ten steps in its setting; the generator samples, and the trainer's tokens count three times."""
    rows = rungs.climb(str(rung), "discover" if rung == 6 else publish.setting_of(rung), steps=10)
    assert [row["step"] for row in rows] == [0, 8, 10] and rows[2]["passes"] > rows[2]["tokens"] > 0
    assert all(0 <= row["pass_rate"] <= 1 for row in rows)


def test_each_setting_has_a_first_model():
    assert all(setting.task(0, 8).first_model for setting in rungs.SETTINGS.values())


@pytest.mark.long
@pytest.mark.parametrize("name", rungs.WITHOUT)
def test_scalerl_without_one_of_its_changes_runs(name, small):
    """In turns no token is older than the eight updates of its turn; without the phrase the other evaluation has it."""
    rows = rungs.climb(f"no-{name}", "ramble", rate=0.5, steps=16)
    assert [row["step"] for row in rows] == [0, 8, 16] and all(row["rate"] == 0.5 for row in rows)
    assert rows[1]["other"] is None and 0 <= rows[2]["other"] <= 1
    if name == "PipelineRL":
        assert rows[1]["lag"] == pytest.approx(3.5, abs=0.2)  # the mean of 0 to 7


def curve(setting, side, rate, seed, tokens_to_level, end=0.9):
    """From 0 straight to twice the level at twice the tokens; or, if it takes no number, to a tenth of it."""
    level = evidence.LEVELS.get(setting, 0.5)
    top = 2 * level if tokens_to_level else level / 10
    base = {"setting": setting, "side": side, "rate": rate, "seed": seed, "other": 0.1, "lag": 1.0}
    points = [(0, 0.0), (2 * (tokens_to_level or 1), top), (9e9, end), (9e9, end)]
    return [base | {"tokens": t, "passes": 3 * t, "pass_rate": p} for t, p in points]


def test_a_side_is_judged_at_its_best_rate():
    """The median of three pilots; a best rate at the edge brings the next one; a level that is not reached is last."""
    rows = []

    def best(**tokens):
        rows.extend(
            row
            for seed, t in zip(evidence.PILOTS, tokens["of"], strict=True)
            for row in curve("stale", "1", tokens["rate"], seed, t, 0.0 if None in tokens["of"] else 0.9)
        )
        return evidence.best_rate(rows, "stale", "1")

    assert best(rate=0.5, of=(300, 100, 200)) == [(rate, seed) for rate in (1.0, 2.0) for seed in evidence.PILOTS]
    assert best(rate=1.0, of=(190, 190, 900)) == [(2.0, seed) for seed in evidence.PILOTS]
    assert best(rate=2.0, of=(180, 180, 999)) == [(4.0, seed) for seed in evidence.PILOTS]
    assert best(rate=4.0, of=(100, None, None)) == 2.0


def test_measures_by_hand():
    half = curve("discover", "8", 1.0, 1, 100)
    assert evidence.value(half, "tokens") == 100 and evidence.value(half, "passes") == 300
    assert evidence.value(half, "end") == 0.9
    for side, measure, expected in (
        ("2", "with the phrase", 0.1),
        ("2", "without the phrase", 0.9),
        ("3", "with the phrase", 0.9),
    ):
        assert evidence.value(curve("ramble", side, 1.0, 1, 100), measure) == expected


@pytest.mark.parametrize("best", [1.0, 2.0])
def test_runs_come_in_pairs_once_the_rates_are_chosen(best):
    """All pilots agree on a rate: then ten seeds of each side, once (at the setting's own rate too, if it is another),
    of ScaleRL without each change, and of three sides alone; those whose seconds count are the last."""
    tests = evidence.CHANGES + evidence.WHOLE + evidence.BY_FLAGS
    sides = {(test.setting, side) for test in tests for side in (test.before, test.after)}
    rows = [
        row
        for setting, side in sides
        for rate in (*evidence.RATES, 4.0)
        for seed in evidence.PILOTS
        for row in curve(setting, side, rate, seed, 100 if rate == best else 200, 0.9 if rate == best else 0.5)
    ]
    runs = list(evidence.missing(rows))
    twice = [side for side in sides if side[0] != "vllm"] if best != 1 else []
    assert len(runs) == len(set(runs)) == 10 * (len(sides) + len(twice) + 7 + 3)
    assert {run[2] for run in runs} == {best, 1.0}
    assert {run[1] for run in runs[-60:]} == {"alone", "vllm"} and "alone" not in {run[1] for run in runs[:-60]}
    setting = rows[0]["setting"]
    first = [run for run in evidence.missing(rows[4:]) if run[1] == setting]
    assert first == [(rows[0]["side"], setting, rows[0]["rate"], rows[0]["seed"])]  # a pilot, before all that counts


def test_a_published_run_is_never_replaced(monkeypatch, tmp_path):
    """A second run of the same side, rate and seed does not mix with it; publishing again gives the same bytes."""
    monkeypatch.setattr(evidence, "CURVES", tmp_path / "curves.csv.gz")
    head, first, again, other = (
        ",".join(rungs.COLUMNS),
        "discover,8,1.0,7,0,5",
        "discover,8,1.0,7,0,6",
        "stale,8,1.0,7,0,9",
    )
    (tmp_path / "a.csv").write_text(f"{head}\n{first}\n")
    evidence.publish(tmp_path)
    (tmp_path / "a.csv").write_text(f"{head}\n{again}\n{other}\n")
    evidence.publish(tmp_path)
    assert evidence.lines_in(tmp_path) == [first, other]
    assert [row["tokens"] for row in evidence.rows_in(tmp_path)] == [5, 9]
    before = evidence.CURVES.read_bytes()
    evidence.publish(tmp_path)
    assert evidence.CURVES.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("-- 9", "there is no rung '9'; the rungs are 0 GRPO, 1 PipelineRL, "),
        ("-- -1", "there is no rung '-1'"),
        ("CISPO", "there is no rung 'CISPO'"),
        ("4 --steps -5", "--steps must be at least 1, not -5"),
        ("4 --seed -1", "--seed must be at least 0 and below 2**63, not -1"),
        ("4 --rate nan", "--rate must be above 0 and at most 16, not nan"),
        ("all --seed 3", "all takes no --seed"),
    ],
)
def test_what_is_not_there(words, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.main(words.split())
    assert error in capsys.readouterr().err


@pytest.mark.long
def test_the_command(monkeypatch, tmp_path, capsys, small):
    """Diff and question come before the run, the answer after it, and the picture lies where it says."""
    monkeypatch.setattr(run, "OUT", tmp_path)
    assert run.main(["4", "--steps", "8"]) == 0
    said = capsys.readouterr().out
    places = [said.index(text) for text in ("has_variance", "Question", "step  8", "Your curve over those of rung 3")]
    assert "**" not in said
    assert places == sorted(places) and (tmp_path / "rung_4.png").stat().st_size > 5000


def test_all_goes_on_where_it_was():
    """Three seeds of both sides of each test in the ladder's files, none twice; what is there is not made again."""
    rows = evidence.rows_in()
    runs = list(run.waiting(rows))
    assert len(runs) == len(set(runs)) >= 3 * 15 and {seed for *_, seed in runs} == {1, 2, 3}
    side, setting, rate, seed = runs[0]
    assert list(run.waiting([*rows, *curve(setting, side, rate, seed, 100)])) == runs[1:]


@pytest.mark.filterwarnings("ignore:Precision loss")
@pytest.mark.parametrize(
    ("before", "after", "words", "p"),
    [
        ((300, 400), (150, 200), "**saves 50 %** [50, 50] of the tokens", 0),
        ((100, 100), (110, 130), "not seen: +20 % [-59, +246] tokens", 1 - 2 / math.pi * math.atan(2.1406)),
        ((100,) * 3, (None, None, 50), "not seen: -50 % (1 of 3) tokens", 1),
        ((None, *(100,) * 9), (100, *(None,) * 9), "not seen: – (0 of 10) tokens", 22 / 2**10),
    ],
)
def test_an_outcome_by_hand(before, after, words, p):
    """The second: logs of 1.1 and 1.3 have the mean .179 and the standard error .0835, so t is 2.14 with one degree of
    freedom, whose quantile is 12.7. Where too few reach the level, signs: two of three, then nine of ten, take more."""
    rows = [
        row
        for side, values in (("7", before), ("8", after))
        for seed, tokens in enumerate(values)
        for row in curve("discover", side, 2.0, seed, tokens)
    ]
    rows = [row | {"pass_rate": 0.1} if row["tokens"] == 9e9 else row for row in rows]
    test = evidence.Test("batch normalization", "discover", "tokens", "7", "8")
    result = publish.outcome(rows, test, (2.0, 2.0), range(len(before)))
    assert publish.in_words(result, result.p) == words and result.p == pytest.approx(p, abs=1e-4)


def test_holm_counts_the_tests_that_were_replaced():
    """Of all 32 and 23 tests .001 is the smallest, times 55; .002 counts 54 times."""
    results = [publish.Outcome(evidence.TESTS[0], (1, 1), (0, 0), (0, 0, 0), 2, 2, p) for p in (0.002, 0.001)]
    assert publish.corrected(results) == pytest.approx([0.108, 0.055])


def test_the_page_has_what_the_published_curves_give():
    rows = evidence.rows_in()
    page = rungs.PAGE.read_text()
    for name, block in publish.blocks(rows).items():
        assert f"<!-- refit {name} -->\n{block}\n<!-- end -->" in page, name


def test_nothing_runs_beside_a_run(tmp_path, monkeypatch):
    """The program sleeps until it ends, also where two may run: this one is timed."""
    asked = []

    def todo(rows):
        asked.append(rows)
        return [("0", "vllm", 1.0, evidence.SEEDS[0])] if len(asked) == 1 else []

    monkeypatch.setattr(evidence, "make", lambda *run: time.sleep(2))
    evidence.work(todo, tmp_path, at_once=2)
    assert len(asked) == 2


def test_the_published_runs_are_whole():
    """All that the page's tests need is there, from step 0 to the setting's last."""
    rows = evidence.rows_in()
    assert list(evidence.missing(rows)) == []
    last = {name: setting.steps for name, setting in rungs.SETTINGS.items()}
    last |= {name: int(flags.split("--max_steps ")[1].split()[0]) for name, flags in by_flags.SETTINGS.items()}
    steps = {}
    for row in rows:
        steps.setdefault((row["setting"], row["side"], row["rate"], row["seed"]), []).append(row["step"])
    for run_of, numbers in steps.items():
        assert [numbers[0], numbers[-1]] == [0, last[run_of[0]]] and len(numbers) == len(set(numbers)), run_of
