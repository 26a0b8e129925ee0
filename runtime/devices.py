"""Which devices the engines use, and by which channel weights reach them: asked before the model is loaded."""

import os
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch

from fp32_head import GENERATOR_ARGS
from runtime.flags import EngineFlags, ModelFlags, UsageError, parsed_engine_args
from runtime.run_folder import Record
from runtime.weights import Channel, FileWeights, MessageWeights, TransferWeights

if TYPE_CHECKING:  # its import takes seconds
    from accelerate import Accelerator

VLLM_SHARE = 0.92  # of a GPU's memory that an engine takes by vLLM's default
SHARED = 0.35  # on a GPU on which a trainer runs, too: vLLM's would starve it
RECEIVING = 0.85  # on a GPU of its own with `nccl`: the buffers of a transfer come on top


class Placement(NamedTuple):
    """Where the engines are, and how weights reach them."""

    channel: str  # file, ipc, nccl or message
    devices: list[int]  # this host's GPUs that engines use; none if there is none, or Ray places the engines
    share: float  # of a GPU's memory that an engine takes


def place(flags: EngineFlags) -> Placement:
    """Raises UsageError for devices and channels that cannot work."""
    trainers, count = trainers_here(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        check_driver()
        if flags.generator_devices or flags.weight_channel in ("ipc", "nccl"):
            raise UsageError("--generator_devices and --weight_channel ipc, nccl need GPUs, and this host has none.")
    elif flags.engine == "torch":
        raise UsageError("--engine torch is for a CPU: leave it out, or hide the GPUs by CUDA_VISIBLE_DEVICES=''.")
    elif trainers > count:
        raise UsageError(f"{trainers} trainer processes need a GPU each: give the launcher --num_processes {count}.")
    devices = generator_devices(flags, count, trainers) if count else []
    shared = [device for device in devices if device < trainers]
    remote = on_ray(flags)
    automatic = "message" if remote and not count else "file" if not count else "ipc" if shared else "nccl"
    channel = automatic if flags.weight_channel == "auto" else flags.weight_channel
    if channel == "nccl" and shared:
        raise UsageError("--weight_channel nccl needs --generator_devices that no trainer process uses; or use `ipc`.")
    if channel == "ipc" and shared != devices:
        raise UsageError(
            f"--weight_channel ipc needs engines on the trainers' own GPUs, 0 to {trainers - 1}, but "
            f"--generator_devices are {devices}; use `nccl` and other GPUs, or `file`."
        )
    if remote and channel not in ("nccl", "message"):
        raise UsageError(f"--weight_channel {channel} reaches no engine that Ray places; use `nccl` or `message`.")
    if remote and os.environ.get("RANK", "0") == "0":
        check_ray()
    usual = SHARED if shared else RECEIVING if channel == "nccl" else VLLM_SHARE
    return Placement(channel, devices, engine_options(flags).get("gpu_memory_utilization", usual))


def check_ray() -> None:
    """Its package is installed, and VLLM_HOST_IP, where workers meet the trainer, is this host's. Raises UsageError."""
    if not find_spec("ray"):
        raise UsageError("--engine_args with Ray: pip install -r requirements-ray.txt on every host, or leave it out.")
    address = os.environ.get("VLLM_HOST_IP", "")
    try:
        with socket.socket() as probe:
            probe.bind((address or "nowhere.invalid", 0))
    except OSError as error:
        raise UsageError(
            f"VLLM_HOST_IP={address} is no address of this host, and engines that Ray places meet the trainer there; "
            "set it to what this host's `ray start` has as --node-ip-address."
        ) from error


def trainers_here() -> int:
    """Trainer processes on this host; they use its first devices."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_driver() -> None:
    """With a driver that is too old torch finds no GPU, and the run would go on without. Raises UsageError."""
    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return  # no GPU is wanted
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "too old" in str(error):
            raise UsageError(
                f"the NVIDIA driver is too old for torch {torch.__version__}, which is built for CUDA "
                f"{torch.version.cuda}; install 580 or newer, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
            ) from error


def new_channel(flags: EngineFlags, accelerator: "Accelerator") -> tuple[Channel, dict[str, str]]:
    """(the weight channel of this rank, the environment that shows the engine its devices). Raises UsageError."""
    placement, rank = place(flags), accelerator.process_index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [visible[i] if len(visible) > i and visible[i] else str(i) for i in placement.devices]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}
    if placement.channel in ("file", "message"):
        channel: Channel = MessageWeights(rank) if placement.channel == "message" else FileWeights(rank)
    else:
        address = os.environ["VLLM_HOST_IP"] if on_ray(flags) else "127.0.0.1"
        channel = TransferWeights(placement.channel, rank, engine_workers(flags), address)
    if placement.share in (SHARED, RECEIVING) and "gpu_memory_utilization" not in engine_options(flags):
        channel.engine_args["gpu_memory_utilization"] = placement.share
        if rank == 0:
            print(f"an engine takes {placement.share} of its GPU; `gpu_memory_utilization` in --engine_args wins")
    return channel, environment


def generator_devices(flags: EngineFlags, count: int, trainers: int) -> list[int]:
    """Which of this host's `count` GPUs the engines use, of which the first `trainers` train: those given, else free
    ones, else the trainers' own; none if Ray places the engines. Raises UsageError."""
    if on_ray(flags):
        return []
    needed = engine_workers(flags)
    if flags.generator_devices:
        found = [int(x) if x.strip().isdigit() else -1 for x in flags.generator_devices.split(",")]
    else:
        found = list(range(trainers, trainers + needed) if trainers + needed <= count else range(min(needed, count)))
    if len(set(found)) != needed or not all(0 <= device < count for device in found):
        raise UsageError(
            f"--generator_devices {flags.generator_devices or found}: --tensor_parallel x --data_parallel need "
            f"{needed} different devices, and this host has {count}, 0 to {count - 1}."
        )
    return found


def devices_in_use(flags: EngineFlags, trainers: int) -> int:
    """Devices that train, `trainers` on all hosts, or sample: accelerators, or CPU cores. Idle ones do not count."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return min(os.cpu_count() or 1, trainers * torch.get_num_threads() + engine_workers(flags))
    engines = generator_devices(flags, gpus, trainers_here())  # none if Ray places them, on any host
    return trainers + (sum(device >= trainers_here() for device in engines) if engines else engine_workers(flags))


# ---------------------------------------------------------------------------------------------- vLLM's own arguments

OWN_FLAG = {name: name for name in ("model", "dtype", "seed", "max_num_seqs")}  # of what the trainer must know, too
OWN_FLAG |= {f"{name}_size": name for name in ("tensor_parallel", "data_parallel")} | {"max_model_len": "max_budget"}


def engine_options(flags: EngineFlags) -> Record:
    """The engine arguments of vLLM that the flags ask for, those of an FP32 head among them. Raises UsageError for
    arguments that cannot be read, or that contradict --fp32_head."""
    given = parsed_engine_args(flags.engine_args)
    for name in OWN_FLAG.keys() & given.keys():
        raise UsageError(f"--engine_args {name}: use --{OWN_FLAG[name]}, which the trainer reads, too.")
    overrides = given.get("hf_overrides", {})
    if not isinstance(overrides, dict):
        raise UsageError(f"--engine_args hf_overrides must be a JSON object, not {overrides!r}.")
    ours = "float32" if generator_fp32_head(flags) else flags.dtype
    if (head := overrides.get("head_dtype", ours)) != ours:
        raise UsageError(f"--engine_args head_dtype {head!r} is not {ours!r}; set --fp32_head.")
    sizes = {"tensor_parallel_size": flags.tensor_parallel, "data_parallel_size": flags.data_parallel}
    options: Record = {name: count for name, count in sizes.items() if count > 1} | given
    if flags.trust_remote_code:
        options = {"trust_remote_code": True} | options
    if generator_fp32_head(flags):
        options["hf_overrides"] = GENERATOR_ARGS["hf_overrides"] | overrides
    return options


def generator_fp32_head(flags: ModelFlags) -> bool:
    """Whether the generator's logits are an FP32 product, as the trainer's are with --fp32_head."""
    return flags.fp32_head


def on_ray(flags: EngineFlags) -> bool:
    """Whether Ray places the engines' workers, on any host."""
    return engine_options(flags).get("distributed_executor_backend") == "ray"


def engine_workers(flags: EngineFlags) -> int:
    """Processes of all engines together: tensor x data x pipeline parallel."""
    return flags.tensor_parallel * flags.data_parallel * int(engine_options(flags).get("pipeline_parallel_size", 1))
