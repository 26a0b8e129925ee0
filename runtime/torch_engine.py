"""Continuous batching in plain torch: an engine for models so small that vLLM's overhead per token exceeds the model's
own work.

It has the interface of `vllm_engine.VLLMEngine` and runs in the trainer's process, in the generator's event loop. Each
step samples one token for every active request; a request that is complete leaves, and another takes its slot at the
next step. New weights are loaded between two steps: requests go on with them over the keys and values of the old ones,
as in vLLM, and each token carries the version that sampled it.

SIMPLIFIED. On a CPU, and full attention. Slots have the length of the longest request (vLLM pages them), a prompt
is computed once for all requests that enter with it (vLLM keeps it for later ones), and the second request of an
interrupted completion is prefilled from scratch.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from runtime.weights import Weights
from vllm_engine import Sample

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PretrainedConfig


class SlotCache:
    """Keys and values (S, heads, L, d) of each layer for S slots of L tokens; a step writes one position of each."""

    def __init__(self, config: "PretrainedConfig", slots: int, length: int, dtype: torch.dtype):
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
        self.position = torch.zeros(slots, dtype=torch.long)  # that the next step writes, in each slot
        self.all_slots = torch.arange(slots)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """What transformers' attention calls with the new token's keys and values, (S, heads, 1, d)."""
        longest = int(self.position.max()) + 1
        self.keys[layer][self.all_slots, :, self.position] = keys[:, :, 0]
        self.values[layer][self.all_slots, :, self.position] = values[:, :, 0]
        return self.keys[layer, :, :, :longest], self.values[layer, :, :, :longest]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Grouped-query attention that copies no keys or values; attention_mask (B, 1, T, L): True where it looks."""
    query = query.unflatten(1, (key.shape[1], -1))  # (B, KV heads, queries of each, T, d)
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


class TorchEngine:
    """An engine in this process. `sample` raises what a step raised."""

    trainer_waits = False

    def __init__(
        self, model: str, stop_ids: Sequence[int], max_model_len: int, temperature: float, max_num_seqs: int, seed: int,
        dtype: torch.dtype = torch.float32, fp32_head: bool = True,
    ):  # fmt: skip
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("slots", attention)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="slots")
        self.head_dtype = torch.float32 if fp32_head else dtype
        self.stop = torch.tensor(list(stop_ids))
        self.temperature = temperature
        self.slots = slots = max_num_seqs
        self.version = 0
        self.prepared_version = 0
        self.random = torch.Generator().manual_seed(seed)
        self.waiting: deque[Request] = deque()
        self.inside: dict[int, Request] = {}  # by slot
        self.cache = SlotCache(self.model.config, slots, max_model_len, dtype)
        # Of each slot: its tokens, prompt included, with their log-probs and versions; how many it has, and may have.
        self.tokens = torch.zeros(slots, max_model_len + 1, dtype=torch.long)
        self.logprobs = torch.zeros(slots, max_model_len + 1)
        self.versions = torch.zeros(slots, max_model_len + 1, dtype=torch.long)
        self.lengths = torch.ones(slots, dtype=torch.long)
        self.ends = torch.ones(slots, dtype=torch.long)

    def prepare(self, weights: Weights, version: int) -> None:
        """Keeps a copy of the weights of `version` for the next `start` or `update`."""
        self.new_weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
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

    async def weight_digests(self) -> list[dict[str, str]]:
        """Each parameter's name and `torch.hash_tensor` of it."""
        return [{name: str(torch.hash_tensor(x.detach()).item()) for name, x in self.model.named_parameters()}]

    def shutdown(self) -> None:
        """Does nothing: stepping stops with the event loop."""

    async def _run(self) -> None:
        try:
            while True:
                if not (self.waiting or self.inside):
                    self.wake.clear()
                    await self.wake.wait()
                with torch.inference_mode():
                    self._enter()
                    self._step()
                await asyncio.sleep(0)  # lets waiting coroutines run and new requests arrive
        except Exception as error:
            for request in [*self.waiting, *self.inside.values()]:
                if not request.answer.done():
                    request.answer.set_exception(error)
            raise

    def _enter(self) -> None:
        """Waiting requests take free slots: the keys and values of their prompts are computed, once for each prompt."""
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
        self.ends[free] = torch.tensor([len(request.prompt) + request.max_tokens for request in requests])
        for slot in free:
            self.inside[slot] = self.waiting.popleft()

    def _step(self) -> None:
        """One token for each request that is inside. Empty slots compute one, too, which nobody reads."""
        every, last = self.cache.all_slots, self.lengths - 1
        self.cache.position = last
        visible = torch.arange(int(last.max()) + 1) <= last[:, None]  # (S, L)
        body = self.model.base_model(
            input_ids=self.tokens[every, last][:, None],
            position_ids=last[:, None],
            past_key_values=self.cache,
            attention_mask=visible[:, None, None],
        )
        hidden = body.last_hidden_state[:, 0].to(self.head_dtype)  # (S, H)
        logits = hidden @ self.model.lm_head.weight.to(self.head_dtype).T  # (S, V)
        logprobs = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        token = torch.multinomial(logprobs.exp(), 1, generator=self.random)  # (S, 1)
        self.tokens[every, self.lengths] = token[:, 0]
        self.logprobs[every, self.lengths] = logprobs.gather(1, token)[:, 0]
        self.versions[every, self.lengths] = self.version
        stopped = torch.isin(token[:, 0], self.stop)
        ended = (stopped | (self.lengths + 1 >= self.ends)).tolist()
        busy = list(self.inside)
        self.lengths[busy] += 1
        for slot in busy:
            if ended[slot]:
                self._leave(slot, "stop" if stopped[slot] else "length")

    def _leave(self, slot: int, reason: str) -> None:
        request = self.inside.pop(slot)
        sampled = slice(len(request.prompt), int(self.lengths[slot]))
        self.lengths[slot] = self.ends[slot] = 1
        if request.answer.cancelled():
            return
        ids = self.tokens[slot, sampled].tolist()
        logprobs = self.logprobs[slot, sampled].tolist()
        versions = self.versions[slot, sampled].tolist()
        request.answer.set_result(Sample(ids, logprobs, versions, reason, request.prefilled))
