"""ScaleRL in TRL. The two legs need no TRL; the rest is skipped without it, for TRL is in an extra of its own."""

import doctest
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lab import scalerl_advantage
from length_control import Interruption
from tasks.arithmetic import IDS

pytest.importorskip("datasets", reason="of the extra `cpu`")
HAS_TRL = importlib.util.find_spec("trl") is not None
needs_trl = pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed: pip install '.[trl]'")


@pytest.fixture(scope="module")
def scalerl():
    """lab/trl_scalerl.py; without TRL, with classes in its place that have nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_TRL:
            for name in ("trl", "trl.generation", "trl.models"):
                patch.setitem(sys.modules, name, ModuleType(name))
            trl, generation, models = (sys.modules[name] for name in ("trl", "trl.generation", "trl.models"))
            trl.GRPOConfig = trl.GRPOTrainer = type("Nothing", (), {})
            generation.vllm_generation = models.unwrap_model_for_generation = None
        from lab import trl_scalerl

        yield trl_scalerl
        sys.modules.pop("lab.trl_scalerl")


# length_control.py's cases: budget 4, answer_budget 2; 3 thinks, 9 is </think>, 5 answers, 7 8 9 is the phrase, 0 ends
@pytest.mark.parametrize(
    ("first", "then_asked", "second", "completion", "mask"),
    [
        ([3] * 6, [1, 2, 3, 3, 3, 3, 7, 8, 9], [5, 0], [3, 3, 3, 3, 7, 8, 9, 5, 0], [1, 1, 1, 1, 0, 0, 0, 1, 1]),
        ([3, 3, 9, 5, 5, 5], [1, 2, 3, 3, 9, 5], [0, 5], [3, 3, 9, 5, 0], [1] * 5),
        ([3, 9, 5, 5, 5, 5], [1, 2], [5], [3, 9, 5, 5], [1] * 4),
        ([3, 9, 5, 0], [1, 2], [5], [3, 9, 5, 0], [1] * 4),
    ],
)
def test_legs(scalerl, first, then_asked, second, completion, mask):
    """Who has no second leg asks for the prompt once more: every process samples twice, or the others wait for it."""
    answers, asked = [first, second], []

    def sample(prompts, limit):
        asked.append((prompts, limit))
        ids = answers.pop(0)
        return [(ids, [-0.5] * len(ids))]

    trainer = SimpleNamespace(
        interruption=Interruption(4, 4, 2, phrase_ids=[7, 8, 9], end_of_thinking_ids=[9]),
        args=SimpleNamespace(seed=0),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(process_index=0),
        eos_token_ids=[0],
        sample=sample,
        _tokenize_prompts=lambda prompts: ([[1, 2]], None, {}),
    )
    output = scalerl.ScaleRLTrainer.rollout(trainer, ["1 2"], trainer)
    assert output == {
        "prompt_ids": [[1, 2]],
        "completion_ids": [completion],
        "logprobs": [[-0.5 * sampled for sampled in mask]],
        "env_mask": [mask],
    }
    assert asked == [([[1, 2]], 4), ([then_asked], 2)]


NEVER = [IDS["again"]]  # the first model does not write it: all that is cut gets the phrase


def tiny(scalerl, folder, reward, steps=1, **options):
    """A trainer of 4 prompts a step x 4 rollouts, of recipe.py's task and first model."""
    from datasets import Dataset
    from trl import GRPOConfig

    task = scalerl.ChainTask(0, 8)
    rows = [{"prompt": task.text(p.prompt_ids), "key": p.key} for p in task.train]
    settings = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 16, "num_generations": 4,
        "learning_rate": 1e-3, "bf16": False, "use_cpu": True, "report_to": "none", "logging_strategy": "no",
        "disable_tqdm": True, "save_strategy": "no", "cast_lm_head_to_fp32": True, "gradient_checkpointing": False,
    }  # fmt: skip
    return scalerl.ScaleRLTrainer(
        str(scalerl.FIRST_MODELS / "discover"), reward, GRPOConfig(**settings | options), Dataset.from_list(rows),
        processing_class=task.tokenizer, interruption=Interruption(2, 3, 4, [*task.phrase_ids, *NEVER], NEVER),
    )  # fmt: skip


def even_sum(completion_ids, **_):
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


