"""runtime/trainer.py: the gradient of a batch on any number of microbatches and ranks, the optimizer step, the models
that are refused, and gradient checkpointing."""

import copy
import math
import pickle
import random
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import accelerate.utils
import pytest
import torch
import transformers
from safetensors.torch import load_file, save
from saved_bytes import saved_bytes
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import losses
import masks
from runtime import checkpoints
from runtime.flags import Flags, UsageError
from runtime.model import Policy, Row, whole
from runtime.parts import Parts
from runtime.ranks import Ranks
from runtime.recorder import staleness
from runtime.trainer import ADAMW, LossScale, Trainer, TrainingBatch, clip_options, hold_in, learning_rate

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {"vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.5}
SHAPE |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


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
    alone = SimpleNamespace(device=torch.device("cpu"), process_index=rank, num_processes=ranks)
    alone.prepare, alone.unwrap_model, alone.reduce = lambda *things: things, lambda model: model, lambda tensor: tensor
    alone.no_sync, alone.backward = lambda model: nullcontext(), torch.Tensor.backward
    alone.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
    return alone


def trainer_of(folder: str, rank: int = 0, ranks: int = 1, accelerator=None, **flags) -> Trainer:
    return Trainer(Flags(**flags), accelerator or rank_of(rank, ranks), folder)


@pytest.fixture
def new_accelerator():
    """Makes accelerate's own, of one process. What a bfloat16 trainer told it is forgotten with the next, and at the
    end."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def new() -> Accelerator:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(True)
        return Accelerator(cpu=True)

    yield new
    new()
    AcceleratorState._reset_state(True)


def hand_batch() -> TrainingBatch:
    """Two prompts with four rollouts each: 18 trained tokens, one forced; behavior log-probs near the random model's
    -log(23) = -3.1, so that some ratios are capped."""
    masks = [[1] * n for n in (3, 1, 3, 2, 2, 2, 2, 4)]
    masks[2][1] = 0
    rows = [Row([1] if i < 4 else [3, 2], range(10, 10 + len(mask)), mask) for i, mask in enumerate(masks)]
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(m, dtype=torch.bool) for m in masks], batch_first=True)
    behaviour = -(2.9 + 0.1 * torch.arange(4)) * mask  # (8, 4)
    advantages = torch.tensor([1.6, -0.5, -0.5, -0.5, 1.1, 1.1, -1.1, -1.1])
    token_weights = losses.aggregation_weights(mask, torch.arange(8) // 4)
    return TrainingBatch(rows, behaviour, mask, advantages, token_weights, old_logprobs=behaviour - 0.1)


def gradient_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([whole(parameter.grad).flatten() for parameter in trainer.model.parameters()])


def weights_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([whole(parameter.detach()).flatten() for parameter in trainer.model.parameters()])


def refused(folder: str, sentence: str, **flags) -> UsageError:
    with pytest.raises(UsageError, match=sentence) as caught:
        trainer_of(folder, **flags)
    return caught.value


def test_the_policy_is_gone_when_the_process_group_ends(monkeypatch, new_accelerator):
    """A DDP policy that still lives then waits, at times for ever, for a thread of gloo's that waits for it."""
    accelerator, ended, idle = new_accelerator(), [], SimpleNamespace(close=lambda: None, trace=None)
    trainer = SimpleNamespace(policy=accelerator.prepare(torch.nn.Linear(2, 2)))
    parts = Parts(Ranks(accelerator), None, idle, trainer, None, None, idle, idle, None)
    policy = weakref.ref(trainer.policy)
    monkeypatch.setattr(accelerator, "end_training", lambda: ended.append(policy() is None))
    parts.close()
    assert ended == [True]


def test_learning_rates_by_hand():
    """1/4, 2/4, 3/4, 1, then constant. sqrt: 16 x 16 = 256 completions, a quarter of 1024, give half."""
    flags = Flags(lr=1e-3, warmup_steps=4, max_steps=12)
    rates = [learning_rate(flags, 256, v) for v in (0, 1, 2, 3, 4, 11, 50)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    assert learning_rate(Flags(lr=1e-3, warmup_steps=0, lr_scale="sqrt"), 256, 0) == pytest.approx(0.5e-3)


@pytest.mark.parametrize(
    ("loss", "changes", "options"),
    [
        ("cispo", {"eps_max": 4.0, "eps_low": 0.1, "eps_high": 0.2}, {"eps_max": 4.0}),
        ("gspo", {}, {}),
        ("gspo", {"eps_low": 0.0, "eps_high": 0.005}, {"eps_low": 0.0, "eps_high": 0.005}),
        ("dapo", {"eps_high": 0.28}, {"eps_high": 0.28}),
        ("dispo", {"eps_low": 0.1}, {"eps_low": 0.1}),
        ("grpo", {}, {}),
        ("grpo", {"eps_low": 0.1, "eps_high": 0.3}, {"eps": 0.1}),
        ("tis", {"eps_low": 0.1, "eps_high": 0.3}, {"eps_low": 0.1, "eps_high": 0.3}),
    ],
)
def test_clip_options(loss, changes, options):
    """What was not given stays at the loss's own default; the loss takes all of it."""
    assert clip_options(Flags(loss=loss, **changes)) == options
    zeros, old = torch.zeros(1, 1), {"old_logprobs": torch.zeros(1, 1)} if loss == "tis" else {}
    losses.LOSSES[loss](zeros, zeros, torch.ones(1), torch.ones(1, 1), **options, **old)


def test_the_loss_is_put_together_with_the_right_signs(model_folder):
    """Oracle: full logits row by row. minimize sum token_weights * (-min(rho, cap) A log pi + kl_coef kl - entropy_coef
    H), the reference being the model as it was at the start."""
    trainer = trainer_of(model_folder, eps_max=1.05, kl_coef=0.3, entropy_coef=0.2, temperature=0.8)
    batch, reference = hand_batch(), copy.deepcopy(trainer.model)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    model = copy.deepcopy(trainer.model)
    loss, kls, entropies, capped = 0.0, [], [], 0
    for n, row in enumerate(batch.rows):
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        new, old = (torch.log_softmax(m(input_ids=ids).logits[0] / 0.8, -1) for m in (model, reference))
        for t, token in enumerate(row.completion_ids):
            if not row.mask[t]:
                continue
            at = len(row.prompt_ids) + t - 1
            logp, entropy = new[at, token], torch.distributions.Categorical(logits=new[at]).entropy()
            log_r = old[at, token].detach() - logp
            ratio = math.exp(logp.item() - batch.behaviour_logprobs[n, t].item())
            kl = log_r.exp() - 1 - log_r
            term = -min(ratio, 1.05) * batch.advantages[n] * logp + 0.3 * kl - 0.2 * entropy
            loss = loss + batch.token_weights[n, t] * term
            kls.append(kl.item())
            entropies.append(entropy.item())
            capped += ratio > 1.05
    loss.backward()
    summary = trainer.gradients(batch)
    wanted = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(gradient_of(trainer), wanted, atol=1e-6, rtol=1e-3)
    assert summary["loss"] == pytest.approx(loss.item(), rel=1e-4) and 0 < capped < 18 == len(kls)
    assert summary["kl"] == pytest.approx(sum(kls) / 18, rel=1e-3)
    assert summary["entropy"] == pytest.approx(sum(entropies) / 18, rel=1e-4)
    assert all(parameter.grad is None for parameter in trainer.reference.parameters())


@pytest.mark.parametrize(
    ("given", "limits"), [({}, {}), ({"mask_high": 1.05, "mask_low": 0.7}, {"low": 0.7, "high": 1.05})]
)
def test_a_mask_multiplies_the_policys_term_and_no_other(model_folder, given, limits):
    """The gradient is that of the loss with the mask in its weights, plus that of the penalty and the entropy. Counts
    are of all microbatches."""
    options = {"tokens_per_microbatch": 12, "lr": 1e-3}
    others, batch = {"kl_coef": 0.3, "entropy_coef": 0.2}, hand_batch()
    masked = trainer_of(model_folder, mask="icepop", **given, **others, **options)
    found = masked.gradients(batch)
    own, plain = trainer_of(model_folder, **options), hand_batch()
    scored = own.score(batch.rows), batch.behaviour_logprobs, batch.advantages, batch.mask
    weights, counts = masks.MASKS["icepop"](*scored, **limits)
    assert found["kept_tokens"] == int(counts["kept"]) == int(weights.sum())
    assert (0 < found["kept_tokens"] < 18) == bool(given)
    for sign, name in ((1, "masked_positive"), (-1, "masked_negative")):
        of_sign = batch.mask & (batch.advantages[:, None] * sign > 0)
        assert found[name] == pytest.approx(float((of_sign & (weights == 0)).sum() / of_sign.sum()))
    plain.token_weights = plain.token_weights * weights
    own.gradients(plain)
    rest, nothing = trainer_of(model_folder, **others, **options), hand_batch()
    nothing.advantages = torch.zeros(8)
    rest.gradients(nothing)
    torch.testing.assert_close(gradient_of(masked), gradient_of(own) + gradient_of(rest), atol=1e-6, rtol=1e-4)
    assert "kept_tokens" not in own.gradients(plain)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["cispo", "tis"])
@pytest.mark.parametrize("layout", [{}, {"share_prompts": True}])
@pytest.mark.parametrize(("tokens", "ranks"), [(12, 1), (12, 2), (1, 3), (2048, 2)])
def test_microbatches_and_ranks_change_nothing(model_folder, loss, layout, tokens, ranks):
    """Data parallelism averages the ranks' gradients: the mean over ranks is the gradient of the whole batch in one
    pass on one rank. The loss that is logged is a sum over the ranks' rows."""
    options = {"loss": loss, "eps_max": 1.05, "kl_coef": 0.1, "entropy_coef": 0.05}
    whole = trainer_of(model_folder, **options)
    summary = whole.gradients(hand_batch())
    gradients, summaries = [], []
    for rank in range(ranks):
        part = trainer_of(model_folder, rank, ranks, **options, tokens_per_microbatch=tokens, **layout)
        summaries.append(part.gradients(hand_batch()))
        gradients.append(gradient_of(part))
    torch.testing.assert_close(sum(gradients) / ranks, gradient_of(whole), atol=1e-6, rtol=1e-4)
    assert sum(s["loss"] for s in summaries) == pytest.approx(summary["loss"], rel=1e-4)
    assert max(s["ratio_max"] for s in summaries) == pytest.approx(summary["ratio_max"], rel=1e-5)


def test_the_ratio_is_mismatch_times_staleness(model_folder):
    """The oracle has what a run has not, the log-probs of the weights that sampled: 1,800 tokens scored by them, with
    noise of .05 nats on top as the generator's, then other weights."""
    trainer, batch = trainer_of(model_folder, tokens_per_microbatch=999), hand_batch()
    batch.rows, batch.mask = batch.rows * 100, batch.mask.repeat(100, 1)
    batch.advantages, batch.token_weights = batch.advantages.repeat(100), batch.token_weights.repeat(100, 1)
    noise = 0.05 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)) * batch.mask
    then = trainer.score(batch.rows)
    batch.behaviour_logprobs = then + noise
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    age = (trainer.score(batch.rows) - then)[batch.mask].square().mean().sqrt().item()
    mismatch = noise[batch.mask].square().mean().sqrt().item()
    total = trainer.gradients(batch)["log_ratio_rms"]
    assert total > 1.1 * age and age > mismatch / 3
    assert staleness(total, mismatch) == pytest.approx(age, rel=0.03)


