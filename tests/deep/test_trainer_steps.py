"""runtime/trainer.py in bfloat16, over a checkpoint, on several ranks, and with a loss of one's own."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny_trainer import (
    gradient_of,
    hand_batch,
    near_uniform_model,
    rank_of,
    saved_model,
    trainer_of,
    weights_of,
)

import losses
from runtime.flags import Flags, UsageError
from runtime.parts import Run
from runtime.ranks import Ranks
from runtime.shared_prompts import score
from runtime.trainer import chosen_loss, clip_options


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    return near_uniform_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def new_accelerator():
    """Makes accelerate's own, of one process; its global state is forgotten with the next, and at the end."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def new() -> Accelerator:
        AcceleratorState._reset_state(True)
        return Accelerator(cpu=True)

    yield new
    AcceleratorState._reset_state(True)


def test_the_policy_is_gone_when_the_process_group_ends(monkeypatch, new_accelerator):
    """A DDP policy that still lives then waits, at times for ever, for a thread of gloo's that waits for it."""
    accelerator, ended = new_accelerator(), []
    trainer = SimpleNamespace(policy=accelerator.prepare(torch.nn.Linear(2, 2)))
    run = SimpleNamespace(ranks=Ranks(accelerator), trainer=trainer)
    policy = weakref.ref(trainer.policy)
    monkeypatch.setattr(accelerator, "end_training", lambda: ended.append(policy() is None))
    Run._end_accelerator(run)
    assert ended == [True]


@pytest.mark.parametrize(
    ("loss", "changes", "options"),
    [
        ("cispo", {"eps_max": 4.0, "eps_low": 0.1, "eps_high": 0.2}, {"eps_max": 4.0}),
        ("gspo", {"eps_low": 0.0, "eps_high": 0.005}, {"eps_low": 0.0, "eps_high": 0.005}),
        ("grpo", {"eps_low": 0.1, "eps_high": 0.3}, {"eps": 0.1}),
        ("tis", {"eps_low": 0.1, "eps_high": 0.3}, {"eps_low": 0.1, "eps_high": 0.3}),
        ("losses:cispo", {"eps_max": 4.0, "eps_low": 0.1}, {}),  # your own has its own defaults
    ],
)
def test_clip_options(loss, changes, options):
    """What was not set stays at the loss's own default; the loss takes all of it."""
    assert clip_options(Flags(loss=loss, **changes)) == options
    zeros = torch.zeros(1, 1)
    old = {"old_logprobs": zeros} if loss == "tis" else {}
    losses.LOSSES[loss.removeprefix("losses:")](zeros, zeros, torch.ones(1), torch.ones(1, 1), **options, **old)


