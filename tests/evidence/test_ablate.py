"""evidence/ablate.py and evidence/sweep.py: which runs are made and which are not made again. A scripted stand-in takes the
place of train.py, so nothing is trained."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import ablate
import curves
import pytest
import sweep
from ablate import UsageError
from comparisons import COMPARISONS, Comparison
from sweep import plan

pytestmark = pytest.mark.medium

STAND_IN = """
import json, os, pathlib, signal, sys, time

words = sys.argv[1:]
flags = dict(zip([w[2:] for w in words[::2]], words[1::2]))
folder = pathlib.Path(flags.get("resume") or flags["output_dir"])
folder.mkdir(parents=True, exist_ok=True)
name = "/".join(folder.parts[-3:]).replace("seed-", "")
plan = json.loads(pathlib.Path(os.environ["STAND_IN"]).read_text()).get(name, {})
with open(os.environ["STAND_IN"] + ".calls", "a") as file:
    file.write(json.dumps([name, words]) + "\\n")
if "resume" not in flags:
    typed = {k: json.loads(v) if v[:1].isdigit() or v in ("true", "false") else v for k, v in flags.items()}
    (folder / "config.json").write_text(json.dumps(typed))

def stop(number, frame):
    checkpoint = folder / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True, exist_ok=True)
    if not plan.get("damage"):
        (checkpoint / "state.json").write_text('{"files": {}}')
    print("stopped by", number)
    sys.exit(128 + number)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
if plan.get("wait") and "resume" not in flags:
    (folder / "waiting").touch()
    time.sleep(plan["wait"])
evals = [{"step": 8 * i, "tokens": 1000 * i, "device_hours": 0.001 * i, "flops": i, "pass_rate": 0.1 + 0.05 * i,
          "n_prompts": 512, "n_samples": 2} for i in range(13)]
step = {"step": 1, "rows": 5, "truncated": 0.0, "lag_mean": 1.0, "lag_max": 2, "ess": 0.9, "capped_positive": 0.01,
        "capped_negative": 0.03, "updated": 1}
