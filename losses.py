"""Policy losses for completions that an older, slightly different policy sampled.

PROBLEM. The completions of a training batch were sampled up to k updates ago, by another program (the generator) whose
numbers differ a little from the trainer's. Treating them as samples of the current policy biases the gradient. The
importance ratio rho = pi_train / pi_gen corrects this token by token, but then a few tokens with a huge ratio dominate
the step.

IDEA. Every loss here keeps the ratio and limits it in its own way. CISPO (MiniMax-M1, arXiv 2506.13585; ScaleRL's
choice) truncates the ratio, stops its gradient, and uses it as a weight on the policy gradient. PPO's clip (GRPO,
2402.03300; DAPO, 2503.14476; GSPO, 2507.18071) drops the gradient of a token that has moved far enough already:

    factor before A * grad log pi      CISPO           DAPO (0.2, 0.26)
    A > 0, rho > 1.26                  min(rho, 5)     0       "likely enough by now"
    A > 0, rho < 0.80                  rho             rho
    A < 0, rho > 1.26                  min(rho, 5)     rho     without a limit
    A < 0, rho < 0.80                  rho             0       "unlikely enough by now"

Between 0.80 and 1.26 both factors are rho. CISPO silences no token; it only limits how much one token weighs. The
tokens that a clip silences are rare ones such as "However" and "Wait" (MiniMax-M1), where an answer changes direction:
a single update can carry their ratio beyond the clip.

    J(theta) = 1/P sum_g [ 1/n_g sum_{i in g} sum_t sg(min(rho_it, eps_max)) A_i log pi_it ]    (2510.13786, Eq. 5)

`normalize_advantages` gives A, a loss gives the term inside the sums (with a minus, because we minimize), and
`aggregation_weights` gives 1 / (P n_g). The loss of a step is `(token_weights * token_loss).sum()`.

SYMBOLS. N rows, one for each rollout (papers also say sample, sequence or completion) · T completion positions, padded
· P groups, n_g trained tokens of group g · A advantage · sg stop-gradient · mask is 1 on tokens that train: sampled,
not forced, not padding · group_ids says which group each row belongs to, e.g. 0 0 1 1. They are not token ids, and a
prompt drawn twice makes two groups.

SIMPLIFIED. One row is one sequence. Sequences packed end to end, (1, T_total), work if advantages and weights are given
for each token, except with `gspo`, which would treat them as one sequence. Log-ratios are bounded to +-20 before `exp`
(a ratio of 5e8). L1, L2 and so on are choices where papers differ or are silent; docs/choices.md lists them.

Two tokens with rho = 7.39 and 0.61, one above 1.26 and one below 0.80, then the loss of a group of two rows:

>>> now, then = torch.tensor([[-1.0, -1.0]], requires_grad=True), torch.tensor([[-3.0, -0.5]])
>>> for loss, A in [(cispo, 1), (dapo, 1), (cispo, -1), (dapo, -1)]:
...     token_loss, metrics = loss(now, then, torch.tensor([A]), torch.ones(1, 2))
...     (gradient,) = torch.autograd.grad(-token_loss.sum(), now)
...     print(f"A = {A:2}  {loss.__name__:5}", [round(factor, 2) for factor in (gradient[0] / A + 0).tolist()])
A =  1  cispo [5.0, 0.61]
A =  1  dapo  [0.0, 0.61]
A = -1  cispo [5.0, 0.61]
A = -1  dapo  [7.39, 0.0]
>>> rewards, group_ids, mask = torch.tensor([1.0, -1.0]), torch.tensor([7, 7]), torch.tensor([[1, 1], [1, 0]])
>>> now, then = torch.full((2, 2), -1.0), torch.tensor([[-3.0, -1.0], [-1.0, -1.0]])
>>> token_loss, metrics = cispo(now, then, normalize_advantages(rewards, group_ids), mask)
>>> round(float((aggregation_weights(mask, group_ids) * token_loss).sum()), 3)  # (5 + 1 - 1) / 3 tokens
1.667
"""

import torch
from torch import Tensor

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]

MAX_LOG_RATIO = 20.0  # float32 exp overflows at 88.7; long before that a ratio says no more than "huge"


