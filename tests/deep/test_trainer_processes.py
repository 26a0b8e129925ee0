"""Several trainer processes on a CPU (gloo) train as one does: DDP and FSDP2, both accelerate's own.

Completions of 2 to 20 tokens after prompts that rows share, and several microbatches a rank; or two rows over three
ranks, so that one has nothing. The reference model of a KL term runs beside the policy.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.utils.other import get_free_port
from safetensors.torch import load_file

from lab import warm_start

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


STATIC = ["--nnodes", 1, "--rdzv_backend", "static", "--master_addr", "127.0.0.1"]


def family(job):
    """The processes of a job: the launcher's and its ranks', which are in sessions of their own."""
    launcher = psutil.Process(job.pid)
    return [launcher, *launcher.children(recursive=True)]


def open_ports(job):
    """Ports on which the job's processes listen on other addresses than loopback."""
    listening = [c.laddr for process in family(job) for c in process.net_connections("inet") if c.status == "LISTEN"]
    return {address.port for address in listening if address.ip != "127.0.0.1"}


def command(kind, processes, *arguments):
    """distributed_worker.py in this many processes, started as docs/gpu.md says."""
    fsdp2 = ["accelerate.commands.launch", "--config_file", ROOT / "configs" / "fsdp2.yaml"]
    launcher = {
        "alone": [],
        "ddp": ["torch.distributed.run", *STATIC, "--master_port", get_free_port(), "--nproc_per_node", processes],
        "fsdp2": [*fsdp2, "--main_process_port", 0, "--num_processes", processes],
    }[kind]
    arguments = [*launcher, ROOT / "tests" / "deep" / "distributed_worker.py", *arguments]
    return [sys.executable, *(["-m"] if launcher else []), *map(str, arguments)]


def run(kind, processes, out, *arguments):
    """What distributed_worker.py writes to `out` after its steps."""
    program = command(kind, processes, "steps", out, *arguments)
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shape = warm_start.ModelShape(hidden_size=32, head_dim=16, intermediate_size=48)
    tied = warm_start.new_model(shape, seed=0)
    (tied if request.param else with_own_head(tied)).save_pretrained(folder)
    return folder


def with_own_head(model):
    """The same model, but for a head of its own."""
    from transformers import Qwen3ForCausalLM

    model.config.tie_word_embeddings = False
    untied = Qwen3ForCausalLM(model.config)
    untied.load_state_dict(model.state_dict())
    return untied


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "processes"), [(14, 2), (2, 3)], ids=["uneven", "a rank with nothing"])
def test_two_processes_train_as_one(model, tmp_path, rows, processes):
    """After 5 steps weights, scores, loss and gradient norm agree to 1e-6 (float32), whatever the ranks hold; FSDP2 with
    gradient checkpointing. The program also goes on from a checkpoint, bit for bit."""
    flags = ["--model", model, "--lr", "0.01", "--tokens_per_microbatch", "64", "--kl_coef", "0.1"]
    alone = run("alone", 1, tmp_path / "one", rows, *flags)
    for kind, more in (("ddp", []), ("fsdp2", ["--gradient_checkpointing", "true"])):
        several = run(kind, processes, tmp_path / kind, rows, *flags, *more)
        assert several.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(several[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_processes_train_as_one_in_bfloat16(model, tmp_path):
    """Without FSDP2 the FP32 weights are kept by hand, and FSDP2's own mixed precision is the oracle: equal but for
    roundings of a gradient, which Adam at a rate of .01 makes 1e-4 of a weight at most. One process cuts other
    microbatches, whose bfloat16 gradients differ a little."""
    flags = ["--model", model, "--lr", "0.01", "--tokens_per_microbatch", "64", "--dtype", "bfloat16"]
    alone = run("alone", 1, tmp_path / "one", 14, *flags)
    by_hand, sharded = (run(kind, 2, tmp_path / kind, 14, *flags) for kind in ("ddp", "fsdp2"))
    assert by_hand.keys() == sharded.keys() == alone.keys()
    for name, tensor in sharded.items():
        torch.testing.assert_close(by_hand[name], tensor, rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(by_hand["scores"], alone["scores"], rtol=0, atol=0.1)
    assert by_hand["model.embed_tokens.weight"].dtype == torch.bfloat16


def end(job):
    """Kills a launcher that still runs, and its ranks."""
    if job.poll() is None:
        for process in family(job):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def stopped_and_resumed(command, tmp_path, stop, patience):
    """`command(*flags)` starts a job, which `stop(job)` ends after three steps, and then another that goes on from its
    checkpoint: every step once, and the generator has the trainer's weights at every probe. Returns the first one's log."""
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "log"
    flags = ["--held_out", 64, "--eval_samples", 1, "--eval_every", 50, "--output_dir", tmp_path / "run"]
    with log.open("w") as out:
        job = subprocess.Popen(command(*flags, "--max_steps", 500), env=ENVIRONMENT, stdout=out, stderr=out)
    try:
        until = time.monotonic() + patience
        while not (metrics.exists() and metrics.read_text().count('"grad_norm"') >= 3):
            assert job.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        stop(job)
        assert job.wait(timeout=patience) != 0
    finally:
        end(job)
    stopped = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir())
    again = command(*flags, "--resume", tmp_path / "run", "--max_steps", stopped + 2)
    done = subprocess.run(again, env=ENVIRONMENT, capture_output=True, text=True, timeout=2 * patience)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "step" in record]
    assert [record["step"] for record in steps] == list(range(1, stopped + 3))
    gaps = [record["logprob_gap"] for record in steps if "logprob_gap" in record]
    assert gaps and max(gaps) < 1e-6
    return log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "engine_dies"), [("ddp", True), ("fsdp2", True), ("fsdp2", False)])
def test_the_whole_job_on_two_processes_stops_and_goes_on(tmp_path, kind, engine_dies):
    """Rank 0 has the engine and the files. Its engine dies, or a SIGTERM goes to the group: both ranks save one
    checkpoint and end, and two processes go on from it."""

    def stop(job):
        assert len(open_ports(job)) == 1  # the launcher's store
        if engine_dies:
            [engine] = [process for process in family(job) if "Engine" in process.name()]
            engine.kill()
        else:
            job.send_signal(signal.SIGTERM)

    log = stopped_and_resumed(lambda *flags: command(kind, 2, "job", "--engine", "vllm", *flags), tmp_path, stop, 180)
    assert ("the generator failed: EngineDied" in log) == engine_dies
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_the_accelerate_files_are_read_by_accelerate():
    from accelerate.commands.config.config_args import load_config_from_file

    for name, kind in (("ddp", "MULTI_GPU"), ("fsdp2", "FSDP")):
        config = load_config_from_file(str(ROOT / "configs" / f"{name}.yaml"))
        assert config.distributed_type == kind and config.num_machines == 1 and config.mixed_precision == "no"
    assert config.fsdp_config["fsdp_version"] == 2
