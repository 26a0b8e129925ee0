"""Tokens: how prompts become token ids, and which ids or texts end the thinking and the completion."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from length_control import PHRASE
from tasks.prompts import PromptOptions

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedTokenizerBase

# What a chat template raises: Gemma's about system messages, or any mistake in its expressions.
TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class Endings:
    """Where completions and their thinking end.

    `end_of_thinking` is the text ("" for a model that does not think apart), `end_of_thinking_ids` its tokens, and
    `phrase_ids` what is forced on thinking that is cut. `thinking_end(ids)` finds the end where the mark is more than
    one token; None where a search for its id is enough.
    """

    stop_ids: tuple[int, ...]
    end_of_thinking: str
    end_of_thinking_ids: tuple[int, ...]
    phrase_ids: tuple[int, ...]
    thinking_end: Callable[[Sequence[int]], int | None] | None


def find_endings(tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> Endings:
    """The endings that a tokenizer has, where the options do not name them. Raises ValueError naming the option to
    change.

    `thinking` "false": the model answers at once and has no end of thinking. "true": it thinks, and `</think>` need not
    be one token of the tokenizer. "auto": it thinks if the tokenizer or its chat template knows `</think>`, unless
    prompts end with it, as where a template closes the thinking. Any other text is the end of thinking.
    """
    end = {"true": "</think>", "auto": "</think>", "false": ""}.get(options.thinking, options.thinking)
    template = str(tokenizer.chat_template or "")
    is_closed = False
    if end.strip() and end in template and options.apply_chat_template:
        [ids] = encode_prompts(tokenizer, [[{"role": "user", "content": ""}]], options)
        is_closed = tokenizer.decode(ids).rstrip().endswith(end.rstrip())
    if options.thinking == "auto":
        end = end if not is_closed and (end in template or end in tokenizer.get_vocab()) else ""
    elif is_closed:
        raise ValueError(f"`thinking` {options.thinking}: the chat template closes the thinking; set `thinking` false")
    phrase = options.interruption_phrase or PHRASE.removesuffix("</think>") + end
    if not phrase.endswith(end):
        raise ValueError(f"`interruption_phrase` must end with the end of thinking {end!r}, got {phrase!r}")
    stops = stop_ids(tokenizer)
    if not stops:
        raise ValueError(
            "`model`: its tokenizer has no end-of-sequence token; set `eos_token` in tokenizer_config.json"
        )
    if not end:
        return Endings(stops, "", (), (), None)
    end_ids = encode(tokenizer, end)
    phrase_ids = encode(tokenizer, phrase)
    # An added token is never merged with its neighbors, so its id is enough.
    is_one_token = end in tokenizer.get_added_vocab()
    thinking_end = None if is_one_token else end_in_text(tokenizer, end)
    return Endings(stops, end, end_ids, phrase_ids, thinking_end)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of `text` alone. Raises ValueError if the tokenizer cannot write it."""
    with encoding(repr(text)):
        return tuple(tokenizer.encode(text, add_special_tokens=False))


@contextlib.contextmanager
def encoding(what: str) -> Iterator[None]:
    """What a tokenizer raises for words that it does not have becomes a ValueError. The one of our own tasks knows a
    few words only: it cannot write the prompts of a data set."""
    try:
        yield
    except Exception as error:  # the library `tokenizers` raises no narrower kind
        raise ValueError(
            f"`model`: its tokenizer cannot write {what} ({reason_of(error)}); take a model that was trained on text"
        ) from error


def reason_of(error: Exception) -> str:
    """An error's kind and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end of sequence and those of the generation_config.json in its folder (chat models have two), or
    of config.json where there is none, as in transformers."""
    from transformers import GenerationConfig, PretrainedConfig

    folder = tokenizer.name_or_path
    more = None
    try:
        more = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        with contextlib.suppress(OSError):  # neither file is there
            more = PretrainedConfig.get_config_dict(folder)[0].get("eos_token_id")
    ids = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def end_in_text(tokenizer: PreTrainedTokenizerBase, mark: str) -> Callable[[Sequence[int]], int | None]:
    """A function of completion ids: how many tokens it takes until the text holds `mark`; None if it never does.

    For marks of several tokens, which byte-pair encoding merges with their neighbors: ` </think>`, `</think>\\n\\n`.
    """

    def answer_start(ids: Sequence[int]) -> int | None:
        def ended(n: int) -> bool:
            return mark in tokenizer.decode(list(ids[:n]), skip_special_tokens=False)

        # A text that holds the mark goes on holding it, so a binary search finds the shortest such beginning.
        return bisect.bisect_left(range(len(ids)), True, key=ended) if ended(len(ids)) else None

    return answer_start


def without_extra_ends(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """A prompt's tokens without a second BOS before a text that has one, and without the end token that some tokenizers
    append: behind it a model has nothing to say."""
    if len(ids) > 1 and ids[0] == ids[1] and ids[0] in tokenizer.get_added_vocab().values():
        ids = ids[1:]
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[dict[str, str]]],
    options: PromptOptions,
) -> list[list[int]]:
    """Token ids of each prompt, given as chat messages: `prompt_template` around its last message, then the chat
    template if the tokenizer has one. Chat templates of models that can do both (Qwen3) read `enable_thinking`, and
    choose for themselves if `thinking` is neither "true" nor "false". Raises ValueError if the chat template raises, or
    writes nothing."""
    if not prompts:
        return []
    filled = []
    for *earlier, last in prompts:
        content = options.prompt_template.replace("{prompt}", last["content"])
        filled.append([*earlier, {**last, "content": content}])
    # Mistral's own tokenizer has its chat format in code, and no template.
    has_template = tokenizer.chat_template or type(tokenizer).__name__.startswith("MistralCommon")
    if not options.apply_chat_template or not has_template:
        texts = ["\n\n".join(message["content"] for message in messages) for messages in filled]
        with encoding("the prompts"):
            return [without_extra_ends(tokenizer, ids) for ids in tokenizer(texts)["input_ids"]]
    choice = {"enable_thinking": options.thinking == "true"} if options.thinking in ("true", "false") else {}
    with encoding("the prompts"):
        try:
            ids = tokenizer.apply_chat_template(
                filled, add_generation_prompt=True, tokenize=True, return_dict=False, **choice
            )
        except TEMPLATE_ERRORS as error:
            reason = reason_of(error)
        else:
            reason = "" if any(ids) else "it writes nothing"
    if reason:
        fix = "change the messages or the template, or set `apply_chat_template` false"
        raise ValueError(f"the tokenizer's chat template does not take these prompts ({reason}); {fix}")
    return ids
