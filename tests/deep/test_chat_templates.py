"""Tokens: chat templates that close the thinking or raise, prompts with two beginnings, and bad options."""

import pytest
from bpe import bpe_tokenizer
from tokenizers import processors

from tasks.prompts import PromptOptions
from tasks.tokens import encode_prompts, find_endings


def test_bad_options_are_refused_by_name():
    """The last tokenizer has no end of its own."""
    endless = bpe_tokenizer()
    endless.eos_token = None
    for tokenizer, options, words in (
        (bpe_tokenizer(), {"interruption_phrase": "Stop."}, "`interruption_phrase` must end with .* '</think>'"),
        (endless, {}, "no end-of-sequence token; set `eos_token`"),
    ):
        with pytest.raises(ValueError, match=words):
            find_endings(tokenizer, PromptOptions(**options))


def test_the_chat_template_is_given_the_choice_to_think():
    """A template like Qwen3's: thinking unless `enable_thinking` is false, which closes it in the prompt."""
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer.chat_template += "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    for thinking, end in (("auto", ""), ("DONE", ""), ("true", "<think>"), ("false", "<think></think>")):
        [ids] = encode_prompts(tokenizer, [[{"role": "user", "content": "Hi"}]], PromptOptions(thinking=thinking))
        assert tokenizer.decode(ids) == f"[user]Hi[assistant]{end}"


def test_a_template_that_closes_the_thinking_leaves_none_to_the_model():
    """`</think>` would never come, and every completion would be unfinished: whoever asks for thinking is told."""
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template += "<think>\n\n</think>\n\n"
    assert find_endings(tokenizer, PromptOptions()).end_of_thinking == ""
    assert find_endings(tokenizer, PromptOptions(apply_chat_template=False)).end_of_thinking == "</think>"
    with pytest.raises(
        ValueError, match="`thinking` true: the chat template closes the thinking; set `thinking` false"
    ):
        find_endings(tokenizer, PromptOptions(thinking="true"))


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
        [ids] = encode_prompts(tokenizer, [[{"role": "user", "content": prompt}]], PromptOptions())
        assert tokenizer.decode(ids) == expected


def test_mistrals_own_tokenizer_has_a_chat_format_without_a_template():
    class MistralCommonBackend:
        chat_template = None

        def apply_chat_template(self, messages, **_):
            return [[len(messages)]]

    assert encode_prompts(MistralCommonBackend(), [[{"role": "user", "content": "Hi"}]], PromptOptions()) == [[1]]


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
        encode_prompts(tokenizer, [[{"role": "user", "content": "2 + 3"}]], PromptOptions())
    assert "\n" not in str(refused.value)