def test_update_warms_up_and_throws_bad_gradients_away(monkeypatch, model_folder):
    """lr 1e-3 after 4 warm-up steps; Adam's first step is lr * sign(gradient). A NaN gradient changes nothing, not the
    weights, not Adam's moments, and it does not stay for the next step."""
    monkeypatch.setitem(ADAMW, "weight_decay", 0.0)
    trainer = trainer_of(model_folder, lr=1e-3, warmup_steps=4)
    parameters, rates, before = list(trainer.model.parameters()), [], weights_of(trainer)
    for version in range(5):
        trainer.gradients(hand_batch())
        step = trainer.update(version)
        rates.append(step["lr"])
        assert step["updated"] == 1 and all(p.grad is None or not p.grad.any() for p in parameters)
        if version == 0:
            assert (weights_of(trainer) - before).abs().max().item() == pytest.approx(step["lr"], rel=1e-3)
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    state, before = copy.deepcopy(trainer.optimizer.state_dict())["state"], weights_of(trainer)
    trainer.gradients(hand_batch())
    parameters[0].grad[0, 0] = math.nan
    assert trainer.update(5)["updated"] == 0 and torch.equal(weights_of(trainer), before)
    for now, kept in zip(trainer.optimizer.state_dict()["state"].values(), state.values(), strict=True):
        assert all(torch.equal(now[name], kept[name]) for name in kept)
    assert all(p.grad is None or not p.grad.any() for p in parameters)


