"""Runs made by hand, as evidence/curves.py reads them."""

import curves
import numpy as np
import pandas as pd

from fit_sigmoid import sigmoid


def made(variant="base", seed=0, rates=None, A=0.8, n=16, every=50.0, C_mid=300.0, comparison="one", **given):
    """A finished run with evaluations of 1,024 samples at 0, every, 2 every, ... tokens: on R0 = .1, B = 2 unless there
    are `rates`. Device-hours are a thousandth of the tokens. `given` replaces columns, or flags and state."""
    C = every * np.arange(n + 1 if rates is None else len(rates))
    rates = sigmoid(C, 0.1, A, 2.0, C_mid) if rates is None else rates
    points = dict.fromkeys(curves.NUMBERS, np.full(C.size, np.nan))
    points |= {
        "step": 8.0 * np.arange(C.size),
        "tokens": C,
        "device_hours": C / 1000,
        "flops": 10 * C,
        "pass_rate": np.array(rates),
        "n": np.full(C.size, 1024.0),
    }
    points |= {name: np.array(given.pop(name), dtype=float) for name in list(given) if name in points}
    of_it = {"flags": {}, "state": "finished"} | given
    return curves.Evaluations(f"{comparison}/{variant}/seed-{seed}", comparison, variant, seed, **of_it, points=points)


def rows(*runs):
    """The rows of the file that `curves_of` makes these runs of."""
    found = []
    for run in runs:
        flags = " ".join(f"--{name} {value}" for name, value in run.flags.items())
        first = (run.run, run.comparison, run.variant, str(run.seed), flags, run.state)
        found += [
            (*first, *(curves._text(name, run.points[name][i]) for name in curves.NUMBERS))
            for i in range(run.rates.size)
        ]
    return pd.DataFrame(found, columns=curves.COLUMNS)
