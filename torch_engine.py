"""Continuous batching in plain torch: an engine for models so small that vLLM's overhead per token exceeds the model's
own work.

It has the interface that generator.py lists, returns vllm_engine's `Sample`, and runs in the trainer's process, in the
generator's event loop. A step of the engine (no update) samples one token for every active request; a request that is
complete leaves, and another takes its slot at the next step. New weights are loaded between two steps: requests go on
with them over the keys and values of the old ones, as in vLLM. Each token carries the version that sampled it.

SIMPLIFIED. On the CPU, also where there is a GPU: its model is too small for one. Full attention. Slots have the length
of the longest request (vLLM pages them), a prompt is computed once for all requests that enter with it (vLLM keeps it
for later ones), and the second request of an interrupted completion is prefilled from scratch.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp32_head import fp32_product
from vllm_engine import Sample, check_sample

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PretrainedConfig


class SlotCache:
    """Keys and values (S, heads, L, d) of each layer for S slots of L tokens; a step writes one position of each."""

    def __init__(self, config: "PretrainedConfig", slots: int, length: int, dtype: torch.dtype):
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
        self.position = torch.zeros(slots, dtype=torch.long)  # that the next step writes, in each slot
        self.longest = length  # the first positions, which attention reads
        self.all_slots = torch.arange(slots)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """What transformers' attention calls with the new token's keys and values, (S, heads, 1, d)."""
        self.keys[layer][self.all_slots, :, self.position] = keys[:, :, 0]
        self.values[layer][self.all_slots, :, self.position] = values[:, :, 0]
        return self.keys[layer, :, :, : self.longest], self.values[layer, :, :, : self.longest]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Grouped-query attention that copies no keys or values; attention_mask (N, 1, T, L): True where it looks."""
    query = query.unflatten(1, (key.shape[1], -1))  # (N, KV heads, queries of each, T, d)
    scores = torch.einsum("bkgtd,bkld->bkgtl", query, key) * scaling
    probabilities = scores.masked_fill(~attention_mask[:, :, None], -torch.inf).softmax(-1)
    return torch.einsum("bkgtl,bkld->btkgd", probabilities, value).flatten(2, 3), None


@dataclass(eq=False)
class Request:
    """One request, while it waits for a slot or has one."""

    prompt: list[int]
    max_tokens: int
    answer: asyncio.Future  # of a Sample
    prefilled: int = 0  # prompt tokens that were computed for it
    versions: list[int] = field(default_factory=list)  # of each sampled token

    @property
    def tokens_so_far(self) -> int:
        """Those of the prompt, and those that were sampled."""
        return len(self.prompt) + len(self.versions)


