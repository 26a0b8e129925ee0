"""Policy losses for completions that an older, slightly different policy sampled.

PROBLEM. The completions in a training batch were sampled up to k optimiser steps ago, and by another program (the
generator engine) whose numbers differ a little from the trainer's. Taking them for the current policy's own biases the
gradient. The importance ratio rho removes the bias, but then a few tokens with a huge ratio rule the step.

IDEA. Every loss here keeps the ratio and limits it in its own way.
- CISPO (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786, Eq. 5): truncate the ratio, stop its gradient, use it
  as a weight on the policy gradient. A token at the cap still learns.
- GRPO (2402.03300), DAPO (2503.14476): PPO's clip. A token past the clip gets no gradient where its advantage would
  push it further out; on the other side it is free to come back.
- GSPO (2507.18071): the same clip on one ratio a sequence, the geometric mean of its tokens' ratios.
- TIS (Yao et al. 2025): PPO's clip against the trainer's own old log-probs, times a truncated trainer/engine ratio.
  Where a batch gets one update, as under PipelineRL, pi_old is pi: the clip never acts, and the gradient of TIS with
  a ratio per token is that of CISPO with eps_max = cap, to the bit.

    J(theta) = E_x [ 1/sum_g |y_g| * sum_i sum_t sg(min(rho_it, eps_max)) * A_i * log pi_it ]      2510.13786, Eq. 5

`normalize_advantages` gives A, a loss gives the term inside the sums (with a minus: we minimise), `aggregation_weights`
gives the sums and means. A step's loss is `(weights * token_loss).sum()` over any split into microbatches and ranks.

TRAINERS THAT AVERAGE. That loss is a sum. A trainer that divides must be given the loss times what it divides by: times
the ranks under DDP, FSDP and accelerate; times the accumulation steps too with `accelerator.accumulate` (its `backward`
divides), and in HF Trainer, unless its inputs have `labels` and the model takes `**kwargs`, or it has a
`compute_loss_func`. Without the factor the gradient is 1/ranks or 1/steps of the right one: Adam hides that, gradient
clipping and SGD do not.

SYMBOLS. N rows (rollouts) · T completion positions, padded · rho = pi_train / pi_gen per token: the trainer now, over
the generator's recorded log-prob · A advantage, one a row or one a token · sg stop-gradient · mask 1 on tokens that
train (sampled, not forced, not padding) · group_ids one id a group of rollouts (a prompt twice in the batch is two
groups).

SIMPLIFIED. A sequence is a row. Sequences packed end to end, (1, T_total), work with advantages and weights per token,
which the caller lays out in the same order; but gspo and sequence-level tis would take the packed row for one sequence,
so give them padded rows: `pad_sequence(logprobs[0].split(lengths), batch_first=True)`. Advantages and weights need the
whole batch of all ranks: the caller gathers rewards and masks first. Log-ratios are bounded to +-20 before `exp` (a
ratio of 5e8); beyond that a clipped loss has no gradient.

CHOICES, where papers are silent or differ. L1: eps_max is an absolute cap on rho as in ScaleRL (MiniMax-M1 writes
1 + eps_high), without a lower cap. L2: the batch std is that of the rows given; drop zero-variance groups before.
L3: population std (ddof 0), eps 1e-6. L4: `ratio_*` and `ess` describe pi_train / pi_gen per token whatever the loss,
so that runs with different losses compare; `capped_*` counts what the loss itself truncates or clips. L5: every loss,
GSPO too, is averaged by the caller's `how`, whose default is ScaleRL's `prompt`; GSPO's own paper averages by `sample`.

>>> rewards, ids, mask = torch.tensor([1.0, -1.0]), torch.tensor([7, 7]), torch.tensor([[1, 1], [1, 0]])
>>> token_loss, _ = cispo(torch.full((2, 2), -1.0), torch.full((2, 2), -1.0), normalize_advantages(rewards, ids), mask)
>>> round(float((aggregation_weights(mask, ids, "prompt") * token_loss).sum()), 3)  # (1 + 1 - 1) / 3 tokens
0.333
"""

import torch
from torch import Tensor

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]

MAX_LOG_RATIO = 20.0  # FP32 exp overflows at 88.7; long before that a ratio says no more than "huge"


