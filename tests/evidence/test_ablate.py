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

WRITE_REPORTS = ablate.write_reports
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
    """(call ablate with these words, set what the stand-in does in a run, the runs and words of its calls so far)."""
    train, script = tmp_path / "train.py", tmp_path / "script.json"
    train.write_text(STAND_IN)
    script.write_text("{}")
    monkeypatch.setenv("STAND_IN", str(script))
    monkeypatch.setattr(sweep, "TRAIN", train)
    monkeypatch.setattr(ablate, "write_reports", lambda *of_all: None)  # seconds of fits

    def call(*words):
        return ablate.main([*words, "--output", str(tmp_path / "runs")])

    def calls():
        file = Path(f"{script}.calls")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return call, lambda script_of_runs: script.write_text(json.dumps(script_of_runs)), calls


def names(calls):
    return [name for name, _ in calls]


# ---- planning


def test_equal_flags_are_one_run_in_the_folder_of_the_first_comparison(table, tmp_path):
    """`same` of two is `base` of one, `again` is `dapo`; a flag given at its default changes nothing."""
    one, two = (plan(name, [0, 1], tmp_path, {}) for name in ("one", "two"))
    folders = [f"{owner}/seed-{seed}" for seed in (0, 1) for owner in ("two/grpo", "one/base", "one/dapo")]
    assert [str(run.folder.relative_to(tmp_path)) for run in two.values()] == folders
    assert two["same", 1] == one["base", 1] and len({*one.values(), *two.values()}) == 6
    table["two"].variants["grpo"] = "--loss cispo --eps_max 5"
    assert plan("two", [0], tmp_path, {})["grpo", 0].folder == one["base", 0].folder


def test_the_table_makes_no_run_twice(tmp_path):
    """As many folders as there are different sets of flags. Leave-one-out has 9 runs a seed, to which the losses add
    two caps of CISPO, another clip of DAPO and four of GSPO."""
    runs = {run for name in COMPARISONS for run in plan(name, [0], tmp_path, {}).values()}
    assert len({run.folder for run in runs}) == len({run.flags for run in runs}) == len(runs)
    first = set(plan("leave-one-out", [0], tmp_path, {}).values())
    assert len(first) == 9 and len(set(plan("losses", [0], tmp_path, {}).values()) - first) == 7


@pytest.mark.parametrize("name", list(COMPARISONS))
def test_every_row_is_accepted_by_train(name, tmp_path):
    """Flags that train.py refuses, or rounds, would show only after minutes. Baselines are rows."""
    from runtime.flag_checks import check_flags
    from runtime.flags import parse_flags

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
    """800k tokens, 1.5M tokens, 0.05 hours; one kind switches the other off."""
    assert ablate.budget_flags("800k") == {"max_sampled_tokens": 800_000, "max_hours": 0.0}
    assert ablate.budget_flags("1.5M")["max_sampled_tokens"] == 1_500_000
    assert ablate.budget_flags("900")["max_sampled_tokens"] == 900
    assert ablate.budget_flags("0.05h") == {"max_sampled_tokens": 0, "max_hours": 0.05}
    object.__setattr__(table["one"], "setting", "--k 4 --max_sampled_tokens 100")
    runs = plan("one", [0], tmp_path, ablate.budget_flags("0.05h"))
    words = runs["base", 0].command()
    assert words[words.index("--max_sampled_tokens") + 1] == "0" and words[words.index("--max_hours") + 1] == "0.05"
    for bad in ("0", "-5k", "many", "h", "nan", "inf"):
        with pytest.raises(UsageError):
            ablate.budget_flags(bad)


def test_an_unknown_variant_is_refused(program):
    call, _, calls = program
    assert call("two", "--only", "nothing") == 2 and calls() == []


# ---- the sweep


def test_finished_runs_are_never_run_again(program, capsys):
    """One has 2 variants x 2 seeds; then two adds only GRPO; a third call starts nothing."""
    call, _, calls = program
    assert call("one", "--seeds", "2") == 0
    assert names(calls()) == ["one/base/0", "one/dapo/0", "one/base/1", "one/dapo/1"]
    assert call("two", "--seeds", "2") == 0
    assert names(calls())[4:] == ["two/grpo/0", "two/grpo/1"]
    assert call("two", "--seeds", "2") == 0 and len(calls()) == 6
    assert "6 runs are finished, 0 are to be run" in capsys.readouterr().out


def wait_for(path):
    for _ in range(500):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


def ctrl_c_once(*paths):
    """A thread that sends this process Ctrl-C when all of these are there; it is to be waited for."""

    def interrupt():
        for path in paths:
            wait_for(path)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.parametrize("damaged", [False, True])
