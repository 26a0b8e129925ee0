"""ScaleRL's advantages and averages for trainers that take the mean over all tokens: verl and SkyRL, in one function.

Their losses are linear in the advantage, so an advantage can carry the weight of its token: times 1 / (P n_g) for the
prompt average, times all the tokens that the trainer will divide by. Groups with equal rewards get 0 and count nowhere.
It is exact while one batch is one update, and CISPO's ratio is the generator's.

verl 0.9.1, its v1 trainer (the default):

    VERL_USE_EXTERNAL_MODULES=scalerl_advantage PYTHONPATH=lab python -m verl.trainer.main_ppo \
        algorithm.adv_estimator=scalerl ...

SkyRL, before the trainer is made; then `trainer.algorithm.advantage_estimator=scalerl`:

    AdvantageEstimatorRegistry.register("scalerl", scalerl)

The other flags: docs/elsewhere.md.

Three prompts; the rewards of c are equal, a has two tokens and b four:

>>> rewards = torch.tensor([[1, 0], [0, 1], [0, 0], [0, 0], [0, 1], [0, 1]]).float()
>>> mask = torch.tensor([[1, 0], [1, 1], [1, 0], [1, 1], [1, 1], [1, 1]])
>>> advantages, _ = scalerl(rewards, mask, np.array(["a", "b", "a", "b", "c", "c"]))
>>> (advantages / mask.sum()).round(decimals=4).tolist()  # advantages of 1 and -1, times 1 / (2 prompts · tokens)
[[0.25, 0.0], [0.125, 0.125], [-0.25, -0.0], [-0.125, -0.125], [0.0, 0.0], [0.0, 0.0]]
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from filters import has_variance
from losses import aggregation_weights, normalize_advantages


def scalerl(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **_: object
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), the same (N, T) twice, of rewards (N, T), the mask of trained tokens (N, T), and a name of
    each row's prompt (N,). All rows of the step, in any order."""
    rewards = token_level_rewards.sum(-1)  # (N,)
    group_ids = torch.as_tensor(np.unique(index, return_inverse=True)[1], device=rewards.device)  # (N,)
    keep = has_variance(rewards, group_ids)  # (N,)
    advantages = torch.zeros_like(rewards)  # (N,)
    advantages[keep] = normalize_advantages(rewards[keep], group_ids[keep])
    weights = aggregation_weights(response_mask * keep[:, None], group_ids)  # (N, T)
    weighted = advantages[:, None] * weights * response_mask.sum()  # (N, T)
    return weighted, weighted


if "verl" in sys.modules:  # verl imports this file at the end of its own import
    from verl.trainer.ppo.core_algos import register_adv_est

    register_adv_est("scalerl")(scalerl)
