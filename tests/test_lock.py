"""runtime/lock.py, and the default run where the system is not Linux."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import folder
from runtime.flags import Flags, UsageError
from runtime.folder import Folder, check_folder

SCRIPT = Path(__file__).with_name("as_on_windows.py")
SMALL = (
    "--max_steps 3 --batch_prompts 3 --rollouts 4 --k 1 --held_out 4 --max_num_seqs 16 --save_every 2 --eval_every 3"
)


def test_a_folder_has_one_holder(monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "LOCK_PATIENCE", 0.0)
    first, second = Folder(tmp_path), Folder(tmp_path)
    first.lock()
    with pytest.raises(UsageError, match="another run uses the folder"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_holds_no_lock(tmp_path):
    """Its file stays, and hinders neither a new run nor the next holder."""
    script = "import sys, time; from runtime.folder import Folder; Folder(sys.argv[1]).lock(); print(1, flush=True); time.sleep(99)"
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, cwd=SCRIPT.parents[1])
    assert process.stdout.readline() == b"1\n"
    process.kill()
    process.wait()
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    check_folder(Flags(output_dir=str(tmp_path)))
    Folder(tmp_path).lock()


@pytest.mark.medium
def test_three_steps_and_a_resume_as_on_windows(tmp_path, model):
    """Without fcntl, resource, SIGHUP, user ids and vLLM; no folder can be opened; text is ASCII unless a file says
    otherwise."""
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    run = tmp_path / "run"
    for flags in (
        f"--output_dir {run} --model {model} --zero_variance_filter false {SMALL}",
        f"--resume {run} --max_steps 4",
    ):
        command = [sys.executable, str(SCRIPT), *flags.split()]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, errors="replace")
        assert result.returncode == 0, result.stderr
    assert "resumed from" in result.stdout and (run / "model" / "config.json").exists()
    assert not (run / "lock").exists()