def test_clipping_is_by_the_norm_of_the_whole_gradient(monkeypatch, model_folder):
    """With an optimizer that only subtracts, at lr 1: the step's norm is the smaller of LARGEST_NORM and its own."""
    for clip in (1e-3, 1e3):
        monkeypatch.setattr("runtime.trainer.LARGEST_NORM", clip)
        trainer = trainer_of(model_folder, lr=1.0, warmup_steps=0)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        trainer.gradients(hand_batch())
        norm, before = gradient_of(trainer).norm().item(), weights_of(trainer)
        assert trainer.update(0)["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert (weights_of(trainer) - before).norm().item() == pytest.approx(min(norm, clip), rel=1e-2)


def test_score_is_the_policys_own_logprobs_on_the_whole_batch(model_folder):
    """All rows at their places whatever the microbatches; two ranks fill in a part each, and the parts add up."""
    batch = hand_batch()
    whole = trainer_of(model_folder).score(batch.rows)
    assert whole.shape == batch.mask.shape and not whole.requires_grad and ((whole < 0) == batch.mask).all()
    for ranks in (1, 2):
        parts = [trainer_of(model_folder, r, ranks, tokens_per_microbatch=9).score(batch.rows) for r in range(ranks)]
        torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_parameters_that_cost_flops(monkeypatch, tmp_path, new_accelerator, tied):
    """The lookup of an embedding costs nothing: P is all parameters if one table serves as head, too. The generator
    gets its own dtype, before shards travel; the trainer's weights stay FP32."""
    gathered, whole = [], DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", lambda shard: gathered.append(shard.dtype) or whole(shard))
    accelerator = new_accelerator()
    trainer = trainer_of(saved_model("Qwen3", tmp_path, tie_word_embeddings=tied), 0, 1, accelerator, dtype="bfloat16")
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters()}
    assert ("lm_head.weight" in sizes) == (not tied)
    assert trainer.parameters_in_flops == sum(sizes.values()) - (0 if tied else sizes["model.embed_tokens.weight"])
    weights = dict(trainer.weights.items())
    assert set(weights) == set(sizes) and gathered == [torch.bfloat16] * len(sizes)
    assert {(isinstance(x, DTensor), x.dtype) for x in weights.values()} == {(False, torch.bfloat16)}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def rounded_to(dtype, model):
    """A copy with parameters, but no buffers, in this dtype."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "more", "recompute"),
    [
        ("Qwen3", {"tie_word_embeddings": True}, False),
        ("Phi", {"partial_rotary_factor": 0.5}, True),  # its head has a bias
        ("Qwen3Moe", MIXTURE, True),
    ],
)
def test_bfloat16_is_that_of_a_bfloat16_model_over_fp32_weights(kind, more, recompute, tmp_path, new_accelerator):
    """The oracle is the same model loaded in bfloat16. Log-probs, and the gradient of one microbatch, are its own to
    the last bit; those of several are summed in FP32. Weights, gradients and moments are FP32."""
    folder, batch = saved_model(kind, tmp_path, **more), hand_batch()
    options = {"dtype": "bfloat16", "gradient_checkpointing": recompute, "tokens_per_microbatch": 9}
    trainer = trainer_of(folder, 0, 1, new_accelerator(), **options)
    oracle = trainer_of(folder)
    model = rounded_to(torch.bfloat16, oracle.model)
    oracle.policy = Policy(model)
    parts, wanted = trainer._microbatches(batch.rows), {}
    assert len(parts) > 2
    with torch.no_grad():
        for part in parts:
            assert torch.equal(trainer.policy(part)[0], oracle.policy(part)[0])
    trainer.policy.reshard()
    trainer.gradients(batch)
    assert trainer.accelerator.is_fsdp2
    for part in parts:
        model.zero_grad()
        oracle._loss(part, batch)[0].backward()
        for name, parameter in model.named_parameters():
            wanted[name] = wanted.get(name, 0) + parameter.grad.float()
    for name, parameter in trainer.model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert torch.equal(whole(parameter.grad), wanted[name]), name
        assert not torch.equal(wanted[name], wanted[name].bfloat16().float())  # a sum in bfloat16 would be
    assert trainer.update(0)["updated"] == 1
    assert {x.dtype for state in trainer.optimizer.state.values() for x in state.values()} == {torch.float32}


def test_bfloat16_products_but_for_the_head(tmp_path, new_accelerator):
    """Experts, too, which no autocast reaches; and at the end of the body no layer holds its bfloat16 weights any
    more."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(word in func.overloadpacket.__name__ for word in ("mm", "linear", "attention")):
                seen.append({x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()})
            return func(*args, **(kwargs or {}))

    seen, sharded = [], []
    trainer = trainer_of(saved_model("Qwen3Moe", tmp_path, **MIXTURE), 0, 1, new_accelerator(), dtype="bfloat16")
    layers = trainer.model.model.layers
    trainer.model.model.norm.register_forward_hook(
        lambda *_: sharded.extend(isinstance(p, DTensor) for p in layers.parameters())
    )
    [part] = trainer._microbatches(hand_batch().rows)
    with Products():
        trainer.policy(part)
    assert len(seen) >= 2 * (4 + 1 + 2) and seen[-1] == {torch.float32}  # projections, router, experts
    assert seen[:-1] == [{torch.bfloat16}] * (len(seen) - 1)
    assert sharded and all(sharded)


