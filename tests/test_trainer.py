"""runtime/trainer.py: the gradient of a batch on any number of microbatches and ranks, the optimizer step in float32 and
bfloat16, the models that are refused, and gradient checkpointing."""

import copy
import json
import math
import pickle
import random
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import masks
import pytest
import torch
import transformers
from safetensors.torch import load_file, save
from saved_bytes import saved_bytes
from transformers import AutoModelForCausalLM

import losses
from runtime.flags import Flags, UsageError
from runtime.model import TokenRow
from runtime.parts import Run, check_model, check_saving
from runtime.ranks import Ranks
from runtime.recorder import staleness
from runtime.run import load_tensors
from runtime.trainer import ADAMW, Trainer, TrainingBatch, clip_options, learning_rate
from tasks.arithmetic import ChainTask

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def saved_model(kind: str, folder: Path, **more) -> str:
    """The folder of a tiny random model of that kind."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | more)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    """A Qwen3 with a tied head, near the uniform distribution."""
    folder = tmp_path_factory.mktemp("model")
    return saved_model("Qwen3", folder, tie_word_embeddings=True, num_hidden_layers=1, initializer_range=0.08)


def rank_of(rank: int, ranks: int) -> SimpleNamespace:
    """What the trainer asks of accelerate, for one of `ranks` ranks that never meet."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        process_index=rank,
        num_processes=ranks,
        is_fsdp2=False,
        prepare=lambda *things: things,
        prepare_model=lambda model, evaluation_mode: model,
        prepare_optimizer=lambda optimizer: optimizer,
        unwrap_model=lambda model: model,
        reduce=lambda tensor, reduction="sum": tensor,
        no_sync=lambda model: nullcontext(),
        backward=torch.Tensor.backward,
        clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
    )


def trainer_of(folder: str, rank: int = 0, ranks: int = 1, accelerator=None, **flags) -> Trainer:
    return Trainer(Flags(**flags), accelerator or rank_of(rank, ranks), folder)


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


