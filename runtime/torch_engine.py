"""Continuous batching in plain torch: an engine for models so small that vLLM's own work on each token takes longer
than the model's.

It has the interface of `vllm_engine.VLLMEngine` and runs in the trainer's process, in the generator's event loop. Every
step gives each request that is inside one token; a request that is complete leaves, and another takes its slot at the
next step. New weights are loaded between two steps: requests go on with them over the keys and values of the old ones,
as in vLLM, and each token carries the version that sampled it.

SIMPLIFIED. FP32 on a CPU, and full attention. Slots have the length of the longest request (vLLM pages them), a prompt
is computed once for all requests that enter with it (vLLM keeps it for later ones), and a second leg is computed anew.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from runtime.weights import Weights
from vllm_engine import Sample

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PretrainedConfig

GREEDY = 1e-6  # a temperature at which the likeliest token has all of the probability


class SlotCache:
    """Keys and values (S, heads, L, d) of each layer for S slots of L tokens; a step writes one position of each."""

    def __init__(self, config: "PretrainedConfig", slots: int, length: int):
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, length, config.head_dim)
        self.keys, self.values, self.position = torch.zeros(shape), torch.zeros(shape), torch.zeros(slots, dtype=int)
        self.every = torch.arange(slots)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """What transformers' attention calls with the new token's keys and values, (S, heads, 1, d)."""
        longest = int(self.position.max()) + 1
        for stored, new in ((self.keys[layer], keys), (self.values[layer], values)):
            stored[self.every, :, self.position] = new[:, :, 0]
        return self.keys[layer, :, :, :longest], self.values[layer, :, :, :longest]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Grouped-query attention that copies no keys or values; attention_mask (B, 1, T, L): True where it looks."""
    query = query.unflatten(1, (key.shape[1], -1))  # (B, KV heads, queries of each, T, d)
    scores = torch.einsum("bkgtd,bkld->bkgtl", query, key) * scaling
    attended = scores.masked_fill(~attention_mask[:, :, None], -torch.inf).softmax(-1)
    return torch.einsum("bkgtl,bkld->btkgd", attended, value).flatten(2, 3), None