def test_one_process_is_a_group_of_its_own_on_a_gpu_too(monkeypatch, new_accelerator):
    """It needs no NCCL. torch says that its "fake" group's results are wrong; with one rank they are what went in."""
    accelerator, group = new_accelerator(), torch.distributed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hold_in(accelerator, torch.bfloat16)
    sent, objects = torch.arange(1.0, 5.0), [None]
    for collective in (group.all_gather_single, group.reduce_scatter_single):
        found = torch.zeros(4)
        collective(found, sent)
        assert found.tolist() == [1, 2, 3, 4]
    assert accelerator.reduce(sent).tolist() == [1, 2, 3, 4]
    group.broadcast(sent, 0)
    assert sent.tolist() == [1, 2, 3, 4] and accelerate.utils.gather_object(["own"]) == ["own"]
    group.scatter_object_list(objects, ["own"])  # as a sharded checkpoint is planned
    assert objects == ["own"]
    group.barrier()


def test_float16_scales_the_loss(tmp_path, new_accelerator):
    """A loss of a millionth: its gradients at single activations are below the smallest float16, 6e-8, so without a
    scale the gradient is off by more than a tenth, and with it equal to float32's to a hundredth. The log-probs are
    those of the model in float16, to the bit."""
    folder, batch, found = saved_model("Qwen3", tmp_path), hand_batch(), {}
    batch.token_weights = batch.token_weights * 1e-6
    for name in ("float32", "float16", "unscaled"):
        dtype = "float16" if name == "unscaled" else name
        trainer = trainer_of(folder, 0, 1, new_accelerator(), dtype=dtype, tokens_per_microbatch=9)
        if name == "unscaled":
            trainer.loss_scale.scale = 1.0
        trainer.gradients(batch)
        scale = trainer.loss_scale.scale if trainer.loss_scale else 1.0
        found[name] = gradient_of(trainer) / scale
        assert found[name].dtype == torch.float32
    wanted = found["float32"].norm()
    assert (found["float16"] - found["float32"]).norm() < 0.01 * wanted
    assert (found["unscaled"] - found["float32"]).norm() > 0.1 * wanted
    trainer, oracle = trainer_of(folder, 0, 1, new_accelerator(), dtype="float16"), trainer_of(folder)
    oracle.policy, parts = Policy(rounded_to(torch.float16, oracle.model)), trainer._microbatches(batch.rows)
    with torch.no_grad():
        assert all(torch.equal(trainer.policy(part)[0], oracle.policy(part)[0]) for part in parts)
    trainer.policy.reshard()
    assert {x.dtype for _, x in trainer.weights.items()} == {torch.float16}
    trainer.loss_scale.scale = 2.0**10
    trainer.gradients(hand_batch())
    norm = gradient_of(trainer).norm().item() / 2**10
    assert trainer.update(0) == pytest.approx(
        {
            "grad_norm": norm,
            "lr": trainer.optimizer.param_groups[0]["lr"],
            "updated": 1,
            "loss_scale": 2**10,
            "overflow": 0,
        },
        rel=1e-4,
    )
    assert {x.dtype for state in trainer.optimizer.state.values() for x in state.values()} == {torch.float32}