def hand_batch() -> TrainingBatch:
    """Two prompts with four rollouts each: 18 trained tokens, one forced; behavior log-probs near the random model's
    -log(23) = -3.1, so that some ratios are capped."""
    masks = [[1] * n for n in (3, 1, 3, 2, 2, 2, 2, 4)]
    masks[2][1] = 0
    rows = [TokenRow([1] if i < 4 else [3, 2], range(10, 10 + len(mask)), mask) for i, mask in enumerate(masks)]
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(m, dtype=torch.bool) for m in masks], batch_first=True)
    behaviour = -(2.9 + 0.1 * torch.arange(4)) * mask  # (8, 4)
    advantages = torch.tensor([1.6, -0.5, -0.5, -0.5, 1.1, 1.1, -1.1, -1.1])
    token_weights = losses.aggregation_weights(mask, torch.arange(8) // 4)
    return TrainingBatch(rows, behaviour, mask, advantages, token_weights, old_logprobs=behaviour - 0.1)


def gradient_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


def weights_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def shift_weights(trainer: Trainer, size: float) -> None:
    """Moves every weight by a random amount of this size, the same in every run."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=rng))


def refused(folder: str, sentence: str, **flags) -> UsageError:
    with pytest.raises(UsageError, match=sentence) as caught:
        trainer_of(folder, **flags)
    return caught.value


def test_the_policy_is_gone_when_the_process_group_ends(monkeypatch, new_accelerator):
    """A DDP policy that still lives then waits, at times for ever, for a thread of gloo's that waits for it."""
    accelerator, ended = new_accelerator(), []
    trainer = SimpleNamespace(policy=accelerator.prepare(torch.nn.Linear(2, 2)))
    run = SimpleNamespace(ranks=Ranks(accelerator), trainer=trainer)
    policy = weakref.ref(trainer.policy)
    monkeypatch.setattr(accelerator, "end_training", lambda: ended.append(policy() is None))
    Run._end_accelerator(run)
    assert ended == [True]


def test_learning_rates_by_hand():
    """1/4, 2/4, 3/4, 1, then constant."""
    flags = Flags(lr=1e-3, warmup_steps=4, max_steps=12)
    rates = [learning_rate(flags, version) for version in (0, 1, 2, 3, 4, 11, 50)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    assert learning_rate(Flags(lr=1e-3, warmup_steps=0), 0) == 1e-3


@pytest.mark.parametrize(
    ("loss", "changes", "options"),
    [
        ("cispo", {"eps_max": 4.0, "eps_low": 0.1, "eps_high": 0.2}, {"eps_max": 4.0}),
        ("gspo", {"eps_low": 0.0, "eps_high": 0.005}, {"eps_low": 0.0, "eps_high": 0.005}),
        ("dispo", {"eps_low": 0.1}, {"eps_low": 0.1}),
        ("grpo", {"eps_low": 0.1, "eps_high": 0.3}, {"eps": 0.1}),
        ("tis", {"eps_low": 0.1, "eps_high": 0.3}, {"eps_low": 0.1, "eps_high": 0.3}),
    ],
)
def test_clip_options(loss, changes, options):
    """What was not set stays at the loss's own default; the loss takes all of it."""
    assert clip_options(Flags(loss=loss, **changes)) == options
    zeros = torch.zeros(1, 1)
    old = {"old_logprobs": zeros} if loss == "tis" else {}
    losses.LOSSES[loss](zeros, zeros, torch.ones(1), torch.ones(1, 1), **options, **old)


# ------------------------------------------------------------------------------------------------------------ gradients


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


@pytest.mark.parametrize(
    ("name", "flags", "limits"),
    [
        ("icepop", {}, {}),
        ("icepop", {"mask_high": 1.05, "mask_low": 0.7}, {"low": 0.7, "high": 1.05}),
        ("m2po", {"mask_high": 0.02}, {"high": 0.02}),
    ],
)
def test_a_mask_multiplies_the_policys_term_and_no_other(model_folder, name, flags, limits):
    """The gradient is that of the loss with the mask in its weights, plus that of the penalty and the entropy. Counts
    are of all microbatches, and `m2po` compares the tokens of all of them."""
    options = {"tokens_per_microbatch": 12, "lr": 1e-3}
    others = {"kl_coef": 0.3, "entropy_coef": 0.2}
    batch = hand_batch()
    masked = trainer_of(model_folder, mask=name, **flags, **others, **options)
    _, summary = masked.backward(batch)
    own = trainer_of(model_folder, **options)
    scored = own.score(batch.rows), batch.behaviour_logprobs, batch.advantages, batch.mask
    weights, counts = masks.MASKS[name](*scored, **limits)
    assert summary["kept_tokens"] == int(counts["kept"]) == int(weights.sum())
    assert (0 < summary["kept_tokens"] < 18) == bool(flags)
    for sign, key in ((1, "masked_positive"), (-1, "masked_negative")):
        of_sign = batch.mask & (batch.advantages[:, None] * sign > 0)
        assert summary[key] == pytest.approx(float((of_sign & (weights == 0)).sum() / of_sign.sum()))
    plain = hand_batch()
    plain.token_weights = plain.token_weights * weights
    assert "kept_tokens" not in own.backward(plain)[1]
    rest, nothing = trainer_of(model_folder, **others, **options), hand_batch()
    nothing.advantages = torch.zeros(8)
    rest.backward(nothing)
    torch.testing.assert_close(gradient_of(masked), gradient_of(own) + gradient_of(rest), atol=1e-6, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["cispo", "tis"])
@pytest.mark.parametrize(("tokens", "ranks"), [(12, 1), (12, 2), (1, 3), (2048, 2)])
def test_microbatches_and_ranks_change_nothing(model_folder, loss, tokens, ranks):
    """Data parallelism averages the ranks' gradients: the mean over ranks is the gradient of the whole batch in one
    pass on one rank. The loss that is logged is a sum over the ranks' rows."""
    options = {"loss": loss, "eps_max": 1.05, "kl_coef": 0.1, "entropy_coef": 0.05}
    alone = trainer_of(model_folder, **options)
    _, summary = alone.backward(hand_batch())
    gradients, summaries = [], []
    for rank in range(ranks):
        part = trainer_of(model_folder, rank, ranks, **options, tokens_per_microbatch=tokens)
        summaries.append(part.backward(hand_batch())[1])
        gradients.append(gradient_of(part))
    torch.testing.assert_close(sum(gradients) / ranks, gradient_of(alone), atol=1e-6, rtol=1e-4)
    assert sum(s["loss"] for s in summaries) == pytest.approx(summary["loss"], rel=1e-4)
    assert max(s["ratio_max"] for s in summaries) == pytest.approx(summary["ratio_max"], rel=1e-5)


def test_the_ratio_is_mismatch_times_staleness(model_folder):
    """The oracle has what a run has not, the log-probs of the weights that sampled: 1,800 tokens scored by them, with
    noise of .05 nats on top as the generator's, then other weights."""
    trainer, batch = trainer_of(model_folder, tokens_per_microbatch=999), hand_batch()
    batch.rows = batch.rows * 100
    batch.mask = batch.mask.repeat(100, 1)
    batch.advantages = batch.advantages.repeat(100)
    batch.token_weights = batch.token_weights.repeat(100, 1)
    noise = 0.05 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)) * batch.mask
    before = trainer.score(batch.rows)
    batch.behaviour_logprobs = before + noise
    shift_weights(trainer, 0.008)
    age = (trainer.score(batch.rows) - before)[batch.mask].square().mean().sqrt().item()
    mismatch = noise[batch.mask].square().mean().sqrt().item()
    total = trainer.backward(batch)[1]["log_ratio_rms"]
    assert total > 1.1 * age and age > mismatch / 3
    assert staleness(total, mismatch) == pytest.approx(age, rel=0.03)


