"""A run on two hosts: Ray's head and train.py on the one, the engine's worker on the other."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from two_hosts import LACKS, Host, two_hosts

from runtime.folder import Folder

FLAGS = "--engine lab.hosts:RayEngine --batch_prompts 8 --rollouts 8 --held_out 64 --eval_every 10"


def launched(host: Host, folder: Path, *flags: Any) -> subprocess.Popen:
    """train.py there, with an engine that Ray places. It prints into `folder`.log."""
    with folder.with_suffix(".log").open("a") as log:
        return host.start(sys.executable, "train.py", *FLAGS.split(), *flags, stdout=log, stderr=log)


def steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in Folder(folder).read("metrics.jsonl") if "step" in record]


@pytest.mark.slow  # two minutes of both processors; test_hosts.py has what Ray is asked, and how weights travel
def test_a_run_on_two_hosts(tmp_path: Path) -> None:
    """The command of lab/hosts/README.md. A dead worker ends it with a checkpoint and exit code 75, and a new process
    goes on: no step is lost or made twice, and the log-probs of both sides agree whenever they were compared. Where hosts
    cannot be made, this test is left out."""
    if LACKS:
        pytest.skip(f"tests of several hosts need {LACKS}")
    folder, count = tmp_path / "run", 40
    output = folder.with_suffix(".log")
    with two_hosts() as (here, there):
        here.ray("--head", "--num-gpus=0", "--include-dashboard=false")
        there.ray(f"--address={here.address}:6379", "--num-gpus=1")
        run = launched(here, folder, "--output_dir", folder, "--max_steps", count)
        end = time.monotonic() + 300
        while run.poll() is None and len(steps(folder)) < 5 and time.monotonic() < end:
            time.sleep(0.1)
        there.run("pkill", "-KILL", "-f", "^ray::RayWorker")  # it sees the processes of that host only
        assert run.wait(100) == 75 and "EngineDied" in output.read_text(), output.read_text()[-3000:]
        assert 5 <= len(steps(folder)) < count
        assert launched(here, folder, "--resume", folder).wait(300) == 0, output.read_text()[-3000:]
    assert [record["step"] for record in steps(folder)] == list(range(1, count + 1))
    gaps = [record["logprob_gap"] for record in steps(folder) if "logprob_gap" in record]
    assert len(gaps) >= 2 and max(gaps) < 1e-6
