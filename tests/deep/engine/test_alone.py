"""pipeline_rl.py, vllm_engine.py and generator.py, copied into an empty folder, drive a real engine:
docs/pipeline_rl_alone.py is what a borrower writes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.medium
def test_three_files_alone_drive_an_engine(tmp_path):
    """It samples, takes six batches, pushes new weights of a tied head in flight after each, prints the lags, at most
    k = 2, and ends; no other file of ours is there. vLLM writes nothing: neither its import, start and end here nor
    those of its process."""
    (tmp_path / "runtime").mkdir()
    for file in ("pipeline_rl.py", "vllm_engine.py", "generator.py", "docs/pipeline_rl_alone.py"):
        shutil.copy(ROOT / file, tmp_path / file.removeprefix("docs/"))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "pipeline_rl_alone.py"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    theirs = "Triton|model shards|Loading weights"  # transformers' bars
    noise = [line for line in done.stderr.splitlines() if line and not re.search(theirs, line)]
    assert noise == [] and len(done.stdout.splitlines()) == 6
    lines = re.findall(r"^step (\d): lag (\d\.\d\d), at most (\d)$", done.stdout, re.M)
    assert [int(step) for step, _, _ in lines] == list(range(6))
    largest = [int(most) for _, _, most in lines]
    assert largest[0] == 0 and max(largest) == 2
    assert len((ROOT / "docs" / "pipeline_rl_alone.py").read_text().splitlines()) <= 45
