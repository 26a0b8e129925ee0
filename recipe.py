"""ScaleRL (arXiv 2510.13786) on one screen: the concept files, an optimizer, and the loop.

    python recipe.py [STEPS [SEED]]    # needs neither a GPU nor vLLM: a model that seldom thinks discovers thinking

train.py is this with flags, checkpoints, several processes, and a proof that the weights arrived. To sample with vLLM,
put `VLLMEngine(folder, task.stop_ids, max_model_len=64, seed=seed)` of vllm_engine.py in the place of `TorchEngine`.
"""

import sys
from contextlib import closing

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForCausalLM

from filters import PassRateHistory, has_variance
from fit_sigmoid import fit, report
from fp32_head import Scorer
from length_control import Interruption
from losses import aggregation_weights, cispo, normalize_advantages
from pipeline_rl import Pacer, lags
from runtime.generator import Generator
from runtime.torch_engine import TorchEngine
from tasks.arithmetic import DISCOVER_POOL, ChainTask
from tasks.prompts import PromptStream
from tasks.warm_start import DISCOVER, WarmStart, warm_start

B, G, K, LR = 8, 16, 8, 3.5e-4  # prompts a step, rollouts a prompt, the most steps off-policy, learning rate


def train(steps: int = 64, seed: int = 0) -> None:
    """The loop. Shapes: N = B · G rollouts are taken, M of them train, and the longest has L tokens with its prompt."""
    torch.set_num_threads(1)  # one core for the trainer, one for the generator
    task = ChainTask(seed, DISCOVER_POOL)  # chains such as 7 a +8 b *3, modulo 10
    folder = str(warm_start("runs/cache", settings=WarmStart(demonstrations=DISCOVER), report=print))  # the first model
    engine = TorchEngine(folder, task.stop_ids, max_model_len=64, temperature=1.0, max_num_seqs=B * G, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(model.named_parameters())
    score = Scorer(model)  # FP32 logits, as in the generator
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.01)
    warmup = LinearLR(optimizer, start_factor=0.2, total_iters=4)  # the paper: lr 5e-7, 100 steps of warm-up
    history = PassRateHistory(threshold=0.9)  # no positive resampling: solved prompts do not come again
    prompts = PromptStream(task.train, seed, history.retired)
    control = Interruption(14, 18, 4, task.phrase_ids, task.end_of_thinking_ids)  # 14 to 18 tokens of thinking, 4 more
    pacer = Pacer(B, K)  # PipelineRL-8
    generator = Generator(engine, prompts, task.score, pacer, G, length_control=control, seed=seed)
    version, curve = 0, []  # the policy version counts updates
    with closing(generator):
        generator.start(weights)  # they are version 0
        for step in range(steps):
            if step % 8 == 0:
                curve.append(evaluate(generator, task, step))
            groups = generator.take(B)  # waits for the oldest ones
            rows = [(list(group.problem.prompt_ids), r) for group in groups for r in group.rollouts]  # N pairs
            assert all(0 <= lag <= K for _, rollout in rows for lag in lags(rollout, version))
            for group in groups:
                history.update(group.problem.key, [rollout.correct for rollout in group.rollouts])
            rewards = torch.tensor([rollout.reward for _, rollout in rows])  # (N,)
            group_ids = torch.arange(B).repeat_interleave(G)  # (N,)
            keep = has_variance(rewards, group_ids)  # (N,) zero-variance filter
            if not keep.any():  # no update, so the version stays
                generator.release(B)
                continue
            rows = [row for row, trains in zip(rows, keep, strict=True) if trains]  # M of the N
            rewards, group_ids = rewards[keep], group_ids[keep]  # (M,) each
            advantages = normalize_advantages(rewards, group_ids)  # (M,) over the batch's std
            # Prompt, completion, zeros, which causal attention never sees. Entry t is of token t + 1; no prompt trains.
            ids = padded([prompt + rollout.completion_ids for prompt, rollout in rows])  # (M, L)
            behaviour = padded([[0.0] * (len(prompt) - 1) + rollout.logprobs for prompt, rollout in rows])  # (M, L - 1)
            mask = padded([[0] * (len(prompt) - 1) + rollout.mask for prompt, rollout in rows])  # (M, L - 1)
            logprobs, _ = score(ids)  # (M, L - 1)
            token_loss, _ = cispo(logprobs, behaviour, advantages, mask)  # (M, L - 1)
            (aggregation_weights(mask, group_ids) * token_loss).sum().backward()  # prompt average
            torch.nn.utils.clip_grad_norm_(weights.values(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
            version += 1
            generator.push(weights, version, release=B)  # a copy, in flight: running requests go on with it
        curve.append(evaluate(generator, task, steps))
    print(report("this run", fit(*zip(*curve, strict=True), n_samples=len(task.held_out)), "tokens"))


def evaluate(generator: Generator, task: ChainTask, step: int) -> tuple[int, float]:
    """(tokens that training has sampled so far, held-out pass rate at the version pushed last)."""
    tokens = generator.counters.sampled
    answers = generator.result_of(generator.evaluate(task.held_out, 1))
    pass_rate = sum(rollout.correct for [rollout] in answers) / len(answers)
    example = task.text([*task.held_out[7].prompt_ids, *answers[7][0].completion_ids])  # a problem, and what it writes
    print(f"step {step:2}  {tokens:6,} tokens  right {pass_rate:.2f}   {example}", flush=True)
    return tokens, pass_rate


def padded(rows: list[list]) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


if __name__ == "__main__":  # vLLM's process imports this file
    if len(sys.argv) > 3 or not all(map(str.isdigit, sys.argv[1:])):
        sys.exit(__doc__)
    train(*map(int, sys.argv[1:]))
