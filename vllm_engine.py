"""A vLLM engine whose weights change while it samples, and that records which version of them sampled each token.

PROBLEM. An asynchronous trainer has new weights every second or minute. An engine that is restarted for them, or waits
until its requests end, is idle meanwhile. And for each token the trainer needs its probability and who sampled it.

IDEA. vLLM's scheduler is paused between two of its steps, the weights of the running model are replaced, and it goes
on. Requests freeze meanwhile and keep their keys and values, so nothing is computed twice. vLLM 0.32 stamps each token
with a version that we set at each change, and returns the log-prob of the sampled token at the sampling temperature.

    prepare(weights, v)     the trainer's thread copies them into memory that both processes map
    await update()          pause · vLLM's worker loads the file · the version becomes v · resume
    await sample(prompt, ..)  Sample(completion_ids, logprobs, versions): for instance versions = [3, 3, 3, 4, 4]

A token sampled at version 4 may attend to keys and values from version 3. Its log-prob then differs from the trainer's
at version 4, which is expected. Where one version sampled all tokens, prefill included, both must agree
(runtime/evaluation.py).

SIMPLIFIED. One engine on this host. What a run adds is in runtime/engine.py, and other hosts are in lab/hosts;
pipeline_rl.py decides when a request may enter.

By hand, without vLLM: new weights went live in the middle of a request, after its third token. vLLM reports spans:

>>> token_versions([Span(0, 3, "3"), Span(3, 5, "4")])
[3, 3, 3, 4, 4]

The trainer is at version 5 when it reads them, so the lags of these five tokens are 2, 2, 2, 1, 1.

QUESTION. The trainer scores all five with version 4. Which log-probs must agree with vLLM's? (lab/experiments.md)
"""

import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch


@dataclass
class Sample:
    """One request's answer; lists have one entry per token."""

    completion_ids: list[int]
    logprobs: list[float]  # of the sampled tokens, at the sampling temperature
    versions: list[int]  # of the weights that sampled them
    finish_reason: str  # "stop" or "length"
    prefilled: int  # prompt tokens that the engine computed and did not find in its cache


@dataclass(eq=False)  # an engine equals only itself
class VLLMEngine:
    """One vLLM engine in a process of its own: a version per token, and weights that change while its requests run."""

    model: str  # folder of the initial weights, in Hugging Face format
    stop_ids: Sequence[int]  # token ids that end a completion
    max_model_len: int  # tokens of the longest prompt and completion together
    channel: Any = None  # how weights reach it; None: a `WeightFile`
    temperature: float = 1.0  # of sampling; the log-probs are those at it
    max_num_seqs: int = 256  # requests inside it at once
    dtype: str = "float32"  # of its weights and products; or "bfloat16"
    seed: int = 0  # of its sampling
    engine_args: dict[str, Any] = field(default_factory=dict)  # more of vLLM's AsyncEngineArgs

    def __post_init__(self) -> None:
        self.channel = self.channel or WeightFile()
        gpu = torch.cuda.is_available()
        self.args: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "enforce_eager": not gpu,
            "block_size": None if gpu else 32,  # the default on a CPU, 128, is longer than many prompts: no cache hits
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled, temperature included
            "generation_config": "vllm",  # or the model's own file sets top_p and top_k behind our back
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": self.seed,
        }
        self.args |= self.channel.engine_args | self.engine_args
        self.environment = vllm_environment(gpu, self.args["enforce_eager"], self.args["dtype"])
        self.slots = self.args["max_num_seqs"]
        self.version = 0  # that is live
        self.prepared_version = 0  # of the weights prepared last
        self.vllm: Any = None
        self._request_numbers = itertools.count()

    def prepare(self, weights: Any, version: int) -> None:
        """Keeps the weights of `version` for the next `start` or `update`. Not to be called while one of these runs."""
        self.channel.prepare(weights)
        self.prepared_version = version

    async def start(self) -> None:
        """Starts vLLM with the weights prepared last. If that fails, the caller must still call `shutdown`."""
        # Not a local variable: vLLM's import keeps exceptions, whose tracebacks keep this frame's locals alive.
        self.vllm = self.new_vllm()
        await self._load()
        await self.sample([0, 0], 2, "warm-up")  # a fresh engine's first step takes seconds

    def new_vllm(self) -> Any:
        """vLLM's AsyncLLM with the model folder's weights."""
        for name, value in self.environment.items():  # vLLM's process inherits them; runtime/engine.py undoes it
            os.environ.setdefault(name, value)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**self.args))

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int, salt: str) -> Sample:
        """One request. `salt`: it reuses cached keys and values only of requests with the same salt."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        longest = self.args["max_model_len"]
        if len(prompt_ids) + max_tokens > longest:
            raise ValueError(f"{len(prompt_ids)} prompt tokens and {max_tokens} more exceed max_model_len = {longest}")
        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            logprobs=0,  # the sampled token's own
            flat_logprobs=True,  # one list, no dict for each token; made by vLLM's output processor, in this process
            stop_token_ids=list(self.stop_ids),
            ignore_eos=True,  # or vLLM also stops at the end token of config.json, which `stop_ids` may not have
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # no other request has these
        )
        prompt = {"type": "token", "prompt_token_ids": list(prompt_ids), "cache_salt": salt}
        async for output in self.vllm.generate(prompt, params, request_id=str(next(self._request_numbers))):
            completion = output.outputs[0]  # FINAL_ONLY: the loop runs once
        ids = list(completion.token_ids)
        logprobs, versions = self.logprobs_and_versions(output)
        check_sample(ids, logprobs, versions, completion.finish_reason)
        prefilled = len(prompt_ids) - (output.num_cached_tokens or 0)
        return Sample(ids, logprobs, versions, completion.finish_reason, prefilled)

    def logprobs_and_versions(self, output: Any) -> tuple[list[float], list[int]]:
        """(log-probs, versions) of a request's tokens. vLLM reports spans of tokens for each version of the weights."""
        completion = output.outputs[0]
        return completion.logprobs.logprobs, token_versions(completion.weight_versions)

    async def update(self) -> None:
        """The weights prepared last become live, between two steps of vLLM: requests freeze and keep their cache.
        If loading fails, they stay frozen."""
        # clear_cache=True would prefill every running request anew; vLLM's pause_generation adds 20 ms of sleep.
        await self.vllm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self._load()
        await self.vllm.resume_generation()

    async def _load(self) -> None:
        version = self.prepared_version
        await self.channel.deliver(self.vllm)
        await self.vllm.update_weight_version(str(version))  # every token sampled from now on carries it
        self.version = version

    def shutdown(self) -> None:
        """Ends vLLM's process and removes the channel's files; may be called twice."""
        if self.vllm is not None:
            self.vllm.shutdown(timeout=10)  # killed earlier, it leaves semaphores behind; on a GPU 3 s were too few
            self.vllm.shutdown = lambda: None  # its `__del__` calls it again, perhaps after Python's modules are gone
            self.vllm = None
        self.channel.close()


