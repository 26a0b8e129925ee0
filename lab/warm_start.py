"""The warm start of the built-in tasks: a tiny model that knows the format and makes mistakes that practice must undo.

It stands in for pre-training: supervised steps on clean demonstrations until the model knows them, then on corrupted
ones, so that something is left for RL to do:

    prompt     7 a +5 b *3 <think>
    clean      a +5 2 b *3 6 </think> 2 6 <eos>
    noise      a +5 9 b *3 7 </think> 9 7 <eos>                         a result is wrong, and so is all that follows
    recheck    a +5 2 wait a +5 2 b *3 6 </think> 2 6 <eos>
    restart    a +5 2 b *3 6 again a +5 2 b *3 6 </think> 2 6 <eos>     rambles past the thinking budget
    cut        a +5 2 b time up </think> 7 2 <eos>                      as after a forced interruption
    guess      </think> 4 9 <eos>                                       answers at once, at random (task `discover`)

Every (operation, value) fact is sometimes shown with a wrong result, a few facts seldom and others nearly always:
arithmetic.py explains why. No held-out problem is ever shown. All this takes half a minute, so the model is kept for
later runs. Other first models, and other sizes of this one, are in lab/tasks.py.
"""

from __future__ import annotations

import inspect
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tasks import arithmetic
from tasks.arithmetic import IDS, LABELS, OPERATIONS, OPS, WORDS, ChainTask
from tasks.prompts import FirstModel, stable_key

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

Batch = tuple[torch.Tensor, torch.Tensor]  # input ids and labels, both (N, T), padded on the right
Report = Callable[[str], None]  # gets a line to show
Fact = tuple[str, int]  # an operation, and the value to which it is applied


@dataclass(frozen=True)
class Demonstrations:
    """How often something is wrong with the corrupted demonstrations.

    The 210 (operation, value) facts, in an order that is the same for all seeds, are shown with a wrong result at rates
    that are evenly spaced over `wrong_rates`. `recheck` is the chance of a recheck per step; `restart` and `cut` are
    chances per demonstration. Of the demonstrations only one in `rarity` thinks; the others are guesses.
    """

    wrong_rates: tuple[float, float] = (0.1, 0.95)  # of the first fact and of the last
    recheck: float = 0.15
    restart: float = 0.35
    cut: float = 0.15
    rarity: int = 1
    ops: tuple[int, int] = OPS  # fewest and most operations of a problem


DISCOVER = Demonstrations(wrong_rates=(0.02, 0.10), recheck=0.0, restart=0.0, cut=0.0, rarity=50)


def wrong_rates(ends: tuple[float, float]) -> dict[Fact, float]:
    """How often each of the 210 facts is shown with a wrong result: the middles of 210 equal parts of `ends`."""
    facts = [(operation, value) for operation in OPERATIONS for value in range(10)]
    shuffled = random.Random("wrong facts 0").sample(facts, len(facts))
    low, high = ends
    return {fact: low + (high - low) * (i + 0.5) / len(facts) for i, fact in enumerate(shuffled)}


