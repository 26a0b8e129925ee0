"""Policy losses for completions that an older, slightly different policy sampled.

PROBLEM. The completions of a training batch were sampled up to k updates ago, by another program (the generator) whose
numbers differ a little from the trainer's. As samples of the current policy they would bias the gradient. The
importance ratio rho = pi_train / pi_gen corrects this token by token, but then a few huge ratios dominate the step.

IDEA. Every loss here keeps the ratio and limits it in its own way. CISPO (MiniMax-M1, arXiv 2506.13585; ScaleRL's
choice) truncates the ratio, stops its gradient, and uses it as a weight on the policy gradient. PPO's clip (GRPO,
2402.03300; DAPO, 2503.14476; GSPO, 2507.18071) drops the gradient of a token that has moved far enough already:

    factor before Â * grad log pi      CISPO           DAPO (0.2, 0.26)
    Â > 0, rho > 1.26                  min(rho, 5)     0       "likely enough by now"
    Â < 0, rho < 0.80                  rho             0       "unlikely enough by now"
    any other                          min(rho, 5)     rho     no limit for Â < 0

CISPO silences no token. A clip silences rare ones first, such as "However" and "Wait", where an answer changes its
direction (MiniMax-M1): a single update can carry their ratio beyond it.

    J(theta) = 1/P sum_g [ 1/n_g sum_{i in g} sum_t sg(min(rho_it, eps_max)) Â_i log pi_it ]    (2510.13786, Eq. 5)

`normalize_advantages` gives Â, a loss gives the term inside the sums (with a minus, because we minimize), and
`aggregation_weights` gives 1 / (P n_g). The loss of a step is `(token_weights * token_loss).sum()`.

SYMBOLS. N rows, one for each rollout (papers also say sample, sequence or completion) · T completion positions, padded
· P groups that train, n_g trained tokens of group g · Â advantage · sg stop-gradient · mask: 1 on tokens that
train: sampled, not forced, not padding · group_ids: each row's group, e.g. 0 0 1 1 (a prompt drawn twice makes two).

IN YOUR TRAINER. On policy, where no log-probs were recorded, pass the same log-probs twice: the second has no gradient,
and rho is 1. To shuffle rows, keep one number beside each, its tokens' weight: `aggregation_weights(...).amax(1)`.

SIMPLIFIED. One row is one sequence. Packed ones, (1, T), become T rows of a token: all inputs as `x[0][:, None]`, and
`aggregation_weights(mask[0][:, None], group_of_token)`. That is exact but for `gspo` and the averages `sample` and
`constant`, which need whole rows. L1 to L11 mark choices: docs/choices.md.

The factors of two tokens with rho = 7.39 and 0.61 (+ 0 makes 0.0 of -0.0):

>>> now, then = torch.tensor([[-1.0, -1.0]], requires_grad=True), torch.tensor([[-3.0, -0.5]])
>>> for loss, adv in [(cispo, 1), (dapo, 1), (dapo, -1)]:
...     token_loss, metrics = loss(now, then, torch.tensor([adv]), torch.ones(1, 2))
...     (gradient,) = torch.autograd.grad(-token_loss.sum(), now)
...     print(f"adv {adv:2}  {loss.__name__:5}", [round(factor, 2) for factor in (gradient[0] / adv + 0).tolist()])
adv  1  cispo [5.0, 0.61]
adv  1  dapo  [0.0, 0.61]
adv -1  dapo  [7.39, 0.0]

QUESTION. What is CISPO's factor for the second token if `weight` in `cispo` is not detached? (lab/experiments.md)
"""

import torch
from torch import Tensor

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
MAX_LOG_RATIO = 20.0  # float32 exp overflows at 88.7; a ratio of e^20 = 5e8 says no more than "huge"