def test_score_is_the_policys_own_logprobs_on_the_whole_batch(model_folder):
    """All rows at their places whatever the microbatches; two ranks fill in a part each, and the parts add up."""
    batch = hand_batch()
    expected = trainer_of(model_folder).score(batch.rows)
    assert expected.shape == batch.mask.shape and not expected.requires_grad
    assert ((expected < 0) == batch.mask).all()
    for ranks in (1, 2):
        parts = [trainer_of(model_folder, r, ranks, tokens_per_microbatch=9).score(batch.rows) for r in range(ranks)]
        torch.testing.assert_close(sum(parts), expected, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------ optimizer steps


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


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_parameters_that_cost_flops(tmp_path, tied):
    """The lookup of an embedding costs nothing: P is all parameters if one table serves as head, too. The generator
    gets its own dtype; the trainer's weights stay FP32."""
    trainer = trainer_of(saved_model("Qwen3", tmp_path, tie_word_embeddings=tied), dtype="bfloat16")
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters()}
    assert ("lm_head.weight" in sizes) == (not tied)
    lookup = 0 if tied else sizes["model.embed_tokens.weight"]
    assert trainer.parameters_in_flops == sum(sizes.values()) - lookup
    weights = dict(trainer.weights.items())
    assert set(weights) == set(sizes)
    assert {x.dtype for x in weights.values()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


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
            assert torch.equal(trainer.policy(part)[0], oracle.policy(part)[0])
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
            load_tensors(accelerator, tmp_path / "checkpoint")
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
    load_tensors(accelerator, tmp_path / "checkpoint")
    assert torch.equal(weights_of(other), middle)


# --------------------------------------------------------------------------------------------------- models and weights

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "more", "plain"),
    [
        ("Granite", {"logits_scaling": 8.0}, False),
        ("Gemma2", {}, False),  # final_logit_softcapping 30
        ("Bert", {"is_decoder": True}, False),  # a layer more before the head
        ("Gemma2", {"final_logit_softcapping": None}, True),
        ("Phi", {}, True),  # its head has a bias
        ("OPT", OPT, True),  # calls its body's decoder, not its body
        ("Mamba2", {"num_heads": 4, "state_size": 8, "n_groups": 1, "expand": 2}, True),  # has no attention
    ],
)
def test_models_that_the_trainer_would_compute_wrongly_are_refused(kind, more, plain, tmp_path):
    """The trainer's head is W h + b; a Granite's log-probs would be nats off."""
    folder = saved_model(kind, tmp_path, **more)
    if plain:
        assert trainer_of(folder)
    else:
        refused(folder, r"^--model .* logits are no plain product .* take another model\.$")


