"""New weights in a real engine while it samples."""

from contextlib import closing

import pytest
import torch
from small import TINY, random_qwen3

pytestmark = pytest.mark.gpu


@torch.no_grad()
def new_weights(trainer, version: int) -> None:
    """Random weights, the same for a version, whole nats from the last."""
    rng = torch.Generator().manual_seed(version)
    for parameter in trainer.model.parameters():
        values = torch.randn(parameter.shape, generator=rng) * 0.1 + (parameter.ndim == 1)  # norms around 1
        parameter.copy_(values)


def mean_gap(trainer, pairs: list) -> float:
    """Mean difference of log-probs between the trainer as it is now and the engine that sampled, in nats a token."""
    from runtime.evaluation import logprob_gaps
    from runtime.microbatches import TokenRow

    rows = [TokenRow(problem.prompt_ids, rollout.completion_ids, rollout.mask) for problem, rollout in pairs]
    gaps = logprob_gaps(trainer.score(rows), [rollout.logprobs for _, rollout in pairs], rows)
    return torch.cat(gaps).mean().item()


def sampled_by(rollout) -> list[int]:
    """The version of each sampled token."""
    return [version for version in rollout.versions if version >= 0]  # a forced one has -1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("engine", ["torch", "vllm", "lab.fast_vllm:FastEngine", "lab.hosts:NcclEngine"])
def test_new_weights_reach_an_engine_that_samples(device, figure, engine_args, tmp_path, engine, tied):
    """What is sampled after an update has the log-probs of the new weights, and not of others. Meanwhile, the groups of
    training are under way; some have tokens of several versions."""
    from runtime.flags import parse_flags
    from runtime.parts import Run

    if engine == "lab.hosts:NcclEngine" and torch.cuda.device_count() < 2:
        pytest.skip("nccl needs a second GPU, for the engine")
    model = random_qwen3(tmp_path / "model", TINY | {"tie_word_embeddings": tied})
    argv = ["--model", model, "--output_dir", str(tmp_path / "run"), "--engine", engine]
    argv += engine_args if engine != "torch" else []
    flags = parse_flags([*argv, "--batch_prompts", "4", "--rollouts", "4", "--max_num_seqs", "32"], "")
    run = Run(flags)
    generator, problems = run.generator.on_main, run.task.held_out[:8]
    pairs, mixed = [], 0
    with closing(run):
        generator.start(run.trainer.weights, 0)
        for version in range(1, 9):
            new_weights(run.trainer, version)
            if pairs:  # which these weights did not sample
                figure("gap under other weights, nats", mean_gap(run.trainer, pairs), above=0.1)
            taken = generator.take(flags.batch_prompts)
            generator.push(run.trainer.weights, version, release=len(taken))
            rollouts = [rollout for group in taken for rollout in group.rollouts]
            assert all(sampled_by(rollout) == sorted(sampled_by(rollout)) for rollout in rollouts)
            mixed += sum(len(set(sampled_by(rollout))) > 1 for rollout in rollouts)
            groups = generator.result_of(generator.evaluate(problems, 2))
            pairs = [(problem, r) for problem, group in zip(problems, groups, strict=True) for r in group]
            assert all(set(sampled_by(rollout)) == {version} for _, rollout in pairs)
            figure("gap under the new weights, nats", mean_gap(run.trainer, pairs), below=2e-2)
    figure("mean pause of an update, s", generator.counters.sync_seconds / 8)
    figure("completions of several versions", mixed, above=0)
