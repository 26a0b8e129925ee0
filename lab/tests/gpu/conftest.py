"""What only a GPU can show: `make -C lab gpu-check` runs it test by test (lab/bench/gpu.py). Part 1 needs no vLLM.

    python -m pytest lab/tests/gpu -m gpu -x -v --device cuda
    python -m pytest lab/tests/gpu -m gpu -x -v --device cpu     # the same code with small numbers, on a machine without GPU

The figures stand in the report that --junitxml names, and with -s as lines of JSON in what is printed.
"""

import json

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="", choices=["cuda", "cpu"], help="of the checks in lab/tests/gpu")
    parser.addoption(
        "--engine_args", default="{}", help="vLLM's arguments, as JSON: those that let several run at once"
    )


@pytest.fixture
def device(request):
    device = request.config.getoption("--device", "")
    if not device:
        pytest.skip("needs --device: cuda, or cpu to try the code")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.fail("torch sees no GPU: the driver must be 580 or newer, for CUDA 13")
    return device


@pytest.fixture
def engine_args(request):
    """The flag and its value."""
    return ["--engine_args", request.config.getoption("--engine_args", "{}")]


@pytest.fixture
def figure(record_property):
    """`figure(name, value, below=1.0)` records a value and holds it to its bounds, which NaN never keeps."""

    def record(name, value, *, above=-torch.inf, below=torch.inf):
        record_property(name, value)
        print("\n" + json.dumps({"figure": name, "value": value, "holds": above < value < below}), flush=True)
        assert above < value < below, f"{name}: {value}, which must be above {above} and below {below}"

    return record