def normalize_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    how: str = "batch",
    eps: float = 1e-6,
    ddof: int = 0,
) -> Tensor:
    """Rewards centered per group and scaled (arXiv 2510.13786, section 3.2).

    `batch` is ScaleRL's, `prompt` GRPO's, `none` Dr.GRPO's. `maxrl` (2602.02710) divides by the pass rate, as the
    gradient of the pass rate's logarithm does.

    L2: drop the groups with equal rewards before the call. Their advantages are 0, but they still count. If they are a
    share p of all groups, leaving them in the std makes the step 1 / sqrt(1 - p) times as large, leaving them in the
    average (see `aggregation_weights`) 1 - p times, and leaving them in both sqrt(1 - p) times. For p = 1/2 that is
    1.41, 0.50 and 0.71, and p differs from batch to batch.

    Args:
        rewards, group_ids: (N,) of all ranks, complete groups in any order. One NaN makes all advantages NaN, except
            those of groups with equal rewards, which are 0.
        how, eps: what to divide by, plus eps. `batch`: std of all centered rewards. `prompt`: that of the group's own.
            `none`: nothing. `maxrl`: the group's mean above its lowest reward (L8: for rewards of 0 and 1 this is the
            group's pass rate).
        ddof: 0 for the population std, 1 for the sample std (L3: papers do not say which).
    Returns (N,), float64 if the rewards are, else float32; exactly 0 where a group has equal rewards or one row.
    Raises ValueError for an unknown `how`, or shapes that do not agree.
    """
    if how not in ("batch", "prompt", "none"):
        raise ValueError(f"normalize_advantages: how={how!r} is not one of batch, prompt, none.")
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be (N,).")
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)  # (P,), (N,), (P,)
    slots = rewards.new_zeros(len(sizes))  # (P,)
    highest = slots.scatter_reduce(0, group, rewards, "amax", include_self=False)  # (P,)
    lowest = slots.scatter_reduce(0, group, rewards, "amin", include_self=False)  # (P,)
    unequal = (highest != lowest)[group]  # (N,)

    def sum_over_group(x: Tensor) -> Tensor:
        return x.new_zeros(len(sizes)).index_add(0, group, x)[group]  # (N,)

    # A_i = r_i - mean_group(r), set to exactly 0 for equal rewards. The float32 mean of seven rewards of 0.1 is off by
    # 7e-9; divided by its own std, that would become an advantage of -.007 with this eps, and of 1 with eps = 0.
    values = rewards if rewards.dtype == torch.float64 else rewards.float()  # (N,)
    mean = sum_over_group(values) / sizes[group]  # (N,)
    centered = torch.where(unequal, values - mean, 0.0)  # (N,)
    if how == "none":
        return centered
    if how == "batch":
        # std^2 = 1 / (N - ddof) sum_i A_i^2: of the centered advantages, not of raw rewards; each row counts once
        variance = (centered - centered.mean()).square().sum() / (len(centered) - ddof)  # ()
        divisor = variance.sqrt() + eps  # ()
    else:
        # std_g^2 = 1 / (G - ddof) sum_{i in g} A_i^2
        variance = sum_over_group(centered.square()) / (sizes[group] - ddof)  # (N,)
        divisor = variance.sqrt() + eps  # (N,)
    # A_i^norm = A_i / divisor, and 0 for equal rewards: with a single row, or with eps = 0, the division is 0 / 0
    return torch.where(unequal, centered / divisor, 0.0)  # (N,)


def cispo(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_max: float = 5.0,
) -> LossAndMetrics:
    """ScaleRL's loss: truncated importance weights on the policy gradient (arXiv 2510.13786, Eq. 5).

    Args:
        logprobs: (N, T) log-probs of the sampled tokens under the trainer's policy now; the gradient flows here.
        behaviour_logprobs: (N, T) log-probs that the generator recorded when it sampled.
        advantages: (N,) one for each row, or (N, T) one for each token (turns, per-token credit, packed rows).
        mask: (N, T) 1 on tokens that train. What lies outside, NaN included, changes nothing.
        eps_max: cap on rho. L1: absolute as in ScaleRL (MiniMax-M1 writes 1 + eps_high), and without a lower bound.
    Returns (token_loss (N, T) to be minimized, 0 outside the mask; metrics as 0-d tensors, see `summarize_metrics`).
    Results are at least float32. bfloat16 has no value between 1 and 1.0078, and GSPO's clip range ends inside that
    gap.
    Raises ValueError for shapes that do not agree. The other losses share these arguments, returns and errors.
    """
    logprobs, log_ratio, advantages, trained = _select(logprobs, behaviour_logprobs, advantages, mask)  # (N, T) each
    rho = _bounded_exp(log_ratio)  # (N, T)
    # token loss = - sg(min(rho, eps_max)) * A * log pi;  without sg there would be a second term, the gradient of rho
    weight = rho.clamp(max=eps_max).detach()  # (N, T)
    token_loss = -weight * advantages * logprobs  # (N, T)
    return token_loss, _metrics(log_ratio, rho > eps_max, advantages, trained)