def cispo(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, eps_max: float = 5.0
) -> LossAndMetrics:
    """ScaleRL's loss: truncated importance weights on the policy gradient (arXiv 2510.13786, Eq. 5).

    Args:
        logprobs: (N, T) log-probs of the sampled tokens under the trainer's policy now; the gradient flows here.
        behaviour_logprobs: (N, T) log-probs that the generator recorded when it sampled.
        advantages: (N,) one a row, or (N, T) one a token (turns, per-token credit, packed rows).
        mask: (N, T) 1 on tokens that train. What lies outside, NaN included, changes nothing.
        eps_max: absolute cap on rho (L1).
    Returns:
        (token_loss (N, T) to be minimised, 0 outside the mask; metrics as 0-d tensors, see `summarize_metrics`). FP32
        at least, whatever the log-probs' dtype: bfloat16 has no number between 1 and 1.0078, where GSPO clips.
    Raises:
        ValueError: the shapes do not agree. The other losses share these arguments, returns and errors.
    """
    logprobs, log_ratio, advantages, trained = _select(logprobs, behaviour_logprobs, advantages, mask)
    rho = _bounded_exp(log_ratio)  # (N, T)
    # token loss = - sg(min(rho, eps_max)) * A * log pi;  without sg the gradient of rho would come on top
    token_loss = -rho.clamp(max=eps_max).detach() * advantages * logprobs  # (N, T)
    return token_loss, _metrics(log_ratio, rho > eps_max, advantages, trained)


def gspo(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 3e-3,
    eps_high: float = 4e-3,
) -> LossAndMetrics:
    """Clip of one ratio a sequence (arXiv 2507.18071, Eq. 5-7), with the clips that ScaleRL needed.

    The sequence's term stands on each of its tokens, so that the `sample` average is the paper's mean over sequences
    (L5: under `prompt`, rows of 1 and 9 tokens weigh .1 and .9, under `sample` .5 and .5). `capped_*` counts all tokens
    of a clipped sequence. Advantages per token make it the paper's GSPO-token (section 4.3): the ratio is the
    sequence's, the sign of A_it says which clip holds token t, and A_it moves token t alone; equal advantages in a row
    give GSPO itself. Arguments, returns and errors as in `cispo`.
    """
    logprobs, log_ratio, advantages, trained = _select(logprobs, behaviour_logprobs, advantages, mask)
    length = trained.sum(-1, keepdim=True).clamp_min(1)  # (N, 1)
    log_s = log_ratio.sum(-1, keepdim=True) / length  # (N, 1)
    # s_it = sg(s_i) * pi_it / sg(pi_it),   s_i = exp( 1/|y_i| * sum_t log rho_it )
    s = _bounded_exp(log_s.detach() + (logprobs - logprobs.detach()))  # (N, T), s_i in each place of row i
    term, capped = _clipped_term(s, advantages, eps_low, eps_high)  # (N, T), (N, T)
    # `where` again: a NaN in one token makes s NaN, and NaN * 0 would carry it to the padding
    return torch.where(trained, -term, 0.0), _metrics(log_ratio, capped, advantages, trained)


def dapo(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.26,
) -> LossAndMetrics:
    """PPO's clip with a wider upper side, so that unlikely tokens can grow (arXiv 2503.14476, Eq. 8).

    DAPO's own upper clip is 0.28, ScaleRL's best 0.26. Arguments, returns and errors as in `cispo`.
    """
    _, log_ratio, advantages, trained = _select(logprobs, behaviour_logprobs, advantages, mask)
    term, capped = _clipped_term(_bounded_exp(log_ratio), advantages, eps_low, eps_high)  # (N, T), (N, T)
    return -term, _metrics(log_ratio, capped, advantages, trained)


def grpo(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, eps: float = 0.2
) -> LossAndMetrics:
    """PPO's symmetric clip (arXiv 2402.03300, Eq. 3; its KL term is `kl_penalty`).

    Dr.GRPO (2503.20783) is this with `none` advantages and `constant` weights. The rest as in `cispo`.
    """
    return dapo(logprobs, behaviour_logprobs, advantages, mask, eps_low=eps, eps_high=eps)


