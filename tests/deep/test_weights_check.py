"""runtime/evaluation.py: the weights check on mixtures of experts and numbers that are none, and how often it comes."""

import math

import pytest

from runtime.folder import RunFailed


def test_probes_come_as_often_when_steps_come_in_rounds(run):
    """Every 3 steps, or at the end of the round of 4 that passes one. What begins after a step is compared in the next
    one; the evaluation of step 0 is compared in step 1."""
    for schedule, steps in (("pipeline", [1, 4, 7, 10]), ("ppo_off_policy", [1, 5, 9])):
        played = run(schedule=schedule, k=4, max_steps=12, eval_every=100, probe_every=3)
        assert [r["step"] for r in played.steps if "logprob_gap" in r] == steps


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gap_that_is_no_number_ends_the_run(run, dtype, experts):
    """One row of ten."""
    with pytest.raises(RunFailed, match="weights check: at version 0 trainer and generator differ by nan nats"):
        run(trainer={"experts": experts, "off": [math.nan, 0.0]}, dtype=dtype)


@pytest.mark.long
def test_the_median_row_decides_for_a_mixture_of_experts(run):
    """Ten rows: one or four off by 0.1 are what rounding at the router does, seven off are old weights."""
    for off in ([0.1, 0.0], [0.1] * 4 + [0.0]):
        assert run(trainer={"experts": 4, "off": off}, probe_every=100).steps[0]["logprob_gap"] == 0.0
    with pytest.raises(RunFailed, match=r"differ by 1\.0e-01"):
        run(trainer={"experts": 4, "off": [0.1] * 7 + [0.0]})
    with pytest.raises(RunFailed, match=r"differ by 1\.0e-02"):  # the mean of one in ten
        run(trainer={"off": [0.1, 0.0]})