def _select(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
) -> tuple[Tensor, ...]:
    """(log-probs, log-ratios, advantages, bool trained), (N, T) each, at least float32, 0 (False) outside the mask."""
    shape = logprobs.shape
    equal = shape == behaviour_logprobs.shape == mask.shape
    if len(shape) != 2 or not equal or advantages.shape not in (shape, shape[:1]):
        shapes = [tuple(x.shape) for x in (logprobs, behaviour_logprobs, mask, advantages)]
        raise ValueError(f"expected logprobs, behaviour_logprobs, mask (N, T); advantages (N,) or (N, T); got {shapes}")
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))  # (N, T)
    behaviour = behaviour_logprobs.detach().to(logprobs.dtype)  # (N, T)
    advantages = advantages.detach().to(logprobs.dtype)  # (N,) or (N, T)
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # (N, 1): the same for all tokens of a row
    # Choose first, multiply later: 0 * inf and 0 * nan are nan, in the value and again in the gradient.
    trained = mask.bool()  # (N, T)
    logprobs = torch.where(trained, logprobs, 0.0)  # (N, T)
    behaviour = torch.where(trained, behaviour, 0.0)  # (N, T)
    advantages = torch.where(trained, advantages, 0.0)  # (N, T)
    # log rho = log pi_train - log pi_gen
    return logprobs, logprobs - behaviour, advantages, trained


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # no ratio overflows; NaN stays NaN


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

    DAPO's own upper clip is 0.28; the best in ScaleRL is 0.26. The rest is as in `cispo`.
    """
    _, log_ratio, advantages, trained = _select(logprobs, behaviour_logprobs, advantages, mask)  # (N, T) each
    rho = _bounded_exp(log_ratio)  # (N, T)
    term, capped = _clipped_term(rho, advantages, eps_low, eps_high)  # (N, T), (N, T)
    return -term, _metrics(log_ratio, capped, advantages, trained)


def _clipped_term(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, to be maximized (N, T), and where the clip takes effect, bool (N, T)."""
    # term = min( rho A, clip(rho, 1 - eps_low, 1 + eps_high) A )
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)  # (N, T)
    term = torch.minimum(ratio * advantages, clipped * advantages)  # (N, T)
    # The clip takes effect where A pushes the ratio further away from 1: above for A > 0, below for A < 0.
    too_high = (advantages > 0) & (ratio > 1 + eps_high)  # (N, T)
    too_low = (advantages < 0) & (ratio < 1 - eps_low)  # (N, T)
    return term, too_high | too_low


def grpo(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps: float = 0.2,
) -> LossAndMetrics:
    """PPO's symmetric clip (arXiv 2402.03300, Eq. 3; its KL term is `kl_penalty`).

    With `none` advantages and `constant` weights it is Dr.GRPO's (2503.20783). The rest is as in `cispo`.
    """
    return dapo(logprobs, behaviour_logprobs, advantages, mask, eps_low=eps, eps_high=eps)