def longrope(original: int) -> dict:
    """Rotary scaling as in Phi-3 and Phi-4-mini: all positions turn slower once one is beyond `original`."""
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    scaling["original_max_position_embeddings"] = original
    more = {"original_max_position_embeddings": original, "sliding_window": None}
    return {"rope_parameters": scaling} | more


@pytest.mark.parametrize(("longest", "apart"), [(32, True), (33, False)])
def test_a_model_whose_rows_change_each_other_is_refused(tmp_path, longest, apart):
    folder = saved_model("Phi3", tmp_path, **longrope(32))
    if apart:
        assert Trainer(Flags(), rank_of(0, 1), folder, longest)
    else:
        with pytest.raises(UsageError, match=f"rows of {longest} tokens change the log-probs of shorter rows"):
            Trainer(Flags(), rank_of(0, 1), folder, longest)


def test_a_temperature_without_sampling_does_not_keep_a_model_from_being_saved(tmp_path):
    """As several public models have it: transformers loads such settings and refuses to save them."""
    folder = Path(saved_model("Qwen3", tmp_path / "model"))
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    trainer = trainer_of(str(folder))
    check_saving(trainer.model, ChainTask(pool_size=8, held_out_size=8))
    trainer.model.save_pretrained(tmp_path / "saved")
    trainer.model.generation_config.top_p = 7.0
    with pytest.raises(UsageError, match="--model could not be saved after the last step"):
        check_saving(trainer.model, None)


MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
MIXTURE |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}


@pytest.mark.long
def test_persistent_buffers_travel_in_their_own_dtype(tmp_path):
    """The correction bias of a router (GLM-4.5, DeepSeek-V3); rotary frequencies stay at home."""
    folder = saved_model("Glm4Moe", tmp_path, **MIXTURE)
    trainer, name = trainer_of(folder, dtype="bfloat16"), "model.layers.1.mlp.gate.e_score_correction_bias"
    weights = dict(trainer.weights.items())
    assert weights.keys() == load_file(Path(folder) / SAFE).keys()
    assert weights[name].dtype == torch.float32


@pytest.mark.long
def test_a_model_of_text_and_images_trains_on_text(tmp_path):
    """Gemma 3 of 4B and more: the sizes of the text model are in a config of its own."""
    text = SHAPE | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"image_token_index": 20, "boi_token_index": 21, "eoi_token_index": 22, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, **ids
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trainer = trainer_of(str(tmp_path))
    before = weights_of(trainer)
    assert trainer.backward(hand_batch())[0] and trainer.update(0)["updated"] == 1
    assert not torch.equal(before, weights_of(trainer)) and trainer.parameters_in_flops > 0
    task = SimpleNamespace(stop_ids=[22], phrase_ids=[], end_of_thinking_ids=[], train=[], held_out=[])
    check_model(Flags(), trainer.model, task, 64)
    with pytest.raises(UsageError, match="the model's context has 64"):
        check_model(Flags(), trainer.model, task, 65)