def test_a_loss_scale_that_overflows_is_halved(monkeypatch, tmp_path, new_accelerator):
    """2^40 overflows float16 and changes nothing; each such step halves. At 2^10 three good steps double it. A NaN at a
    scale of 1 is the fault of no scale."""
    monkeypatch.setattr("runtime.trainer.GROWTH_INTERVAL", 3)
    trainer = trainer_of(saved_model("Qwen3", tmp_path), 0, 1, new_accelerator(), dtype="float16", warmup_steps=0)
    trainer.loss_scale.scale = 2.0**40
    before = weights_of(trainer)
    for scale in (2**40, 2**39):
        trainer.gradients(hand_batch())
        step = trainer.update(0)
        assert (step["updated"], step["overflow"], step["loss_scale"]) == (0, 1, scale)
    assert torch.equal(weights_of(trainer), before) and trainer.loss_scale.scale == 2**38
    assert not trainer.optimizer.state
    trainer.loss_scale.scale, scales = 2.0**10, []
    for version in range(7):
        trainer.gradients(hand_batch())
        step = trainer.update(version)
        assert (step["updated"], step["overflow"]) == (1, 0)
        scales.append(step["loss_scale"])
    assert scales == [2**10] * 3 + [2**11] * 3 + [2**12] and not torch.equal(weights_of(trainer), before)
    assert LossScale().update(False) == {"loss_scale": 2**16, "overflow": 1}
    least = LossScale()
    least.load_state_dict({"scale": 1.0, "good_steps": 2})
    assert least.update(False) == {"loss_scale": 1, "overflow": 0}
    assert least.state_dict() == {"scale": 1.0, "good_steps": 0}  # nor has it gone on


