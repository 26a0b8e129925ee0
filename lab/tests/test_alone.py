"""The lab's files that others copy: each works in an empty folder, forecast.py with curves.py beside it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1]

# The files that are copied, and what the first of them prints as a script, among other things.
COPIED = {
    ("law/forecast.py", "law/curves.py"): "usage:",
    ("law/other_laws.py",): "1,500 completions: 32 rollouts, 2 prompts, 23 updates",
}


@pytest.mark.parametrize("names", COPIED, ids=lambda names: names[0])
def test_works_in_an_empty_folder(tmp_path, names):
    for name in names:
        shutil.copy(LAB / name, tmp_path)
    script = Path(names[0]).name
    arguments = ["--help"] if COPIED[names] == "usage:" else []
    command = [sys.executable, "-B", script, *arguments]  # Python looks for imports beside the script
    printed = subprocess.check_output(command, text=True, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert COPIED[names] in printed
    assert {path.name for path in tmp_path.iterdir()} == {Path(name).name for name in names}
