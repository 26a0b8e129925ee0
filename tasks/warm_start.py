"""The warm start of the built-in task: a tiny model that knows the format and makes mistakes.

It stands in for pre-training: supervised steps on clean demonstrations until the model knows them, then on corrupted
ones (demonstrations.py). It takes half a minute, so the model is kept in a folder that later runs use again. With the
default settings the model is right on about 7 % of the held-out problems.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tasks.chain import IDS, WORDS, word_tokenizer
from tasks.demonstrations import Batch, Demonstrations, Demonstrator
from tasks.prompts import stable_key


@dataclass(frozen=True)
class ModelShape:
    """The tiny Qwen3: about 0.2M parameters. head_dim is 32 because vLLM's CPU attention refuses 24.

    `vocabulary` counts the rows of the embedding, which is the head, too. Those beyond the task's words stand for no
    word, but are in the softmax: the demonstrations teach that they are improbable, and no more.
    """

    hidden_size: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    init_std: float = 0.08
    vocabulary: int = len(WORDS)


@dataclass(frozen=True)
class WarmStart:
    """Settings of the warm start: the model, what it is shown, and how it is trained on it."""

    shape: ModelShape = ModelShape()
    demonstrations: Demonstrations = field(default_factory=Demonstrations)
    clean_loss: float = 0.08
    clean_steps: int = 600
    corrupted_steps: int = 90
    corrupted_loss: float = 0.0  # ends the second phase before its steps are made
    batch_size: int = 64
    lr: float = 3e-3


def supervised_steps(model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> Iterator[float]:
    """One optimizer step per batch on the mean cross-entropy of the taught tokens. Yields each step's loss."""
    for ids, labels in batches:
        logits = model(input_ids=ids, use_cache=False).logits  # (N, T, V)
        # Position t predicts token t + 1.
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def new_model(shape: ModelShape, seed: int) -> Any:
    """A Qwen3ForCausalLM of this shape for the words of chain mod 10, in FP32, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size, tie_word_embeddings=True, initializer_range=shape.init_std,
        max_position_embeddings=256, eos_token_id=IDS["<eos>"], pad_token_id=IDS["<pad>"], bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()


def warm_start_optimizer(model: Any, lr: float) -> torch.optim.AdamW:
    """AdamW as the warm start uses it."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)


def train_warm_start(settings: WarmStart, seed: int, report: Callable[[str], None] = lambda line: None) -> Any:
    """The warm-started model: clean demonstrations until they are known, then corrupted ones.

    The first phase ends at a smoothed loss and not at a step count: how many steps that takes depends on the seed, and
    with a fixed count the seed would decide how much is left for RL. Raises RuntimeError if the loss is not reached.
    """
    model = new_model(settings.shape, seed)
    optimizer = warm_start_optimizer(model, settings.lr)

    def phase(corrupted: bool, steps: int, enough: float) -> tuple[int, float]:
        """(steps made, smoothed loss): `steps`, or fewer if the loss falls below `enough`."""
        demonstrator = Demonstrator(settings.demonstrations, seed, corrupted)
        batches = (demonstrator.batch(settings.batch_size) for _ in range(steps))
        step, smoothed = 0, math.inf
        for step, loss in enumerate(supervised_steps(model, optimizer, batches), 1):
            smoothed = loss if step == 1 else 0.9 * smoothed + 0.1 * loss
            if smoothed < enough:
                break
        return step, smoothed

    step, loss = phase(False, settings.clean_steps, settings.clean_loss)
    if not loss < settings.clean_loss:
        raise RuntimeError(
            f"the warm start's loss is {loss:.3f} after {step} clean steps, not below "
            f"{settings.clean_loss}; raise clean_steps or try another seed"
        )
    report(f"warm start: {step} clean steps, loss {loss:.3f}")
    step, loss = phase(True, settings.corrupted_steps, settings.corrupted_loss)
    report(f"warm start: {step} corrupted steps, loss {loss:.3f}")
    return model.eval()


def warm_start(
    cache_dir: str | Path, *, seed: int = 0, settings: WarmStart = WarmStart(),
    report: Callable[[str], None] = lambda line: None,
) -> Path:  # fmt: skip
    """Folder of the warm-started model and its tokenizer in Hugging Face format; trained once, then cached.

    `report` gets one line per phase. The folder's name is a hash of the settings, the seed and the source of all that
    makes the model. The folder is written under a temporary name and renamed: one that exists is complete, even if a
    run was killed.
    """
    makers = [Path(__file__).with_name(f"{name}.py") for name in ("chain", "demonstrations", "warm_start")]
    made_of = [asdict(settings), seed, torch.__version__, *(file.read_text() for file in makers)]
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
        # Another process made the same model at the same time and was first.
        if not (folder / "config.json").exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
