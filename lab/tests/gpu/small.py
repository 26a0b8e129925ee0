"""Random Qwen3s for the checks."""

from pathlib import Path
from typing import Any

import torch

from runtime.engine import Placement, RunEngine
from runtime.weights import RunWeightFile

ROOT = Path(__file__).resolve().parents[3]
TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1, "tie_word_embeddings": True}
QWEN3_06B = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
QWEN3_06B |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}


class FileEngine(RunEngine):
    """Its weights come through the file where they would stay on the GPU."""

    @classmethod
    def new_channel(cls, placement: Placement, rank: int) -> RunWeightFile:
        """This rank's end of the weight channel."""
        return RunWeightFile(rank)


def random_qwen3(folder: Path, shape: dict[str, Any]) -> str:
    """Folder of a Qwen3 with random weights and the built-in task's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tasks import arithmetic

    torch.manual_seed(0)
    end = arithmetic.IDS["<eos>"]
    config = Qwen3Config(**shape, eos_token_id=end, pad_token_id=end, bos_token_id=None)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    arithmetic.word_tokenizer().save_pretrained(folder)
    return str(folder)
