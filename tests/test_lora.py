"""runtime/lora.py: what is trained, what leaves the trainer, and what is saved. The oracle of a merge is peft's own."""

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from replay import Program, go, small_model
from safetensors.torch import load_file
from test_run_folder import assert_same_state
from test_trainer import MIXTURE, hand_batch, new_accelerator, saved_model, trainer_of  # noqa: F401
from transformers import AutoModelForCausalLM

import runtime.parts
import train
from runtime import checkpoints, flag_checks
from runtime import model as models
from runtime.flag_checks import check_flags
from runtime.flags import Flags, UsageError
from runtime.lora import adapter_tensors, add_adapters, save_adapter
from runtime.model import CheckpointTensors, merged_parameters

ROOT = Path(__file__).resolve().parent.parent
EIGHT = {"lora_rank": 8}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {"Qwen3": 7, "Llama": 7, "Qwen2": 7, "Phi": 6}  # linear layers of a block; the last two have biases


def loaded(folder) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def shaken(folder: str, **flags) -> AutoModelForCausalLM:
    """The model with adapters whose B is no longer 0."""
    net = loaded(folder)
    add_adapters(Flags(**EIGHT | flags), net, folder, 0)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in net.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return net


def saved(net, folder: Path, **config) -> str:
    """Its adapter alone; `config` replaces what adapter_config.json says."""
    save_adapter(net, adapter_tensors(net), folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


def logits(net) -> torch.Tensor:
    with torch.no_grad():
        return net(input_ids=torch.arange(20)[None]).logits


def test_a_merged_weight_by_hand():
    """W is 2 x 3 ones, A = (1 2 3), B = (1 10)ᵀ, r = 1, alpha = 2: W + 2 B A = 1 + 2 (1 2 3 | 10 20 30)."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    bias = net[0].bias.detach().clone()
    net[0].weight.data.fill_(1.0)
    peft.inject_adapter_in_model(peft.LoraConfig(r=1, lora_alpha=2, target_modules=["0"]), net)
    net[0].lora_A["default"].weight.data.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    net[0].lora_B["default"].weight.data.copy_(torch.tensor([[1.0], [10.0]]))
    found = dict(merged_parameters(net))
    assert found["0.weight"].tolist() == [[3, 5, 7], [21, 41, 61]] and not found["0.weight"].requires_grad
    assert found.keys() == {"0.weight", "0.bias"} and torch.equal(found["0.bias"], bias)


@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_gets_the_model_that_peft_merges(kind, tmp_path):
    """Names, order, shapes and metadata of the model without adapters; peft's merge of the saved adapter, bit for bit,
    in bfloat16 rounded once. FLOPs are those of the model."""
    folder = saved_model(kind, tmp_path / "base", tie_word_embeddings=kind == "Qwen3")
    net, plain = shaken(folder), loaded(folder)
    oracle = peft.PeftModel.from_pretrained(loaded(folder), saved(net, tmp_path / "adapter")).merge_and_unload()
    wanted = dict(oracle.named_parameters())
    for dtype in (torch.float32, torch.bfloat16):
        sent, unadapted = CheckpointTensors(net, dtype), CheckpointTensors(plain, dtype)
        assert sent.metadata() == unadapted.metadata()
        found = list(sent.items())
        assert [name for name, _ in found] == [name for name, _ in unadapted.items()]
        for name, tensor in found:
            assert tensor.dtype == dtype and torch.equal(tensor, wanted[name].to(dtype)), name
    changed = [name for name, tensor in plain.named_parameters() if not torch.equal(tensor, wanted[name])]
    assert len(changed) == 2 * KINDS[kind]
    assert models.active_parameters(net) == models.active_parameters(plain)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_policys_logprobs_are_those_of_the_merged_model(recompute, tmp_path):
    """Also with layers recomputed, and with an adapter that was saved for inference after training with dropout."""
    folder = saved_model("Qwen3", tmp_path / "base")
    adapter = saved(shaken(folder), tmp_path / "adapter", lora_dropout=0.5, inference_mode=True)
    trainer = trainer_of(folder, lora_adapter=adapter, gradient_checkpointing=recompute)
    oracle, rows = trainer_of(folder), hand_batch().rows
    before = oracle.score(rows)
    oracle.model.load_state_dict(dict(trainer.weights.items()), strict=False)
    found, wanted = trainer.score(rows), oracle.score(rows)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert (wanted - before).abs().max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_move_and_nothing_else_does(dtype, tmp_path, new_accelerator):  # noqa: F811
    """At first the policy is the model itself. Only adapters have gradients and moments, so 12 bytes each. From a
    checkpoint the second step is the same, bit for bit."""
    folder, batch, ends = saved_model("Qwen3", tmp_path / "model"), hand_batch(), []
    options = {"dtype": dtype, "lr": 1e-2, "warmup_steps": 0, "tokens_per_microbatch": 9, "kl_coef": 0.1}
    scores = trainer_of(folder, 0, 1, new_accelerator(), **options).score(batch.rows)
    for resumed in (False, True):
        accelerator = new_accelerator()
        trainer = trainer_of(folder, 0, 1, accelerator, **options | EIGHT)
        start = {name: models.whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}
        assert torch.equal(trainer.score(batch.rows), scores)
        if resumed:
            checkpoints.load(accelerator, tmp_path / "checkpoint")
        for version in (1,) if resumed else (0, 1):
            trainer.gradients(batch)
            learn = {name for name, p in trainer.model.named_parameters() if p.grad is not None}
            trainer.update(version)
            if version == 0:
                accelerator.save_state(str(tmp_path / "checkpoint"))
        ends.append({name: models.whole(p.detach()) for name, p in trainer.model.named_parameters()})
        moved = {name for name in start if not torch.equal(start[name], ends[-1][name])}
        assert moved == learn == {name for name in start if ".lora_" in name}
        assert len(trainer.optimizer.state) == len(moved) == 2 * 2 * 7  # A and B of seven layers in two blocks
        assert len(trainer.optimizer.param_groups[0]["params"]) == len(moved)
    layer, parts = "model.layers.1.mlp.up_proj", ("base_layer", "lora_A.default", "lora_B.default")
    w, a, b = (ends[0][f"{layer}.{part}.weight"] for part in parts)
    sent = dict(trainer.weights.items())[f"{layer}.weight"]
    assert torch.equal(sent, (w + 32 / 8 * (b @ a)).to(sent.dtype)) and sent.dtype == getattr(torch, dtype)
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.long
def test_the_first_a_is_the_seeds(tmp_path):
    """Whatever was drawn before, as on ranks that did not make the model; and what is drawn afterwards is not
    changed."""
    folder, found = saved_model("Qwen3", tmp_path), []
    for seed, draws in ((0, 0), (0, 5), (1, 0)):
        torch.manual_seed(9)
        torch.rand(draws)
        net, state = loaded(folder), torch.get_rng_state()
        add_adapters(Flags(**EIGHT), net, folder, seed)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(adapter_tensors(net))
    a = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    assert torch.equal(found[0][a], found[1][a]) and not torch.equal(found[0][a], found[2][a])


RANK = ["--lora_rank", "4"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, model):
    """The folder and the end of a run with adapters."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        return folder, go(monkeypatch, folder, model, *RANK)


@pytest.mark.long
def test_a_run_saves_the_merged_model_and_the_adapter(adapted, model):
    """`model/` loads as any model; of its tensors those of linear layers differ from the base's. peft puts
    `model/adapter` onto the base, and the logits are those of `model/`."""
    folder, run = adapted
    final, base = load_file(folder / "model" / "model.safetensors"), load_file(Path(model) / "model.safetensors")
    assert final.keys() == base.keys() and run.progress.version > 3
    changed = {name.split(".")[-2] for name in base if not torch.equal(final[name], base[name])}
    assert changed == set(LINEAR)
    with_adapter = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "model" / "adapter", dtype=torch.float32)
    assert with_adapter.peft_config["default"].base_model_name_or_path == model
    tensors = load_file(folder / "model" / "adapter" / "adapter_model.safetensors")
    assert tensors.keys() == peft.get_peft_model_state_dict(with_adapter).keys()
    torch.testing.assert_close(logits(loaded(folder / "model")), logits(with_adapter), atol=1e-5, rtol=0)
    assert (logits(with_adapter) - logits(loaded(model))).abs().max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("killed_after", [2, 5])
