"""ScaleRL on one screen: the concept files, an optimizer, and the loop. train.py is this with flags, vLLM by default,
checkpoints, several processes, and a check that the weights arrived.

    python recipe.py        # no GPU, no vLLM
"""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from filters import PassRateHistory, has_variance
from fit_sigmoid import fit, report
from fp32_head import Scorer
from length_control import Interruption
from losses import aggregation_weights, cispo, normalize_advantages
from pipeline_rl import Pacer, lags
from runtime.generator import Generator
from runtime.torch_engine import TorchEngine  # or: from vllm_engine import VLLMEngine
from tasks.arithmetic import graded_task
from tasks.prompts import PromptStream
from tasks.warm_start import warm_start

B, G, K, STEPS = 16, 16, 8, 160  # prompts a step, rollouts a prompt, steps off-policy, optimizer steps

torch.manual_seed(0)
torch.set_num_threads(1)
task = graded_task()  # chains of sums modulo 10; one problem in five is impossible, so the ceiling is .80
folder = str(warm_start("runs/cache", report=print))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
weights = dict(model.named_parameters())
score = Scorer(model)  # FP32 logits, the same as the generator's
optimizer = torch.optim.AdamW(model.parameters(), lr=7e-4, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.01)

history = PassRateHistory(threshold=0.9)  # no positive resampling
control = Interruption(14, 18, 4, task.phrase_ids, task.end_of_thinking_ids)  # forced interruption
engine = TorchEngine(folder, task.stop_ids, 64, 1.0, 256, 0)
prompts = PromptStream(task.train, 0, history.retired)
generator = Generator(engine, prompts, task.score, Pacer(B, K), G, length_control=control)  # PipelineRL-8


def padded(rows, dtype):  # (N, L)
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


tokens, pass_rates = [], []
try:
    generator.start(weights)
    for version in range(STEPS + 1):
        if version % 10 == 0:  # sampled while the next gradient is computed in train.py; here we wait
            answers = generator.result_of(generator.evaluate(task.held_out, 1))
            pass_rates.append(sum(rollout.correct for [rollout] in answers) / len(answers))
            tokens.append(generator.counters.sampled if version else 0)
            print(f"step {version:3}  pass rate {pass_rates[-1]:.3f}  tokens {tokens[-1]:,}")

        groups = generator.take(B)  # the B oldest; the generator goes on sampling
        rollouts = [rollout for group in groups for rollout in group.rollouts]  # N = B G
        prompt_ids = [list(group.problem.prompt_ids) for group in groups for _ in group.rollouts]
        rewards = torch.tensor([rollout.reward for rollout in rollouts])  # (N,)
        group_ids = torch.arange(B).repeat_interleave(G)  # (N,)
        for group in groups:
            history.update(group.problem.key, [rollout.correct for rollout in group.rollouts])

        keep = has_variance(rewards, group_ids)  # (N,) zero-variance filter
        kept = [(prompt_ids[i], rollouts[i]) for i in keep.nonzero().flatten().tolist()]  # K pairs
        if not kept:
            generator.release(B)
            continue
        advantages = normalize_advantages(rewards[keep], group_ids[keep])  # (K,) over the batch's std
        # Prompt and completion in one row. Position t predicts token t + 1, and no token of a prompt trains.
        ids = padded([prompt + rollout.completion_ids for prompt, rollout in kept], torch.long)  # (K, L)
        behaviour = padded([[0] * (len(prompt) - 1) + r.logprobs for prompt, r in kept], torch.float32)  # (K, L - 1)
        mask = padded([[0] * (len(prompt) - 1) + r.mask for prompt, r in kept], torch.bool)  # (K, L - 1)

        logprobs, _ = score(ids)  # (K, L - 1)
        token_loss, metrics = cispo(logprobs, behaviour, advantages, mask, eps_max=5.0)  # (K, L - 1)
        loss = (aggregation_weights(mask, group_ids[keep]) * token_loss).sum()  # prompt average
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        generator.push(weights, version + 1, release=B)  # in flight: running requests go on with the new weights
        oldest = max(lag for rollout in rollouts for lag in lags(rollout, version))
        assert oldest <= K
finally:
    generator.close()

print(report("this run", fit(tokens, pass_rates, n_samples=len(task.held_out)), "tokens"))
