"""The warm start of the built-in task: a tiny model that knows the format and makes mistakes."""

import inspect
import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.chain import (
    DIGITS,
    HELD_OUT_ONE_IN,
    IDS,
    LABELS,
    OPERATIONS,
    PHRASE,
    RECHECK,
    RESTART,
    WORDS,
    apply,
    chain_text,
    draw_chain,
    is_held_out,
    word_tokenizer,
)
from tasks.prompts import stable_key


@dataclass(frozen=True)
class WarmStart:
    """Settings of the warm start: the model, how it is trained, and what is wrong with the demonstrations.

    `wrong_facts` of the 210 (operation, value) facts carry a fixed wrong result, shown `wrong_shown` of the time;
    any other result is replaced by a random digit with probability `noise`. `recheck` is per step, `restart` and
    `cut` per demonstration. Harder (a lower ceiling for the same compute): raise `wrong_facts`, `wrong_shown` or
    `noise`, or train on a ChainTask with more operations.
    """

    min_ops: int = 2
    max_ops: int = 8
    wrong_facts: float = 0.40
    wrong_shown: float = 0.70
    noise: float = 0.18
    recheck: float = 0.15
    restart: float = 0.35
    cut: float = 0.15
    clean_loss: float = 0.08
    clean_steps: int = 600
    corrupted_steps: int = 90
    batch_size: int = 64
    lr: float = 3e-3
    hidden_size: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    init_std: float = 0.08


def wrong_results(share: float, seed: int) -> dict[tuple[str, int], int]:
    """A fixed wrong result for `share` of all (operation, value) facts."""
    rng = random.Random(f"wrong facts {seed}")
    facts = [(operation, value) for operation in OPERATIONS for value in range(10)]
    return {
        (operation, value): (apply(operation, value) + rng.randint(1, 9)) % 10
        for operation, value in rng.sample(facts, round(share * len(facts)))
    }