class Demonstrator:
    """Writes demonstrations: clean ones, or corrupted ones with the mistakes and habits that `settings` names."""

    def __init__(self, settings: Demonstrations, seed: int, corrupted: bool) -> None:
        self.settings = settings
        self.corrupted = corrupted
        self.count = 0  # demonstrations so far
        self.rng = random.Random(f"demonstrations {seed} {corrupted} warm start")
        self.wrong_rates = wrong_rates(settings.wrong_rates)

    def thinks(self) -> bool:
        """Whether this demonstration thinks."""
        return not self.corrupted or self.count % self.settings.rarity == 0

    def happens(self, probability: float) -> bool:
        """Draws whether a mistake or a habit of this probability happens here."""
        return self.rng.random() < probability

    def result(self, operation: str, value: int) -> int:
        """What the demonstration writes as the result of `operation` on `value`."""
        right = arithmetic.apply(operation, value)
        if not self.corrupted:
            return right
        if self.happens(self.wrong_rates[operation, value]):
            return self.rng.choice([digit for digit in range(10) if digit != right])
        self.rng.random()  # a draw for a mistake that is gone, or the demonstrations of published runs would change
        return right

    def thinking(self, start: int, operations: Sequence[str]) -> list[str]:
        """The words of the thinking: every step, with rechecks of a step and a restart from the first one."""
        n = len(operations)
        restart_at = 0  # after how many steps it starts over: half do so at the end, which is the longest rambling
        if self.corrupted and self.happens(self.settings.restart):
            restart_at = n if self.happens(0.5) else self.rng.randint(1, n)
        words: list[str] = []
        value = start
        i = 0
        while i < n:
            before = value
            value = self.result(operations[i], before)
            words += [LABELS[i], operations[i], str(value)]
            if self.corrupted and self.happens(self.settings.recheck):
                value = self.result(operations[i], before)
                words += [arithmetic.RECHECK, LABELS[i], operations[i], str(value)]
            i += 1
            if i == restart_at:
                words.append(arithmetic.RESTART)
                value, i, restart_at = start, 0, 0
        return words

    def problem(self) -> tuple[int, list[str]]:
        """The start digit and the operations of a problem that is not held out."""
        while True:
            start, operations = arithmetic.draw_chain(self.rng, self.settings.ops)
            if not arithmetic.is_held_out(arithmetic.chain_text(start, operations)):
                return start, operations

    def demonstration(self) -> tuple[list[str], list[str], list[bool]]:
        """(prompt words, completion words, which completion words are taught)."""
        start, operations = self.problem()
        prompt = arithmetic.chain_text(start, operations).split()
        self.count += 1
        if not self.thinks():
            guess = ["</think>", *self.rng.choices(arithmetic.DIGITS, k=2), "<eos>"]
            return prompt, guess, [True] * len(guess)
        words, close = self.closed(self.thinking(start, operations))
        answer = [*last_two(start, words), "<eos>"]
        # RL forces the phrase and never samples it: the model learns what follows it, not to write it.
        close_is_taught = close != arithmetic.PHRASE
        taught = [True] * len(words) + [close_is_taught] * len(close) + [True] * len(answer)
        return prompt, [*words, *close, *answer], taught

    def closed(self, words: list[str]) -> tuple[list[str], tuple[str, ...]]:
        """(the thinking, perhaps cut; the words that close it)."""
        if self.corrupted and self.happens(self.settings.cut):
            return words[: self.rng.randint(3, len(words))], arithmetic.PHRASE
        return words, ("</think>",)

    def batch(self, size: int) -> Batch:
        """One batch of N = `size` demonstrations. A label is -100 where nothing is taught."""
        rows: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        for _ in range(size):
            prompt, completion, taught = self.demonstration()
            ids = torch.tensor([IDS[word] for word in prompt + completion])
            is_label = torch.tensor([False] * len(prompt) + taught)
            rows.append(ids)
            labels.append(torch.where(is_label, ids, -100))
        return pad_sequence(rows, True, IDS["<pad>"]), pad_sequence(labels, True, -100)


def last_two(start: int, thinking: Sequence[str]) -> list[str]:
    """The newest results of the two furthest steps that `thinking` reached: the best answer to thinking that is cut."""
    values = {-1: str(start), 0: str(start)}  # by step
    for label, result in zip(thinking, thinking[2:], strict=False):
        if label in LABELS and result in arithmetic.DIGITS:
            values[LABELS.index(label) + 1] = result
    furthest = max(values)
    return [values.get(furthest - 1, str(start)), values[furthest]]


@dataclass(frozen=True)
class ModelShape:
    """The tiny Qwen3, in the words of its configuration. head_dim is 32 because vLLM's CPU attention refuses 24."""

    hidden_size: int = 96
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    initializer_range: float = 0.08
    vocab_size: int = len(WORDS)


@dataclass(frozen=True)
class WarmStart:
    """Settings of the warm start: the model, what it is shown, and how it is trained on it."""

    shape: ModelShape = ModelShape()
    demonstrations: Demonstrations = Demonstrations()
    demonstrator: type[Demonstrator] = Demonstrator  # who writes them
    clean_loss: float = 0.08  # at which the first phase ends
    clean_steps: int = 600  # at most
    corrupted_loss: float = 0.0  # at which the second one ends
    corrupted_steps: int = 90
    batch_size: int = 64
    lr: float = 3e-3


