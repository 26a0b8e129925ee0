"""Several trainer processes on a CPU (gloo) train as one does: DDP and FSDP2, both accelerate's own; and what rank 0 makes
or raises, every rank gets.

Rows of 2 to 40 tokens and several microbatches a rank, or two rows over three ranks, so that one has nothing; the
reference model of a KL term runs beside the policy.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import accelerate.utils
import psutil
import pytest
import torch
from accelerate.utils.other import get_free_port
from safetensors.torch import load_file

from runtime.flags import Flags
from runtime.folder import Folder
from runtime.generator import EngineFailed
from runtime.ranks import Ranks, SharedGenerator
from runtime.recorder import Recorder
from runtime.run import save
from tasks import warm_start

ROOT = Path(__file__).parent.parent
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
    arguments = [*launcher, ROOT / "tests" / "distributed_worker.py", *arguments]
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
    shape = replace(warm_start.SHAPES["xs"], hidden_size=32, head_dim=16, intermediate_size=48)
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
    single roundings of a weight. One process cuts other microbatches, whose bfloat16 gradients differ a little."""
    flags = ["--model", model, "--lr", "0.01", "--tokens_per_microbatch", "64", "--dtype", "bfloat16"]
    alone = run("alone", 1, tmp_path / "one", 14, *flags)
    by_hand, sharded = (run(kind, 2, tmp_path / kind, 14, *flags) for kind in ("ddp", "fsdp2"))
    assert by_hand.keys() == sharded.keys() == alone.keys()
    for name, tensor in sharded.items():
        torch.testing.assert_close(by_hand[name], tensor, rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(by_hand["scores"], alone["scores"], rtol=0, atol=0.1)
    assert by_hand["model.embed_tokens.weight"].dtype == torch.bfloat16


def end(job):
    """Kills a launcher that still runs, and its ranks."""
    if job.poll() is None:
        for process in family(job):
            with suppress(psutil.NoSuchProcess):
                process.kill()


TRANSFER = ["--weight_channel", "nccl", "--engine_args", '{"worker_extension_cls": "transfers_on_cpu.Receiver"}']


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "transfer"), [("ddp", []), ("fsdp2", []), ("fsdp2", TRANSFER)])
def test_the_whole_job_on_two_processes_stops_and_goes_on(tmp_path, kind, transfer):
    """Rank 0 has the engines and the files. Its engine dies (weights by file), or a SIGTERM goes to the group: both
    ranks save one checkpoint and end, and two processes go on from it: every step once, and the generator has the
    trainer's weights at every probe."""
    flags = [*transfer, "--held_out", "64", "--eval_samples", "1", "--eval_every", "50"]
    flags += ["--output_dir", tmp_path / "run"]
    if transfer:  # in vLLM's CPU build a transfer leaves a tied head behind
        from transformers import Qwen3ForCausalLM

        built_in = Qwen3ForCausalLM.from_pretrained(warm_start.warm_start(ROOT / "runs" / "cache"))
        with_own_head(built_in).save_pretrained(tmp_path / "model")
        flags += ["--model", tmp_path / "model"]
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "log"
    with log.open("w") as out:
        program = command(kind, 2, "job", *flags, "--max_steps", 500)
        job = subprocess.Popen(program, env=ENVIRONMENT, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 180
        while not (metrics.exists() and metrics.read_text().count('"grad_norm"') >= 3):
            assert job.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        assert len(open_ports(job)) == 1  # the launcher's store
        if transfer:
            job.send_signal(signal.SIGTERM)
        else:
            [engine] = [process for process in family(job) if "Engine" in process.name()]
            engine.kill()
        assert job.wait(timeout=60) != 0
    finally:
        end(job)
    assert ("the generator failed: EngineDied" in log.read_text()) == (not transfer)
    stopped = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir())
    again = command(kind, 2, "job", *flags, "--resume", tmp_path / "run", "--max_steps", stopped + 2)
    done = subprocess.run(again, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "step" in record]
    assert [record["step"] for record in steps] == list(range(1, stopped + 3))
    gaps = [record["logprob_gap"] for record in steps if "logprob_gap" in record]
    assert gaps and max(gaps) < 1e-6
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_the_accelerate_files_are_read_by_accelerate():
    from accelerate.commands.config.config_args import load_config_from_file

    for name, kind in (("ddp", "MULTI_GPU"), ("fsdp2", "FSDP")):
        config = load_config_from_file(str(ROOT / "configs" / f"{name}.yaml"))
        assert config.distributed_type == kind and config.num_machines == 1 and config.mixed_precision == "no"
    assert config.fsdp_config["fsdp_version"] == 2