@pytest.mark.long
def test_the_reference_of_a_bfloat16_run_is_its_first_policy(tmp_path, new_accelerator):
    """To the last bit, so that the KL penalty begins at 0."""
    folder = saved_model("Qwen3", tmp_path)
    trainer = trainer_of(folder, 0, 1, new_accelerator(), dtype="bfloat16", kl_coef=0.1)
    assert {p.dtype for p in trainer.reference.parameters()} == {torch.bfloat16}
    assert trainer.gradients(hand_batch())["kl"] == 0.0
    trainer.update(0)
    assert trainer.gradients(hand_batch())["kl"] > 0.0


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_checkpoint_continues_to_the_last_bit(dtype, tmp_path, new_accelerator):
    """Two steps, or one, a checkpoint, a new trainer and the other. A trainer of another dtype refuses the
    checkpoint."""
    folder, found = saved_model("Qwen3", tmp_path / "model"), []
    for resumed in (False, True):
        accelerator = new_accelerator()
        trainer = trainer_of(folder, 0, 1, accelerator, dtype=dtype, lr=1e-2, warmup_steps=0, tokens_per_microbatch=9)
        if resumed:
            checkpoints.load(accelerator, tmp_path / "checkpoint")
        elif dtype == "float16":
            trainer.loss_scale.scale = 2.0**10
        for version in (1,) if resumed else (0, 1):
            trainer.gradients(hand_batch())
            trainer.update(version)
            if trainer.loss_scale:
                assert trainer.loss_scale.state_dict() == {"scale": 2.0**10, "good_steps": version + 1}
            if version == 0:
                accelerator.save_state(str(tmp_path / "checkpoint"))
        found.append(weights_of(trainer))
    assert torch.equal(*found) and not torch.equal(found[0], found[0].bfloat16().float())
    accelerator = new_accelerator()
    trainer_of(folder, 0, 1, accelerator, dtype="bfloat16" if dtype == "float32" else "float32")
    with pytest.raises(checkpoints.CheckpointError, match="is not what this trainer saves, .*: give dtype and la"):
        checkpoints.load(accelerator, tmp_path / "checkpoint")