def normalize_advantages(
    rewards: Tensor, group_ids: Tensor, how: str = "batch", eps: float = 1e-6, ddof: int = 0
) -> Tensor:
    """Rewards centered per group and scaled (arXiv 2510.13786, section 3.2).

    L2: drop the groups with equal rewards before the call. Their advantages are 0, but they count. With `equal`, their
    share of all groups (it differs from batch to batch), the gradient is multiplied:
        where they stay                             by                      for equal = 1/2
        the std                                     1 / sqrt(1 - equal)     1.41
        the average (see `aggregation_weights`)     1 - equal               0.50
        both                                        sqrt(1 - equal)         0.71
    Args:
        rewards, group_ids: (N,) of all ranks, also arrays or lists; complete groups in any order.
        how, eps: what to divide by, plus eps. `batch`: std of all centered rewards (ScaleRL). A NaN spreads to all.
            `prompt`: that of the group's own (GRPO), as with one prompt a step. `none`: nothing (Dr.GRPO).
        ddof: 0 for the population std, 1 for the sample std (L3: papers do not say which).
    Returns (N,), float64 if the rewards are, else float32; exactly 0 where a group has equal rewards or one row.
    Raises ValueError for an unknown `how`, or shapes that do not agree.
    """
    if how not in ("batch", "prompt", "none"):
        raise ValueError(f"normalize_advantages: how={how!r} is not one of batch, prompt, none.")
    rewards, group_ids = torch.as_tensor(rewards), torch.as_tensor(group_ids)
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be (N,).")
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)  # (P,), (N,), (P,)

    def over_group(x: Tensor, reduce: str) -> Tensor:  # (N,) -> (N,): each row has its group's result
        return x.new_zeros(len(sizes)).scatter_reduce(0, group, x, reduce, include_self=False)[group]

    unequal = over_group(rewards, "amax") != over_group(rewards, "amin")  # (N,)
    # Â_i = r_i - mean_group(r), set to exactly 0 for equal rewards. The float32 mean of seven rewards of 0.1 is off by
    # 7e-9; divided by its own std, that would become an advantage of -.007 with this eps, and of -1 with eps = 0.
    values = rewards if rewards.dtype == torch.float64 else rewards.float()  # (N,)
    centered = torch.where(unequal, values - over_group(values, "mean"), 0.0)  # (N,)
    if how == "none":
        return centered
    if how == "batch":
        # std^2 = 1 / (N - ddof) sum_i Â_i^2: of the centered advantages, not of raw rewards; each row counts once
        variance = (centered - centered.mean()).square().sum() / (len(centered) - ddof)  # ()
    else:
        # std_g^2 = 1 / (G - ddof) sum_{i in g} Â_i^2
        variance = over_group(centered.square(), "sum") / (sizes[group] - ddof)  # (N,)
    # Â_i^norm = Â_i / (std + eps), and 0 for equal rewards: with a single row, or with eps = 0, the division is 0 / 0
    return torch.where(unequal, centered / (variance.sqrt() + eps), 0.0)  # (N,)


def cispo(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, eps_max: float = 5.0
) -> LossAndMetrics:
    """ScaleRL's loss: truncated importance weights on the policy gradient (arXiv 2510.13786, Eq. 5).

    Args:
        logprobs: (N, T) log-probs of the sampled tokens under the trainer's policy now; the gradient flows here.
        behaviour_logprobs: (N, T) log-probs that the generator recorded when it sampled.
        advantages: (N,) or (N, 1) one for each row, or (N, T) one for each token (turns, per-token credit).
        mask: (N, T) 1 on tokens that train. What lies outside, NaN included, changes nothing.
        eps_max: cap on rho. L1: absolute as in ScaleRL (MiniMax-M1 writes 1 + eps_high), and without a lower bound.
    Returns (token_loss (N, T) to be minimized, 0 outside the mask; metrics as 0-d tensors, see `summarize_metrics`), in
    float32 at least. ValueError: shapes that do not agree, labels as a mask. The other losses share all of this.
    """
    trained, advantages, logprobs, behaviour = _select(mask, advantages, logprobs, behaviour_logprobs)  # (N, T) each
    # log rho = log pi_train - log pi_gen
    log_ratio = logprobs - behaviour  # (N, T)
    rho = _bounded_exp(log_ratio)  # (N, T)
    # token loss = - sg(min(rho, eps_max)) * Â * log pi;  without sg there would be a second term, the gradient of rho
    weight = rho.clamp(max=eps_max).detach()  # (N, T)
    return -weight * advantages * logprobs, _metrics(log_ratio, rho > eps_max, advantages, trained)