def on_two_ranks(monkeypatch, work) -> list:
    """`work(ranks)` on rank 0 and on rank 1 at the same time: what each returned or raised."""
    sent, barrier, rank = {}, threading.Barrier(2, timeout=5), threading.local()

    def broadcast_object_list(values):
        if rank.number == 0:
            sent["values"] = values
        barrier.wait()
        received = list(sent["values"])
        barrier.wait()
        return received

    def run(number):
        rank.number = number
        try:
            return work(Ranks(SimpleNamespace(is_main_process=number == 0, num_processes=2)))
        except Exception as error:
            return error

    monkeypatch.setattr(accelerate.utils, "broadcast_object_list", broadcast_object_list)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


def test_what_rank_0_makes_or_raises_reaches_every_rank(monkeypatch):
    calls = []
    assert on_two_ranks(monkeypatch, lambda ranks: ranks.from_main(lambda: calls.append(1) or 7)) == [7, 7]
    assert calls == [1]
    results = on_two_ranks(monkeypatch, lambda ranks: ranks.from_main(lambda: 1 / 0))
    assert [type(error) for error in results] == [ZeroDivisionError] * 2
    monkeypatch.setattr(accelerate.utils, "broadcast_object_list", lambda values: 1 / 0)  # one process asks nobody
    assert Ranks(SimpleNamespace(is_main_process=True, num_processes=1)).from_main(lambda: 3) == 3


def test_other_ranks_save_without_a_clock_and_a_generator(tmp_path):
    """Only rank 0 has them: a save that asked for them on every rank left rank 0 waiting, and half a checkpoint."""
    saved, accelerator = [], SimpleNamespace(is_main_process=False, num_processes=1)
    accelerator.save_state, accelerator.wait_for_everyone = saved.append, lambda: None
    ranks, folder = Ranks(accelerator), Folder(tmp_path)
    shared = SharedGenerator(None, SimpleNamespace(), ranks)
    recorder = Recorder(Flags(), ranks, folder, None, None, shared)
    trainer = SimpleNamespace(weights_are_finite=lambda: True)
    run = SimpleNamespace(ranks=ranks, folder=folder, recorder=recorder, generator=shared, trainer=trainer)
    assert save(run) is None and len(saved) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_every_rank_gathers_the_weights_and_hears_of_a_push_that_failed(monkeypatch, fails):
    """Rank 0 gathers within the generator's push, rank 1 by its channel. A push that failed is raised by the next one's
    `settle`, on both, before anything is gathered."""
    calls, generator = [], SimpleNamespace(settle=lambda: 1 / (not fails))
    generator.push = lambda weights, version, release: calls.append(("push", version, release))
    generator.release = lambda count: calls.append(("release", count))

    def work(ranks):
        channel = SimpleNamespace(prepare=lambda weights: calls.append(("prepare", weights)), trainer_waits=True)
        shared = SharedGenerator(generator if ranks.main else None, channel, ranks)
        shared.release(2)
        shared.push("weights", 5, release=3)

    results = on_two_ranks(monkeypatch, work)
    assert [type(error) for error in results] == [ZeroDivisionError if fails else type(None)] * 2
    gathered = [] if fails else [("prepare", "weights"), ("push", 5, 3)]
    assert sorted(calls) == [*gathered, ("release", 2)]


@pytest.mark.parametrize("transfer", [True, False])
@pytest.mark.parametrize("starts", [True, False])
def test_every_rank_hears_of_an_engine_that_does_not_start(monkeypatch, transfer, starts):
    """Before a transfer, in which rank 1 would wait for rank 0; a file is written before the engine starts."""
    gathered = []

    def work(ranks):
        def prepare(weights):
            if transfer:
                channel.meet()
            gathered.append(weights)

        def start(weights, version):
            if not transfer:
                prepare(weights)
            if not starts:
                raise EngineFailed("vLLM does not start")
            if transfer:
                prepare(weights)

        channel = SimpleNamespace(prepare=prepare)
        SharedGenerator(SimpleNamespace(start=start) if ranks.main else None, channel, ranks).start("weights", 0)

    results = on_two_ranks(monkeypatch, work)
    assert [str(error) for error in results] == ["None" if starts else "vLLM does not start"] * 2
    assert gathered == ["weights"] * (2 if starts or not transfer else 0)
