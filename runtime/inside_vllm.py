"""Code that vLLM imports into its own processes, because the engine's arguments name it. runtime/engine.py has the
table of what it changes in vLLM, and who is at the other end.

    RunWeightReceiver    mixed into vLLM's worker (`worker_extension_cls`): vllm_engine's, and mixtures of experts
    plain_if_small       keeps small linears unpacked, so that new weights are copied to where they are: 4 ms instead of
                         19, and the default run is about 1.17 times as fast
    WholeCompletions     vLLM's scheduler (`scheduler_cls`), except that it sends a request's tokens when the request is
                         done: token by token, packing and unpacking took as much time as computing them. It makes the
                         default run 1.3 times as fast. AsyncWholeCompletions is the same on a GPU, where vLLM schedules
                         a step while the one before it runs.
    skip_inner_tokens    a request's cache blocks are looked at when it enters or fills one, not at every token
    exit_with_trainer    ends the engine's process when its trainer has ended

Source: vLLM 0.32, vllm/model_executor/model_loader/reload and vllm/v1/core/sched.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from torch.nn.functional import linear
from tqdm import tqdm
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

import vllm_engine

WRITTEN_FOR = "0.32."  # the vLLM whose scheduler `WholeCompletions` changes
SMALL = 2**16  # measured on an AMD EPYC: at four times as many weights oneDNN is 1.3 times as fast


class RunWeightReceiver(vllm_engine.WeightReceiver):
    """Loads new weights into the running model."""

    def load_gpu_memory(self, handle: list[Any], layout: vllm_engine.Layout) -> None:
        """As `load_weight_file`, from the trainer's memory on this GPU."""
        if self.opened[0] != handle:
            self.opened = handle, vllm_engine.tensors_in(shared_memory(handle), layout)
        self.load_tensors(self.opened[1])

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copies the tensors to where the model has its weights. Raises RuntimeError if one is missing."""
        model = self.model_runner.get_model()
        for layer in model.modules():
            if not torch.cuda.is_available() and hasattr(getattr(layer, "quant_method", None), "moe_kernel"):
                layer.quant_method.moe_kernel = None  # a layer repacks its experts only for a new kernel
        self.repacked = is_repacked(model)
        super().load_tensors(tensors)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the trainer writes to this memory next


def shared_memory(handle: list[Any]) -> torch.Tensor:
    """The bytes of another process's storage: on a GPU, or on a CPU where a test stands in for one."""
    kind = torch.UntypedStorage
    storage = kind._new_shared_cuda(*handle) if torch.cuda.is_available() else kind._new_shared_filename_cpu(*handle)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_repacked(model: torch.nn.Module) -> bool:
    """Whether a layer computes with anything but its parameters, so that copying into these would not reach it."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        is_plain = getattr(layer, "cpu_linear", None) is linear
        if torch.cuda.is_available():
            is_plain = isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
        splits_weights = hasattr(layer, "kv_b_proj")  # latent attention
        if splits_weights or (method is not None and not is_plain):
            return True
    return False


def plain_if_small(dispatch: Callable[..., None]) -> Callable[..., None]:
    """vLLM's choice of the product for a CPU's linear layer, but for small ones. Up to SMALL float32 weights torch's
    product is as fast as oneDNN's, which would repack the weights and prepare its products anew after each update."""

    def choose(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.dtype == torch.float32 and weight.ndim == 2 and weight.numel() <= SMALL:
            layer.cpu_linear = linear
        else:
            dispatch(layer, remove_weight)

    return choose


# The scheduler: from here to `skip_inner_tokens`.


@dataclass
class PartialCompletion:
    """What a running request has sampled so far; lists have one entry per token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pauses: list[int] = field(default_factory=list)  # pauses of generation before the token was sampled
    prefill_stats: Any = None


class SampledLogprobs:
    """Takes the place of vLLM's LogprobsLists in its scheduler: a list of numbers per request, not three arrays."""

    def __init__(self, lists: Any):
        self.values = lists.logprobs[:, 0].tolist()  # column 0 is the sampled token's
        self.starts = lists.cu_num_generated_tokens  # of each request's tokens; None: one token each

    def slice_request(self, index: int, count: int) -> list[float]:
        """Log-probs of the step's `index`-th request, which sampled `count` tokens."""
        start = index if self.starts is None else self.starts[index]
        return self.values[start : start + count]


class WholeCompletions(Scheduler):
    """Sends each completion once, when it is complete. Weights change only in a pause, so the number of pauses before a
    token says which weights sampled it; the trainer's side knows which pause brought which version.

        pauses before each token        [0, 0, 1]     counted here, sent as "pauses"
        version after that many pauses  [3, 4]        RunEngine.versions
        version of each token           [3, 3, 4]     RunEngine.logprobs_and_versions

    What is sent are plain lists, {"logprobs": [...], "pauses": [...]}, in the field `kv_transfer_params`: vLLM hands it
    from its scheduler to the output of the request untouched, and it is empty in an engine that moves no keys and
    values to others. vLLM's own field for log-probs holds three small arrays for every token.
    """

    def __init__(self, *args: object, **options: object):
        if not vllm.__version__.startswith(WRITTEN_FOR):
            raise RuntimeError(
                f"runtime.inside_vllm.WholeCompletions is written for vLLM {WRITTEN_FOR}x, not {vllm.__version__}: "
                "install the version that pyproject.toml pins, or take vLLM's own scheduler by --engine_args "
                "scheduler_cls=null"
            )
        super().__init__(*args, **options)
        if len(self.kv_cache_config.kv_cache_groups) == 1:  # with several groups, block boundaries differ
            manager = self.kv_cache_manager
            no_blocks = manager.empty_kv_cache_blocks
            manager.allocate_slots = skip_inner_tokens(manager.allocate_slots, no_blocks, self.block_size)
        self._partial: dict[str, PartialCompletion] = {}
        self._pauses = 0

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Counts a pause when it ends: a step under way when it begins still samples with the old weights."""
        if self.pause_state != PauseState.UNPAUSED and pause_state == PauseState.UNPAUSED:
            self._pauses += 1
        super().set_pause_state(pause_state)

    def finish_requests(self, request_ids: Any, finished_status: object) -> object:
        """Forgets what aborted requests had sampled (None: all)."""
        if request_ids is None:
            self._partial.clear()
        else:
            for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
                self._partial.pop(request_id, None)
        return super().finish_requests(request_ids, finished_status)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """After each step: vLLM's messages, with only the requests that are done."""
        if model_runner_output.logprobs is not None:
            model_runner_output.logprobs = SampledLogprobs(model_runner_output.logprobs)
        messages = super().update_from_output(scheduler_output, model_runner_output)
        for message in messages.values():
            message.outputs = list(self._complete(message.outputs))
        return messages

    def _complete(self, outputs: Iterable[Any]) -> Iterable[Any]:
        for output in outputs:
            partial = self._partial.setdefault(output.request_id, PartialCompletion())
            count = len(output.new_token_ids)
            partial.token_ids += output.new_token_ids
            partial.pauses += [self._pauses] * count
            if output.new_logprobs is not None:
                partial.logprobs += output.new_logprobs
            partial.prefill_stats = partial.prefill_stats or output.prefill_stats
            if output.finished:
                del self._partial[output.request_id]
                output.new_token_ids = partial.token_ids
                output.new_logprobs = None
                output.prefill_stats = partial.prefill_stats
                output.kv_transfer_params = {"logprobs": partial.logprobs, "pauses": partial.pauses}
                yield output


class AsyncWholeCompletions(WholeCompletions, AsyncScheduler):
    """`WholeCompletions` over the scheduler that vLLM takes on a GPU. A pause finds a step under way there: its tokens
    come while the pause lasts, and count to the weights before it."""


def skip_inner_tokens(allocate_slots: Callable[..., Any], no_blocks: object, block_size: int) -> Callable[..., Any]:
    """Skips vLLM's `allocate_slots` when the next token falls inside a block that the request already owns. The call
    would allocate nothing, and it takes a quarter of a small model's engine time. Blocks are taken, freed and cached
    at their borders."""

    def allocate(request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        if num_new_tokens == 1 and 0 < request.num_computed_tokens % block_size < block_size - 1:
            return no_blocks
        return allocate_slots(request, num_new_tokens, *args, **options)

    return allocate


def exit_with_trainer(trainer: int) -> None:
    """Ends this process within a second of the trainer's death: SIGKILL leaves a parent no time to end its children."""
    is_child = os.getppid() == trainer  # else this is the engine's own child, as under tensor parallelism

    def trainer_lives() -> bool:
        return os.getppid() == trainer if is_child else Path(f"/proc/{trainer}").exists()

    def watch() -> None:
        while trainer_lives():
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="exit_with_trainer", daemon=True).start()


trainer_pid = os.environ.get("SCALERL_TRAINER_PID", "")
if trainer_pid.isdigit() and int(trainer_pid) != os.getpid():  # this is an engine's process, started by a trainer
    os.setpgid(0, 0)  # own process group: a signal sent to the trainer's group must not reach the engine
    tqdm.set_lock(threading.RLock())  # its own is a semaphore in shared memory, which a SIGKILL would leave there
    exit_with_trainer(int(trainer_pid))
    utils.dispatch_cpu_unquantized_gemm = plain_if_small(utils.dispatch_cpu_unquantized_gemm)
