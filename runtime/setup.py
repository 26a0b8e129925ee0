"""The parts of a run, made from its flags."""

import math
from typing import Any

import length_control
from runtime.flags import UsageError
from tasks import chain, data_sets


def load_task(flags: Any, judge: bool = True) -> Any:
    """The built-in task, or that of data sets; see tasks/ for what a task has. Without `judge`, on ranks that score
    nothing, no reward worker outlives the check of the rows. Raises UsageError."""
    if flags.dataset == "chain":
        return chain.ChainTask(seed=flags.seed, pool_size=flags.prompts)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(flags.model, trust_remote_code=flags.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--model {flags.model} has no tokenizer that loads ({reason}).") from error
    options = data_sets.PromptOptions(
        flags.prompt_column or None, flags.answer_column or None, flags.prompt_template, held_out=flags.held_out,
        max_tokens=flags.max_prompt_tokens, chat=flags.apply_chat_template,
        thinking={"auto": None, "true": True, "false": False}[flags.thinking],
    )  # fmt: skip
    try:
        return data_sets.load_dataset_task(
            flags.dataset, tokenizer, options, reward="math" if flags.reward in ("task", "shuffled") else flags.reward,
            reward_workers=flags.reward_workers, reward_timeout=flags.reward_timeout, reward_errors=flags.reward_errors,
            end_of_thinking=flags.end_of_thinking or None, phrase=flags.interruption_phrase or None,
            stop_tokens=flags.stop_tokens or None, judge=judge,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_model(flags: Any, config: Any, task: Any, control: length_control.Interruption | None) -> None:
    """Raises UsageError if the task does not fit the model: its vocabulary, or its context."""
    longest = control.max_completion if control else flags.max_budget + flags.answer_budget
    needed = longest + max(len(problem.prompt_ids) for problem in [*task.train, *task.held_out])
    context = getattr(config, "max_position_embeddings", None) or math.inf
    if needed > context:
        raise UsageError(
            f"--max_budget {flags.max_budget}: the longest prompt and completion take {needed} tokens, the model's "
            f"context has {context}; lower --max_budget, --answer_budget or --max_prompt_tokens."
        )
    if len(task.tokenizer) > config.vocab_size:
        raise UsageError(
            f"--model has a vocabulary of {config.vocab_size}, the task's tokenizer has {len(task.tokenizer)}; "
            "give the model that belongs to the task."
        )