class Span(NamedTuple):
    """Tokens `start` to `end` - 1 of a completion, sampled by one version, as vLLM reports them."""

    start: int
    end: int
    version: str


def token_versions(spans: Iterable[Span]) -> list[int]:
    """The version that sampled each token."""
    return [int(span.version) for span in spans for _ in range(span.start, span.end)]


def check_sample(ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], finish_reason: str) -> None:
    """Raises RuntimeError for what is missing: lengths differ, a log-prob is NaN, infinite or above 0 (1e-4 of rounding
    is allowed), or the request neither stopped nor ran out.

    A missing log-prob read as 0.0 would mean pi_gen = 1. The ratio is then pi_train itself, and an unlikely token, with
    a ratio near 0, would silently stop training.
    """
    if not ids or not len(ids) == len(logprobs) == len(versions):
        raise RuntimeError(f"the engine gave {len(ids)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
    if not all(math.isfinite(x) and x <= 1e-4 for x in logprobs):
        raise RuntimeError("the engine returned a log-prob that is above 0 or not finite")
    if finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine ended a request with {finish_reason!r} instead of 'stop' or 'length'")


def vllm_environment(gpu: bool, eager: bool, dtype: str) -> dict[str, str]:
    """Environment of the engine's process: errors are printed, chatter is not."""
    always = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "VLLM_NO_USAGE_STATS": "1",
    }
    on_cpu = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process: one process fewer
        "OMP_NUM_THREADS": "1",  # the other cores are the trainer's
    }
    # vLLM compiles one small function of its sampler even in eager mode: seconds at the start, and it needs a compiler.
    uncompiled = {"TORCH_COMPILE_DISABLE": "1"} if eager else {}
    # vLLM's attention for float32 is Triton's, whose products have 10 bits of significand if nothing asks for all 23.
    exact = {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}
    return always | (exact if gpu else on_cpu | uncompiled)