def _select(mask: Tensor, advantages: Tensor, logprobs: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Every input in its order as (N, T), at least float32, and 0 outside the mask; only `logprobs` has a gradient."""
    shape = logprobs.shape
    equal = all(x.shape == shape for x in (mask, *others))
    if len(shape) != 2 or not equal or advantages.shape not in (shape, shape[:1], (len(logprobs), 1)):
        shapes = [tuple(x.shape) for x in (logprobs, *others, mask, advantages)]
        raise ValueError(f"expected log-probs, mask (N, T); advantages (N,), (N, 1) or (N, T); got {shapes}.")
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]  # (N, T), or (N, 1): one for all of a row
    trained = _trained(mask)  # (N, T)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    inputs = (advantages.detach(), logprobs, *(x.detach() for x in others))
    # Choose first, multiply later: 0 * inf and 0 * nan are nan, in the value and again in the gradient.
    return trained, *(torch.where(trained, x.to(dtype), 0.0) for x in inputs)


def _trained(mask: Tensor) -> Tensor:
    """The mask as bool. Labels of -100 would train what they are to leave out; the look waits for the device."""
    if mask.dtype != torch.bool and ((mask != 0) & (mask != 1)).any():
        raise ValueError("the mask has values other than 0 and 1. Is it labels? Then give labels != -100.")
    return mask.bool()


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # no ratio overflows; NaN stays NaN


def dapo(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, *,
    eps_low: float = 0.2, eps_high: float = 0.26,
) -> LossAndMetrics:  # fmt: skip
    """PPO's clip, wider above (arXiv 2503.14476, Eq. 8, with 0.28). In ScaleRL 0.26 ends at .53, 0.27 at .48."""
    trained, advantages, logprobs, behaviour = _select(mask, advantages, logprobs, behaviour_logprobs)  # (N, T) each
    log_ratio = logprobs - behaviour  # (N, T)
    term, capped = _clipped_term(_bounded_exp(log_ratio), advantages, eps_low, eps_high)  # (N, T), (N, T)
    return -term, _metrics(log_ratio, capped, advantages, trained)


def _clipped_term(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, to be maximized (N, T), and where the clip takes effect, bool (N, T)."""
    # term = min( rho Â, clip(rho, 1 - eps_low, 1 + eps_high) Â ):  too high counts for Â > 0, too low for Â < 0
    free = ratio * advantages  # (N, T)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages  # (N, T)
    return torch.minimum(free, clipped), clipped < free


def grpo(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, eps: float = 0.2
) -> LossAndMetrics:
    """PPO's symmetric clip (arXiv 2402.03300, Eq. 3). With `none` advantages and `constant` weights it is Dr.GRPO's."""
    return dapo(logprobs, behaviour_logprobs, advantages, mask, eps_low=eps, eps_high=eps)


def gspo(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, *,
    eps_low: float = 3e-3, eps_high: float = 4e-3,
) -> LossAndMetrics:  # fmt: skip
    """PPO's clip on one ratio for each sequence (arXiv 2507.18071, Eq. 5-7), with the clips of ScaleRL's GSPO run.

    As the reward, this ratio is of the whole sequence; one of a token is noisy, most of all in mixtures of experts.
    With 1/|y| its log is a mean, which hardly moves: hence such small clips. Each token has its sequence's term. L5:
    with `sample` that is the paper's mean. Advantages (N, T) make it GSPO-token (section 4.3): Â_it moves only token t.
    """
    trained, advantages, logprobs, behaviour = _select(mask, advantages, logprobs, behaviour_logprobs)  # (N, T) each
    log_ratio = logprobs - behaviour  # (N, T)
    # s_i = exp( 1/|y_i| * sum_t log rho_it )
    log_s = log_ratio.sum(-1, keepdim=True) / trained.sum(-1, keepdim=True).clamp_min(1)  # (N, 1)
    # s_it = sg(s_i) * pi_it / sg(pi_it):  the value s_i on every token of row i, and the gradient through its own pi_it
    s = _bounded_exp(log_s.detach() + (logprobs - logprobs.detach()))  # (N, T)
    term, capped = _clipped_term(s, advantages, eps_low, eps_high)  # (N, T), (N, T)
    # `where` as in `_select`: a NaN in one token makes s NaN, and NaN * 0 would carry it to the padding
    return torch.where(trained, -term, 0.0), _metrics(log_ratio, capped, advantages, trained)


def tis(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, *,
    old_logprobs: Tensor, eps_low: float = 0.2, eps_high: float = 0.2, cap: float = 2.0,
) -> LossAndMetrics:  # fmt: skip
    """PPO's clip against the trainer's own old log-probs, times a truncated correction (Yao et al. 2025).

    Only here is the ratio split in two: rho = w q, where w = pi_old / pi_gen is all that came before this batch's
    training, and q = pi / pi_old the change by it. (Elsewhere rho holds both; a factor w on top would correct twice.)
    `old_logprobs` (N, T) are the trainer's before the first update on this batch. If that is the only update, as under
    PipelineRL, pi_old is pi: no clip acts, and the gradient is that of CISPO with eps_max = cap, to the bit.
    """
    three = logprobs, behaviour_logprobs, old_logprobs  # (N, T) each
    trained, advantages, logprobs, behaviour, old = _select(mask, advantages, *three)  # (N, T) each
    w = _bounded_exp(old - behaviour)  # (N, T)
    q = _bounded_exp(logprobs - old)  # (N, T)
    # token loss = - min(w, cap) * min(q Â, clip(q, 1 - eps_low, 1 + eps_high) Â)
    term, clipped = _clipped_term(q, advantages, eps_low, eps_high)  # (N, T), (N, T)
    token_loss = torch.where(trained, -w.clamp(max=cap) * term, 0.0)  # (N, T), `where` as in gspo
    metrics = _metrics(logprobs - behaviour, clipped, advantages, trained)
    metrics["tis_capped"] = ((w > cap) & trained).sum()
    return token_loss, metrics


LOSSES = {"cispo": cispo, "gspo": gspo, "dapo": dapo, "grpo": grpo, "tis": tis}


def aggregation_weights(mask: Tensor, group_ids: Tensor, how: str = "prompt", constant: float | None = None) -> Tensor:
    """The averages of a loss as one weight for each token, so that every split of the batch sums to the same gradient.

    If your trainer divides the loss, multiply by its divisor: the number of ranks under DDP, FSDP and accelerate, the
    accumulation steps with `accelerator.accumulate`. Adam hides a missing factor; gradient clipping does not.

    Args:
        mask, group_ids: (N, T), (N,) of all ranks and microbatches together; dropped rows are left out or all 0.
        how: weight of a token in groups of 10 + 100 and of 50 + 50 tokens, and the step's share of the row of 10:
            `sample`    mean over a row, then over rows (GRPO)          1/40, 1/400; 1/200    25 %
            `prompt`    mean over a group, then over groups (ScaleRL)   1/220; 1/200          4.5 %
            `token`     mean over all tokens (DAPO's code)              1/210                 4.8 %
            `constant`  sum over a row / `constant`, for example the budget in tokens, then mean over rows (Dr.GRPO)
    Returns (N, T), float64 if the mask is, else float32. L10: a row or group without trained tokens does not count: in
    a denominator it would shrink the step. ValueError: an unknown `how`, no positive constant, other shapes, labels.
    """
    if mask.dim() != 2 or group_ids.shape != mask.shape[:1]:
        raise ValueError(f"mask {tuple(mask.shape)} must be (N, T) and group_ids {tuple(group_ids.shape)} (N,).")
    if how == "constant" and not (constant or 0) > 0:
        raise ValueError(f"aggregation_weights: how='constant' needs constant > 0, got {constant}.")
    trained = _trained(mask)  # (N, T)
    tokens = trained.sum(-1)  # (N,) int64: a float32 count is exact only to 2^24, and large batches have more tokens
    rows = (tokens > 0).sum()  # ()
    ids, group = torch.unique(group_ids, return_inverse=True)  # (P,), (N,)
    group_tokens = tokens.new_zeros(len(ids)).index_add(0, group, tokens)  # (P,)
    denominators = {  # (N,) each: a token of row i weighs 1 / denominator_i
        "sample": tokens * rows,  # |y_i| N
        "prompt": group_tokens[group] * (group_tokens > 0).sum(),  # n_g P
        "token": tokens.sum().expand_as(tokens),  # sum_i |y_i|
        "constant": (constant or 1.0) * rows.double().expand_as(tokens),  # constant N
    }
    if how not in denominators:
        raise ValueError(f"aggregation_weights: how={how!r} is not one of {', '.join(denominators)}.")
    token_weights = torch.where(trained, 1.0 / denominators[how].double()[:, None], 0.0)  # (N, T)
    return token_weights if mask.dtype == torch.float64 else token_weights.float()


# The losses of ScaleRL end here. GRPO adds a penalty:
def kl_penalty(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, estimator: str = "k3", sampling_term: bool = False
) -> Tensor:
    """Estimate of KL(pi || pi_ref) for each sampled token. ScaleRL uses none; GRPO (2402.03300) uses k3.

             value, with r = pi_ref / pi     mean over tokens of pi     mean of its gradient
        k1   -log r                          KL(pi || pi_ref)           0: a monitor, not a loss
        k2   (log r)^2 / 2                   biased                     that of KL(pi || pi_ref)
        k3   r - 1 - log r                   KL(pi || pi_ref)           that of KL(pi_ref || pi)
    L11: this gradient leaves out that pi also chooses the tokens. `sampling_term` adds that, so that k1 and k3 have the
    gradient of KL(pi || pi_ref). All of it is approximate on older tokens: no ratio corrects for their age. Shapes are
    (N, T); float32 at least. Raises ValueError for an unknown estimator, other shapes, or labels as a mask.
    """
    if not logprobs.shape == reference_logprobs.shape == mask.shape:
        raise ValueError("kl_penalty: logprobs, reference_logprobs and mask must have one shape (N, T).")
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))  # (N, T)
    reference = reference_logprobs.detach().to(logprobs.dtype)  # (N, T)
    log_r = torch.where(_trained(mask), reference - logprobs, 0.0)  # (N, T)
    bounded = log_r.clamp(max=MAX_LOG_RATIO)  # in both terms of k3: in r alone it would reverse the gradient's sign
    estimates = {"k1": -log_r, "k2": log_r.square() / 2, "k3": torch.expm1(bounded) - bounded}  # (N, T) each
    if estimator not in estimates:
        raise ValueError(f"kl_penalty: estimator={estimator!r} is not one of {', '.join(estimates)}.")
    kl = estimates[estimator]
    # grad E_{y ~ pi}[kl(y)] = E[ grad kl(y) + kl(y) grad log pi(y) ], and grad log pi = -grad log r
    return kl - kl.detach() * (log_r - log_r.detach()) if sampling_term else kl


# What is logged: not needed to understand the losses.
def _metrics(log_ratio: Tensor, capped: Tensor, advantages: Tensor, trained: Tensor) -> dict[str, Tensor]:
    """Sums, counts and maxima over trained tokens, before any truncation; 0-d tensors that stay on the device."""
    log_ratio = log_ratio.detach()  # (N, T), 0 outside the mask
    rho = torch.where(trained, _bounded_exp(log_ratio), 0.0).double()  # (N, T) float64: any split adds up
    log_rho = log_ratio.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # (N, T)
    positive = trained & (advantages > 0)  # (N, T)
    negative = trained & (advantages < 0)  # (N, T)
    return {
        "tokens": trained.sum(),
        "ratio_sum": rho.sum(),
        "ratio_sq_sum": rho.square().sum(),
        "log_ratio_sq_sum": log_rho.square().sum(),
        "ratio_max": rho.max() if rho.numel() else rho.sum(),  # an empty microbatch or rank has no maximum
        "tokens_positive": positive.sum(),
        "tokens_negative": negative.sum(),
        "capped_positive": (capped & positive).sum(),
        "capped_negative": (capped & negative).sum(),
    }


def merge_metrics(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of microbatches or ranks as one: `_max` keys take the maximum, others add. ValueError for other keys."""
    if not parts or any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("merge_metrics: expected at least one dict of metrics, and the same keys in each.")
    merged = {}
    for key in parts[0]:
        column = torch.stack([torch.as_tensor(part[key]) for part in parts])  # (parts,)
        merged[key] = column.amax(0) if key.endswith("_max") else column.sum(0)
    return merged


def summarize_metrics(metrics: dict[str, Tensor]) -> dict[str, float]:
    """What a step logs, from its merged metrics. Waits for the device: call it once in a step.

    ratio_mean, ratio_max   of rho before any truncation. L4: whatever the loss, so that runs with other losses compare
    ess                     effective sample size as a fraction: (sum rho)^2 / (n sum rho^2), above 0 and at most 1
    log_ratio_rms           root mean square of log rho: how far, in nats, a log-prob typically is from the generator's
    capped_*, masked_*      of the tokens with Â > 0 or Â < 0 that the loss capped, or a mask (lab/masks.py) dropped
    tis_capped              of all tokens, those whose w was capped
    """
    m = {key: float(value) for key, value in metrics.items()}
    tokens = m["tokens"] or 1
    summary = {
        "ratio_mean": m["ratio_sum"] / tokens,
        "ratio_max": m["ratio_max"],
        "ess": m["ratio_sum"] ** 2 / (m["tokens"] * m["ratio_sq_sum"] or 1),
        "log_ratio_rms": (m["log_ratio_sq_sum"] / tokens) ** 0.5,
    }
    for name in ("capped_positive", "capped_negative", "masked_positive", "masked_negative"):
        if name in m:
            summary[name] = m[name] / (m[name.replace("capped", "tokens").replace("masked", "tokens")] or 1)
    if "tis_capped" in m:
        summary["tis_capped"] = m["tis_capped"] / tokens
    return summary


if __name__ == "__main__":  # show the worked example, and check it
    import doctest

    print(__doc__[__doc__.index("The factors") :])
    raise SystemExit(doctest.testmod().failed)