def test_an_adapter_in_the_place_of_a_model_is_refused(monkeypatch, model_folder):
    """With peft installed transformers loads its base, too, frozen: nothing would train."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.peft_config = {}
    report = {"missing_keys": [], "mismatched_keys": []}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (model, report))
    refused(model_folder, r"^--model .* is an adapter; merge it into its base model first\.$")


class Code:
    def __reduce__(self):
        return print, ("code ran",)


def without(name):
    return lambda weights: save({key: tensor for key, tensor in weights.items() if key != name})


def reshaped(weights):
    return save(weights | {"model.norm.weight": torch.ones(9)})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (SAFE, lambda weights: save(weights)[:5000], r"does not load as a causal LM \(SafetensorError: .*\)"),
        (PICKLED, lambda weights: pickle.dumps(Code()), r"does not load .* \(UnpicklingError: .*\)"),
        (PICKLED, lambda weights: b"no pickle at all", r"does not load as a causal LM \(.*\)"),
        (PICKLED, None, r"does not load as a causal LM \(.+\)"),  # no weights at all
        (SAFE, without("model.norm.weight"), r"weights lack model\.norm\.weight.*\(1 such tensors\); get .*"),
        (SAFE, without("lm_head.weight"), r"weights lack lm_head\.weight.*\(1 such tensors\); get .*"),
        (SAFE, reshaped, r"in another shape \(1 .*; get .*"),
    ],
)
def test_weights_that_are_damaged_are_refused_in_a_sentence(tmp_path, capsys, name, content, sentence):
    """Cut short, a pickle (whose code does not run), tensors that lack (which would be random) or have other shapes."""
    folder = Path(saved_model("Qwen3", tmp_path, tie_word_embeddings=False))
    weights = load_file(folder / SAFE)
    (folder / SAFE).unlink()
    if content:
        (folder / name).write_bytes(content(weights))
    error = refused(str(folder), rf"^--model .*{sentence}\.$")
    assert "\n" not in str(error) and "code ran" not in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- gradient checkpointing


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_keeps_the_layers_inputs_only(dtype, tmp_path):
    """Four layers, 2,048 positions: at most a quarter of the bytes for backward, and the same gradient."""
    folder = saved_model("Qwen3", tmp_path, num_hidden_layers=4, max_position_embeddings=512, initializer_range=0.1)
    rng = random.Random(0)
    rows = [TokenRow([1], [rng.randrange(23) for _ in range(255)], [1] * 255) for _ in range(8)]
    sizes, gradients = [], []
    for switch in (False, True):
        trainer = trainer_of(folder, gradient_checkpointing=switch, dtype=dtype)
        [part] = trainer._microbatches(rows)
        outputs = []
        sizes.append(saved_bytes(trainer.policy.model, lambda t=trainer, p=part, o=outputs: o.append(t.policy(p)[0])))
        outputs[0].sum().backward()
        gradients.append(gradient_of(trainer))
    assert sizes[1] < sizes[0] / 4
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6 * float(gradients[0].abs().max()))


@pytest.mark.parametrize("kind", ["Qwen3", "OPT"])  # OPT drops by the layer's own flag
def test_gradient_checkpointing_switches_no_dropout_on(kind, tmp_path):
    """Log-probs twice the same, and those without it."""
    more = OPT if kind == "OPT" else {}
    folder = saved_model(kind, tmp_path, **more, attention_dropout=0.5, dropout=0.5)
    plain, checkpointed = (trainer_of(folder, gradient_checkpointing=switch) for switch in (False, True))
    [part] = plain._microbatches(hand_batch().rows)
    expected = plain.policy(part)[0]
    for _ in range(2):
        assert torch.equal(checkpointed.policy(part)[0], expected)


def test_gradient_checkpointing_of_a_model_without_such_layers_is_refused(tmp_path):
    folder = saved_model("CTRL", tmp_path, n_embd=32, n_layer=1, n_head=2, dff=48)
    refused(folder, "--gradient_checkpointing true: CTRLLMHeadModel has no layers for it", gradient_checkpointing=True)
