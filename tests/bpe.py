"""Byte-level BPE tokenizers for the tests, trained on the spot."""

from collections.abc import Sequence
from typing import Any

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def train_tokenizer(words: Any, texts: Sequence[str], special: Sequence[str], size: int) -> Any:
    """A tokenizer that splits by the pre-tokenizer `words`; the first of `special` ends a text, the last pads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = words, decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": list(special)}
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[-1])


def bpe_tokenizer(chat: bool = True, think: bool = True) -> Any:
    """`chat`: has a chat template, which writes `[role]text...[assistant]`. `think`: `</think>` is one token."""
    from tokenizers import pre_tokenizers

    special = ["<|end|>", *["<think>", "</think>"] * think, "<|pad|>"]
    texts = ["What is 1 + 2? It is boxed. Okay, time is up. Let me stop."] * 10
    tokenizer = train_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), texts, special, 350)
    if chat:
        tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        tokenizer.chat_template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    return tokenizer


def qwen2_tokenizer(texts: Sequence[str]) -> Any:
    """With Qwen2's pre-tokenizer; `</think>` is no token of its own."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
    words = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return train_tokenizer(words, texts, ["<|end|>"], 400)
