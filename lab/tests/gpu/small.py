"""Random Qwen3s, and a task for them. As a script it makes `tiny` and, on a GPU, `qwen` in the present folder."""

import itertools
import json
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1, "tie_word_embeddings": True}
QWEN3_06B = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
QWEN3_06B |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
# So that a random model has a gradient.
REWARD = "import random\ndef coin(*_):\n    return random.random() < 0.5\n"


def random_qwen3(folder: Path, shape: dict[str, Any]) -> str:
    """Folder of a Qwen3 with random weights and the built-in task's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tasks import arithmetic

    torch.manual_seed(0)
    end = arithmetic.IDS["<eos>"]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=end, pad_token_id=end, bos_token_id=None))
    model.bfloat16().save_pretrained(folder)
    arithmetic.word_tokenizer().save_pretrained(folder)
    return str(folder)


def random_task(folder: Path, shape: dict[str, Any]) -> None:
    """A random model, prompts and a reward for it. Each of its tokens is a word: TRL decodes them all."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tasks import arithmetic

    random_qwen3(folder / "model", shape)
    words = arithmetic.IDS | {f"t{i}": i for i in range(len(arithmetic.IDS), shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    rows = [{"question": " ".join(digits), "answer": digits[0]} for digits in itertools.product("0123456789", repeat=3)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


if __name__ == "__main__":
    random_task(Path("tiny"), TINY)
    if torch.cuda.is_available():
        random_task(Path("qwen"), QWEN3_06B)
