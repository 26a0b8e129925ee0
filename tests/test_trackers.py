"""--report_to: what TensorBoard, trackio and wandb get of a run. The last two are stand-ins: they are optional."""

import sys
from types import SimpleNamespace

import accelerate.tracking
import numpy as np
import pytest
from accelerate.utils import LoggerType

from runtime import flag_checks
from runtime.flag_checks import check_flags
from runtime.flags import Flags, UsageError

pytestmark = pytest.mark.long


@pytest.mark.parametrize("package", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_one_sentence(monkeypatch, package):
    """accelerate passes over it without a word."""
    monkeypatch.setattr(flag_checks, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"--report_to {package}: pip install {package}, or leave it out"):
        check_flags(Flags(output_dir="/nowhere/run", report_to=package))


@pytest.fixture
def tracker(monkeypatch):
    """Makes a package `name` with the parts of its interface that accelerate and we call; what they get is in `.calls`."""

    def make(name: str) -> SimpleNamespace:
        calls = []
        run = SimpleNamespace(
            log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append(("finish", {}))
        )
        package = SimpleNamespace(
            calls=calls, config=SimpleNamespace(update=lambda values, **_: calls.append(("config", values))),
            init=lambda **options: calls.append(("init", options)) or run, Image=lambda pixels: pixels,
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.setattr(flag_checks, "find_spec", lambda _: True)
        monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType(name)])
        return package

    return make


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_gets_flags_steps_evaluations_and_the_picture(tracker, program, tmp_path, name):
    """Two steps, evaluated at 0 and 2. Steps never go back: wandb drops records that do. wandb's files are in the run's
    folder."""
    package, folder = tracker(name), str(tmp_path / "run")
    assert program("--max_steps", "2", "--report_to", name)[0] == 0
    (first, init), (second, config), *logged, picture, last = package.calls
    more = {"dir": folder} if name == "wandb" else {}
    assert (first, init) == ("init", {"project": "scalerl", "name": folder} | more)
    assert second == "config" and config["max_steps"] == 2 and last == ("finish", {})
    assert [(step, "grad_norm" in values, "eval/pass_rate" in values) for step, values in logged] == [
        (0, False, True), (1, True, False), (2, True, False), (2, False, True),
    ]  # fmt: skip
    assert not any("step" in values for _, values in logged)  # a name that trackio keeps for itself
    step, values = picture
    [pixels] = np.asarray(values["curve"]).reshape(-1, 3, 4, 3)
    assert step == 2 and pixels.dtype == np.uint8


def test_a_resumed_run_is_another_one_there(tracker, program, tmp_path):
    """It may have gone back to a checkpoint, and repeats steps that were logged."""
    package = tracker("trackio")
    program("--max_steps", "2", "--report_to", "trackio")
    del package.calls[:]
    assert program("--resume", "--max_steps", "3")[0] == 0
    assert package.calls[0] == ("init", {"project": "scalerl", "name": f"{tmp_path / 'run'} from step 2"})
    assert [step for step, _ in package.calls[2:-1]] == [3, 3, 3]  # the step, its evaluation, the picture


def test_tensorboard_shows_the_curve(program, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert program("--max_steps", "2", "--report_to", "tensorboard")[0] == 0
    events = EventAccumulator(str(tmp_path / "run" / "scalerl")).Reload()
    assert [event.step for event in events.Scalars("eval/pass_rate")] == [0, 2]
    assert [event.step for event in events.Scalars("grad_norm")] == [1, 2]
    [image] = events.Images("curve")
    assert (image.step, image.width, image.height) == (2, 4, 3)
