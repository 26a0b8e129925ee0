"""`make test` runs on the CPU build of vLLM, also on a machine with an NVIDIA GPU, and never in the GPU's environment."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
REQUIREMENTS = ("requirements.txt", "requirements-cpu.txt", "requirements-dev.txt")


def commands(target: str, folder: Path, nvidia: bool, *variables: str) -> str:
    """What `make target` would run in a fresh checkout, with a false `nvidia-smi` on PATH or without any."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in REQUIREMENTS:
        (folder / name).touch()
    programs = folder / "bin"
    programs.mkdir()
    for name in ("sh", "make", "python3"):
        (programs / name).symlink_to(shutil.which(name))
    if nvidia:
        (programs / "nvidia-smi").symlink_to(shutil.which("true"))
    return subprocess.check_output(
        ["make", "-n", target, *variables], cwd=folder, env={"PATH": str(programs)}, text=True
    )


def test_tests_have_an_environment_of_their_own_beside_a_gpus(tmp_path):
    said = commands("test", tmp_path, nvidia=True)
    assert ".venv-cpu/bin/pip install -q -r requirements-cpu.txt" in said
    assert "pip uninstall -q -y torchvision" in said
    assert "requirements.txt" not in said and ".venv/" not in said
    assert said.index("-r requirements-cpu.txt") < said.index(".venv-cpu/bin/pip install -q -r requirements-dev.txt")
    assert said.rstrip().endswith('.venv-cpu/bin/python -m pytest -n 2 -m "not slow and not medium and not gpu"')


def test_the_demo_takes_the_gpus_build_where_there_is_one(tmp_path):
    said = commands("demo", tmp_path, nvidia=True)
    assert ".venv/bin/pip install -q -r requirements.txt" in said
    assert not any(words in said for words in ("requirements-cpu.txt", "pip uninstall", "requirements-dev.txt"))


def test_without_a_gpu_there_is_one_environment(tmp_path):
    said = commands("test", tmp_path, nvidia=False)
    assert ".venv/bin/pip install -q -r requirements-cpu.txt" in said and ".venv-cpu" not in said


def test_a_log_is_forecast_without_torch(tmp_path):
    said = commands("fit", tmp_path, False, "LOG=a.csv", "FLAGS=--x tokens")
    assert "requirements" not in said and said.rstrip().endswith(".venv-law/bin/python tools/fit.py a.csv --x tokens")


def test_tests_see_no_gpu(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in REQUIREMENTS:
        (tmp_path / name).touch()
    for name in (".venv", ".venv-cpu"):  # whose Python says what it sees
        (tmp_path / name / "bin").mkdir(parents=True)
        python = tmp_path / name / "bin" / "python"
        python.write_text("#!/bin/sh\nenv\n")
        python.chmod(0o755)
        (tmp_path / name / "installed").touch()
        (tmp_path / name / "installed-dev").touch()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"}
    said = subprocess.run(["make", "test"], cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert "\nCUDA_VISIBLE_DEVICES=\n" in said


def test_the_workflow_runs_what_ci_runs():
    """One list of checks, in `.ci/run`; each of its lines is a target of the Makefile."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert workflow.count("- run:") == 1 and '- run: sudo -E env "PATH=$PATH" bash .ci/run' in workflow
    targets = [line.split()[1] for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    makefile = (ROOT / "Makefile").read_text().splitlines()
    assert {"test", "lint", "typecheck"} <= set(targets)
    assert all(any(line.startswith(f"{target}:") for line in makefile) for target in targets)


def test_the_mutants_tests_find_what_they_import():
    """mutmut runs them in a folder that has the files that it was told to copy, and tests/."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    there = {*told["source_paths"], *told["also_copy"]}
    for name in [*told["pytest_add_cli_args_test_selection"], "tests/fake_engine.py", "tests/scorer_worker.py"]:
        imported = re.findall(r"^\s*(?:from|import) (\w+)", (ROOT / name).read_text(), re.M)
        assert {f"{module}.py" for module in imported if (ROOT / f"{module}.py").exists()} <= there, name
