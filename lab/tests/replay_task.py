"""What test_replay.py trains on and against: a task that a random model solves half of the time, and losses."""

import losses
from tasks.arithmetic import ChainTask


class Even(ChainTask):
    """Right is a completion whose first token has an even id."""

    def score(self, problem, completions):
        return [(1.0, True) if ids[0] % 2 == 0 else (-1.0, False) for ids in completions]


def even(seed, held_out):
    return Even(seed, 24, held_out)


def same(logprobs, behaviour_logprobs, advantages, mask):
    """The recipe's loss by another name."""
    return losses.cispo(logprobs, behaviour_logprobs, advantages, mask)


def turned(logprobs, behaviour_logprobs, advantages, mask):
    """The recipe's with the other sign."""
    token_loss, metrics = losses.cispo(logprobs, behaviour_logprobs, advantages, mask)
    return -token_loss, metrics


def silent(logprobs, behaviour_logprobs, advantages, mask):
    """No gradient for A < 0."""
    token_loss, metrics = losses.cispo(logprobs, behaviour_logprobs, advantages, mask)
    return token_loss * (advantages > 0)[:, None], metrics
