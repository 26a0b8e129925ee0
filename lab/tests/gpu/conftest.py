"""What only a GPU can show: `make -C lab gpu-check`, up to the first failure. Part 1 needs no vLLM.

    python -m pytest lab/tests/gpu -m gpu -x -v --device cuda
    python -m pytest lab/tests/gpu -m gpu -x -v --device cpu     # the same code with small numbers, on a machine without GPU

The figures stand in the report that --junitxml names.
"""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="", choices=["cuda", "cpu"], help="of the checks in lab/tests/gpu")


@pytest.fixture
def device(request):
    device = request.config.getoption("--device", "")
    if not device:
        pytest.skip("needs --device: cuda, or cpu to try the code")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.fail("torch sees no GPU: the driver must be 580 or newer, for CUDA 13")
    return device


@pytest.fixture
def figure(record_property):
    """`figure(name, value, below=1.0)` records a value and holds it to its bounds, which NaN never keeps."""

    def record(name, value, *, above=-torch.inf, below=torch.inf):
        record_property(name, value)
        assert above < value < below, f"{name}: {value}, which must be above {above} and below {below}"

    return record
