"""lab/law/walk.py: exponents and distances by hand, and what a run must have recorded."""

import math

import numpy as np
import pytest
import torch
import walk


def test_exponents_by_hand():
    """Distances that grow as sqrt(k) have .5 everywhere, without an interval; those from starting points that grow as
    k^0 and k^1 have a mean of .5 with a Student interval of 12.7 standard errors of .5 = 6.35."""
    k = np.array([3.0, 6, 12])
    for exponent in walk.exponents(np.array([3 * k**0.5, 5 * k**0.5])):
        assert exponent == pytest.approx((0.5, 0.5, 0.5))
    assert walk.exponents(np.array([k**0, k]))[-1] == pytest.approx((0.5, 0.5 - 6.353, 0.5 + 6.353), abs=1e-3)


def test_distances_by_hand():
    """Weights (3, 4) apart by 5; logits, centered, of one token by 1 and -1; log-probs by .3 and .4, whose rms is
    sqrt(.125)."""
    before = torch.zeros(2), torch.zeros(1, 2), torch.zeros(2)
    after = torch.tensor([3.0, 4.0]), torch.tensor([[1.0, -1.0]]), torch.tensor([0.3, 0.4])
    assert walk.between(before, after) == pytest.approx([5.0, 1.0, math.sqrt(0.125)])


def test_too_few_recorded_steps_are_one_sentence(tmp_path, capsys):
    assert walk.main([str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert "0 recorded steps, and at least 8 are needed: --record_every 8" in output.err and output.err.count("\n") == 1
