"""Two hosts for the tests of this folder. Where they cannot be made, leave these out by `--ignore tests/hosts`."""

from collections.abc import Iterator

import pytest
from ray_run import Pair
from two_hosts import LACKS, hosts


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """With Ray, and nothing in use."""
    assert not LACKS, f"tests of several hosts need {LACKS}; leave them out by --ignore tests/hosts"
    with hosts(2) as (a, b):
        made = Pair(a, b)
        a.ray("start", "--head", "--num-gpus=0")
        made.start_b()
        yield made