def gspo(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 3e-3,
    eps_high: float = 4e-3,
) -> LossAndMetrics:
    """PPO's clip on one ratio for each sequence (arXiv 2507.18071, Eq. 5-7), with the clips of ScaleRL's GSPO run.

    The reward belongs to the sequence, and ratios of single tokens are noisy. They are noisiest in long answers and in
    mixtures of experts, where an update changes which experts compute a token.

    Each token carries the term of its sequence, and `capped_*` counts all tokens of a clipped one. L5: with the average
    `sample` that is the paper's mean over sequences; with others long sequences count more. Advantages for each token
    make it GSPO-token (section 4.3): the ratio stays the sequence's, and A_it clips and moves only token t.
    """
    logprobs, log_ratio, advantages, trained = _select(logprobs, behaviour_logprobs, advantages, mask)  # (N, T) each
    # s_i = exp( 1/|y_i| * sum_t log rho_it )
    length = trained.sum(-1, keepdim=True).clamp_min(1)  # (N, 1)
    log_s = log_ratio.sum(-1, keepdim=True) / length  # (N, 1)
    # s_it = sg(s_i) * pi_it / sg(pi_it):  the value s_i on every token of row i, and the gradient through its own pi_it
    s = _bounded_exp(log_s.detach() + (logprobs - logprobs.detach()))  # (N, T)
    term, capped = _clipped_term(s, advantages, eps_low, eps_high)  # (N, T), (N, T)
    # `where` as in `_select`: a NaN in one token makes s NaN, and NaN * 0 would carry it to the padding
    token_loss = torch.where(trained, -term, 0.0)  # (N, T)
    return token_loss, _metrics(log_ratio, capped, advantages, trained)


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
) -> LossAndMetrics:
    """PPO's clip against the trainer's own old log-probs, times a truncated correction (Yao et al. 2025).

    Only here is the ratio split in two: rho = q * w, where q = pi / pi_old is the change by training on this batch and
    w = pi_old / pi_gen is everything before it. PPO's clip acts on q, a cap on w. (In the other losses rho holds both;
    a factor w on top would correct twice.)

    `old_logprobs` (N, T) are the trainer's before the first update on this batch. If that is the only update, as under
    PipelineRL, pi_old is pi. Then the clip never acts, and the gradient is that of CISPO with eps_max = cap, to the
    bit. `tis_capped` in the metrics counts the tokens above the cap. The rest is as in `cispo`.
    """
    logprobs, log_ratio, _, _ = _select(logprobs, behaviour_logprobs, advantages, mask)  # (N, T) each
    # The same once more, with the old log-probs in the numerator.
    old_logprobs = old_logprobs.detach().to(logprobs.dtype)  # (N, T)
    old, log_w, advantages, trained = _select(old_logprobs, behaviour_logprobs, advantages, mask)  # (N, T) each
    # token loss = - min(w, cap) * min(q A, clip(q, 1 - eps_low, 1 + eps_high) A)
    w = _bounded_exp(log_w)  # (N, T)
    q = _bounded_exp(logprobs - old)  # (N, T)
    term, capped = _clipped_term(q, advantages, eps_low, eps_high)  # (N, T), (N, T)
    token_loss = torch.where(trained, -w.clamp(max=cap) * term, 0.0)  # (N, T), `where` as in gspo
    metrics = _metrics(log_ratio, capped, advantages, trained)
    metrics["tis_capped"] = ((w > cap) & trained).sum()
    return token_loss, metrics


LOSSES = {"cispo": cispo, "gspo": gspo, "dapo": dapo, "grpo": grpo, "tis": tis}


def aggregation_weights(
    mask: Tensor,
    group_ids: Tensor,
    how: str = "prompt",
    constant: float | None = None,
) -> Tensor:
    """The averages of a loss as one weight for each token, so that every split of the batch sums to the same gradient.

    If your trainer divides the loss, multiply by its divisor: the number of ranks under DDP, FSDP and accelerate, the
    accumulation steps with `accelerator.accumulate`. Adam hides a missing factor; gradient clipping does not.

    Args:
        mask, group_ids: (N, T), (N,) of all ranks and microbatches together; dropped rows are left out or all 0.
        how: `sample` mean over a row's tokens, then over rows (GRPO) · `prompt` over a group's tokens, then over
            groups (ScaleRL) · `token` over all (DAPO's code) · `constant` sum / constant, mean over rows (Dr.GRPO).
            Groups of 10 + 100 and 50 + 50 tokens: `sample` 1/40, 1/400, 1/200 · `prompt` 1/220, 1/200 · `token` 1/210.
            So the completion of 10 tokens has 25 %, 4.5 % and 4.8 % of the step.
        constant: what `constant` divides by, for example the completion budget in tokens.
    Returns (N, T), float64 if the mask is, else float32; 0 outside the mask. L10: a row or group without trained tokens
    is not counted: left in a denominator it would shrink the step.
    Raises ValueError for an unknown `how`, a missing or non-positive constant, or shapes that do not agree.
    """
    if mask.dim() != 2 or group_ids.shape != mask.shape[:1]:
        raise ValueError(f"mask {tuple(mask.shape)} must be (N, T) and group_ids {tuple(group_ids.shape)} (N,).")
    trained = mask.bool()  # (N, T)
    tokens = trained.sum(-1)  # (N,) int64: a float32 count is exact only to 2^24, and large batches have more tokens
    rows = (tokens > 0).sum()  # ()
    if how == "sample":  # 1 / (|y_i| * N)
        denominator = tokens * rows  # (N,)
    elif how == "prompt":  # 1 / (n_g * P)
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
    token_weights = torch.where(trained, 1.0 / denominator.double()[:, None], 0.0)  # (N, T)
    return token_weights if mask.dtype == torch.float64 else token_weights.float()