@needs_trl
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradient_at_the_optimizer(scalerl, tmp_path, microbatches):
    """It is that of the paper's sums over groups and tokens, written as loops, with Hugging Face's own logits. The
    generator's log-probs of second tokens are lowered by 2: a ratio of 7.4, which the cap makes 5."""
    options = {"per_device_train_batch_size": 16 // microbatches, "gradient_accumulation_steps": microbatches}
    trainer = tiny(scalerl, tmp_path, even_sum, max_grad_norm=0, **options)
    seen = {}
    score = trainer._generate_and_score_completions

    def keep_batch(inputs):
        seen["batch"] = score(inputs)
        seen["batch"]["sampling_per_token_logps"][:, 1] -= 2
        return seen["batch"]

    class AtTheOptimizer(scalerl.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            seen["gradient"] = torch.cat([p.grad.flatten() for p in model.parameters()])

    trainer._generate_and_score_completions = keep_batch
    trainer.add_callback(AtTheOptimizer)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    trainer.model.load_state_dict(before)

    batch, rewards = seen["batch"], trainer.by_function[:, 0].view(4, 4).double()
    groups = [g for g in range(4) if rewards[g].min() != rewards[g].max()]
    assert 2 <= len(groups) and not batch["tool_mask"].all()
    centered = [r - rewards[g].mean() for g in groups for r in rewards[g]]
    std = (sum(c * c for c in centered) / len(centered)) ** 0.5
    loss = 0.0
    for g in groups:
        masks = [batch["completion_mask"][4 * g + i] * batch["tool_mask"][4 * g + i] for i in range(4)]
        tokens = sum(mask.sum() for mask in masks)
        for i in range(4):
            row = 4 * g + i
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] == 1]
            ids = torch.cat([prompt, batch["completion_ids"][row]])[None]
            log_p = trainer.model(input_ids=ids).logits[0].log_softmax(-1)
            for t in range(len(masks[i])):
                if masks[i][t]:
                    at = len(prompt) + t
                    logprob = log_p[at - 1, ids[0, at]]
                    rho = (logprob - batch["sampling_per_token_logps"][row, t]).exp().detach()
                    A = (rewards[g, i] - rewards[g].mean()) / (std + 1e-6)
                    loss = loss - rho.clamp(max=5) * A * logprob / tokens / len(groups)
    trainer.model.zero_grad()
    loss.backward()
    wanted = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert (seen["gradient"] - wanted).norm() < 1e-4 * wanted.norm()


@needs_trl
def test_resume_forgets_no_retired_prompt(scalerl, tmp_path):
    """Of eight prompts those whose text begins with an even digit are always right, and retire at their first visit."""

    def right(prompts, **_):
        return [float(int(prompt[0]) % 2 == 0) for prompt in prompts]

    def keys(trainer):
        calculate, drawn = trainer._calculate_rewards, []

        def keep_keys(inputs, *others):
            drawn.append([row["key"] for row in inputs[::4]])
            return calculate(inputs, *others)

        trainer._calculate_rewards = keep_keys
        return drawn

    options = {"save_strategy": "steps", "save_steps": 2}
    whole = tiny(scalerl, tmp_path, right, steps=4, **options)
    of_whole = keys(whole)
    whole.train()
    resumed = tiny(scalerl, tmp_path, right, steps=4, **options)
    of_resumed = keys(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert of_resumed == of_whole[2:]
    assert resumed.history.state_dict() == whole.history.state_dict() and resumed.sampled == whole.sampled
    retired = {resumed.train_dataset[int(i)]["key"] for i in resumed.history.state_dict()["retired"]}
    assert retired and not retired & {key for step in of_resumed for key in step}


@needs_trl
def test_stops_when_every_prompt_is_retired(scalerl, tmp_path):
    trainer = tiny(scalerl, tmp_path, lambda prompts, **_: [1.0] * len(prompts), steps=9)
    trainer.train()
    assert trainer.state.global_step == 2  # eight prompts, four a step


@needs_trl
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"cast_lm_head_to_fp32": False}, "cast_lm_head_to_fp32=True"),
        ({"steps_per_generation": 2}, "accumulation_steps"),
    ],
)
def test_bad_settings(scalerl, tmp_path, option, words):
    with pytest.raises(ValueError, match=words):
        tiny(scalerl, tmp_path, even_sum, **option)


def test_advantages_that_carry_the_averages():
    """The worked example of scalerl_advantage.py."""
    result = doctest.testmod(scalerl_advantage)
    assert result.attempted and not result.failed
