"""Tokens: where thinking and completions end, and how prompts are encoded."""

import pytest
from bpe import bpe_tokenizer, qwen2_tokenizer

from length_control import PHRASE as PAPERS_PHRASE
from length_control import Interruption
from tasks.tokens import default_stop_ids, encode_prompts, find_endings


def test_the_end_of_thinking_is_found_however_it_is_tokenized():
    """`</think>` is `</ think >` by itself, `</ think >\\n\\n` before a blank line and ` </ think >` behind a space. Thinking
    that ended so by itself gets no phrase, and the answer's tokens are those behind the token that completes the mark.
    The paper's phrase ends with ` </think>`, encoded as one text. (A search for the mark's ids once missed both.)"""
    tokenizer = qwen2_tokenizer(["I think </think>\n\nThe answer is 5", "think</think> 5", PAPERS_PHRASE] * 20)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    forms = {
        text: [tokenizer.decode([i]) for i in encode(text)]
        for text in ("</think>", "</think>\n\n", " </think>", " </think>\n\n")
    }
    assert forms == {
        "</think>": ["</", "think", ">"],
        "</think>\n\n": ["</", "think", ">\n\n"],
        " </think>": [" </", "think", ">"],
        " </think>\n\n": [" </", "think", ">\n\n"],
    }
    found = find_endings(tokenizer, thinking=True)
    assert found.phrase_ids == tuple(encode(PAPERS_PHRASE))
    for phrase_ids in (found.phrase_ids, (*encode(PAPERS_PHRASE[:-8]), *found.end_of_thinking_ids)):
        control = Interruption(50, 50, 9, phrase_ids, found.end_of_thinking_ids, found.thinking_end)
        for between in forms:
            for answer in ("", "7", "The answer is 5"):
                ids = encode(f"I think{between}{answer}")
                leg = control.second_leg([1], ids, "length")
                assert (leg.prompt_ids, leg.forced_ids) == ([1, *ids], [])
                assert leg.max_tokens == 9 - len(encode(answer))
        for text in ("I think", "I think </", "I think </think", "\u20ac"):
            assert control.second_leg([1], encode(text), "length").forced_ids == list(phrase_ids)
        assert control.second_leg([1], encode("\u20ac")[:1], "length").forced_ids  # half a character


def test_a_mark_that_is_one_token_is_found_by_its_id():
    """An added token is never merged with its neighbors. The phrase is the paper's."""
    tokenizer = bpe_tokenizer()
    found = find_endings(tokenizer)
    assert tokenizer.decode(found.phrase_ids) == PAPERS_PHRASE
    assert found.thinking_end is None and len(found.end_of_thinking_ids) == 1
    assert found.phrase_ids[-1:] == found.end_of_thinking_ids == (tokenizer.get_vocab()["</think>"],)


@pytest.mark.parametrize(
    ("think", "options", "end"),
    [
        (True, {}, "</think>"),
        (True, {"thinking": True}, "</think>"),
        (True, {"thinking": False}, ""),  # instruct models that never think know the token, too
        (False, {}, ""),
        (False, {"thinking": True}, "</think>"),
        (False, {"thinking": True, "end_of_thinking": "DONE"}, "DONE"),
        (False, {"end_of_thinking": "</think>"}, "</think>"),
    ],
)
def test_whether_a_model_thinks(think, options, end):
    tokenizer = bpe_tokenizer(think=think)
    found = find_endings(tokenizer, **options)
    assert found.end_of_thinking == end == tokenizer.decode(found.end_of_thinking_ids)
    assert (found.thinking_end is not None) == (end != "" and not think)
    if found.thinking_end:
        assert len(found.end_of_thinking_ids) > 1
        assert found.thinking_end([*found.phrase_ids, 5]) == len(found.phrase_ids)


def test_stop_tokens_come_from_the_generation_config_too(tmp_path):
    """Chat models end a turn with one token and a text with another; the model's generation_config.json names both."""
    from transformers import AutoTokenizer, GenerationConfig

    bpe_tokenizer().save_pretrained(tmp_path)
    assert default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0,)
    GenerationConfig(eos_token_id=[7, 0]).save_pretrained(tmp_path)
    assert default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0, 7)
    GenerationConfig(eos_token_id=9).save_pretrained(tmp_path)
    assert default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0, 9)


def test_stop_tokens_are_given_by_name():
    tokenizer = bpe_tokenizer()
    found = find_endings(tokenizer, stop_tokens="<|pad|>, <|end|>")
    assert found.stop_ids == (tokenizer.pad_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interruption_phrase": "Stop."}, "`interruption_phrase` must end with the end of thinking '</think>'"),
        ({"stop_tokens": "<|end|>, <nope>,<|END|>"}, "`stop_tokens`: the tokenizer has no token '<nope>', '<|END|>'; "),
        ({"stop_tokens": "<|end|>,"}, "`stop_tokens`: the tokenizer has no token ''"),
    ],
)
def test_bad_options_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words.replace("|", r"\|")):
        find_endings(bpe_tokenizer(), **options)


def test_a_tokenizer_without_an_end_needs_a_stop_token():
    tokenizer = bpe_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token; name one with `stop_tokens`"):
        find_endings(tokenizer)


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
        [ids] = encode_prompts(tokenizer, messages, "Q: {prompt} Box it: \\boxed{}.", use)
        assert tokenizer.decode(ids) == expected
    assert encode_prompts(chat, []) == []


def test_the_chat_template_is_given_the_choice_to_think():
    """A template like Qwen3's: thinking unless `enable_thinking` is false, which closes it in the prompt."""
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer.chat_template += "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    for thinking, end in ((None, ""), (True, "<think>"), (False, "<think></think>")):
        [ids] = encode_prompts(tokenizer, [[{"role": "user", "content": "Hi"}]], thinking=thinking)
        assert tokenizer.decode(ids) == f"[user]Hi[assistant]{end}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('System role not supported') }}", "TemplateError: System role not supported"),
        ("{% for %}", "TemplateSyntaxError: Expected an expression, .*"),
        ("{{ unknown.name }}", "UndefinedError: 'unknown' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 'a' + 1 }}", "TypeError: .*"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: .*"),
        ("{{ range(10 ** 9) | list }}", "OverflowError: .*"),
        ("{% if false %}never{% endif %}", "it writes nothing"),
    ],
)
def test_a_chat_template_that_raises_is_refused_in_a_sentence(template, reason):
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = template
    told = rf"^the tokenizer's chat template does not take .* \({reason}\); .* `apply_chat_template` false$"
    with pytest.raises(ValueError, match=told) as refused:
        encode_prompts(tokenizer, [[{"role": "user", "content": "2 + 3"}]])
    assert "\n" not in str(refused.value)