def tis(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    cap: float = 2.0,
    level: str = "token",
) -> LossAndMetrics:
    """PPO's clip against the trainer's own old log-probs, times a truncated engine correction (Yao et al. 2025).

    Only here is the ratio split in two. The other losses have the engine's mismatch inside rho already: this factor on
    top of them would correct it twice.

    `old_logprobs` (N, T): the trainer's log-probs under the weights it had before the first update on this batch. At
    that first update they are `logprobs`, and the clip never acts.
    `cap`: C in min(w, C); `tis_capped` in the metrics counts tokens above it.
    `level`: w = pi_old / pi_gen of each `token`, or the product of these over the `sequence`, on all its tokens (Liu et
    al. 2025, "When Speed Kills Stability"). A token's ratio leaves out that pi_old would have come to the tokens before
    it with another probability, so its gradient is biased even without the cap; the product's is not, but varies more.
    Raises ValueError for another level. The rest as in `cispo`.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"tis: level={level!r} is not one of token, sequence.")
    logprobs, log_ratio, _, _ = _select(logprobs, behaviour_logprobs, advantages, mask)
    old_logprobs = old_logprobs.detach().to(logprobs.dtype)  # (N, T)
    old, log_mismatch, advantages, trained = _select(old_logprobs, behaviour_logprobs, advantages, mask)
    if level == "sequence":  # log prod_t = sum_t log, in every place of the row
        log_mismatch = log_mismatch.sum(-1, keepdim=True).expand_as(logprobs)  # (N, T)
    mismatch = _bounded_exp(log_mismatch)  # (N, T) w = pi_old / pi_gen
    term, capped = _clipped_term(_bounded_exp(logprobs - old), advantages, eps_low, eps_high)  # (N, T), (N, T)
    # token loss = - min(w, C) * min(r A, clip(r, 1 - eps_low, 1 + eps_high) A),   r = pi / pi_old
    token_loss = torch.where(trained, -mismatch.clamp(max=cap) * term, 0.0)  # (N, T), `where` as in gspo
    metrics = _metrics(log_ratio, capped, advantages, trained)
    return token_loss, metrics | {"tis_capped": ((mismatch > cap) & trained).sum()}


LOSSES = {"cispo": cispo, "gspo": gspo, "dapo": dapo, "grpo": grpo, "tis": tis}


def normalize_advantages(
    rewards: Tensor, group_ids: Tensor, how: str = "batch", eps: float = 1e-6, ddof: int = 0
) -> Tensor:
    """Rewards centred per prompt and scaled (arXiv 2510.13786, section 3.2; `prompt` is GRPO's, `none` Dr.GRPO's).

    Args:
        rewards: (N,) of the whole batch and of whole groups. Drop zero-variance groups before the call (L2): a share p
            of them left in makes the batch std smaller, and the step larger by 1 / sqrt(1 - p). One NaN makes the
            batch std NaN, and with it every advantage of the batch that is not exactly 0.
        group_ids: (N,) group of each row, in any order.
        how: divide by (std + eps) of the `batch`'s centred rewards, of the `prompt`'s rewards, or by nothing (`none`).
        eps, ddof: added to the std; 0 for the population std, 1 for the sample std (L3).
    Returns:
        (N,) advantages, float64 if the rewards are, else float32; exactly 0 where a prompt has equal rewards or one.
    Raises:
        ValueError: unknown `how`, or shapes that do not agree.
    """
    if how not in ("batch", "prompt", "none"):
        raise ValueError(f"normalize_advantages: how={how!r} is not one of batch, prompt, none.")
    unequal = _has_variance(rewards, group_ids)  # (N,)
    values = rewards if rewards.dtype == torch.float64 else rewards.float()
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)  # (P,), (N,), (P,)

    def sum_over_group(x: Tensor) -> Tensor:
        return x.new_zeros(len(sizes)).index_add(0, group, x)[group]  # (N,)

    # A_i = r_i - mean_group(r), exactly 0 for equal rewards: the FP32 mean of seven 0.1 is off by 7e-9, and dividing
    # that by its own std would make an advantage of 1 out of rounding
    centred = torch.where(unequal, values - sum_over_group(values) / sizes[group], 0.0)  # (N,)
    if how == "none":
        return centred
    if how == "batch":  # over sequences, not weighted by tokens; of the centred advantages, not of raw rewards
        variance = (centred - centred.mean()).square().sum() / (len(centred) - ddof)  # ()
    else:
        variance = sum_over_group(centred.square()) / (sizes[group] - ddof)  # (N,)
    # A_i^norm = A_i / (std + eps);  `where` again: with a single row or eps = 0 the division is 0 / 0
    return torch.where(unequal, centred / (variance.sqrt() + eps), 0.0)  # (N,)


def aggregation_weights(mask: Tensor, group_ids: Tensor, how: str = "prompt", constant: float | None = None) -> Tensor:
    """The averages of a loss as one weight a token, so that every split of the batch sums to the same gradient.

    Args:
        mask: (N, T) of the whole batch, all ranks and microbatches; rows that a filter dropped are left out or all 0.
        group_ids: (N,) group of each row.
        how: `sample` mean over a row's tokens, then over rows (GRPO) · `prompt` over a prompt's tokens, then over
            prompts (ScaleRL) · `token` over all tokens (DAPO) · `constant` sum / constant, mean over rows (Dr.GRPO).
        constant: what `constant` divides by, for example the completion budget in tokens.
    Returns:
        (N, T), float64 if the mask is, else float32; 0 outside the mask. A row or prompt without trained tokens is not
        counted: left in a denominator it would shrink the step.
    Raises:
        ValueError: unknown `how`, `constant` without a positive constant, or shapes that do not agree.
    """
    if mask.dim() != 2 or group_ids.shape != mask.shape[:1]:
        raise ValueError(f"mask {tuple(mask.shape)} must be (N, T) and group_ids {tuple(group_ids.shape)} (N,).")
    trained = mask.bool()  # (N, T)
    tokens = trained.sum(-1)  # (N,) int64: an FP32 count is exact only to 2^24, and large batches have more tokens
    rows = (tokens > 0).sum()  # ()
    if how == "sample":  # 1 / (|y_i| * N)
        denominator = tokens * rows  # (N,)
    elif how == "prompt":  # 1 / (sum_g |y_g| * P)
        ids, group = torch.unique(group_ids, return_inverse=True)  # (P,), (N,)
        group_tokens = tokens.new_zeros(len(ids)).index_add(0, group, tokens)  # (P,)
        denominator = group_tokens[group] * (group_tokens > 0).sum()  # (N,)
    elif how == "token":  # 1 / sum_i |y_i|
        denominator = tokens.sum().expand_as(tokens)  # (N,)
    elif how == "constant":  # 1 / (constant * N)
        if constant is None or not constant > 0:
            raise ValueError(f"aggregation_weights: how='constant' needs constant > 0, got {constant}.")
        denominator = constant * rows.double().expand_as(tokens)  # (N,)
    else:
        raise ValueError(f"aggregation_weights: how={how!r} is not one of sample, prompt, token, constant.")
    weights = torch.where(trained, 1.0 / denominator.double()[:, None], 0.0)  # (N, T)
    return weights if mask.dtype == torch.float64 else weights.float()


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimate of KL(pi || pi_ref) on sampled tokens. ScaleRL uses none; GRPO (2402.03300) uses k3.

    With r = pi_ref / pi:  k1 = -log r · k2 = (log r)^2 / 2 · k3 = r - 1 - log r. On tokens sampled from pi itself the
    values of k1 and k3 are unbiased, and as losses k1's gradient has expectation 0 (a monitor, not a loss), k2's is
    that of KL(pi || pi_ref), k3's that of KL(pi_ref || pi). On tokens sampled up to k steps ago this holds only about:
    no ratio corrects for their age.

    Args: logprobs (N, T) with gradient, reference_logprobs (N, T), mask (N, T).
    Returns: (N, T), FP32 at least, 0 outside the mask.
    Raises: ValueError for an unknown estimator or shapes that do not agree.
    """
    if not logprobs.shape == reference_logprobs.shape == mask.shape:
        raise ValueError("kl_penalty: logprobs, reference_logprobs and mask must have one shape (N, T).")
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))  # (N, T)
    log_r = torch.where(mask.bool(), reference_logprobs.detach().to(logprobs.dtype) - logprobs, 0.0)  # (N, T)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    if estimator == "k3":
        log_r = log_r.clamp(max=MAX_LOG_RATIO)  # in both terms: bounding r alone would turn the gradient's sign round
        return torch.expm1(log_r) - log_r
    raise ValueError(f"kl_penalty: estimator={estimator!r} is not one of k1, k2, k3.")