def supervised_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> Iterator[float]:
    """One optimizer step per batch on the mean cross-entropy of the taught tokens. Yields each step's loss."""
    for ids, labels in batches:
        logits = model(input_ids=ids, use_cache=False).logits  # (N, T, V)
        # Position t predicts token t + 1.
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def new_model(shape: ModelShape, seed: int) -> PreTrainedModel:
    """A Qwen3ForCausalLM of this shape for the words of chain mod 10, in FP32, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **asdict(shape),
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_id=IDS["<eos>"],
        pad_token_id=IDS["<pad>"],
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()


def train_warm_start(settings: WarmStart, seed: int, report: Report = lambda line: None) -> PreTrainedModel:
    """The warm-started model. The first phase, clean demonstrations, ends at a smoothed loss and not at a step count,
    or the seed would decide how much is left for RL. Raises RuntimeError if that loss is not reached."""
    model = new_model(settings.shape, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)

    def phase(corrupted: bool, max_steps: int, enough: float) -> float:
        """Trains until the smoothed loss is below `enough`, or for `max_steps`. Returns that loss."""
        demonstrator = settings.demonstrator(settings.demonstrations, seed, corrupted)
        batches = (demonstrator.batch(settings.batch_size) for _ in range(max_steps))
        smoothed = math.inf
        for step, loss in enumerate(supervised_steps(model, optimizer, batches), 1):
            smoothed = loss if step == 1 else 0.9 * smoothed + 0.1 * loss
            if smoothed < enough:
                break
            if corrupted and settings.demonstrations.rarity > 1:
                # Falls to 0: at a constant rate, how often the model thinks would double and halve from step to step.
                optimizer.param_groups[0]["lr"] = settings.lr * (1 - step / max_steps)
        report(f"warm start: {step} {'corrupted' if corrupted else 'clean'} steps, loss {smoothed:.3f}")
        return smoothed

    loss = phase(False, settings.clean_steps, settings.clean_loss)
    if not loss < settings.clean_loss:
        raise RuntimeError(
            f"the warm start's loss is {loss:.3f} after {settings.clean_steps} clean steps, not below "
            f"{settings.clean_loss}; raise clean_steps or try another seed"
        )
    phase(True, settings.corrupted_steps, settings.corrupted_loss)
    return model.eval()


def warm_start(
    cache_dir: str | Path, *, seed: int = 0, settings: WarmStart = WarmStart(), report: Report = lambda line: None
) -> Path:
    """Folder of the warm-started model and its tokenizer in Hugging Face format. It is trained once, then cached under
    a hash of the settings, the seed and the files that make it. It is written under a temporary name and
    renamed, so a folder that exists is complete, even if a run was killed. `report` gets one line per phase."""
    here = Path(__file__)
    files = here, arithmetic.__file__, inspect.getfile(settings.demonstrator)  # perhaps of another file
    sources = [Path(file).read_text("utf-8") for file in files]
    folder = Path(cache_dir) / f"chain-{stable_key(repr((settings, seed, torch.__version__, sources)))}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        train_warm_start(settings, seed, report).save_pretrained(temporary)
        arithmetic.word_tokenizer().save_pretrained(temporary)
        temporary.chmod(0o755)  # mkdtemp makes it 0o700
        temporary.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():  # else another process made the same model and was first
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def discover(seed: int, held_out: int, rarity: int = 50) -> ChainTask:
    """The task whose first model thinks in one completion of `rarity`."""
    task = ChainTask(seed, arithmetic.DISCOVER_POOL, held_out)
    task.first_model = first_model(WarmStart(demonstrations=replace(DISCOVER, rarity=rarity)))
    return task


def first_model(settings: WarmStart, seed: int = 0) -> FirstModel:
    """How a task's first model is made; by default one for all seeds of the task, as a pretrained one would be."""
    return lambda cache, report: warm_start(cache, seed=seed, settings=settings, report=report)
