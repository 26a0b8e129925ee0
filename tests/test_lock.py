"""runtime/lock.py, and the default run where the system is not Linux."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.lock import lock, unlock

SCRIPT = Path(__file__).with_name("as_on_windows.py")
SMALL = (
    "--max_steps 3 --batch_prompts 3 --rollouts 4 --k 1 --held_out 4 --max_num_seqs 16 --save_every 2 --eval_every 3"
)


def test_a_folder_has_one_holder(tmp_path):
    descriptor = lock(tmp_path)
    assert descriptor is not None and lock(tmp_path) is None
    unlock(descriptor)
    assert lock(tmp_path) is not None and list(tmp_path.iterdir()) == []


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