def merge_metrics(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of several microbatches or ranks as one: keys ending in `_max` take the maximum, all others add.

    Nothing is read back from the device. Raises ValueError if there are no parts or their keys differ.
    """
    if not parts or any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("merge_metrics: expected at least one dict of metrics, and the same keys in each.")
    columns = {key: torch.stack([torch.as_tensor(part[key]) for part in parts]) for key in parts[0]}  # (parts,) each
    return {key: column.amax(0) if key.endswith("_max") else column.sum(0) for key, column in columns.items()}


def summarize_metrics(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Means and shares of a whole step from its merged metrics. Waits for the device: call it once a step.

    Returns:
        ratio_mean, ratio_max: of rho = pi_train / pi_gen over trained tokens, before any truncation (L4);
        ess: effective sample size (sum rho)^2 / (n sum rho^2), as a share in (0, 1], 1 if all ratios are equal;
        capped_positive, capped_negative: share of the tokens with A > 0 (A < 0) that the loss capped or clipped;
        tis_capped (loss tis only): share of all tokens. A share of no tokens is 0.
    """
    m = {key: float(value) for key, value in metrics.items()}

    def share(part: float, whole: float) -> float:
        return part / whole if whole else 0.0

    summary = {
        "ratio_mean": share(m["ratio_sum"], m["tokens"]),
        "ratio_max": m["ratio_max"],
        "ess": share(m["ratio_sum"] ** 2, m["tokens"] * m["ratio_sq_sum"]),
        "capped_positive": share(m["capped_positive"], m["tokens_positive"]),
        "capped_negative": share(m["capped_negative"], m["tokens_negative"]),
    }
    return summary | ({"tis_capped": share(m["tis_capped"], m["tokens"])} if "tis_capped" in m else {})


def _select(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probs, log-ratios, advantages, bool trained), each (N, T), FP32 at least, 0 (False) outside the mask."""
    shapes = [tuple(x.shape) for x in (logprobs, behaviour_logprobs, mask, advantages)]
    if logprobs.dim() != 2 or shapes[:3] != [shapes[0]] * 3 or shapes[3] not in (shapes[0], shapes[0][:1]):
        raise ValueError(
            f"expected logprobs, behaviour_logprobs, mask (N, T) and advantages (N,) or (N, T), got {shapes}."
        )
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))  # (N, T)
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]  # (N, T) or (N, 1)
    trained = mask.bool()  # (N, T)
    # Choose first, multiply later: 0 * inf and 0 * nan are nan, in the value and again in the gradient.
    logprobs = torch.where(trained, logprobs, 0.0)  # (N, T)
    behaviour = torch.where(trained, behaviour_logprobs.detach().to(logprobs.dtype), 0.0)  # (N, T)
    advantages = torch.where(trained, advantages.detach().to(logprobs.dtype), 0.0)  # (N, T)
    return logprobs, logprobs - behaviour, advantages, trained


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the argument bounded to +-MAX_LOG_RATIO, so that no ratio overflows; NaN stays NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_term(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, to be maximised (N, T), and where the clip binds, bool (N, T)."""
    # min( rho A, clip(rho, 1 - eps_low, 1 + eps_high) A ): binds above for A > 0, below for A < 0
    term = torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)  # (N, T)
    capped = ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))  # (N, T)
    return term, capped