class TorchEngine:
    """An engine in this process. `sample` raises what a step raised."""

    def step(self) -> None:
        """One token for each request that has a slot."""
        self._enter()  # waiting requests take free slots
        stopped = self._sample()  # a new token in each slot; (S,) True where it ends its request
        self._leave(stopped)  # requests that are complete are answered, and give their slots back

    def __init__(
        self, model: str, stop_ids: Sequence[int], max_model_len: int, temperature: float, max_num_seqs: int, seed: int,
        dtype: torch.dtype = torch.float32, fp32_head: bool = True,
    ):  # fmt: skip
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # "Loading weights" would stand between the caller's lines
        AttentionInterface.register("slots", attention)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="slots")
        if (kind := self.model.config.model_type) != "qwen3":
            raise ValueError(f"the torch engine samples from a Qwen3, as the built-in model is, not from a {kind}")
        self.fp32_head = fp32_head
        self.stop = torch.tensor(list(stop_ids))
        self.temperature = temperature
        self.slots = slots = max_num_seqs
        self.version = 0
        self.prepared_version = 0
        self.random = torch.Generator().manual_seed(seed)
        self.waiting: deque[Request] = deque()
        self.inside: dict[int, Request] = {}  # by slot
        self.max_model_len = max_model_len
        self.cache = SlotCache(self.model.config, slots, max_model_len, dtype)
        # Of each slot: its tokens, prompt included, with their log-probs; how many it has.
        self.tokens = torch.zeros(slots, max_model_len + 1, dtype=torch.long)
        self.logprobs = torch.zeros(slots, max_model_len + 1)
        self.lengths = torch.ones(slots, dtype=torch.long)

    def prepare(self, weights: Any, version: int) -> None:
        """Keeps a copy of the weights of `version` for the next `start` or `update`."""
        self.new_weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        self.prepared_version = version

    async def start(self) -> None:
        """Begins to step, with the weights prepared last."""
        await self.update()
        self.wake = asyncio.Event()
        self.stepping = asyncio.create_task(self._run())

    async def update(self) -> None:
        """The weights prepared last become live."""
        self.model.load_state_dict(self.new_weights, strict=False)  # a tied head is not among them
        self.version = self.prepared_version

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int, salt: str) -> Sample:
        """One request; `salt` changes nothing here, where no keys and values are kept for later requests."""
        if self.stepping.done():  # a step raised: this request would wait forever
            self.stepping.result()
        request = Request(list(prompt_ids), max_tokens, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        self.wake.set()
        return await request.answer

    def shutdown(self) -> None:
        """Does nothing: stepping stops with the event loop."""

    async def _run(self) -> None:
        try:
            while True:
                if not (self.waiting or self.inside):
                    self.wake.clear()
                    await self.wake.wait()
                with torch.inference_mode():
                    self.step()
                await asyncio.sleep(0)  # lets waiting coroutines run and new requests arrive
        except Exception as error:
            for request in [*self.waiting, *self.inside.values()]:
                if not request.answer.done():
                    request.answer.set_exception(error)
            raise

    def _enter(self) -> None:
        """The keys and values of new requests' prompts are computed, once for each prompt."""
        free = [slot for slot in range(self.slots) if slot not in self.inside][: len(self.waiting)]
        if not free:
            return
        requests = [self.waiting[i] for i in range(len(free))]  # they wait until nothing can fail any more
        row_of: dict[tuple[int, ...], int] = {}  # each different prompt -> its row in the forward pass
        for request in requests:
            prompt = tuple(request.prompt)
            if prompt not in row_of:
                row_of[prompt] = len(row_of)
                request.prefilled = len(prompt)  # the first one with this prompt; the others find it
        longest = max(map(len, row_of))
        ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in row_of])
        causal = torch.ones(1, 1, longest, longest, dtype=torch.bool).tril()  # padding comes after the prompt
        computed = self.model.base_model(input_ids=ids, attention_mask=causal, use_cache=True).past_key_values
        rows = torch.tensor([row_of[tuple(request.prompt)] for request in requests])
        for i, layer in enumerate(computed.layers):
            self.cache.keys[i, free, :, :longest] = layer.keys[rows]
            self.cache.values[i, free, :, :longest] = layer.values[rows]
        self.tokens[free, :longest] = ids[rows]
        self.lengths[free] = torch.tensor([len(request.prompt) for request in requests])
        for slot in free:
            self.inside[slot] = self.waiting.popleft()

    def _sample(self) -> Tensor:
        """Samples one token in each slot, also in the empty ones, whose tokens nobody reads. Returns (S,): whether it
        is a stop token."""
        cache, lengths = self.cache, self.lengths
        cache.position = lengths - 1  # each slot's last token goes in; a new slot's is its prompt's last, again
        cache.longest = max(request.tokens_so_far for request in self.inside.values())
        visible = torch.arange(cache.longest) <= cache.position[:, None]  # (S, L)
        body = self.model.base_model(
            input_ids=self.tokens[cache.all_slots, cache.position][:, None],
            position_ids=cache.position[:, None],
            past_key_values=cache,
            attention_mask=visible[:, None, None],
        )
        hidden = body.last_hidden_state[:, 0]  # (S, H)
        head = self.model.lm_head.weight.t()  # (H, V)
        logits = fp32_product(hidden, head) if self.fp32_head else (hidden @ head).float()  # (S, V)
        logprobs = torch.log_softmax(logits / self.temperature, dim=-1)
        token = torch.multinomial(logprobs.exp(), 1, generator=self.random)[:, 0]  # (S,)
        self.tokens[cache.all_slots, lengths] = token
        self.logprobs[cache.all_slots, lengths] = logprobs.gather(1, token[:, None])[:, 0]
        lengths.add_(1).clamp_(max=self.max_model_len)  # the limit is for empty slots
        return torch.isin(token, self.stop)

    def _leave(self, stopped: Tensor) -> None:
        """Every request has one more token, of the live version. Those that are complete leave."""
        ended = stopped.tolist()
        for slot, request in list(self.inside.items()):
            request.versions.append(self.version)
            if ended[slot] or len(request.versions) == request.max_tokens:
                self._answer(slot, request, "stop" if ended[slot] else "length")

    def _answer(self, slot: int, request: Request, reason: str) -> None:
        sampled = slice(len(request.prompt), request.tokens_so_far)
        ids = self.tokens[slot, sampled].tolist()
        logprobs = self.logprobs[slot, sampled].tolist()
        check_sample(ids, logprobs, request.versions, reason)
        del self.inside[slot]  # only now that nothing can fail any more
        if not request.answer.cancelled():
            request.answer.set_result(Sample(ids, logprobs, request.versions, reason, request.prefilled))
