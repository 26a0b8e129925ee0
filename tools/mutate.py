"""Mutation run: breaks the code in one place at a time and shows which test notices.

    python tools/mutate.py                    # all of the table below: `make mutate`
    python tools/mutate.py losses filters     # two files only
    python tools/mutate.py losses -k GSPO     # only the mutations whose description contains the text
    python tools/mutate.py --check            # is every old text still found exactly once? Runs no test

PROBLEM. Tests that pass prove little: a test may run the line with the sign and never look at the sign.

IDEA. For each row of `MUTATIONS` a copy of the project gets one fault that published RL code really had (a dropped
detach, a mean for a sum, a cap read as 1 + eps), and the tests of that file run on the copy. A failing test kills the
mutation; it survives if none does, and then a test is missing. The run ends with exit code 1 if a mutation survives, an
old text is no longer found exactly once (the table must follow the code), or the unbroken copy fails its tests.

HOW. torch is imported once; every mutation runs pytest in a forked child, which dies with whatever the fault did to it.
First the test files of the mutated file (`TESTS`, else tests/test_NAME.py), up to the first failure; if they all pass,
the other fast tests that mention the module. A fault that makes a test hang is killed by the time limit.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT = 120.0  # seconds for the tests of one mutation

# Test files to run first for a source file, where they are not just tests/test_NAME.py. Fast ones first.
TESTS: dict[str, list[str]] = {
    "pipeline_rl.py": ["tests/test_pacer.py"],
    "flags.py": ["tests/test_train.py"],
    "trainer.py": ["tests/test_train.py"],
    "engine_side.py": ["tests/test_engine_side.py", "tests/test_generator.py"],
    "policy.py": ["tests/test_policy.py", "tests/test_train.py", "tests/test_models.py"],
    "records.py": ["tests/test_train.py", "tests/test_checkpoint.py"],
}

# file -> [(what is broken, old text, new text)]; the old text stands exactly once in the file
MUTATIONS: dict[str, list[tuple[str, str, str]]] = {
    "length_control.py": [
        ("budget never reaches its maximum", "rng.randint(", "rng.randrange("),
        ("a leg that stopped by itself goes on", 'if finish_reason != "length":', 'if finish_reason == "abort":'),
        ("forced tokens in the mask", "[0] * n_forced", "[1] * n_forced"),
        ("mask shifted by one", "[1] * n_first + [0]", "[1] * (n_first - 1) + [0]"),
        ("phrase not in the second prompt", "SecondLeg(so_far + forced,", "SecondLeg(so_far,"),
        ("phrase handed out, not a copy", "forced = list(self.phrase_ids)", "forced = self.phrase_ids"),
        ("answer gets the thinking's budget", "forced, self.answer_budget)", "forced, self.max_budget)"),
        ("answer tokens sampled so far forgotten", "self.answer_budget - answered", "self.answer_budget"),
        ("mark counted as answer", "end in range(len(mark), len(ids) + 1):", "end in range(len(mark) - 1, len(ids)):"),
        ("mark at the very end missed", "range(len(mark), len(ids) + 1)", "range(len(mark), len(ids))"),
        ("last mark instead of first", "range(len(mark), len(ids) + 1)", "range(len(ids), len(mark) - 1, -1)"),
        (
            "only the mark's last token compared",
            "ids[end - len(mark) : end] == mark",
            "ids[end - 1 : end] == mark[-1:]",
        ),
        (">= for >: a leg of 0 tokens", "if left > 0 else None", "if left >= 0 else None"),
        ("phrase left out of the longest completion", "self.max_budget + len(self.phrase_ids) +", "self.max_budget +"),
        (
            ">= for >: equal budgets refused",
            "if self.min_budget > self.max_budget:",
            "if self.min_budget >= self.max_budget:",
        ),
        ("budget of 0 accepted", "self.min_budget < 1 or", "self.min_budget < 0 or"),
        ("answer budget of 0 accepted", "or self.answer_budget < 1", "or self.answer_budget < 0"),
        ("phrase need not end thinking", "if phrase[-len(end) :] != end:", "if end[-1] not in phrase:"),
        (
            "penalty's sign",
            "((max_length - lengths) / cache_length - 1)",
            "((lengths - max_length) / cache_length - 1)",
        ),
        ("ramp starts one cache too late", "/ cache_length - 1).clamp", "/ cache_length).clamp"),
        ("penalty as a reward", ".clamp(-1, 0)", ".clamp(0, 1)"),
        ("penalty without its floor", ".clamp(-1, 0)", ".clamp(max=0)"),
        ("penalty without its ceiling", ".clamp(-1, 0)", ".clamp(min=-1)"),
        ("in-place write into the lengths", "((max_length - lengths) /", "(lengths.neg_().add_(max_length) /"),
        ("penalty of integers cut to integers", "torch.promote_types(lengths.dtype, torch.float32)", "torch.float32"),
        ("ramp of length 0", "if not 1 <= cache_length", "if not 0 <= cache_length"),
        ("count instead of rate", "/ max(len(reasons), 1)", "/ 1"),
        ("rate of those that stopped", 'reason == "length" for', 'reason != "length" for'),
        ("every unfinished end is a truncation", 'reason == "length" for', 'reason != "stop" for'),
        ("warning from above 5 % only", "if rate < HEALTHY_TRUNCATION:", "if rate <= HEALTHY_TRUNCATION:"),
        ("loud already at 10 %", "if rate <= COLLAPSE_TRUNCATION:", "if rate < COLLAPSE_TRUNCATION:"),
    ],
    "fp32_head.py": [
        ("generator's head in the model's dtype", '{"head_dtype": "float32"}', '{"head_dtype": "bfloat16"}'),
        ("bfloat16 product by default", "fp32: bool = True", "fp32: bool = False"),
        ("--fp32_head false without effect", "dtype if fp32 else hidden.dtype", "dtype"),
        ("FP64 computed in FP32", "dtype = torch.float64 if double else torch.float32", "dtype = torch.float32"),
        ("chunk ignores the bytes of a number", "(weight.shape[0] * dtype.itemsize)", "weight.shape[0]"),
        ("chunk of 0 tokens", "max(1, CHUNK_BYTES", "max(0, CHUNK_BYTES"),
        ("no chunks at all", "chunk_tokens = max(1,", "chunk_tokens = max(hidden.shape[0],"),
        ("temperature 0 accepted", "if temperature <= 0:", "if temperature < 0:"),
        ("rounding lost", "return weight + (weight.to(dtype)", "return weight + (weight"),
        ("gradient not straight through", "- weight).detach()", "- weight)"),
        (
            "gradient rounded",
            "return weight + (weight.to(dtype).to(weight.dtype) - weight).detach()",
            "return weight.to(dtype).to(weight.dtype)",
        ),
        ("no maximum taken off", "z.amax(-1, keepdim=True)", "z.new_zeros(len(z), 1)"),
        ("log-prob without its normaliser", ".squeeze(1) - total.log()", ".squeeze(1)"),
        ("normaliser is a mean", "total = e.sum(-1)", "total = e.mean(-1)"),
        ("neighbour's target scored", "targets[rows, None]).squeeze(1)", "targets[rows, None].roll(1)).squeeze(1)"),
        ("entropy's sign", "total.log() - e.mul_(z)", "-total.log() + e.mul_(z)"),
        (
            "entropy estimated by -logprob",
            "entropy[rows] = total.log() - e.mul_(z).sum(-1) / total",
            "entropy[rows] = -logprobs[rows]",
        ),
        ("entropy's normaliser", "e.mul_(z).sum(-1) / total", "e.mul_(z).mean(-1)"),
        ("entropy always with gradient", "if not options.entropy_grad:", "if False:"),
        (
            "backward's logsumexp without the maximum",
            "logsumexp[rows] = top.squeeze(1) + total.log()",
            "logsumexp[rows] = total.log()",
        ),
        (
            "weight gradient summed in its own dtype",
            "torch.zeros_like(weight, dtype=options.dtype)",
            "torch.zeros_like(weight)",
        ),
        (
            "weight gradient of the last chunk only",
            "grad_weight.addmm_(dz.t(), hidden[rows].to(options.dtype))",
            "grad_weight.copy_(dz.t() @ hidden[rows].to(options.dtype))",
        ),
        ("bias gradient of the last chunk only", "grad_bias.add_(dz.sum(0))", "grad_bias.copy_(dz.sum(0))"),
        ("bias gradient is a mean", "dz.sum(0)", "dz.mean(0)"),
        ("gradient forgets the temperature", "(grad_logprobs[rows] / options.temperature)", "(grad_logprobs[rows])"),
        ("gradient multiplied by the temperature", "(grad_logprobs[rows] / options", "(grad_logprobs[rows] * options"),
        (
            "entropy gradient forgets the temperature",
            "(grad_entropy[rows] / options.temperature)",
            "(grad_entropy[rows])",
        ),
        ("entropy gradient's sign", ".mul_(g_entropy).add_(g)", ".mul_(-g_entropy).add_(g)"),
        ("entropy gradient without its mean", "logp.add_(entropy[rows, None]).mul_(", "logp.mul_("),
        ("gradient's sign", ".mul_(-g)  # dz_j", ".mul_(g)  # dz_j"),
        (
            "target's own gradient lost",
            "dz.scatter_add_(1, targets[rows, None], g)",
            "dz.scatter_add_(1, targets[rows, None], 0 * g)",
        ),
        (
            "in-place write into the incoming gradient",
            "(grad_logprobs[rows] / options.temperature)",
            "grad_logprobs[rows].div_(options.temperature)",
        ),
        (
            "in-place rounding of the masters",
            "return weight + (weight.to(dtype)",
            "weight.data.copy_(weight.to(dtype))\n    return weight + (weight.to(dtype)",
        ),
        (
            "in-place write into the hidden states",
            "h = hidden[rows].to(options.product_dtype)",
            "h = hidden[rows].mul_(1).to(options.product_dtype)",
        ),
        ("product under autocast", "torch.mm(h, head, out=z)", "z.copy_(h @ head)"),
        (
            "product with bias under autocast",
            "torch.addmm(bias, h, head, out=z)",
            "z.copy_(torch.addmm(bias, h, head))",
        ),
        (
            "hidden gradient under autocast",
            "torch.mm(dz, head, out=grad_hidden[rows])",
            "grad_hidden[rows] = dz @ head",
        ),
        (
            "weight gradient under autocast",
            "grad_weight.addmm_(dz.t(), hidden[rows].to(options.dtype))",
            "grad_weight.add_(dz.t() @ hidden[rows].to(options.dtype))",
        ),
        ("bias dropped", "torch.addmm(bias, h, head, out=z)", "torch.mm(h, head, out=z)"),
        ("temperature multiplied", "z.div_(options.temperature)", "z.mul_(options.temperature)"),
        ("temperature ignored", "if options.temperature != 1.0:", "if False:"),
        (
            "only the first chunk",
            "for start in range(0, hidden.shape[0], options.chunk_tokens):",
            "for start in range(0, 1):",
        ),
        (
            "a rest of tokens left out",
            "range(0, hidden.shape[0], options",
            "range(0, hidden.shape[0] - options.chunk_tokens + 1, options",
        ),
    ],
    "losses.py": [
        ("eps_max read as 1 + eps", "rho.clamp(max=eps_max)", "rho.clamp(max=1 + eps_max)"),
        ("CISPO without its cap", "rho.clamp(max=eps_max).detach()", "rho.detach()"),
        ("CISPO with a lower cap", "rho.clamp(max=eps_max)", "rho.clamp(min=0.8, max=eps_max)"),
        ("CISPO's stop-gradient dropped", "rho.clamp(max=eps_max).detach()", "rho.clamp(max=eps_max)"),
        ("CISPO's sign", "token_loss = -rho.clamp", "token_loss = rho.clamp"),
        ("CISPO counts the cap from above 1 + eps", "rho > eps_max, advantages", "rho > 1 + eps_max, advantages"),
        (">= for >: a ratio at the cap counts", "rho > eps_max, advantages", "rho >= eps_max, advantages"),
        ("GSPO's ratio is a sum", "log_ratio.sum(-1, keepdim=True) / length", "log_ratio.sum(-1, keepdim=True)"),
        (
            "GSPO divides by the padded length",
            "length = trained.sum(-1, keepdim=True)",
            "length = trained.new_full((len(trained), 1), trained.shape[1], dtype=torch.int64)",
        ),
        ("GSPO's sign", "torch.where(trained, -term, 0.0), _m", "torch.where(trained, term, 0.0), _m"),
        ("GSPO's term on padding", "return torch.where(trained, -term, 0.0), _m", "return -term, _m"),
        (
            "GSPO's clips swapped",
            "_clipped_term(s, advantages, eps_low, eps_high)",
            "_clipped_term(s, advantages, eps_high, eps_low)",
        ),
        (
            "DAPO's clips swapped",
            "_clipped_term(_bounded_exp(log_ratio), advantages, eps_low, eps_high)",
            "_clipped_term(_bounded_exp(log_ratio), advantages, eps_high, eps_low)",
        ),
        ("DAPO's sign", "return -term, _metrics", "return term, _metrics"),
        ("GRPO's clip one-sided", "eps_low=eps, eps_high=eps)", "eps_low=1.0, eps_high=eps)"),
        ("TIS without its cap", "-mismatch.clamp(max=cap) * term", "-mismatch * term"),
        ("TIS without its factor", "-mismatch.clamp(max=cap) * term", "-term"),
        (
            "TIS corrects twice: PPO's ratio against the generator",
            "_bounded_exp(logprobs - old)",
            "_bounded_exp(log_ratio)",
        ),
        (
            "TIS's old log-probs with gradient",
            "old_logprobs.detach().to(logprobs.dtype)",
            "old_logprobs.to(logprobs.dtype)",
        ),
        ("TIS's mismatch upside down", "_bounded_exp(log_mismatch)", "_bounded_exp(-log_mismatch)"),
        ("TIS counts padding as capped", "((mismatch > cap) & trained)", "(mismatch > 0)"),
        ("max for min in the clip", "torch.minimum(ratio * adv", "torch.maximum(ratio * adv"),
        (
            "clip without min: the gradient dies on both sides",
            "torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)",
            "ratio.clamp(1 - eps_low, 1 + eps_high) * advantages",
        ),
        ("clip's sides swapped", "ratio.clamp(1 - eps_low, 1 + eps_high)", "ratio.clamp(1 - eps_high, 1 + eps_low)"),
        (
            "clipped counts for the wrong sign of A",
            "((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0)",
            "((advantages < 0) & (ratio > 1 + eps_high)) | ((advantages > 0)",
        ),
        ("ratio upside down", "return logprobs, logprobs - behaviour,", "return logprobs, behaviour - logprobs,"),
        ("gradient through the generator's log-probs", "behaviour_logprobs.detach().to", "behaviour_logprobs.to"),
        ("gradient through the advantages", "advantages.detach().to(", "advantages.to("),
        (
            "NaN outside the mask multiplied by 0",
            "logprobs = torch.where(trained, logprobs, 0.0)",
            "logprobs = logprobs * trained",
        ),
        (
            "NaN of the generator multiplied by 0",
            "torch.where(trained, behaviour_logprobs.detach().to(logprobs.dtype), 0.0)",
            "behaviour_logprobs.detach().to(logprobs.dtype) * trained",
        ),
        (
            "in-place write into the log-probs",
            "logprobs = torch.where(trained, logprobs, 0.0)",
            "logprobs = logprobs.masked_fill_(~trained, 0.0)",
        ),
        (
            "in-place write into the generator's log-probs",
            "torch.where(trained, behaviour_logprobs.detach().to(logprobs.dtype), 0.0)",
            "behaviour_logprobs.detach().masked_fill_(~trained, 0.0)",
        ),
        ("ratio not bounded", "log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()", "log_ratio.exp()"),
        (
            "metrics of the bounded ratio's log",
            "rho = torch.where(trained, _bounded_exp(log_ratio), 0.0)",
            "rho = torch.where(trained, log_ratio, 0.0)",
        ),
        (
            "metrics count padding",
            "rho = torch.where(trained, _bounded_exp(log_ratio), 0.0)",
            "rho = _bounded_exp(log_ratio)",
        ),
        ("metrics hold means, not sums", '"ratio_sum": rho.sum()', '"ratio_sum": rho.mean()'),
        (
            "metrics count A = 0 as positive",
            "trained & (advantages > 0), trained",
            "trained & (advantages >= 0), trained",
        ),
        (
            "zero variance by a std",
            "return (highest != lowest)[group]",
            "return ((highest - lowest).abs() > 1e-3)[group]",
        ),
        ("rewards not centred per prompt", "sum_over_group(values) / sizes[group]", "values.mean()"),
        (
            "batch std of the raw rewards",
            "variance = (centred - centred.mean()).square().sum()",
            "variance = (values - values.mean()).square().sum()",
        ),
        ("ddof ignored", "(len(centred) - ddof)", "len(centred)"),
        ("ddof ignored per prompt", "(sizes[group] - ddof)", "sizes[group]"),
        ("divided by the variance", "(variance.sqrt() + eps)", "(variance + eps)"),
        ("eps inside the root", "(variance.sqrt() + eps)", "(variance + eps).sqrt()"),
        (
            "rounding noise of equal rewards becomes an advantage",
            "centred = torch.where(unequal, values - sum_over_group(values) / sizes[group], 0.0)",
            "centred = values - sum_over_group(values) / sizes[group]",
        ),
        ("batch and prompt swapped", 'if how == "batch":', 'if how == "prompt":'),
        ("empty rows in the denominator", "rows = (tokens > 0).sum()", "rows = (tokens >= 0).sum()"),
        ("dropped prompts in the denominator", "(group_tokens > 0).sum()", "(group_tokens >= 0).sum()"),
        ("prompt average is a sample average", "group_tokens[group] * (group", "tokens * (group"),
        (
            "prompt average without its mean over prompts",
            "group_tokens[group] * (group_tokens > 0).sum()",
            "group_tokens[group]",
        ),
        ("sample average without its mean over samples", "denominator = tokens * rows", "denominator = tokens"),
        ("token average is a mean over rows", "tokens.sum().expand_as(tokens)", "tokens"),
        (
            "constant without its mean over rows",
            "constant * rows.double().expand_as(tokens)",
            "constant * torch.ones_like(tokens)",
        ),
        (
            "weights outside the mask",
            "torch.where(trained, 1.0 / denominator.double()[:, None], 0.0)",
            "(1.0 / denominator.double()[:, None]).expand(mask.shape)",
        ),
        ("k1's sign", "return -log_r\n", "return log_r\n"),
        ("k2 without its half", "log_r.square() / 2", "log_r.square()"),
        ("k3 with r upside down", "torch.expm1(log_r) - log_r", "torch.expm1(-log_r) + log_r"),
        ("k3 is k1 squared away", "torch.expm1(log_r) - log_r", "torch.expm1(log_r)"),
        ("KL's gradient through the reference", "reference_logprobs.detach()", "reference_logprobs"),
        ("maxima added up over microbatches", "column.amax(0) if key", "column.sum(0) if key"),
        ("sums averaged over microbatches", "else column.sum(0) for", "else column.double().mean(0) for"),
        (
            "effective sample size upside down",
            'share(m["ratio_sum"] ** 2, m["tokens"] * m["ratio_sq_sum"])',
            'share(m["tokens"] * m["ratio_sq_sum"], m["ratio_sum"] ** 2)',
        ),
        (
            "share of all tokens, not of those with A > 0",
            'share(m["capped_positive"], m["tokens_positive"])',
            'share(m["capped_positive"], m["tokens"])',
        ),
    ],
    "filters.py": [
        (
            "zero variance by a std",
            "return (highest != lowest)[group]",
            "return ((highest - lowest).abs() > 1e-3)[group]",
        ),
        ("keeps what it should drop", "return (highest != lowest)[group]", "return (highest == lowest)[group]"),
        (
            "over the batch, not the group",
            "return (highest != lowest)[group]",
            "return (rewards.max() != rewards.min()).expand(len(group))",
        ),
        ("> for >=: a rate of exactly 0.9 stays", ">= bound.numerator * rollouts", "> bound.numerator * rollouts"),
        (
            "rate in floating point",
            "if solved * bound.denominator >= bound.numerator * rollouts:",
            "if solved / self.threshold >= rollouts:",
        ),
        ("latest for cumulative", 'if self.window == "cumulative"', 'if self.window == "latest"'),
        ("rollouts not counted up", "before[1] + len(values)", "len(values)"),
        ("correct ones not counted up", "before[0] + int(sum(values))", "int(sum(values))"),
        (
            "pass rate from shaped rewards",
            "if not values or any(v not in (0.0, 1.0) for v in values):",
            "if not values:",
        ),
        ("an empty group counts", "if not values or any(", "if any("),
        ("a tensor as prompt id", "if not isinstance(prompt_id, PromptId):", "if False:"),
        ("unseen prompts have rate 0", "solved / rollouts if rollouts else None", "solved / max(rollouts, 1)"),
        (
            "unseen prompts are retired",
            "return prompt_id in self._retired",
            "return prompt_id not in self._counts or prompt_id in self._retired",
        ),
        ("spins when every prompt is retired", "        if not left:\n", "        if False:\n"),
        ("state shared with the saved one", '"retired": list(self._retired)}', '"retired": self._retired}'),
        ("retirement not saved", '"retired": list(self._retired)}', '"retired": []}'),
        ("retirement not loaded", 'dict.fromkeys(state["retired"])', "{}"),
        (
            "loads a history of another threshold",
            '(state["threshold"], state["window"]) != (self.threshold, self.window)',
            'state["window"] != self.window',
        ),
        ("counts not loaded", "self._counts, self._retired = counts,", "self._counts, self._retired = self._counts,"),
        (
            "batch full one group too early",
            "len(self._groups) == self.batch_prompts",
            "len(self._groups) >= self.batch_prompts - 1",
        ),
        ("equal rewards kept", "        if keep:\n", "        if True:\n"),
        ("discarded groups not counted", "self.discarded += 1", "self.discarded += 0"),
        ("kept groups not counted as offered", "self.offered += 1", "self.offered += not keep"),
        (
            "> for >=: gives up one group late",
            "self._in_a_row >= self.max_in_a_row",
            "self._in_a_row > self.max_in_a_row",
        ),
        ("total for in a row", "            self._in_a_row = 0\n", ""),
        ("offers more than a batch", "        if self.full:\n", "        if False:\n"),
        ("takes half a batch", "        if not self.full:\n", "        if False:\n"),
        ("batch handed out twice", "groups, self._groups = self._groups, []", "groups = self._groups"),
        ("counts not reset", "self.offered = self.discarded = 0\n        return", "return"),
    ],
    "pipeline_rl.py": [
        (
            "groups admitted while it closes",
            "if self._closing or self._restarting.locked():",
            "if self._restarting.locked():",
        ),
        ("versions off by one pause", "self._versions[n] for n", "self._versions[n - 1] for n"),
        (
            "bound off by one batch",
            "self.capacity = (k + 1) * batch_prompts",
            "self.capacity = (k + 2) * batch_prompts",
        ),
        ("k B in flight", "self.capacity = (k + 1) * batch_prompts", "self.capacity = k * batch_prompts"),
        (
            "off-policy phase gets one batch more",
            '(k + 1) * batch_prompts if schedule == "pipeline" else k * batch_prompts',
            "(k + 1) * batch_prompts",
        ),
        (
            "trainer takes one batch off-policy",
            'self.take_size = batch_prompts if schedule == "pipeline" else k * batch_prompts',
            "self.take_size = batch_prompts",
        ),
        ("<= for <: one group too many", "self.outstanding < self.capacity", "self.outstanding <= self.capacity"),
        ("<= for <: one ready group too many", "self.ready < self.max_ready", "self.ready <= self.max_ready"),
        (
            "admission never waits for the trainer",
            "self.outstanding < self.capacity and self.ready < self.max_ready",
            "self.outstanding < self.capacity",
        ),
        ("done when taken", "self.training += count", "self.training += 0 * count"),
        ("taken groups not outstanding", "len(self._finished) + self.training", "len(self._finished)"),
        ("one release lets all groups go", "self.training -= count", "self.training = 0"),
        ("more released than are in training", "if count > self.training:", "if count > self.training + 1:"),
        (
            "a group finishes twice",
            "if self._finished.get(group.number, group) is not None:",
            "if group.number not in self._finished:",
        ),
        (
            "a number given twice",
            "self.admitted += 1\n        return self.admitted - 1",
            "self.admitted += 1\n        return self.admitted",
        ),
        ("on-policy refused", "least = 0 if schedule", "least = 1 if schedule"),
        ("off-policy 0 accepted", 'schedule == "pipeline" else 1', 'schedule == "pipeline" else 0'),
        (
            "waits for those that are finished",
            "in self._finished.items() if group is None]",
            "in self._finished.items() if group is not None]",
        ),
        ("lag's sign", "return [version - v for", "return [v - version for"),
        ("lag off by one", "return [version - v for", "return [version + 1 - v for"),
        ("forced tokens have a lag", "rollout.mask, strict=True) if m]", "rollout.mask, strict=True)]"),
        ("NaN and -inf arrive", "math.isfinite(x) and x <= 1e-4", "not x > 1e-4"),
        ("log-prob above 0 arrives", "x <= 1e-4 for", "x <= 1 for"),
        ("rounding above 0 refused", "x <= 1e-4 for", "x <= 0 for"),
        ("empty completion arrives", "if not ids or not len(ids) ==", "if not len(ids) =="),
        ("missing log-probs arrive", "len(ids) == len(logprobs) == len(versions)", "len(ids) == len(versions)"),
        ("missing versions arrive", "len(ids) == len(logprobs) == len(versions)", "len(ids) == len(logprobs)"),
        (
            "aborted request arrives",
            'if finish_reason not in ("stop", "length"):',
            'if finish_reason not in ("stop", "length", "abort"):',
        ),
    ],
    "engine_side.py": [
        ("pauses not counted", "self._pauses += self", "self._pauses += 0 and self"),
        ("a pause said twice counted twice", "self.pause_state == PauseState.UNPAUSED and pause", "pause"),
        (
            "all tokens by the last version",
            "held.pauses += [self._pauses] * count",
            "held.pauses = [self._pauses] * len(held.token_ids)",
        ),
        ("another token's log-prob", "lists.logprobs[:, 0]", "lists.logprobs[:, -1]"),
        ("one token a request", "index if self.starts is None else self.starts[index]", "index"),
        ("aborted requests stay", "self._held.pop(request_id, None)", "pass"),
        ("no block at its first token", "1 and 0 < request", "1 and 0 <= request"),
        ("full blocks not cached in time", "% block_size < block_size - 1", "% block_size < block_size"),
        ("cached prompt tokens unknown", "held.prefill_stats or output.prefill_stats", "output.prefill_stats"),
    ],
    "weight_sync.py": [
        ("weight file written over", "new.replace(self.path)", "shutil.copyfile(new, self.path); new.unlink()"),
        ("weight file readable by others", "stat.S_IRUSR | stat.S_IWUSR)", "0o644)"),
        ("files of living processes removed", 'and not Path(f"/proc/{pid}").exists()', ""),
        ("other ranks write, too", "if self.rank != 0:\n            for _", "if self.rank < 0:\n            for _"),
        (
            "all tensors gathered before one is written",
            "for _, tensor in weights.items():",
            "for _, tensor in list(weights.items()):",
        ),
        ("offsets not summed", "start, end = end, end + torch", "start, end = 0, torch"),
        ("header not padded", 'text += b" " * (-len(text) % 8)', "pass"),
        ("other ranks do not take part", "if self.rank != 0:\n            self._send()", "pass"),
        (
            "sent in the generator's own loop",
            'threading.Thread(target=send, name="weights", daemon=True).start()',
            "send()",
        ),
        ("workers not counted", "1 + self.workers, rank", "self.workers, rank"),
        ("buffer smaller than a tensor", "max(largest, 256 * 2**20)", "256 * 2**20"),
    ],
    "policy.py": [
        ("scored by its own position", "(place - 1)[trains]", "place[trains]"),
        ("target shifted by one", "ids[trains], width", "ids.roll(1)[trains], width"),
        ("output rows as wide as the input", "n * width + t - prompts", "n * longest + t - prompts"),
        (
            "packed rows see each other",
            "position_ids.view(-1)[place] = ids, t",
            "position_ids.view(-1)[place] = ids, place",
        ),
        ("forced tokens scored", "*row.mask)], dtype=torch.bool", "*[1] * len(row.mask))], dtype=torch.bool"),
        ("rows begin where the last one began", "lengths.cumsum(0) - lengths", "0 * lengths"),
        ("rows start at the wrong place", "else n * longest + t", "else n * width + t"),
        ("written where the prompt stands", "t - prompts[n])", "t)"),
        ("padded positions do not count up", "position_ids += torch.arange(longest)", "position_ids += 0"),
        ("empty microbatch without gradients", ".view(n, batch.width) + hidden.sum() * 0", ".view(n, batch.width)"),
        (
            "head not rounded",
            "hidden.to(self.dtype), rounded(weight, self.dtype)",
            "hidden.to(self.dtype), weight",
        ),
        (
            "head cast, gradient rounded",
            "hidden.to(self.dtype), rounded(weight, self.dtype)",
            "hidden.to(self.dtype), weight.to(self.dtype)",
        ),
        (
            "hidden states not rounded",
            "hidden, weight = hidden.to(self.dtype), rounded",
            "hidden, weight = hidden.float(), rounded",
        ),
        ("temperature forgotten", '{"temperature": temperature,', '{"temperature": 1.0,'),
        ("--fp32_head false without effect", '"fp32": fp32_head,', '"fp32": True,'),
        ("entropy never with gradient", '"entropy_grad": entropy_grad}', '"entropy_grad": False}'),
        ("rows dealt round, not back and forth", "else ranks - 1 - seat]", "else seat]"),
        (
            "rows left over by division vanish",
            "enumerate(longest_first):",
            "enumerate(longest_first[: len(longest_first) // ranks * ranks]):",
        ),
        ("shortest rows first", "key=lambda i: -lengths[i])\n    shares", "key=lambda i: lengths[i])\n    shares"),
        ("ranks with fewer microbatches", "[[]] * (count - len(cuts[rank]))", "[]"),
        (
            "width of the rank's own rows",
            "for row in batch), default=1)\n    cuts",
            "for row in batch[rank::ranks]), default=1)\n    cuts",
        ),
        (">= for >: a full microbatch is cut", "used + cost > tokens:", "used + cost >= tokens:"),
        ("padding not counted", "lengths[row] if packed or not pieces else lengths[pieces[-1][0]]", "lengths[row]"),
        ("packed rows counted as padded", "lengths[row] if packed or not pieces", "lengths[row] if not pieces"),
        ("rows of a microbatch forgotten", "used, cost = 0, lengths[row]", "used, cost = 0, 0"),
        (
            "tied head sent twice",
            "for name, parameter in model.named_parameters():\n        tensor",
            "for name, parameter in model.named_parameters(remove_duplicate=False):\n        tensor",
        ),
        (
            "experts sent as transformers holds them",
            "unchanged = list(self._stored[name]) == [name]",
            "unchanged = True",
        ),
        ("all experts counted as visited", "* visited // experts(model.config) if", "if"),
        ("tied head costs no FLOPs", "head.numel() if head is embedding else 0", "0"),
        ("shards sent, not the whole", "(gather() if gather else tensor).to(dtype)", "tensor.to(dtype)"),
        (
            "weights sent in the trainer's dtype",
            "(gather() if gather else tensor).to(dtype)",
            "(gather() if gather else tensor)",
        ),
    ],
    "trainer.py": [
        (
            "ranks' gradients averaged",
            "self.accelerator.backward(loss * ranks)",
            "self.accelerator.backward(loss)",
        ),
        (
            "mean of microbatches",
            "loss = (weights * token_loss).sum()",
            "loss = (weights * token_loss).sum() / len(work)",
        ),
        ("other rows' advantages", "batch.advantages[rows].to(device)", "batch.advantages[: len(rows)].to(device)"),
        ("KL's sign", "token_loss + flags.kl_coef * kl", "token_loss - flags.kl_coef * kl"),
        (
            "entropy bonus as a penalty",
            "token_loss - flags.entropy_coef * entropy",
            "token_loss + flags.entropy_coef * entropy",
        ),
        (
            "first step of the warm-up has rate 0",
            "(version + 1) / max(1, flags.warmup_steps)",
            "version / max(1, flags.warmup_steps)",
        ),
        ("warm-up goes on rising", "min(1.0, (version + 1)", "max(0.0, (version + 1)"),
        ("cosine upside down", "0.5 * (1 + math.cos(", "0.5 * (1 - math.cos("),
        (
            "rate scaled by the square",
            "math.sqrt(flags.batch_prompts * flags.rollouts / 1024)",
            "(flags.batch_prompts * flags.rollouts / 1024)",
        ),
        ("gradient that is not finite applied", "if math.isfinite(norm):", "if norm == norm or True:"),
        ("gradients add up over the steps", "self.optimizer.zero_grad()", "pass"),
        (
            "gradient not clipped",
            "self.policy.parameters(), self.flags.clip_grad)",
            "self.policy.parameters(), self.flags.clip_grad + math.inf)",
        ),
        ("a clip of 0 taken for none", "if value >= 0}", "if value > 0}"),
        ("GRPO's clip ignored", '{"eps": given["eps_low"]} if "eps_low" in given else {}', "{}"),
    ],
    "train.py": [
        ("a mixture judged by its mean", ".median().item()  # is off", ".mean().item()  # is off"),
        ("order of the first epoch kept", "if self._shuffled[0] != self.epoch:", "if self._shuffled[0] < 0:"),
        ("retired prompts come again", "if not self.retired(problem.key):", "if problem is not None:"),
        (
            "epoch never counted",
            "self.epoch, self.position = self.epoch + 1, 0",
            "self.epoch, self.position = self.epoch, 0",
        ),
        ("prompts in flight in reverse order", "return self.first.popleft()", "return self.first.pop()"),
        (
            "a prompt of a saved stream skipped",
            'state["epoch"], state["position"]\n',
            'state["epoch"], state["position"] + 1\n',
        ),
        (
            "penalty added as a bonus",
            "rewards + torch.where(on, penalty, 0.0)",
            "rewards - torch.where(on, penalty, 0.0)",
        ),
        (
            "penalty on wrong answers only",
            "rollout.correct or flags.penalty_on",
            "not rollout.correct or flags.penalty_on",
        ),
        ("penalty's cap without the answer", "cap = flags.max_budget + flags.answer_budget", "cap = flags.max_budget"),
        (
            "shuffled with replacement",
            "rng.sample(range(len(rewards)), len(rewards))",
            "rng.choices(range(len(rewards)), k=len(rewards))",
        ),
        (
            "std before the filter",
            "losses.normalize_advantages(rewards[keep], prompt_ids[keep], flags.normalize_advantages)",
            "losses.normalize_advantages(rewards, prompt_ids, flags.normalize_advantages)[keep]",
        ),
        (
            "dead groups stay",
            "keep = varied if flags.zero_variance_filter else torch.ones_like(varied)",
            "keep = varied if flags.zero_variance_filter is None else torch.ones_like(varied)",
        ),
        (
            "filter cannot be switched off",
            "keep = varied if flags.zero_variance_filter else torch.ones_like(varied)",
            "keep = varied if flags.zero_variance_filter is not None else torch.ones_like(varied)",
        ),
        ("only truncated rows train", "keep = keep & ~truncated", "keep = keep & truncated"),
        (
            "forced tokens counted",
            "padded([rollouts[i].mask for i in chosen], torch.bool)",
            "padded([[1] * len(rollouts[i].mask) for i in chosen], torch.bool)",
        ),
        (
            "prompt average over samples",
            "losses.aggregation_weights(mask, prompt_ids[keep],",
            "losses.aggregation_weights(mask, torch.arange(len(mask)),",
        ),
        ("advantages of other rows", "mask, advantages[keep], weights)", "mask, advantages[: len(rows)], weights)"),
        (
            "constant without the answer",
            "constant = flags.max_budget + flags.answer_budget",
            "constant = flags.max_budget",
        ),
        ("pushed after every update of a phase", "if not run.in_hand:", "if run.step:"),
        ("weights change under an evaluation", "metrics |= run.finish_check()", "metrics |= {}"),
        ("lag at the version after the step", "metrics, before)", "metrics, run.version)"),
        ("a skipped update counts as a version", 'self.version += metrics["updated"]', "self.version += 1"),
        (
            "bad steps add up over the run",
            'self.bad_steps = 0 if metrics["updated"] else',
            'self.bad_steps = self.bad_steps if metrics["updated"] else',
        ),
        ("off-policy batches not shuffled", "self.rng.shuffle(groups)", "pass"),
        ("discarded groups never released", "generator.release(1)", "pass"),
        ("discarded groups not in the history", "self.remember([group])", "pass"),
        (
            "retired in flight counted too late",
            "return late",
            "return sum(self.history.retired(group.problem.key) for group in groups)",
        ),
        ("evaluation by two versions", "if mixed:", "if mixed < 0:"),
    ],
    "records.py": [
        ("evaluation counted as compute", " - counters.eval_seconds", ""),
        (
            "training's FLOPs as sampling's",
            "6 * self.parameters * self.forwarded",
            "2 * self.parameters * self.forwarded",
        ),
        ("prefill costs nothing", "(counters.prefilled + counters.sampled)", "(counters.sampled)"),
        ("compute before a resume lost", 'past.get("flops", 0) + flops', "flops"),
        ("one device counted", "seconds * self.devices / 3600", "seconds / 3600"),
        ("pass@k is all of k", "sum(any(samples) for samples", "sum(all(samples) for samples"),
        (
            "pass rate over prompts",
            "rollout.correct for rollout in rollouts) / len(rollouts)",
            "rollout.correct for rollout in rollouts) / len(groups)",
        ),
        ("last evaluation only", "sum(rates[-2:]) / len(rates[-2:])", "rates[-1]"),
        ("newest checkpoint removed", "self.checkpoints()[: -max(1, keep)]", "self.checkpoints()[max(1, keep) :]"),
        ("oldest checkpoint first", "in reversed(self.checkpoints()):", "in self.checkpoints():"),
        ("damaged checkpoint taken", 'return state if sizes == state["files"] else None', "return state"),
        ("logs keep what came after", "os.truncate(self.path / name, length)", "pass"),
    ],
    "flags.py": [
        ("equal budgets refused", "flags.min_budget <= flags.max_budget,", "flags.min_budget < flags.max_budget,"),
        (
            "G as large as the engine refused",
            "flags.rollouts <= flags.max_num_seqs,",
            "flags.rollouts < flags.max_num_seqs,",
        ),
        ("off-policy 0 accepted", 'least = 1 if flags.schedule == "ppo_off_policy" else 0', "least = 0"),
        ("phases rounded down", "-(-flags.max_steps // flags.k) * flags.k", "flags.max_steps // flags.k * flags.k"),
        ("penalty window of 0", "1 <= flags.penalty_window <= cap", "0 <= flags.penalty_window <= cap"),
        ("a folder of other things taken", "or (folder.is_dir() and not any(folder.iterdir()))", "or folder.is_dir()"),
        (
            "NaN accepted",
            "good = (value >= least if included else value > least) and value < most",
            "good = not (value < least if included else value <= least) and not value >= most",
        ),
    ],
}


class _FirstFailure:
    """pytest plugin: notes the first test that fails, and whether the tests could be collected at all."""

    def __init__(self) -> None:
        self.test, self.broken = "", ""

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken = self.broken or str(report.longrepr).strip().splitlines()[-1]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.test = self.test or report.nodeid


def run_tests(folder: Path, tests: list[str]) -> str:
    """Runs test files on the copy in a forked child: "" if all pass or there are none, else what failed first.

    "hangs" after TIME_LIMIT, "crash" if the interpreter died, "broken: ..." if a test file could not be collected.
    """
    if not tests:
        return ""
    for module_folder in (folder, folder / "tools"):  # two versions of a module may share a size and a time stamp
        shutil.rmtree(module_folder / "__pycache__", ignore_errors=True)
    answer = folder / "mutate_answer.txt"
    answer.write_text("crash")
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()  # so that processes which a test started can be ended with it
            answer.write_text(_run_pytest(folder, tests))
        finally:
            os._exit(0)  # no clean-up of the parent's state, whatever happened
    end, running = time.monotonic() + TIME_LIMIT, True
    try:
        while running and time.monotonic() < end:
            time.sleep(0.02)
            running = os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:  # time limit or Ctrl-C
        if running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return "hangs" if running else answer.read_text()


def _run_pytest(folder: Path, tests: list[str]) -> str:
    import pytest  # imported by the parent already

    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    sys.stdout = sys.stderr = open(os.devnull, "w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    first = _FirstFailure()
    code = pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "not slow", *tests], plugins=[first])
    if first.broken or code not in (0, 1):
        return f"broken: {first.broken or f'pytest ended with code {int(code)}'}"
    return first.test


def copy_project(folder: Path) -> None:
    """Copies the top-level files, tests and tools: what the fast tests read."""
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    for name in ("tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def first_tests(name: str) -> list[str]:
    """The test files that a mutation of file `name` meets first."""
    return TESTS.get(name, [f"tests/test_{Path(name).stem}.py"])


def other_tests(name: str, folder: Path) -> list[str]:
    """The test files beyond `first_tests` that mention the module."""
    word = re.compile(rf"\b{Path(name).stem}\b")
    found = [
        f"tests/{path.name}" for path in sorted((folder / "tests").glob("test_*.py")) if word.search(path.read_text())
    ]
    return [test for test in found if test not in first_tests(name)]


def faults_of_the_table(names: list[str]) -> list[str]:
    """What is wrong with the table itself, one sentence each."""
    faults = []
    for name in names:
        source = (ROOT / name).read_text()
        for what, old, new in MUTATIONS[name]:
            if source.count(old) != 1:
                faults.append(f"{name}: {what}: the old text stands {source.count(old)} times: {old!r}")
                continue
            try:
                compile(source.replace(old, new), name, "exec")
            except SyntaxError as error:
                faults.append(f"{name}: {what}: {error}")
    return faults


def mutate(name: str, old: str, new: str, folder: Path) -> str:
    """Applies one mutation to the copy, runs the tests and takes it back. Returns what killed it, "" if nothing did."""
    source = (folder / name).read_text()
    (folder / name).write_text(source.replace(old, new))
    killer = run_tests(folder, first_tests(name))
    wider = "" if killer else run_tests(folder, other_tests(name, folder))
    (folder / name).write_text(source)
    if wider and not wider.startswith("broken") and run_tests(folder, [wider.split("::")[0]]):
        return f"broken: {wider} fails on the unbroken code too"
    return killer or wider


def main() -> int:
    parser = argparse.ArgumentParser(description="Breaks the code in one place at a time; a test must notice.")
    parser.add_argument("files", nargs="*", help=f"of: {', '.join(MUTATIONS)} (default: all)")
    parser.add_argument("-k", default="", metavar="TEXT", help="only mutations whose description contains the text")
    parser.add_argument("--check", action="store_true", help="only check the table against the code")
    options = parser.parse_args()
    names = [name if name.endswith(".py") else f"{name}.py" for name in options.files] or list(MUTATIONS)
    if unknown := [name for name in names if name not in MUTATIONS]:
        parser.error(f"no mutations for {', '.join(unknown)}; choose from {', '.join(MUTATIONS)}")
    if faults := faults_of_the_table(names):
        print("\n".join(faults))
        return 1
    if options.check:
        print(f"{sum(len(MUTATIONS[name]) for name in names)} mutations fit the code")
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the child and remove the copy, as after Ctrl-C
    os.environ["OMP_NUM_THREADS"] = "1"  # forking is safe only before torch starts threads
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other packages' plugins: 0.2 s a mutation, and none is used
    import pytest  # noqa: F401  imported once here, not in every child
    import torch

    torch.set_num_threads(1)
    start, bad, total = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as temporary:
        folder = Path(temporary)
        copy_project(folder)
        for name in names:
            if failure := run_tests(folder, first_tests(name)):
                print(f"{name}: the unbroken code fails its tests: {failure}")
                return 1
            for what, old, new in [row for row in MUTATIONS[name] if options.k in row[0]]:
                begin, total = time.monotonic(), total + 1
                killer = mutate(name, old, new, folder)
                ok = killer and not killer.startswith("broken")
                if not ok:
                    bad.append(f"{name}: {what} {killer}".strip())
                print(
                    f"{'killed  ' if ok else 'broken  ' if killer else 'SURVIVED'} {name:18} {what:45}"
                    f" {time.monotonic() - begin:5.1f} s  {killer.removeprefix('tests/')}",
                    flush=True,
                )
    print(f"{total - len(bad)} of {total} mutations killed in {time.monotonic() - start:.0f} s")
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