class WeightReceiver:
    """Mixed into vLLM's worker, in the engine's process (`worker_extension_cls`): loads a weight file into the running
    model. Its methods' names must not clash with methods of vLLM's worker."""

    model_runner: Any  # vLLM's worker has these
    model_config: Any
    vllm_config: Any
    repacked = True  # vLLM's CPU linears keep repacked weights, which copying into the parameters would not reach
    opened: tuple[Any, dict[str, torch.Tensor]] = (None, {})  # the memory opened last: its name, its tensors

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copies the tensors to where the model has its weights. Raises RuntimeError if one is missing."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        torch.cpu._init_amx()  # vLLM's bfloat16 attention uses a CPU's AMX, but does not ask Linux for it
        model = self.model_runner.get_model()
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False) and hasattr(model, "lm_head")
        names = {name for name, _ in model.named_parameters() if not (tied and name.startswith("lm_head."))}
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            # 1. Each layer forgets how it repacked its weights, and waits for new ones as at the first load.
            if self.repacked:
                initialize_layerwise_reload(model)
            # 2. The tensors go to their layers, by the names of a checkpoint. Of a missing one vLLM would say nothing.
            loaded = model.load_weights(tensors.items())
            # 3. Each layer repacks what it got, in the memory that the running model reads.
            if self.repacked:
                finalize_layerwise_reload(model, self.model_config)
            if loaded is not None and names - loaded:
                raise RuntimeError(f"the trainer sent no weights for {sorted(names - loaded)[:3]}")
            # 4. A tied head has a repacked copy of its own, which the reload leaves at the old weights.
            if self.repacked and tied:
                model.lm_head.weight = next(m for m in model.modules() if type(m) is VocabParallelEmbedding).weight
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    def load_weight_file(self, path: str, layout: "Layout") -> None:
        """Replaces all weights by those in the file, between two engine steps. Raises RuntimeError if it lacks one."""
        if self.opened[0] != path:
            self.opened = path, tensors_in(mapped(Path(path)), layout)
        self.load_tensors(self.opened[1])


# The concept ends here. --------------------------------------------------------------- memory that two processes share
#
# Trainer and vLLM's worker map one file, once. It holds all tensors; an update is one copy in and one copy out.

SHARED_MEMORY = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())  # files there are in memory
Layout = list[tuple[str, str, list[int], int]]  # name, dtype, shape, and first byte of each tensor in the memory


def tensors_in(memory: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """name -> the tensor in its place in `memory`, whose dtype is uint8."""
    tensors = {}
    for name, dtype, shape, start in layout:
        kind = getattr(torch, dtype)
        tensors[name] = memory[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)
    return tensors


def mapped(path: Path) -> torch.Tensor:
    """The bytes of a file, shared with whoever maps it, too. Beside a GPU they are pinned: it copies faster."""
    memory = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    if torch.cuda.is_available() and int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        # Not pinned, it is only slower. But this thread's next kernel will raise the error: one that nobody needs.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return memory


class WeightFile:
    """The plain weight channel: the trainer writes the file, and an engine on this host reads it.

    A channel has `engine_args`, which vLLM needs for it, and these methods. Weights are a dict, name in the Hugging
    Face checkpoint -> tensor, as `dict(model.named_parameters())`: a tied head is not among them. The folder of this
    file must be on the `sys.path` of the engine's process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="weights-", dir=SHARED_MEMORY))  # for this user only
        self.path = self.folder / "weights"
        self.layout: Layout = []
        self.size = 0  # bytes of all tensors
        self.tensors: dict[str, torch.Tensor] = {}  # in that memory
        self.engine_args: dict[str, Any] = {"worker_extension_cls": f"{__name__}.WeightReceiver"}

    def prepare(self, weights: Any) -> None:
        """Copies these tensors into the memory; no engine may be reading it. Raises OSError if there is no room, and
        RuntimeError if a tensor is missing that was there before."""
        if not self.tensors:  # shards may be gathered one by one: the sizes are known when all have come
            weights = {name: tensor.detach().cpu() for name, tensor in weights.items()}
            self.layout, self.size = [], 0
            for name, tensor in weights.items():  # one after another, each at a multiple of 64 bytes
                self.layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.size))
                self.size += tensor.nbytes + (-tensor.nbytes) % 64
            self.tensors = tensors_in(self.new_memory(), self.layout)
        missing = set(self.tensors)
        for name, tensor in weights.items():
            self.tensors[name].copy_(tensor.detach())
            missing.discard(name)
        if missing:  # the memory has the old ones
            raise RuntimeError(f"the trainer sent no weights for {sorted(missing)[:3]}")

    def new_memory(self) -> torch.Tensor:
        """The memory, `size` bytes. Raises OSError."""
        try:
            with self.path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self.size)  # or a write without room would end this process
        except OSError as error:
            self.path.unlink(missing_ok=True)
            free = shutil.disk_usage(self.folder).free
            raise OSError(
                f"no room for weights of {self.size / 1e6:.1f} MB in {self.folder.parent}, which has "
                f"{free / 1e6:.1f} MB free: make it larger (Docker: --shm-size)"
            ) from error
        return mapped(self.path)

    async def deliver(self, vllm: Any) -> None:
        """Brings the weights prepared last into a paused vLLM."""
        await vllm.collective_rpc("load_weight_file", args=(str(self.path), self.layout))

    def close(self) -> None:
        """Removes the file and its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":  # check the example; docs/pipeline_rl_alone.py runs an engine
    import doctest

    print(__doc__[__doc__.index("By hand") :])
    raise SystemExit(doctest.testmod().failed)