OPT, EXPERTS = {"ffn_dim": 48, "word_embed_proj_dim": 32}, {"num_local_experts": 2}
CONV = {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64, "initializer_range": 0.02}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "more", "plain", "apart"),
    [
        ("Granite", {"logits_scaling": 8.0}, False, None),
        ("Gemma2", {}, False, None),  # final_logit_softcapping 30
        ("Bert", {"is_decoder": True}, False, None),  # a layer more before the head
        ("Gemma2", {"final_logit_softcapping": None}, True, None),
        ("Qwen3", {}, True, True),
        ("Phi", {}, True, True),  # its head has a bias
        ("Mixtral", EXPERTS, True, True),
        ("Lfm2", CONV, True, False),
        ("Mamba2", {"num_heads": 4, "state_size": 8, "n_groups": 1, "expand": 2}, True, False),
        ("OPT", OPT, True, True),  # calls its body's decoder, not its body
        ("Bloom", {}, True, False),
        ("GptOss", EXPERTS | {"num_experts_per_tok": 1}, True, False),
    ],
)
def test_models_that_the_trainer_would_compute_wrongly_are_refused(kind, more, plain, apart, tmp_path):
    """The trainer's head is W h + b; a Granite's log-probs would be nats off. Shared rows of models whose layers do not
    read position ids would change each other's; padded, such a model is taken."""
    folder = saved_model(kind, tmp_path, **more)
    if not plain:
        refused(folder, r"^--model .* logits are no plain product .* take another model\.$")
        return
    assert trainer_of(folder)
    if apart:
        assert trainer_of(folder, share_prompts=True)
    elif apart is False:
        refused(folder, "^--share_prompts true( needs full att|: .* change each other's log-)", share_prompts=True)


def test_shared_prompts_need_full_attention(tmp_path):
    """The mask of shared rows takes the place of a window's."""
    folder = saved_model("Mistral", tmp_path, sliding_window=4)
    refused(folder, "^--share_prompts true needs full attention, and .* has sliding_attention; lea", share_prompts=True)