def test_ctrl_c_ends_the_run_with_a_checkpoint_and_the_next_call_resumes_it(program, damaged, tmp_path):
    """Ctrl-C during the second of four runs. Then: the first is not run again, the second is resumed (begun again if its
    checkpoint is damaged), the others follow."""
    call, script, calls = program
    script({"one/dapo/0": {"wait": 20, "damage": damaged}})
    thread = ctrl_c_once(tmp_path / "runs/one/dapo/seed-0/waiting")
    assert call("one", "--seeds", "2") == 130
    thread.join()
    assert names(calls()) == ["one/base/0", "one/dapo/0"]
    assert (tmp_path / "runs/one/dapo/seed-0.log").read_text().count("stopped by 2") == 1
    assert not (tmp_path / "runs/one/dapo/seed-0/finished.json").exists()
    script({})
    assert call("one", "--seeds", "2") == 0
    assert names(calls())[2:] == ["one/dapo/0", "one/base/1", "one/dapo/1"]
    assert calls()[2][1][0] == ("--output_dir" if damaged else "--resume")
    assert ("--loss" in calls()[2][1]) == damaged


def test_two_runs_at_a_time_both_get_ctrl_c(program, tmp_path):
    """With --jobs 2 the first two of four run together; Ctrl-C reaches both, no other begins, and both are resumed."""
    call, script, calls = program
    script({"one/base/0": {"wait": 20}, "one/dapo/0": {"wait": 20}})
    thread = ctrl_c_once(*(tmp_path / f"runs/one/{variant}/seed-0/waiting" for variant in ("base", "dapo")))
    assert call("one", "--seeds", "2", "--jobs", "2") == 130
    thread.join()
    assert sorted(names(calls())) == ["one/base/0", "one/dapo/0"]
    script({})
    assert call("one", "--seeds", "2", "--jobs", "2") == 0
    assert sorted(names(calls())[2:]) == ["one/base/0", "one/base/1", "one/dapo/0", "one/dapo/1"]
    assert [words[0] for _, words in calls()[2:]].count("--resume") == 2


def test_a_killed_sweep_leaves_no_orphan_and_is_taken_up(program, tmp_path):
    """SIGKILL of the sweep itself: its run gets SIGTERM, saves, and lets go of the lock; the next call resumes it."""
    call, script, calls = program
    script({"one/base/0": {"wait": 20}})
    child = os.fork()
    if not child:
        os._exit(call("one", "--seeds", "1"))
    wait_for(tmp_path / "runs/one/base/seed-0/waiting")
    assert call("one", "--seeds", "1") == 2  # in use
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(tmp_path / "runs/one/base/seed-0/checkpoints/step-000003/state.json")
    time.sleep(0.1)
    assert call("one", "--seeds", "1") == 0
    assert names(calls()) == ["one/base/0", "one/base/0", "one/dapo/0"]
    assert calls()[1][1] == ["--resume", str(tmp_path / "runs/one/base/seed-0")]


def test_a_failed_run_is_named_and_tried_again(program, capsys):
    """Exit code 1 of one run: the others go on, the sweep ends with 1, the next call repeats only that run. Flags that
    train.py refuses (2) end the sweep."""
    call, script, calls = program
    script({"one/base/0": {"exit": 1}})
    assert call("one", "--seeds", "1") == 1
    assert names(calls()) == ["one/base/0", "one/dapo/0"]
    assert "failed: " in capsys.readouterr().out
    script({"one/base/0": {"exit": 2}})
    assert call("one", "--seeds", "2") == 2
    assert names(calls())[2:] == ["one/base/0"]
    script({})
    assert call("one", "--seeds", "1") == 0
    assert names(calls())[3:] == ["one/base/0"]


def test_a_folder_with_other_flags_is_refused(program, table, capsys):
    """The table was edited after the run: neither skipped nor overwritten."""
    call, _, calls = program
    assert call("one", "--seeds", "1") == 0
    object.__setattr__(table["one"], "setting", "--k 8")
    assert call("one", "--seeds", "1") == 2
    assert "--k 4, not 8" in capsys.readouterr().err and len(calls()) == 2


# ---- reports


