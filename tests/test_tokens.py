"""Tokens: where thinking and completions end, and how prompts are encoded."""

import itertools

import pytest
from bpe import bpe_tokenizer, qwen2_tokenizer
from tokenizers import processors

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

    forms = ["</|think|>", "</|think|>\n\n", " </|think|>", " </|think|>\n\n"]  # in tokens
    marks = [form.replace("|", "") for form in forms]
    assert ["|".join(tokenizer.decode([i]) for i in encode(mark)) for mark in marks] == forms
    endings = find_endings(tokenizer, thinking=True)
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


def test_a_mark_that_is_one_token_is_found_by_its_id():
    """An added token is never merged with its neighbors. The phrase is the paper's."""
    tokenizer = bpe_tokenizer()
    endings = find_endings(tokenizer)
    assert tokenizer.decode(endings.phrase_ids) == PAPERS_PHRASE and endings.thinking_end is None
    assert endings.phrase_ids[-1:] == endings.end_of_thinking_ids == (tokenizer.get_vocab()["</think>"],)


def test_whether_a_model_thinks():
    """Instruct models that never think know `</think>`, too."""
    for think, end, options in (
        (True, "</think>", {}),
        (True, "</think>", {"thinking": True}),
        (True, "", {"thinking": False}),
        (False, "", {}),
        (False, "</think>", {"thinking": True}),
        (False, "DONE", {"thinking": True, "end_of_thinking": "DONE"}),
        (False, "</think>", {"end_of_thinking": "</think>"}),
        (True, "</think>", {"apply_chat_template": False}),
    ):
        tokenizer = bpe_tokenizer(think=think)
        endings = find_endings(tokenizer, **options)
        assert endings.end_of_thinking == end == tokenizer.decode(endings.end_of_thinking_ids)
        assert (endings.thinking_end is not None) == (end != "" and not think)
        if endings.thinking_end:
            assert len(endings.end_of_thinking_ids) > 1
            assert endings.thinking_end([*endings.phrase_ids, 5]) == len(endings.phrase_ids)


def test_stop_tokens_come_by_name_or_from_the_generation_config_too(tmp_path):
    """Chat models end a turn with one token and a text with another; the model's generation_config.json names both."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = bpe_tokenizer()
    named = find_endings(tokenizer, stop_tokens="<|pad|>, <|end|>")
    assert named.stop_ids == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    tokenizer.save_pretrained(tmp_path)
    assert default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "model_type": "qwen3"}')  # an older model has only this
    assert default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0, 5)
    for ends, ids in (([7, 0], (0, 7)), (9, (0, 9))):
        GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
        assert default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == ids


def test_bad_options_are_refused_by_name():
    """The last tokenizer has no end of its own."""
    endless = bpe_tokenizer()
    endless.eos_token, stops = None, "`stop_tokens`: the tokenizer has no token "
    for tokenizer, options, words in (
        (bpe_tokenizer(), {"interruption_phrase": "Stop."}, "`interruption_phrase` must end with .* '</think>'"),
        (bpe_tokenizer(), {"stop_tokens": "<|end|>, <nope>,<|END|>"}, rf"{stops}'<nope>', '<\|END\|>'; "),
        (bpe_tokenizer(), {"stop_tokens": "<|end|>,"}, f"{stops}''"),
        (endless, {}, "no end-of-sequence token; name one with `stop_tokens`"),
    ):
        with pytest.raises(ValueError, match=words):
            find_endings(tokenizer, **options)


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


def test_a_template_that_closes_the_thinking_leaves_none_to_the_model():
    """`</think>` would never come, and every completion would be unfinished."""
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template += "<think>\n\n</think>\n\n"
    assert find_endings(tokenizer).end_of_thinking == ""
    assert find_endings(tokenizer, apply_chat_template=False).end_of_thinking == "</think>"
    assert find_endings(tokenizer, thinking=True).end_of_thinking == "</think>"


def test_a_prompt_has_one_beginning_and_no_end():
    """Tokenizers that append their end token, or put a BOS before a text that has one."""
    for post, prompt, expected in (
        ("$A <|end|>", "What?", "What?"),
        ("<think> $A", "<think>What?", "<think>What?"),
        ("<think> $A", "What?", "<think>What?"),
        ("$A", "aaWhat?", "aaWhat?"),
    ):
        tokenizer = bpe_tokenizer(chat=False)
        special = [("<|end|>", 0), ("<think>", 1)]
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single=post, special_tokens=special)
        [ids] = encode_prompts(tokenizer, [[{"role": "user", "content": prompt}]])
        assert tokenizer.decode(ids) == expected


def test_mistrals_own_tokenizer_has_a_chat_format_without_a_template():
    class MistralCommonBackend:
        chat_template = None

        def apply_chat_template(self, messages, **_):
            return [[len(messages)]]

    assert encode_prompts(MistralCommonBackend(), [[{"role": "user", "content": "Hi"}]]) == [[1]]


TEMPLATES = [
    ("{{ raise_exception('System role not supported\\nSorry.') }}", "TemplateError: System role not supported"),
    ("{% for %}", "TemplateSyntaxError: Expected an expression, .*"),
    ("{{ unknown.name }}", "UndefinedError: 'unknown' is undefined"),
    ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ("{{ 'a' + 1 }}", "TypeError: .*"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: .*"),
    ("{{ range(10 ** 9) | list }}", "OverflowError: .*"),
    ("{% if false %}never{% endif %}", "it writes nothing"),
]


@pytest.mark.parametrize(("template", "reason"), TEMPLATES)
def test_a_chat_template_that_raises_is_refused_in_a_sentence(template, reason):
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = template
    message = rf"^the tokenizer's chat template does not take .* \({reason}\); .* `apply_chat_template` false$"
    with pytest.raises(ValueError, match=message) as refused:
        encode_prompts(tokenizer, [[{"role": "user", "content": "2 + 3"}]])
    assert "\n" not in str(refused.value)