(folder / "eval.jsonl").write_text("".join(json.dumps(e) + "\\n" for e in evals))
(folder / "metrics.jsonl").write_text(json.dumps({"config": {}}) + "\\n" + json.dumps(step) + "\\n")
sys.exit(plan.get("exit", 0))
"""


@pytest.fixture
def table(monkeypatch):
    """Two small comparisons that share their baseline."""
    small = {
        "one": Comparison("first", {"base": "", "dapo": "--loss dapo"}, setting="--k 4"),
        "two": Comparison("second", {"grpo": "--loss grpo", "same": "", "again": "--loss dapo"}, setting="--k 4"),
    }
    for module in (ablate, sweep):
        monkeypatch.setattr(module, "COMPARISONS", small)
    return small


@pytest.fixture
def program(table, monkeypatch, tmp_path):
    """Called with words, it is ablate.py on the stand-in, with reports (seconds of fits) only if asked for. `script` sets
    what the stand-in does in a run, `calls` are the runs and words of its calls, `made` their runs from one on."""
    train, script, done = tmp_path / "train.py", tmp_path / "script.json", tmp_path / "script.json.calls"
    train.write_text(STAND_IN)
    script.write_text("{}")
    done.touch()
    monkeypatch.setenv("STAND_IN", str(script))
    monkeypatch.setattr(sweep, "TRAIN", train)

    def call(*words, reports=False):
        with monkeypatch.context() as patch:
            if not reports:
                patch.setattr(ablate, "write_reports", lambda *of_all: None)
            return ablate.main([*words, "--output", str(tmp_path / "runs")])

    call.script = lambda runs: script.write_text(json.dumps(runs))
    call.calls = lambda: [json.loads(line) for line in done.read_text().splitlines()]
    call.made = lambda first=0: [name for name, _ in call.calls()][first:]
    return call


# ---- planning


def test_equal_flags_are_one_run_in_the_folder_of_the_first_comparison(table, tmp_path):
    """`same` of two is `base` of one, `again` is `dapo`; a flag given at its default changes nothing."""
    one, two = (plan(name, [0, 1], tmp_path, {}) for name in ("one", "two"))
    folders = [f"{owner}/seed-{seed}" for seed in (0, 1) for owner in ("two/grpo", "one/base", "one/dapo")]
    assert [str(run.folder.relative_to(tmp_path)) for run in two.values()] == folders
    assert two["same", 1] == one["base", 1] and len({*one.values(), *two.values()}) == 6
    table["two"].variants["grpo"] = "--loss cispo --eps_max 5"
    assert plan("two", [0], tmp_path, {})["grpo", 0].folder == one["base", 0].folder


@pytest.mark.parametrize("name", list(COMPARISONS))
def test_every_row_is_accepted_by_train(name, tmp_path, monkeypatch):
    """Flags that train.py refuses, or rounds, would show only after minutes. Baselines are rows."""
    from runtime.flag_checks import check_flags
    from runtime.flags import parse_flags

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/halves/model").mkdir(parents=True)
    (tmp_path / "runs/halves/model/config.json").write_text('{"model_type": "qwen3"}')
    for run in plan(name, [0], tmp_path, {}).values():
        flags = parse_flags(run.command()[2:], "about")
        assert not [note for note in check_flags(flags) if "rounded" in note]
        assert all(getattr(flags, key) == value for key, value in run.flags)
    assert {*COMPARISONS[name].against, *COMPARISONS[name].against.values()} <= set(COMPARISONS[name].variants)


@pytest.mark.parametrize("row", ["--lamda 1", "--seed 3", "--k eight", "--k", "k 8"])
def test_a_row_with_a_wrong_flag_is_refused(table, row, tmp_path, capsys):
    table["one"].variants["wrong"] = row
    assert ablate.main(["one", "--output", str(tmp_path)]) == 2
    assert row.split()[0] in capsys.readouterr().err


def test_published_runs_of_a_flag_that_went_are_still_read(table):
    """What only the run has, of a flag that train.py has no more, is not compared; what the row names is; and a row that
    names such a flag is reported and never run."""
    row, run = {"k": "4", "gone": "1"}, {"k": "4", "gone": "1", "long_gone": "7"}
    assert ablate.other_flags(row, run) == []
    assert ablate.other_flags(row | {"gone": "2"}, run) == ["gone"] == ablate.other_flags(row, {"k": "4"})
    assert ablate.other_flags(row, run | {"loss": "dapo"}) == ["loss"]
    table["one"].variants["old"] = "--gone 1"
    with pytest.raises(UsageError, match="train.py has no --gone"):
        plan("one", [0], Path("runs"), {})["old", 0].command()


def test_budget_is_of_each_run_and_takes_the_settings_place(table, tmp_path):
    for text, tokens in (("800k", 800_000), ("1.5M", 1_500_000), ("900", 900)):
        assert ablate.budget_flags(text) == {"max_sampled_tokens": tokens}
    object.__setattr__(table["one"], "setting", "--k 4 --max_sampled_tokens 100")
    words = plan("one", [0], tmp_path, ablate.budget_flags("800k"))["base", 0].command()
    assert words[words.index("--max_sampled_tokens") + 1] == "800000"
    for bad in ("0", "-5k", "many", "h", "nan", "0.05h", "1.2.3"):
        with pytest.raises(UsageError):
            ablate.budget_flags(bad)


# ---- the sweep


def test_finished_runs_are_never_run_again(program, capsys):
    """One has 2 variants x 2 seeds; then two adds only GRPO; a third call starts nothing, nor does an unknown variant."""
    assert program("one", "--seeds", "2") == 0
    assert program.made() == ["one/base/0", "one/dapo/0", "one/base/1", "one/dapo/1"]
    assert program("two", "--seeds", "2") == 0
    assert program.made(4) == ["two/grpo/0", "two/grpo/1"]
    assert program("two", "--seeds", "2") == 0
    assert "6 runs are finished, 0 are to be run" in capsys.readouterr().out
    assert program("two", "--only", "nothing") == 2 and len(program.calls()) == 6


def wait_for(path):
    for _ in range(500):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


@pytest.mark.parametrize(
    ("jobs", "waiting", "damaged"), [("1", ["dapo"], False), ("1", ["dapo"], True), ("2", ["base", "dapo"], False)]
)
def test_ctrl_c_ends_the_runs_with_checkpoints_and_the_next_call_resumes_them(
    program, jobs, waiting, damaged, tmp_path
):
    """Ctrl-C during the second of four runs, or, with --jobs 2, during the first two at a time: it reaches each once, and
    no other begins. Then what was finished is not run again, what was stopped is resumed (begun again if its checkpoint
    is damaged), and the others follow."""
    folders = [tmp_path / f"runs/one/{variant}/seed-0" for variant in waiting]

    def interrupt():
        for folder in folders:
            wait_for(folder / "waiting")
        os.kill(os.getpid(), signal.SIGINT)

    program.script({f"one/{variant}/0": {"wait": 20, "damage": damaged} for variant in waiting})
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert program("one", "--seeds", "2", "--jobs", jobs) == 130
    thread.join()
    assert sorted(program.made()) == ["one/base/0", "one/dapo/0"]
    for folder in folders:
        assert Path(f"{folder}.log").read_text().count("stopped by 2") == 1
        assert not (folder / "finished.json").exists()
    program.script({})
    assert program("one", "--seeds", "2", "--jobs", jobs) == 0
    again = [f"one/{variant}/0" for variant in waiting]
    assert sorted(program.made(2)) == sorted([*again, "one/base/1", "one/dapo/1"])
    for words in (words for name, words in program.calls()[2:] if name in again):
        assert words[0] == ("--output_dir" if damaged else "--resume") and ("--loss" in words) == damaged


def test_a_killed_sweep_leaves_no_orphan_and_is_taken_up(program, tmp_path):
    """SIGKILL of the sweep itself: its run gets SIGTERM, saves, and lets go of the lock; the next call resumes it."""
    program.script({"one/base/0": {"wait": 20}})
    child = os.fork()
    if not child:
        os._exit(program("one", "--seeds", "1"))
    folder = tmp_path / "runs/one/base/seed-0"
    wait_for(folder / "waiting")
    assert program("one", "--seeds", "1") == 2  # in use
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(folder / "checkpoints/step-000003/state.json")
    time.sleep(0.1)
    assert program("one", "--seeds", "1") == 0
    assert program.made() == ["one/base/0", "one/base/0", "one/dapo/0"]
    assert program.calls()[1][1] == ["--resume", str(folder)]


def test_a_failed_run_is_named_and_tried_again(program, capsys):
    """Exit code 1 of one run: the others go on, the sweep ends with 1, the next call repeats only that run. Flags that
    train.py refuses (2) end the sweep."""
    program.script({"one/base/0": {"exit": 1}})
    assert program("one", "--seeds", "1") == 1 and "failed: " in capsys.readouterr().out
    program.script({"one/base/0": {"exit": 2}})
    assert program("one", "--seeds", "2") == 2
    program.script({})
    assert program("one", "--seeds", "1") == 0
    assert program.made() == ["one/base/0", "one/dapo/0", "one/base/0", "one/base/0"]


def test_a_folder_with_other_flags_is_refused(program, table, capsys):
    """The table was edited after the run: neither skipped nor overwritten."""
    assert program("one", "--seeds", "1") == 0
    object.__setattr__(table["one"], "setting", "--k 8")
    assert program("one", "--seeds", "1") == 2
    assert "--k 4, not 8" in capsys.readouterr().err and len(program.calls()) == 2


# ---- reports


def test_the_report_reads_what_is_finished(program, table, tmp_path, capsys):
    """One of two variants is finished, the other failed. The budget is the one that was given, not that of the setting,
    which it took the place of."""
    object.__setattr__(table["one"], "pass_rate", 0.3)
    program.script({"one/dapo/0": {"exit": 1}})
    words = ["--seeds", "1", "--results", str(tmp_path / "docs"), "--budget", "90k"]
    assert program("one", *words, reports=True) == 1
    assert (tmp_path / "docs/one.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "docs/one.md").read_text()
    assert f"written to {tmp_path / 'docs/one.md'}" in capsys.readouterr().out
    assert "1 finished runs in the setting `--k 4 --max_sampled_tokens 90000`: *base*. Left out: dapo seed 0 (f" in text
    assert "![one](one.png)" in text and "tokens to 0.3" in text


def test_a_learner_reads_what_changed_and_whether_it_can_be_seen(program, tmp_path, capsys):
    """As `make ablate`: six runs, in at most 25 lines the three figures of both and one sentence, and where the whole
    report is. All runs are alike, so that nothing can be seen."""
    assert program("one", "--seeds", "3", "--jobs", "2", reports=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25 and f"written to {tmp_path / 'runs/results/one.md'}" in lines
    [at] = [i for i, line in enumerate(lines) if line.startswith("dapo against base: ")]
    assert [line[2:24].strip() for line in lines[at + 1 : at + 4]] == ["pass rate at the end", "C_mid", "A"]
    assert lines[at + 1].split()[5:] == ["0.675", "[0.675,", "0.675]"] * 2 + ["+0.000", "[+0.000,", "+0.000]"]
    assert lines[at + 4].startswith("  It cannot be seen: no interval leaves out 0")


def test_the_file_of_curves_gives_the_reports_of_the_folders(program, tmp_path, capsys):
    """`all` makes three runs of two comparisons and reports both; the file that curves.py writes then gives both reports
    to the letter, with the folders gone. A row that was edited since is refused by name, and runs without a row are
    named."""
    assert program("all", "--seeds", "1", reports=True) == 0
    assert program.made() == ["one/base/0", "one/dapo/0", "two/grpo/0"]
    file, again, folder = str(tmp_path / "c.csv.gz"), tmp_path / "again", tmp_path / "runs"
    assert curves.main([str(folder), "--output", file]) == 0
    shutil.move(folder / "results", tmp_path / "results")
    shutil.rmtree(folder)
    words = ["all", "--curves", file, "--results", str(again)]
    assert ablate.main(words) == 0 and len(program.calls()) == 3
    for name in ("one.md", "two.md"):
        assert (again / name).read_text() == (tmp_path / "results" / name).read_text()
    ablate.COMPARISONS["one"].variants["dapo"] = "--loss dapo --eps_high 0.3"
    assert ablate.main(words) == 2
    assert "one/dapo/seed-0 has another --eps_high than its row" in capsys.readouterr().err
    ablate.COMPARISONS.pop("one")
    capsys.readouterr()
    assert ablate.main(words) == 0
    assert "in no comparison, so in no report: one/base/seed-0, one/dapo/seed-0" in capsys.readouterr().out
    assert ablate.main(["all", "--curves", str(tmp_path / "none.csv.gz")]) == 2
    assert "no readable" in capsys.readouterr().err


def test_a_sweep_goes_on_from_the_file_of_curves(program, tmp_path):
    """The folders of seed 0 are lost and their curves kept: of two seeds only seed 1 is run, and the report has both. A
    failed run of the file is run again."""
    program.script({"one/dapo/0": {"exit": 3}})
    assert program("one", "--seeds", "1") == 1
    file, folder = str(tmp_path / "c.csv.gz"), tmp_path / "runs"
    assert curves.main([str(folder), "--output", file]) == 0
    shutil.rmtree(folder)
    program.script({})
    assert program("one", "--seeds", "2", "--finished", file, reports=True) == 0
    assert sorted(program.made(2)) == ["one/base/1", "one/dapo/0", "one/dapo/1"]
    text = (folder / "results/one.md").read_text()
    assert "4 finished runs" in text and "In all rows: seeds 2;" in text
    with pytest.raises(SystemExit):
        program("one", "--finished", file, "--curves", file)


def test_all_names_a_comparison_with_a_baseline_only(program, tmp_path, capsys):
    """Of two, only the baseline that it shares with one is there: there is nothing to compare. Three has no more than
    that in its table, so it has its page."""
    assert program("one", "--seeds", "1") == 0
    ablate.COMPARISONS["two"].variants.pop("again")
    ablate.COMPARISONS["three"] = Comparison("third", {"base": ""}, setting="--k 4")
    program.script({"two/grpo/0": {"exit": 1}})
    assert program("all", "--seeds", "1", reports=True) == 1
    assert "two: 1 of 2 variants have finished runs, nothing to report" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "runs/results").glob("*.md")) == ["one.md", "three.md"]


def test_findings_on_the_other_laws_have_a_page_of_their_own():
    rows = [[name, *"bcdefghi"] for name in ("losses", "reuse", "batch", "grid-easy")]
    tables = {page: text.splitlines()[2:] for page, text in ablate.findings_by_page(rows).items()}
    assert [line.split(" | ")[0] for line in tables["findings"]] == ["| losses", "| batch"]
    assert [line.split(" | ")[0] for line in tables["other-laws"]] == ["| reuse", "| grid-easy"]
    assert ablate.findings_by_page(rows[:1]).keys() == {"findings"}
