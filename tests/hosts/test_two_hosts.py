"""A run on two hosts: Ray's head and train.py on the one, the engine's worker on the other."""

import sys
import time
from pathlib import Path

import pytest
from ray_run import RAY, Launched, Pair

HERE = Path(__file__).parent


def check_nothing_is_left(pair: Pair, before: list) -> None:
    """Within the seconds that Ray takes to end a job's processes."""
    end = time.monotonic() + 20
    while pair.left() != before and time.monotonic() < end:
        time.sleep(0.5)
    assert pair.left() == before


@pytest.mark.medium
def test_twenty_steps(pair: Pair, tmp_path: Path) -> None:
    """The command of docs/gpu.md. The log-probs of both sides agree to 1e-6 after each of twenty updates; the weights
    check passes; nothing is left on either host."""
    before = pair.left()
    run = Launched(pair, tmp_path / "run", "--max_steps", 20)
    assert run.end() == 0, run.said[-3000:]
    steps = run.records()
    assert [record["step"] for record in steps] == list(range(1, 21))
    gaps = [record["logprob_gap"] for record in steps if "logprob_gap" in record]  # a step without an update has none
    assert len(gaps) >= 15 and max(gaps) < 1e-6
    check_nothing_is_left(pair, before)


@pytest.mark.slow
def test_a_stale_head_ends_the_run(pair: Pair, tmp_path: Path) -> None:
    """It is left so on purpose: the log-probs of the two sides drift apart, and the weights check ends the run."""
    flags = ["--engine_args", RAY.replace("}", ', "worker_extension_cls": "stale_head.Receiver"}')]
    run = Launched(pair, tmp_path / "run", "--max_steps", 40, *flags)
    assert run.end() == 1 and "trainer and generator differ by" in run.said, run.said[-3000:]
    assert "Traceback" not in run.said


@pytest.mark.slow
def test_samples_and_versions(pair: Pair, tmp_path: Path) -> None:
    """With the first weights, tokens and log-probs are byte for byte a local engine's. While completions run, ten
    updates: versions are exact to a token."""
    before = pair.left()
    said = pair.a.run(sys.executable, HERE / "engine_on_ray.py", tmp_path / "model", timeout=240)
    assert "as a local engine's" in said
    check_nothing_is_left(pair, before)