def test_a_loss_of_ones_own_is_the_policys_term_and_no_other(model_folder):
    """`module:function`, found once: the gradient is that of the KL penalty and the entropy, which are the trainer's, and
    of what the function returns, here half of CISPO with a cap of its own. Its metrics are its own and the ratios."""
    options = {"kl_coef": 0.3, "entropy_coef": 0.2, "tokens_per_microbatch": 12}
    own, plain, rest = (
        trainer_of(model_folder, **options, loss="test_trainer_steps:half", eps_max=9.0),
        trainer_of(model_folder, eps_max=1.05),
        trainer_of(model_folder, **options),
    )
    nothing = hand_batch()
    nothing.advantages = torch.zeros(8)
    rest.backward(nothing)
    plain.backward(hand_batch())
    _, summary = own.backward(hand_batch())
    torch.testing.assert_close(gradient_of(own), gradient_of(plain) / 2 + gradient_of(rest), atol=1e-6, rtol=1e-4)
    assert summary["kept_tokens"] == 18 and "capped_positive" not in summary and summary["ratio_max"] > 1.05


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        ("test_trainer_steps:only_a_number", r"ValueError: it returned a token_loss of \(\), not \(N, T\)"),
        ("test_trainer_steps:without_gradient", "RuntimeError: element 0 of tensors does not require grad"),
        ("losses:merge_metrics", r"TypeError: merge_metrics\(\) takes 1 positional argument but 4 were given"),
        ("builtins:print", "TypeError: cannot unpack non-iterable NoneType object"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_before_a_model_is_loaded(loss, reason):
    with pytest.raises(UsageError, match=rf"--loss {loss} cannot train \({reason}.*\); write it as losses.cispo is."):
        chosen_loss(Flags(loss=loss))


def half(logprobs, behaviour_logprobs, advantages, mask):
    token_loss, _ = losses.cispo(logprobs, behaviour_logprobs, advantages, mask, eps_max=1.05)
    return token_loss / 2, {"kept": mask.sum()}


def only_a_number(logprobs, behaviour_logprobs, advantages, mask):
    token_loss, metrics = half(logprobs, behaviour_logprobs, advantages, mask)
    return token_loss.sum(), metrics


def without_gradient(logprobs, behaviour_logprobs, advantages, mask):
    token_loss, metrics = half(logprobs, behaviour_logprobs, advantages, mask)
    return token_loss.detach(), metrics


def clipped_adamw(weight, gradient, norm: float, lr: float) -> torch.Tensor:
    """The first step, by its formula in FP64: the moments with their bias taken off are g and g²."""
    g = gradient.double() * min(1.0, 1.0 / (norm + 1e-6))
    decayed = weight.double() * (1 - lr * 0.01)
    return decayed - lr * g / (g.abs() + 1e-15)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "more", "recompute"),
    [
        ("Qwen3", {"tie_word_embeddings": True}, False),
        ("Phi", {"partial_rotary_factor": 0.5}, True),  # its head has a bias
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, True),
    ],
)
def test_bfloat16_is_that_of_a_bfloat16_model_over_fp32_weights(kind, more, recompute, tmp_path):
    """The oracle is the same model in bfloat16, and plain autograd. Log-probs, and the gradient of one microbatch, are
    its own to the last bit; those of several are summed in FP32. A step goes to the FP32 weights, and then the passes
    have these, rounded."""
    folder, batch = saved_model(kind, tmp_path, **more), hand_batch()
    options = {"dtype": "bfloat16", "gradient_checkpointing": recompute, "tokens_per_microbatch": 9}
    trainer = trainer_of(folder, **options, lr=1e-3, warmup_steps=0)
    oracle = trainer_of(folder)
    for parameter in oracle.model.parameters():  # but no buffers
        parameter.data = parameter.data.bfloat16()
    parts, expected = trainer._microbatches(batch.rows), {}
    assert len(parts) > 2
    with torch.no_grad():
        for part in parts:
            assert torch.equal(score(trainer.policy, part)[0], score(oracle.policy, part)[0])
    trainer.backward(batch)
    for part in parts:
        oracle.model.zero_grad()
        oracle._loss(part, batch)[0].backward()
        for name, parameter in oracle.model.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.float()
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, expected[name]), name
        assert not torch.equal(expected[name], expected[name].bfloat16().float())  # a sum in bfloat16 would be
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    step = trainer.update(0)
    assert step["updated"] == 1 and step["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        after = clipped_adamw(before[name], expected[name], norm, 1e-3)
        torch.testing.assert_close(parameter.detach().double(), after, atol=3e-7, rtol=0)
        assert torch.equal(trainer.policy.model.get_parameter(name), parameter.bfloat16())
    assert {x.dtype for state in trainer.optimizer.state.values() for x in state.values()} == {torch.float32}


def test_several_ranks_average_the_fp32_gradients(model_folder):
    """Without DDP, which would average them in bfloat16: each rank's gradient, FP32, goes through one reduction."""
    reduced, accelerator = [], rank_of(0, 2)
    accelerator.reduce = lambda tensor, how: reduced.append((tensor.dtype, how)) or tensor / 4
    trainer = trainer_of(model_folder, accelerator=accelerator, dtype="bfloat16")
    alone = trainer_of(model_folder, 0, 2, dtype="bfloat16")
    for each in (trainer, alone):
        each.backward(hand_batch())
    assert reduced == [(torch.float32, "mean")] * len(list(trainer.model.parameters()))
    assert torch.equal(gradient_of(trainer), gradient_of(alone) / 4)


@pytest.mark.long
def test_the_reference_of_a_bfloat16_run_is_its_first_policy(tmp_path):
    """To the last bit, so that the KL penalty begins at 0."""
    trainer = trainer_of(saved_model("Qwen3", tmp_path), dtype="bfloat16", kl_coef=0.1)
    assert {p.dtype for p in trainer.reference.parameters()} == {torch.bfloat16}
    assert trainer.backward(hand_batch())[1]["kl"] == 0.0
    trainer.update(0)
    assert trainer.backward(hand_batch())[1]["kl"] > 0.0


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_continues_to_the_last_bit(dtype, tmp_path, new_accelerator):
    """Two steps, or one, a checkpoint, a new trainer and the other. A trainer of the other dtype takes the FP32 weights
    of the checkpoint, too."""
    folder, ends = saved_model("Qwen3", tmp_path / "model"), []
    for resumed in (False, True):
        accelerator = new_accelerator()
        trainer = trainer_of(folder, 0, 1, accelerator, dtype=dtype, lr=1e-2, warmup_steps=0, tokens_per_microbatch=9)
        if resumed:
            accelerator.load_state(str(tmp_path / "checkpoint"))
        for version in (1,) if resumed else (0, 1):
            trainer.backward(hand_batch())
            trainer.update(version)
            if version == 0:
                accelerator.save_state(str(tmp_path / "checkpoint"))
                middle = weights_of(trainer)
        ends.append(weights_of(trainer))
    assert torch.equal(*ends) and not torch.equal(ends[0], ends[0].bfloat16().float())
    accelerator = new_accelerator()
    other = trainer_of(folder, 0, 1, accelerator, dtype="bfloat16" if dtype == "float32" else "float32")
    accelerator.load_state(str(tmp_path / "checkpoint"))
    assert torch.equal(weights_of(other), middle)
