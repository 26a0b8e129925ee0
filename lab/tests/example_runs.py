"""Runs made by hand, as lab/evidence/runs.py reads them."""

import numpy as np
from runs import NUMBERS, Run

from fit_sigmoid import sigmoid


def example(variant="base", seed=0, rates=None, A=0.8, n=16, every=50.0, comparison="one", flags="", **columns):
    """A finished run with evaluations of 1,024 samples at 0, every, 2 every, ... tokens: on R0 = .1, B = 2 and C_mid =
    300 unless there are `rates`. Device-hours are a thousandth of the tokens. `columns` are added."""
    C = every * np.arange(n + 1 if rates is None else len(rates))
    if rates is None:
        rates = sigmoid(C, 0.1, A, 2.0, 300.0)
    points = dict.fromkeys(NUMBERS, np.full(C.size, np.nan))
    points |= {
        "step": 8.0 * np.arange(C.size),
        "tokens": C,
        "device_hours": C / 1000,
        "pass_rate": np.array(rates),
        "n": np.full(C.size, 1024.0),
    }
    points |= columns
    name = f"{comparison}/{variant}/seed-{seed}"
    return Run(name, comparison, variant, seed, flags, "finished", points)