def test_a_resumed_run_is_bit_equal(adapted, model, monkeypatch, tmp_path, killed_after):
    go(monkeypatch, tmp_path / "cut", model, *RANK, killed_after=killed_after)
    assert_same_state(adapted[1], go(monkeypatch, tmp_path / "cut", model, "--resume"))


@pytest.mark.long
def test_a_run_goes_on_from_a_saved_adapter(adapted, model, monkeypatch, tmp_path):
    """It begins with the policy that the first run ended with, and its adapter replaces the first."""
    folder, first = adapted
    seen = []

    def start(self, tensors, version=0):
        self.version = version
        seen.append(dict(tensors.items()))

    given = ["--lora_adapter", str(folder / "model" / "adapter")]
    second = go(monkeypatch, tmp_path / "run", model, *given, script={"start": start})
    wanted = dict(first.parts.trainer.weights.items())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in seen[0].items())
    end = dict(second.parts.trainer.weights.items())
    assert not torch.equal(end["model.layers.0.mlp.down_proj.weight"], wanted["model.layers.0.mlp.down_proj.weight"])


@pytest.mark.long
def test_the_whole_program_with_an_engine(model, monkeypatch, tmp_path):
    """The one in torch samples from what it is sent: after each of three updates its log-probs are the trainer's, and
    the hashes of all weights change on both sides. The untrained model is never right; the entropy term has a
    gradient."""
    monkeypatch.setattr(runtime.parts, "warm_started", lambda *_: model)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    folder = tmp_path / "run"
    options = (
        "--engine torch --lora_rank 4 --max_steps 4 --batch_prompts 4 --rollouts 4 --eval_every 4 --probe_every 1 "
        "--eval_problems 8 --max_num_seqs 32 --lr 0.02 --warmup_steps 0 --zero_variance_filter false --entropy_coef 0.1"
    )
    assert train.main(["--output_dir", str(folder), *options.split()]) == 0
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [step["updated"] for step in steps] == [1] * 4
    assert max(step["logprob_gap"] for step in steps[1:]) < 1e-5
    assert (logits(loaded(folder / "model")) - logits(loaded(model))).abs().max() > 0.1
    assert (folder / "model" / "adapter" / "adapter_model.safetensors").exists()