class Code:
    def __reduce__(self):
        return print, ("code ran",)


def without(name):
    return lambda weights: save({key: tensor for key, tensor in weights.items() if key != name})


SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (SAFE, lambda weights: save(weights)[:5000], r"does not load as a causal LM \(SafetensorError: .*\)"),
        (PICKLED, lambda weights: pickle.dumps(Code()), r"does not load .* \(UnpicklingError: .*\)"),
        (PICKLED, lambda weights: b"no pickle at all", r"does not load as a causal LM \(.*\)"),
        (PICKLED, None, r"does not load as a causal LM \(.+\)"),  # no weights at all
        (SAFE, without("model.norm.weight"), r"weights lack model\.norm\.weight.*\(1 such tensors\); get .*"),
        (SAFE, without("lm_head.weight"), r"weights lack lm_head\.weight.*\(1 such tensors\); get .*"),
        (SAFE, lambda weights: save({}), r"weights lack lm_head\.weight.*\(25 such tensors\); get .*"),
        (
            SAFE,
            lambda weights: save(weights | {"model.norm.weight": torch.ones(9)}),
            r"in another shape \(1 .*; get .*",
        ),
    ],
)
def test_weights_that_are_damaged_are_refused_in_a_sentence(tmp_path, capsys, name, content, told):
    """Cut short, a pickle (whose code does not run), tensors that lack (which would be random) or have other shapes."""
    folder = Path(saved_model("Qwen3", tmp_path, tie_word_embeddings=False))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if content:
        (folder / name).write_bytes(content(weights))
    error = refused(str(folder), rf"^--model .*{told}\.$")
    assert "\n" not in str(error) and "code ran" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_keeps_the_layers_inputs_only(dtype, tmp_path, new_accelerator):
    """Four layers, 2,048 positions: at most a quarter of the bytes for backward, and the same gradient."""
    folder = saved_model("Qwen3", tmp_path, num_hidden_layers=4, max_position_embeddings=512, initializer_range=0.1)
    rng = random.Random(0)
    rows = [Row([1], [rng.randrange(23) for _ in range(255)], [1] * 255) for _ in range(8)]
    sizes, gradients = [], []
    for switch in (False, True):
        trainer = trainer_of(folder, 0, 1, new_accelerator(), gradient_checkpointing=switch, dtype=dtype)
        [part] = trainer._microbatches(rows)
        outputs = []
        sizes.append(saved_bytes(trainer.model, lambda t=trainer, p=part, o=outputs: o.append(t.policy(p)[0])))
        outputs[0].sum().backward()
        gradients.append(gradient_of(trainer))
    assert sizes[1] < sizes[0] / 4
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6 * float(gradients[0].abs().max()))


@pytest.mark.parametrize("kind", ["Qwen3", "OPT"])  # OPT drops by the layer's own flag
def test_gradient_checkpointing_switches_no_dropout_on(kind, tmp_path):
    """Log-probs twice the same, and those without it."""
    folder = saved_model(kind, tmp_path, **OPT if kind == "OPT" else {}, attention_dropout=0.5, dropout=0.5)
    plain, checkpointed = (trainer_of(folder, gradient_checkpointing=switch) for switch in (False, True))
    [part] = plain._microbatches(hand_batch().rows)
    wanted, first, second = plain.policy(part)[0], checkpointed.policy(part)[0], checkpointed.policy(part)[0]
    assert torch.equal(first, second) and torch.equal(first, wanted)


def test_gradient_checkpointing_of_a_model_without_such_layers_is_refused(tmp_path):
    folder = saved_model("CTRL", tmp_path, n_embd=32, n_layer=1, n_head=2, dff=48)
    refused(folder, "--gradient_checkpointing true: CTRLLMHeadModel has no layers for it", gradient_checkpointing=True)