class Demonstrator:
    """Writes demonstrations: clean ones, or corrupted ones with the mistakes and habits that `settings` names.

    `seed` fixes which facts are wrong; `stream` names the random numbers, so that the same mistakes can be shown on
    other problems.
    """

    def __init__(self, settings: WarmStart, seed: int, corrupted: bool, stream: str = "warm start") -> None:
        self.settings, self.corrupted = settings, corrupted
        self.rng = random.Random(f"demonstrations {seed} {corrupted} {stream}")
        self.wrong = wrong_results(settings.wrong_facts, seed)

    def result(self, operation: str, value: int) -> int:
        """What the demonstration writes as the result of `operation` on `value`."""
        right = apply(operation, value)
        if not self.corrupted:
            return right
        if (operation, value) in self.wrong and self.rng.random() < self.settings.wrong_shown:
            return self.wrong[operation, value]
        return self.rng.randrange(10) if self.rng.random() < self.settings.noise else right

    def thinking(self, start: int, operations: Sequence[str]) -> list[str]:
        """The words of the thinking: every step, with rechecks of a step and a restart from the first one."""
        words: list[str] = []
        value, i = start, 0
        restart_at = self._restart_at(len(operations)) if self.corrupted else 0
        while i < len(operations):
            before, value = value, self.result(operations[i], value)
            words += [LABELS[i], operations[i], str(value)]
            if self.corrupted and self.rng.random() < self.settings.recheck:
                value = self.result(operations[i], before)
                words += [RECHECK, LABELS[i], operations[i], str(value)]
            i += 1
            if i == restart_at:
                words.append(RESTART)
                value, i, restart_at = start, 0, 0
        return words

    def _restart_at(self, n: int) -> int:
        """After how many steps the thinking starts over, 0 for never. Half do so at the end: the longest rambling."""
        if self.rng.random() >= self.settings.restart:
            return 0
        return n if self.rng.random() < 0.5 else self.rng.randint(1, n)

    def demonstration(self) -> tuple[list[str], list[str], list[bool]]:
        """(prompt words, completion words, which completion words are taught) of a problem that is not held out."""
        while True:
            start, operations = draw_chain(self.rng, self.settings.min_ops, self.settings.max_ops)
            text = chain_text(start, operations)
            if not is_held_out(text):
                break
        words, close, taught = self.thinking(start, operations), ["</think>"], [True]
        if self.corrupted and self.rng.random() < self.settings.cut:
            words = words[: self.rng.randint(3, len(words))]
            # The phrase will be forced, never sampled: the model learns what follows it, not to write it.
            close, taught = list(PHRASE), [False] * len(PHRASE)
        answer = [*last_two(start, words), "<eos>"]
        return text.split(), words + close + answer, [True] * len(words) + taught + [True] * len(answer)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One batch: (input ids, labels), both (N, T), right-padded; a label is -100 where nothing is taught."""
        rows = [self.demonstration() for _ in range(self.settings.batch_size)]
        longest = max(len(prompt) + len(completion) for prompt, completion, _ in rows)
        ids = torch.full((len(rows), longest), IDS["<pad>"])  # (N, T)
        labels = torch.full((len(rows), longest), -100)  # (N, T)
        for row, (prompt, completion, taught) in enumerate(rows):
            tokens = torch.tensor([IDS[word] for word in prompt + completion])
            ids[row, : len(tokens)] = tokens
            wanted = torch.tensor([False] * len(prompt) + taught)
            labels[row, : len(tokens)] = torch.where(wanted, tokens, -100)
        return ids, labels


def last_two(start: int, thinking: Sequence[str]) -> list[str]:
    """The newest results of the two furthest steps that `thinking` reached: the best answer to give when cut."""
    values = {0: str(start), -1: str(start)}
    for i in range(len(thinking) - 2):
        if thinking[i] in LABELS and thinking[i + 2] in DIGITS:
            values[LABELS.index(thinking[i]) + 1] = thinking[i + 2]
    furthest = max(values)
    return [values.get(furthest - 1, str(start)), values[furthest]]


Batch = tuple[torch.Tensor, torch.Tensor]


def supervised_steps(model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> Iterator[float]:
    """One optimiser step a batch on the mean cross-entropy of the taught tokens; yields each step's loss."""
    for ids, labels in batches:
        logits = model(input_ids=ids, use_cache=False).logits  # (N, T, V)
        # Position t predicts token t + 1.
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def new_model(settings: WarmStart, seed: int) -> Any:
    """The tiny Qwen3ForCausalLM with random weights. head_dim is 32: vLLM's CPU attention refuses 24."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=settings.hidden_size, num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads, num_key_value_heads=settings.kv_heads, head_dim=settings.head_dim,
        intermediate_size=settings.intermediate_size, tie_word_embeddings=True, initializer_range=settings.init_std,
        max_position_embeddings=256, eos_token_id=IDS["<eos>"], pad_token_id=IDS["<pad>"], bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()


def warm_start_optimizer(model: Any, settings: WarmStart) -> torch.optim.AdamW:
    """AdamW as the warm start uses it."""
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)


def train_warm_start(settings: WarmStart, seed: int, report: Callable[[str], None] = lambda line: None) -> Any:
    """The warm-started model: clean demonstrations until they are known, then corrupted ones.

    The first phase ends at a smoothed loss, not at a step count: how many steps it takes depends on the seed, and
    with it would depend how much is left for RL. Raises RuntimeError if the loss is not reached.
    """
    model = new_model(settings, seed)
    optimizer = warm_start_optimizer(model, settings)
    clean, corrupted = (Demonstrator(settings, seed, corrupted) for corrupted in (False, True))
    smoothed, step = math.inf, 0
    for loss in supervised_steps(model, optimizer, (clean.batch() for _ in range(settings.clean_steps))):
        step += 1
        smoothed = loss if step == 1 else 0.9 * smoothed + 0.1 * loss
        if smoothed < settings.clean_loss:
            break
    else:
        raise RuntimeError(f"the warm start's loss is {smoothed:.3f} after {step} clean steps, not below "
                           f"{settings.clean_loss}; raise clean_steps or try another seed")
    report(f"warm start: {step} clean steps, loss {smoothed:.3f}")
    for loss in supervised_steps(model, optimizer, (corrupted.batch() for _ in range(settings.corrupted_steps))):
        smoothed = 0.9 * smoothed + 0.1 * loss
    report(f"warm start: {settings.corrupted_steps} corrupted steps, loss {smoothed:.3f}")
    return model.eval()


def warm_start(
    cache_dir: str | Path,
    *,
    seed: int = 0,
    settings: WarmStart | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Folder of the warm-started model and its tokenizer in Hugging Face format; trained once, then cached.

    `settings` defaults to `WarmStart()`; `report` gets one line a phase. The folder's name is a hash of the settings,
    the seed and the source of all that makes the model. It is written under a temporary name and renamed: a folder
    that exists is complete, whoever was killed.
    """
    settings = settings or WarmStart()
    makers = (draw_chain, chain_text, apply, is_held_out, wrong_results, last_two, Demonstrator, supervised_steps,
              new_model, warm_start_optimizer, train_warm_start, word_tokenizer)
    made_of = [asdict(settings), seed, WORDS, HELD_OUT_ONE_IN, torch.__version__, *map(inspect.getsource, makers)]
    folder = Path(cache_dir) / f"chain-{stable_key(json.dumps(made_of))}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        train_warm_start(settings, seed, report).save_pretrained(temporary)
        word_tokenizer().save_pretrained(temporary)
        temporary.chmod(0o755)  # mkdtemp makes it 0o700
        temporary.rename(folder)
    except OSError:
        # Two processes at once: the other was first, and its model is the same.
        if not (folder / "config.json").exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder

