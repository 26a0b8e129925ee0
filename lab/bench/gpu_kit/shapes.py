"""Models with random weights, prompts and rewards for the experiments: `python shapes.py FOLDER SHAPE`."""

import json
import sys
from pathlib import Path

ROOT = Path(sys.argv[3]) if len(sys.argv) > 3 else Path.cwd()
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "lab" / "tests" / "gpu"))


def make(folder: Path, shape: str) -> None:
    import torch
    from small import QWEN3_06B, TINY
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from tasks import arithmetic

    sizes = {"tiny": TINY, "qwen": QWEN3_06B}[shape]
    torch.manual_seed(0)
    end = arithmetic.IDS["<eos>"]
    torch.set_num_threads(8)
    with torch.device("cpu"):  # beside other work on the GPU
        model = Qwen3ForCausalLM(
            Qwen3Config(**sizes, eos_token_id=end, pad_token_id=end, bos_token_id=None, max_position_embeddings=4096)
        )
    model.bfloat16().save_pretrained(folder / "model")
    words = dict(arithmetic.IDS)  # and a word for each other token, so that every decoder knows every token
    words |= {f"t{i}": i for i in range(len(words), sizes["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder / "model")
    rows = [{"question": f"{a} {b} {c}", "answer": a} for a in "0123456789" for b in "0123456789" for c in "0123456789"]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("import random\ndef coin(*_):\n    return random.random() < 0.5\n")
    (folder / "phrase.txt").write_text(" ".join(arithmetic.PHRASE))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    make(folder, sys.argv[2])
    print("made", folder)