@torch.no_grad()
def _metrics(log_ratio: Tensor, capped: Tensor, advantages: Tensor, trained: Tensor) -> dict[str, Tensor]:
    """Sums, counts and maxima over trained tokens, before any truncation; 0-d tensors that stay on the device."""
    rho = torch.where(trained, _bounded_exp(log_ratio), 0.0).double()  # (N, T) FP64: sums do not depend on the split
    positive, negative = trained & (advantages > 0), trained & (advantages < 0)  # (N, T)
    return {
        "tokens": trained.sum(),
        "ratio_sum": rho.sum(),
        "ratio_sq_sum": rho.square().sum(),
        "ratio_max": rho.max() if rho.numel() else rho.sum(),  # an empty microbatch or rank has no maximum
        "tokens_positive": positive.sum(),
        "tokens_negative": negative.sum(),
        "capped_positive": (capped & positive).sum(),
        "capped_negative": (capped & negative).sum(),
    }


def _has_variance(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(N,) bool, True where the row's group has unequal rewards: the lines of `has_variance` in filters.py."""
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be (N,).")
    _, group = torch.unique(group_ids, return_inverse=True)  # (N,)
    blank = torch.zeros_like(rewards)  # (N,), room for a value a group: the first P are used
    highest, lowest = (blank.scatter_reduce(0, group, rewards, f, include_self=False) for f in ("amax", "amin"))
    return (highest != lowest)[group]  # (N,)
