"""Tokens: where thinking and completions end, and how prompts are encoded."""

import itertools

from bpe import bpe_tokenizer, qwen2_tokenizer

from length_control import PHRASE as PAPERS_PHRASE
from length_control import Interruption
from tasks.prompts import PromptOptions
from tasks.tokens import encode_prompts, find_endings, stop_ids


def test_the_end_of_thinking_is_found_however_it_is_tokenized():
    """`</think>` is `</ think >` by itself, `</ think >\\n\\n` before a blank line and ` </ think >` behind a space. Thinking
    that ended so by itself gets no phrase, and the answer's tokens are those behind the token that completes the mark.
    The paper's phrase ends with ` </think>`, encoded as one text. (A search for the mark's ids once missed both.)"""
    tokenizer = qwen2_tokenizer(["I think </think>\n\nThe answer is 5", "think</think> 5", PAPERS_PHRASE] * 20)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    forms = ["</|think|>", "</|think|>\n\n", " </|think|>", " </|think|>\n\n"]  # in tokens
    marks = [form.replace("|", "") for form in forms]
    assert ["|".join(tokenizer.decode([i]) for i in encode(mark)) for mark in marks] == forms
    endings = find_endings(tokenizer, PromptOptions(thinking="true"))
    assert endings.phrase_ids == tuple(encode(PAPERS_PHRASE))
    for phrase_ids in (endings.phrase_ids, (*encode(PAPERS_PHRASE[:-8]), *endings.end_of_thinking_ids)):
        control = Interruption(50, 50, 9, phrase_ids, endings.end_of_thinking_ids, endings.thinking_end)
        for mark, answer in itertools.product(marks, ("", "7", "The answer is 5")):
            ids = encode(f"I think{mark}{answer}")
            leg = control.second_leg([1], ids, "length")
            assert (leg.prompt_ids, leg.forced_ids, leg.max_tokens) == ([1, *ids], [], 9 - len(encode(answer)))
        for text in ("I think", "I think </", "I think </think", "\u20ac"):
            assert control.second_leg([1], encode(text), "length").forced_ids == list(phrase_ids)
        assert control.second_leg([1], encode("\u20ac")[:1], "length").forced_ids  # half a character


def test_whether_a_model_thinks():
    """Instruct models that never think know `</think>`, too."""
    for think, end, options in (
        (True, "</think>", {}),
        (True, "</think>", {"thinking": "true"}),
        (True, "", {"thinking": "false"}),
        (False, "", {}),
        (False, "</think>", {"thinking": "true"}),
        (False, "DONE", {"thinking": "DONE"}),
        (False, "</think>", {"thinking": "</think>"}),
        (True, "</think>", {"apply_chat_template": False}),
    ):
        tokenizer = bpe_tokenizer(think=think)
        endings = find_endings(tokenizer, PromptOptions(**options))
        assert endings.end_of_thinking == end == tokenizer.decode(endings.end_of_thinking_ids)
        assert (endings.thinking_end is not None) == (end != "" and not think)
        if endings.thinking_end:
            assert len(endings.end_of_thinking_ids) > 1
            assert endings.thinking_end([*endings.phrase_ids, 5]) == len(endings.phrase_ids)


def test_stop_tokens_come_from_the_generation_config_too(tmp_path):
    """Chat models end a turn with one token and a text with another; the model's generation_config.json names both."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = bpe_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "model_type": "qwen3"}')  # an older model has only this
    assert stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0, 5)
    for ends, ids in (([7, 0], (0, 7)), (9, (0, 9))):
        GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
        assert stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == ids


def test_template_and_chat_template():
    """The template goes around the last message; braces in a prompt are left as they are."""
    messages = [[{"role": "system", "content": "Be {prompt}."}, {"role": "user", "content": "Is {prompt} {x}?"}]]
    text = "Q: Is {prompt} {x}? Box it: \\boxed{}."
    chat, plain = bpe_tokenizer(), bpe_tokenizer(chat=False)
    for tokenizer, use, expected in (
        (chat, True, f"[system]Be {{prompt}}.[user]{text}[assistant]"),
        (chat, False, f"Be {{prompt}}.\n\n{text}"),
        (plain, True, f"Be {{prompt}}.\n\n{text}"),
    ):
        options = PromptOptions(prompt_template="Q: {prompt} Box it: \\boxed{}.", apply_chat_template=use)
        [ids] = encode_prompts(tokenizer, messages, options)
        assert tokenizer.decode(ids) == expected
    assert encode_prompts(chat, [], PromptOptions()) == []