class TorchEngine:
    """An engine in this process. `sample` raises what a step raised."""

    trainer_waits, replicas = False, 1

    def __init__(self, model: str, stop_ids: Sequence[int], longest: int, temperature: float, slots: int, seed: int):
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("slots", attention)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="slots")
        self.stop, self.temperature, self.slots = torch.tensor(list(stop_ids)), temperature, slots
        self.version = self.prepared = 0
        self.random = torch.Generator().manual_seed(seed)
        self.waiting: deque[tuple[list[int], int, float, asyncio.Future]] = deque()
        # slot -> (tokens of its prompt, those of them that were computed for it, who waits for it)
        self.inside: dict[int, tuple[int, int, asyncio.Future]] = {}
        self.cache = SlotCache(self.model.config, slots, longest)
        self.tokens, self.versions = torch.zeros(2, slots, longest + 1, dtype=torch.long)
        self.logprobs, self.temperatures = torch.zeros(slots, longest + 1), torch.ones(slots, 1)
        self.lengths, self.ends = torch.ones(2, slots, dtype=torch.long)  # tokens so far, and at most

    def prepare(self, weights: Weights, version: int) -> None:
        """Keeps a copy of the weights of `version` for the next `start` or `update`."""
        self.new_weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self.prepared = version

    async def start(self) -> None:
        """Begins to step, with the weights prepared last."""
        await self.update()
        self.wake = asyncio.Event()
        self.stepping = asyncio.create_task(self._run())

    async def update(self) -> None:
        """The weights prepared last become live."""
        self.model.load_state_dict(self.new_weights, strict=False)  # a tied head is not among them
        self.version = self.prepared

    async def sample(
        self, prompt_ids: Sequence[int], max_tokens: int, salt: str, replica: int = 0, temperature: float | None = None
    ) -> Sample:
        """One request; `salt` and `replica` change nothing here. `temperature`: None is the engine's."""
        if self.stepping.done():  # a step raised: this request would wait for ever
            self.stepping.result()
        done = asyncio.get_running_loop().create_future()
        temperature = self.temperature if temperature is None else max(temperature, GREEDY)
        self.waiting.append((list(prompt_ids), max_tokens, temperature, done))
        self.wake.set()
        return await done

    async def weight_digests(self) -> list[dict[str, str]]:
        """Each parameter's name and a hash of its bytes."""
        return [{name: str(torch.hash_tensor(x.detach()).item()) for name, x in self.model.named_parameters()}]

    def shutdown(self) -> None:
        """Does nothing: the loop's end ends the steps."""

    async def _run(self) -> None:
        try:
            while True:
                if not (self.waiting or self.inside):
                    self.wake.clear()
                    await self.wake.wait()
                with torch.inference_mode():
                    self._enter()
                    self._step()
                await asyncio.sleep(0)  # who waited goes on, and new requests come
        except Exception as error:
            for done in [request[-1] for request in self.waiting] + [request[-1] for request in self.inside.values()]:
                if not done.done():
                    done.set_exception(error)
            raise

    def _enter(self) -> None:
        """Waiting requests take free slots: the keys and values of their prompts are computed, once for each prompt."""
        free = [slot for slot in range(self.slots) if slot not in self.inside][: len(self.waiting)]
        if not free:
            return
        taken = [self.waiting.popleft() for _ in free]
        different = {tuple(prompt): i for i, prompt in enumerate(dict.fromkeys(tuple(p) for p, *_ in taken))}
        longest = max(map(len, different))
        ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in different])
        causal = torch.ones(1, 1, longest, longest, dtype=torch.bool).tril()  # padding comes after the prompt
        computed = self.model.base_model(input_ids=ids, attention_mask=causal, use_cache=True).past_key_values
        row = torch.tensor([different[tuple(prompt)] for prompt, *_ in taken])
        for i, layer in enumerate(computed.layers):
            self.cache.keys[i, free, :, :longest] = layer.keys[row]
            self.cache.values[i, free, :, :longest] = layer.values[row]
        self.tokens[free, :longest] = ids[row]
        self.lengths[free] = torch.tensor([len(prompt) for prompt, *_ in taken])
        self.ends[free] = torch.tensor([len(prompt) + most for prompt, most, *_ in taken])
        self.temperatures[free, 0] = torch.tensor([temperature for _, _, temperature, _ in taken])
        for slot, (prompt, *_, done) in zip(free, taken, strict=True):
            computed = len(prompt) if different.pop(tuple(prompt), None) is not None else 0  # the first has them all
            self.inside[slot] = len(prompt), computed, done

    def _step(self) -> None:
        """One token for each request that is inside. Empty slots compute one, too, which nobody reads."""
        every, last = self.cache.every, self.lengths - 1
        self.cache.position = last
        seen = torch.arange(int(last.max()) + 1) <= last[:, None]  # (S, L)
        logits = self.model(
            input_ids=self.tokens[every, last][:, None],
            position_ids=last[:, None],
            past_key_values=self.cache,
            attention_mask=seen[:, None, None],
        ).logits[:, 0]  # (S, V)
        logprobs = torch.log_softmax(logits.float() / self.temperatures, dim=-1)
        token = torch.multinomial(logprobs.exp(), 1, generator=self.random)  # (S, 1)
        self.tokens[every, self.lengths] = token[:, 0]
        self.logprobs[every, self.lengths] = logprobs.gather(1, token)[:, 0]
        self.versions[every, self.lengths] = self.version
        stopped = torch.isin(token[:, 0], self.stop)
        full = self.lengths + 1 >= self.ends
        busy = list(self.inside)
        self.lengths[busy] += 1
        for slot in [slot for slot, ends in zip(busy, (stopped | full)[busy].tolist(), strict=True) if ends]:
            self._leave(slot, "stop" if stopped[slot] else "length")

    def _leave(self, slot: int, reason: str) -> None:
        begin, prefilled, done = self.inside.pop(slot)
        end = int(self.lengths[slot])
        ids, logprobs, versions = (x[slot, begin:end].tolist() for x in (self.tokens, self.logprobs, self.versions))
        self.lengths[slot] = self.ends[slot] = 1
        if not done.cancelled():
            done.set_result(Sample(ids, logprobs, versions, reason, prefilled))
