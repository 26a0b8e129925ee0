"""What all tests of the lab share: random examples are the same every time, and torch has one thread."""

import pytest
from hypothesis import settings

settings.register_profile("lab", derandomize=True, database=None, deadline=None, max_examples=50)
settings.load_profile("lab")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """As in tests/conftest.py."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny untrained model."""
    from scripted import small_model

    return small_model(tmp_path_factory.mktemp("model"))
