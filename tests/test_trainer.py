"""runtime/trainer.py: the gradient of a batch, the same on any number of microbatches and ranks, and the optimizer step.

bfloat16 to the last bit, checkpoints, other models and refusals: tests/deep/test_trainer_steps.py, test_trainer_models.py.
"""

import copy
import math

import pytest
import torch
from tiny_trainer import gradient_of, hand_batch, near_uniform_model, shift_weights, trainer_of, weights_of

from runtime.flags import Flags
from runtime.microbatches import lay_out
from runtime.trainer import ADAMW, learning_rate


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    return near_uniform_model(tmp_path_factory.mktemp("model"))


def test_learning_rates_by_hand():
    """1/4, 2/4, 3/4, 1, then constant."""
    flags = Flags(lr=1e-3, warmup_steps=4, max_steps=12)
    rates = [learning_rate(flags, version) for version in (0, 1, 2, 3, 4, 11, 50)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    assert learning_rate(Flags(lr=1e-3, warmup_steps=0), 0) == 1e-3


def test_the_loss_is_put_together_with_the_right_signs(model_folder):
    """Oracle: full logits row by row. minimize sum token_weights * (-min(rho, cap) A log pi + kl_coef kl - entropy_coef
    H), the reference being the model as it was at the start."""
    trainer = trainer_of(model_folder, eps_max=1.05, kl_coef=0.3, entropy_coef=0.2, temperature=0.8)
    batch, reference = hand_batch(), copy.deepcopy(trainer.model)
    shift_weights(trainer, 0.02)
    model = copy.deepcopy(trainer.model)
    loss, kls, entropies, capped = 0.0, [], [], 0
    for n, row in enumerate(batch.rows):
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        new, old = (torch.log_softmax(m(input_ids=ids).logits[0] / 0.8, -1) for m in (model, reference))
        for t, token in enumerate(row.completion_ids):
            if not row.mask[t]:
                continue
            at = len(row.prompt_ids) + t - 1
            logp = new[at, token]
            entropy = torch.distributions.Categorical(logits=new[at]).entropy()
            log_r = old[at, token].detach() - logp
            ratio = math.exp(logp.item() - batch.behaviour_logprobs[n, t].item())
            kl = log_r.exp() - 1 - log_r
            term = -min(ratio, 1.05) * batch.advantages[n] * logp + 0.3 * kl - 0.2 * entropy
            loss = loss + batch.token_weights[n, t] * term
            kls.append(kl.item())
            entropies.append(entropy.item())
            capped += ratio > 1.05
    loss.backward()
    _, summary = trainer.backward(batch)
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(gradient_of(trainer), expected, atol=1e-6, rtol=1e-3)
    assert summary["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert 0 < capped < 18 == len(kls)
    assert summary["kl"] == pytest.approx(sum(kls) / 18, rel=1e-3)
    assert summary["entropy"] == pytest.approx(sum(entropies) / 18, rel=1e-4)
    assert all(parameter.grad is None for parameter in trainer.reference.parameters())


@pytest.mark.parametrize("loss", ["cispo", "tis"])
@pytest.mark.parametrize(("tokens", "ranks"), [(12, 1), (12, 2), (1, 3), (2048, 2)])
def test_microbatches_and_ranks_change_nothing(model_folder, loss, tokens, ranks):
    """Data parallelism averages the ranks' gradients: the mean over ranks is the gradient of the whole batch in one
    pass on one rank. The loss that is logged is a sum over the ranks' rows."""
    options = {"loss": loss, "eps_max": 1.05, "kl_coef": 0.1, "entropy_coef": 0.05}
    alone = trainer_of(model_folder, **options)
    _, summary = alone.backward(hand_batch(loss == "tis"))
    gradients, summaries = [], []
    for rank in range(ranks):
        part = trainer_of(model_folder, rank, ranks, **options, tokens_per_microbatch=tokens)
        summaries.append(part.backward(hand_batch(loss == "tis"))[1])
        gradients.append(gradient_of(part))
    torch.testing.assert_close(sum(gradients) / ranks, gradient_of(alone), atol=1e-6, rtol=1e-4)
    assert sum(s["loss"] for s in summaries) == pytest.approx(summary["loss"], rel=1e-4)
    assert max(s["ratio_max"] for s in summaries) == pytest.approx(summary["ratio_max"], rel=1e-5)


def test_however_rows_are_dealt_the_gradient_is_the_same(model_folder):
    """Rows in any order, in microbatches of any size, whole or sharing their prompts: gradient and metrics are equal."""
    expected = wanted = None
    for seed, tokens, share in ((0, 2048, False), (1, 2048, True), (2, 12, True), (3, 7, False)):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(8)
        batch = hand_batch()
        batch.rows = [batch.rows[i] for i in order]
        for name in ("behaviour_logprobs", "mask", "advantages", "token_weights"):
            setattr(batch, name, getattr(batch, name)[order])
        assert lay_out(batch.rows, tokens, share=share)[0] == share
        trainer = trainer_of(model_folder, tokens_per_microbatch=tokens, share_prompts=share)
        _, metrics = trainer.backward(batch)
        assert (metrics.pop("forward_tokens") < 31) == share
        if wanted is None:
            expected, wanted = gradient_of(trainer), metrics
        assert (gradient_of(trainer) - expected).norm() < 1e-6 * expected.norm()
        assert metrics == pytest.approx(wanted, rel=1e-5)


def test_score_is_the_policys_own_logprobs_on_the_whole_batch(model_folder):
    """All rows at their places whatever the microbatches; two ranks fill in a part each, and the parts add up."""
    batch = hand_batch()
    expected = trainer_of(model_folder).score(batch.rows)
    assert expected.shape == batch.mask.shape and not expected.requires_grad
    assert ((expected < 0) == batch.mask).all()
    for ranks in (1, 2):
        parts = [trainer_of(model_folder, r, ranks, tokens_per_microbatch=9).score(batch.rows) for r in range(ranks)]
        torch.testing.assert_close(sum(parts), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_warms_up_and_throws_bad_gradients_away(monkeypatch, model_folder, dtype):
    """Adam's first step is lr * sign(gradient), lr being a quarter in the first of 4 warm-up steps. A NaN gradient changes nothing, not the
    weights, not Adam's moments, and it does not stay for the next step."""
    monkeypatch.setitem(ADAMW, "weight_decay", 0.0)
    trainer = trainer_of(model_folder, lr=1e-3, warmup_steps=4, dtype=dtype)
    parameters, before = list(trainer.model.parameters()), weights_of(trainer)
    trainer.backward(hand_batch())
    step = trainer.update(0)
    assert step["updated"] == 1 and step["lr"] == 0.25e-3 and all(p.grad is None for p in parameters)
    assert (weights_of(trainer) - before).abs().max().item() == pytest.approx(0.25e-3, rel=1e-3)
    moments = copy.deepcopy(trainer.optimizer.state_dict())["state"]
    before = weights_of(trainer)
    trainer.backward(hand_batch())
    parameters[0].grad[0, 0] = math.nan
    assert trainer.update(1)["updated"] == 0 and torch.equal(weights_of(trainer), before)
    for now, earlier in zip(trainer.optimizer.state_dict()["state"].values(), moments.values(), strict=True):
        assert all(torch.equal(now[name], earlier[name]) for name in earlier)
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_clipping_is_by_the_norm_of_the_whole_gradient(monkeypatch, model_folder, dtype, clip):
    """With an optimizer that only subtracts, at lr 1: the step's norm is the smaller of LARGEST_NORM and its own."""
    monkeypatch.setattr("runtime.trainer.LARGEST_NORM", clip)
    trainer = trainer_of(model_folder, lr=1.0, warmup_steps=0, dtype=dtype)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    trainer.backward(hand_batch())
    norm, before = gradient_of(trainer).norm().item(), weights_of(trainer)
    assert trainer.update(0)["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert (weights_of(trainer) - before).norm().item() == pytest.approx(min(norm, clip), rel=1e-2)