def test_other_adapters_at_a_resume_are_refused(adapted, model, monkeypatch, tmp_path, capsys):
    """A run without adapters gets none."""
    program = Program(monkeypatch, adapted[0], model, capsys)
    said = f"train.py: --lora_rank: the adapters of --resume {adapted[0]} have 4; leave it out.\n"
    assert program("--resume", "--lora_rank", "8")[::2] == (2, said)
    (tmp_path / "config.json").write_text("{}")  # as of a version without adapters
    said = program("--resume", "--lora_rank", "8", folder=tmp_path)[2]
    assert said.startswith("train.py: --lora_rank: the adapters of")


def refused(net, base: str, **flags) -> str:
    """The sentence; warnings of peft's are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UsageError) as error:
            add_adapters(Flags(**flags), net, base, 0)
    assert str(error.value).count("\n") == 0 and str(error.value).endswith(".")
    return str(error.value)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"hidden_size": 48}, "size mismatch for model.layers.1.mlp.down_proj.lora_B"),
        ({"num_hidden_layers": 1}, "only one of the two has model.layers.1."),
        ({"num_hidden_layers": 3}, "only one of the two has model.layers.2."),
    ],
)
def test_an_adapter_of_another_base_is_refused(more, reason, tmp_path):
    """By its shapes or layers if its base is not known, else by its name, even where every shape fits."""
    folder = saved_model("Qwen3", tmp_path / "base")
    net, other = shaken(folder), saved_model("Qwen3", tmp_path / "other", **more)
    adapter = saved(net, tmp_path / "adapter", base_model_name_or_path=None, target_modules=LINEAR)
    text = refused(loaded(other), other, lora_adapter=adapter)
    assert text.startswith(f"--lora_adapter {adapter} does not fit --model {other} ({reason}")
    assert text.endswith("); give the model that it was trained on.")
    same = saved_model("Qwen3", tmp_path / "same")
    named = f"its adapter_config.json names another base, {folder}"
    assert f"({named})" in refused(loaded(same), same, lora_adapter=saved(net, tmp_path / "named"))
    add_adapters(Flags(lora_adapter=adapter), loaded(same), same, 0)


def test_a_base_may_be_named_by_a_relative_path(tmp_path, monkeypatch):
    folder = saved_model("Qwen3", tmp_path / "base")
    adapter = saved(shaken(folder), tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    add_adapters(Flags(lora_adapter=adapter), loaded("base"), "base", 0)


@pytest.mark.parametrize(
    "more",
    [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "lora_only"}]
    + [{"target_modules": [layer]} for layer in ("lm_head", "embed_tokens")],
)
def test_adapters_that_are_more_than_two_factors_of_a_linear_layer_are_refused(more, tmp_path):
    """Their merged weight is another, they train more than adapters, or they adapt the head or the embedding."""
    folder = saved_model("Qwen2", tmp_path / "base")  # its q_proj has a bias
    config = peft.LoraConfig(**{"r": 2, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]} | more)
    peft.get_peft_model(loaded(folder), config).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    adapter = str(tmp_path / "adapter")
    assert refused(loaded(folder), folder, lora_adapter=adapter).startswith(f"--lora_adapter {adapter}")


def test_a_mixture_is_refused(tmp_path):
    """transformers holds the experts of a layer in one tensor, of which peft adapts each with factors of its own."""
    folder = saved_model("Qwen3Moe", tmp_path, **MIXTURE)
    text = refused(loaded(folder), folder, lora_rank=2)
    assert text == f"--model {folder} is a mixture of experts, which gets no adapters here; train it in full."


def test_an_adapter_given_as_the_model_is_refused(tmp_path):
    """transformers would load both, frozen."""
    folder = saved_model("Qwen3", tmp_path / "base")
    saved(shaken(folder), tmp_path / "base")
    with pytest.raises(UsageError, match="^--model .* is an adapter; give its base as --model and this as --lora_ada"):
        trainer_of(folder)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_rank": 4, "lora_adapter": "adapter"}, "--lora_rank 4 does nothing without new adapters"),
        ({"lora_adapter": "model"}, "--lora_adapter model is no folder of an adapter; it has no adapter_config.json."),
        (
            {"lora_adapter": "run/model/adapter", "output_dir": "run", "overwrite": True},
            "--overwrite would delete --lo",
        ),
        ({"lora_rank": -1}, "--lora_rank must be at least 0"),
    ],
)
def test_flags_that_cannot_work(given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("adapter", "run/model/adapter"):
        Path(folder).mkdir(parents=True)
        Path(folder, "adapter_config.json").touch()
    Path("run/config.json").touch()
    with pytest.raises(UsageError, match=f"^{words}"):
        check_flags(Flags(**{"output_dir": "new"} | given))
    assert check_flags(Flags(output_dir="new", lora_adapter="adapter")) == []
    monkeypatch.setattr(flag_checks, "find_spec", lambda name: None)
    assert check_flags(Flags(output_dir="/nowhere/run")) == []
    with pytest.raises(UsageError, match="^--lora_rank and --lora_adapter need a package: pip install peft"):
        check_flags(Flags(output_dir="/nowhere/run", lora_rank=4))


@pytest.mark.long
def test_counted_memory_of_a_trainer():
    """4 bytes of each parameter and 16 of the adapters'. Of seven layers in three blocks A has 8 x in, B out x 8
    numbers: q and o 64 + 64, k and v 64 + 32, three times 64 + 96."""
    import plan
    from test_plan import FLAGS, PARAMETERS, TINY
    from transformers import Qwen3Config

    adapters = 3 * 8 * (2 * 128 + 2 * 96 + 3 * 160)
    found = plan.trainer_bytes(Qwen3Config(**TINY), Flags(**FLAGS | EIGHT), 1, True)
    assert found["FP32 weights, gradients, moments"] == pytest.approx(4 * PARAMETERS + 16 * adapters, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_adapters_as_one(kind, tmp_path):
    """Merged weights after five steps, gathered from shards; the program also goes on from a checkpoint, bit for bit."""
    from test_ranks import run

    folder = small_model(tmp_path / "model", num_hidden_layers=2)
    flags = ["--model", folder, "--lr", "0.01", "--tokens_per_microbatch", "64", "--lora_rank", "3"]
    alone, two = run("alone", 1, tmp_path / "one", 14, *flags), run(kind, 2, tmp_path / kind, 14, *flags)
    assert two.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)
