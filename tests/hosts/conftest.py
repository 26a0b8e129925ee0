"""Two hosts for the tests of this folder."""

import os
from collections.abc import Iterator, Sequence

import pytest
from two_hosts import LACKS, Host, hosts


@pytest.fixture(scope="session")
def pair() -> Iterator[Sequence[Host]]:
    """The trainer's host, with Ray's head, and the engine's. Where hosts cannot be made, CI fails, and elsewhere these
    tests are left out."""
    if LACKS and "CI" not in os.environ:
        pytest.skip(f"tests of several hosts need {LACKS}")
    assert not LACKS, f"tests of several hosts need {LACKS}"
    with hosts(2) as (a, b):
        a.ray("start", "--head", "--num-gpus=0")
        b.ray("start", f"--address={a.address}:6379", "--num-gpus=1")
        yield a, b