def test_the_report_alone_reads_what_is_finished(program, table, monkeypatch, tmp_path, capsys):
    """One of two variants is finished: its report and picture are written, and nothing is run. The other failed."""
    call, script, calls = program
    object.__setattr__(table["one"], "pass_rate", 0.3)
    script({"one/dapo/0": {"exit": 1}})
    assert call("one", "--seeds", "1") == 1
    monkeypatch.setattr(ablate, "write_reports", WRITE_REPORTS)
    assert call("one", "--seeds", "2", "--report", "--results", str(tmp_path / "docs")) == 0 and len(calls()) == 2
    assert (tmp_path / "docs/one.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "docs/one.md").read_text()
    assert f"written to {tmp_path / 'docs/one.md'}" in capsys.readouterr().out
    assert "1 finished runs. Seeds: base 0." in text
    assert "Left out: dapo seed 0 (failed (exit code 1)), base seed 1 (not run), dapo seed 1 (not run)." in text
    assert "![one](one.png)" in text and "tokens to 0.3" in text


def test_a_learner_reads_what_changed_and_whether_it_can_be_seen(program, monkeypatch, tmp_path, capsys):
    """As `make ablate`: six runs, in at most 25 lines the three figures of both and one sentence, and where the whole
    report is. All runs are alike, so that nothing can be seen."""
    call, _, _ = program
    monkeypatch.setattr(ablate, "write_reports", WRITE_REPORTS)
    assert call("one", "--seeds", "3", "--jobs", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25 and f"written to {tmp_path / 'runs/results/one.md'}" in lines
    [at] = [i for i, line in enumerate(lines) if line.startswith("dapo against base: ")]
    assert [line[2:24].strip() for line in lines[at + 1 : at + 4]] == ["pass rate at the end", "C_mid", "A"]
    assert lines[at + 1].split()[5:] == ["0.675", "[0.675,", "0.675]"] * 2 + ["+0", "[+0,", "+0]"]
    assert lines[at + 4].startswith("  It cannot be seen: no interval leaves out 0")


def test_the_report_names_the_budget_that_was_given(program, monkeypatch, tmp_path):
    """Not the one of the setting, which it took the place of."""
    call, _, _ = program
    monkeypatch.setattr(ablate, "write_reports", WRITE_REPORTS)
    assert call("one", "--seeds", "1", "--only", "base", "--budget", "90k") == 0
    text = (tmp_path / "runs/results/one.md").read_text()
    assert "Setting: `--k 4 --max_sampled_tokens 90000 --max_hours 0.0`" in text


def test_the_file_of_curves_gives_the_reports_of_the_folders(program, monkeypatch, tmp_path, capsys):
    """`all` makes three runs of two comparisons and reports both; the file that curves.py writes then gives both reports
    to the letter, with the folders gone. A row that was edited since is refused by name, and runs without a row are
    named."""
    call, _, calls = program
    monkeypatch.setattr(ablate, "write_reports", WRITE_REPORTS)
    assert call("all", "--seeds", "1") == 0
    assert names(calls()) == ["one/base/0", "one/dapo/0", "two/grpo/0"]
    file, again, folder = str(tmp_path / "c.csv.gz"), tmp_path / "again", tmp_path / "runs"
    assert curves.main([str(folder), "--output", file]) == 0
    shutil.move(folder / "results", tmp_path / "results")
    shutil.rmtree(folder)
    words = ["all", "--curves", file, "--results", str(again)]
    assert ablate.main(words) == 0 and len(calls()) == 3
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


def test_a_sweep_goes_on_from_the_file_of_curves(program, monkeypatch, tmp_path, capsys):
    """The folders of seed 0 are lost and their curves kept: of two seeds only seed 1 is run, and the report has both. A
    failed run of the file is run again."""
    call, script, calls = program
    script({"one/dapo/0": {"exit": 3}})
    assert call("one", "--seeds", "1") == 1
    file, folder = str(tmp_path / "c.csv.gz"), tmp_path / "runs"
    assert curves.main([str(folder), "--output", file]) == 0
    shutil.rmtree(folder)
    script({})
    monkeypatch.setattr(ablate, "write_reports", WRITE_REPORTS)
    assert call("one", "--seeds", "2", "--finished", file) == 0
    assert sorted(names(calls()[2:])) == ["one/base/1", "one/dapo/0", "one/dapo/1"]
    assert "base" in (folder / "results/one.md").read_text()
    with pytest.raises(SystemExit):
        call("one", "--finished", file, "--curves", file)


def test_all_names_a_comparison_with_a_baseline_only(program, monkeypatch, tmp_path, capsys):
    """Of two, only the baseline that it shares with one is there: there is nothing to compare."""
    call, _, _ = program
    assert call("one", "--seeds", "1") == 0
    ablate.COMPARISONS["two"].variants.pop("again")
    monkeypatch.setattr(ablate, "write_reports", WRITE_REPORTS)
    assert call("all", "--seeds", "1", "--report") == 0
    assert "two: 1 of 2 variants have finished runs, nothing to report" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "runs/results").glob("*.md")) == ["one.md"]


def test_findings_on_the_other_laws_have_a_page_of_their_own():
    rows = [[name, *"bcdefghi"] for name in ("losses", "reuse", "batch", "grid-easy")]
    tables = {page: text.splitlines()[2:] for page, text in ablate.findings_by_page(rows).items()}
    assert [line.split(" | ")[0] for line in tables["findings"]] == ["| losses", "| batch"]
    assert [line.split(" | ")[0] for line in tables["other-laws"]] == ["| reuse", "| grid-easy"]
    assert ablate.findings_by_page(rows[:1]).keys() == {"findings"}