# The loss ends here. What follows, a penalty and the metrics, is not needed to understand it.
def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate of KL(pi || pi_ref) for each sampled token. ScaleRL uses none; GRPO (2402.03300) uses k3.

    With r = pi_ref / pi:

             value              mean over tokens of pi      mean of its gradient
        k1   -log r             KL(pi || pi_ref)            0: a monitor, not a loss
        k2   (log r)^2 / 2      biased                      that of KL(pi || pi_ref)
        k3   r - 1 - log r      KL(pi || pi_ref)            that of KL(pi_ref || pi)

    On tokens sampled up to k steps ago this holds only approximately: no ratio corrects for their age. All shapes are
    (N, T), and the result is at least float32. Raises ValueError for an unknown estimator or shapes that do not agree.
    """
    if not logprobs.shape == reference_logprobs.shape == mask.shape:
        raise ValueError("kl_penalty: logprobs, reference_logprobs and mask must have one shape (N, T).")
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))  # (N, T)
    reference = reference_logprobs.detach().to(logprobs.dtype)  # (N, T)
    log_r = torch.where(mask.bool(), reference - logprobs, 0.0)  # (N, T)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    if estimator == "k3":
        log_r = log_r.clamp(max=MAX_LOG_RATIO)  # in both terms: bounding only r would reverse the gradient's sign
        return torch.expm1(log_r) - log_r
    raise ValueError(f"kl_penalty: estimator={estimator!r} is not one of k1, k2, k3.")


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
    """Metrics of several microbatches or ranks as one: keys ending in `_max` take the maximum, all others add.

    Nothing is read back from the device. Raises ValueError for no parts, or parts with different keys.
    """
    if not parts or any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("merge_metrics: expected at least one dict of metrics, and the same keys in each.")
    merged = {}
    for key in parts[0]:
        column = torch.stack([torch.as_tensor(part[key]) for part in parts])  # (parts,)
        merged[key] = column.amax(0) if key.endswith("_max") else column.sum(0)
    return merged


SHARES = {  # of which tokens
    "capped_positive": "tokens_positive",
    "capped_negative": "tokens_negative",
    "masked_positive": "tokens_positive",
    "masked_negative": "tokens_negative",
    "tis_capped": "tokens",
}


def summarize_metrics(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Means and shares of a step from its merged metrics. Waits for the device: call it once in a step.

    ratio_mean, ratio_max: of the tokens' rho before any truncation. L4: whatever the loss, so that runs with different
    losses compare.
    ess: effective sample size (sum rho)^2 / (n sum rho^2), as a share in (0, 1].
    log_ratio_rms: root mean square of log rho. How far, in nats, a token's log-prob typically is from the generator's.
    capped_positive, capped_negative: share of the tokens with A > 0 (A < 0) that the loss capped or clipped.
    masked_positive, masked_negative: share of them that a mask dropped or truncated; only with masks.py.
    tis_capped: share of all tokens; only with `tis`. A share of no tokens is 0.
    """
    m = {key: float(value) for key, value in metrics.items()}
    tokens = m["tokens"] or 1
    summary = {
        "ratio_mean": m["ratio_sum"] / tokens,
        "ratio_max": m["ratio_max"],
        "ess": m["ratio_sum"] ** 2 / (m["tokens"] * m["ratio_sq_sum"] or 1),
        "log_ratio_rms": (m["log_ratio_sq_sum"] / tokens) ** 0.5,
    }
    for name, total in SHARES.items():
        if name in m:
            summary[name] = m[name] / (m[total] or 1)
    return summary


if __name__ == "__main__":  # show the worked example, and check it
    import doctest

    print(__doc__[__doc__.index("Two tokens") :])
    raise SystemExit(doctest.testmod().failed)
