"""recipe.py learns, and a step that trains on nothing makes no version."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import recipe
from generator import Generator

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # CI pastes README's block, which runs all of it
@pytest.mark.timeout(600)
def test_its_first_steps_learn():
    """Measured with seed 0: from .02 to .4. Too few points for a fit, which it says."""
    command = [sys.executable, "recipe.py", "24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    points = re.findall(r"^step +(\d+) +([\d,]+) tokens  right ([\d.]+)   7 a \+8 b -9 <think> ", done.stdout, re.M)
    assert [int(step) for step, *_ in points] == [0, 8, 16, 24]
    assert float(points[0][2]) < 0.1 and float(points[-1][2]) > 0.2
    assert "too few" in done.stdout


@pytest.mark.timeout(300)
def test_a_batch_without_variance_makes_no_version(monkeypatch, capsys):
    """Steps 1 and 3 of five have groups with equal rewards only. If the steps were counted as versions, the weights
    pushed next would skip a number, and tokens would seem older than they are."""
    calls, pushed, released = iter(range(5)), [], []
    varied, push, release = recipe.has_variance, Generator.push, Generator.release

    def has_variance(rewards, group_ids):
        keep = varied(rewards, group_ids)
        return torch.zeros_like(keep) if next(calls) in (1, 3) else keep

    def record_push(self, weights, version, release):
        pushed.append((version, release))
        push(self, weights, version, release)

    def record_release(self, count):
        released.append(count)
        release(self, count)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(recipe, "has_variance", has_variance)
    monkeypatch.setattr(Generator, "push", record_push)
    monkeypatch.setattr(Generator, "release", record_release)
    recipe.train(steps=5)
    assert pushed == [(1, 8), (2, 8), (3, 8)] and released == [8, 8]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step")] == ["0", "5"]
