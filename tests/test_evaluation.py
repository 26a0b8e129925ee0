"""runtime/evaluation.py: the figures and the gap by hand, a run that ends when the generator has other weights, and the law."""

import pytest
import torch
from scripted import rollout

from runtime.evaluation import evaluation_line, figures, law, logprob_gap, logprob_gaps
from runtime.folder import Folder, RunFailed
from runtime.microbatches import TokenRow


def test_figures_by_hand():
    """Correct 2, 1, 0 of 2: mean 1/2, pass@2 2/3. One truncated, one interrupted of six; lengths 2 2 2 4 5 6 = 21."""
    groups = [
        [rollout(1), rollout(1)],
        [rollout(1), rollout(-1, 4, "length")],
        [rollout(-1, 5, forced=1), rollout(-1, 6)],
    ]
    expected = {"pass_rate": 0.5, "pass_at_k": 2 / 3, "n_prompts": 3, "n_samples": 2}
    assert figures(groups)["correct"] == [2, 1, 0]
    expected |= {"interrupted": 1 / 6, "truncated": 1 / 6, "mean_length": 3.5}
    assert {name: figures(groups)[name] for name in expected} == pytest.approx(expected)
    record = figures(groups) | {"step": 30, "tokens": 123_456}
    line = evaluation_line(record)
    for part in ("step 30", "0.500", "pass@2 0.667", "123k", "truncated 16.7%", "interrupted 16.7%", "length 3.5"):
        assert part in line
    sets = {"data/aime24": {"pass_rate": 0.1}, "math": {"pass_rate": 0.25}}
    assert "pass@" not in evaluation_line(record | {"n_samples": 1})  # it would be 0.500 again
    assert evaluation_line(record | {"data_sets": sets}) == line + " · aime24 0.100 · math 0.250"


def test_the_gap_by_hand():
    """Trained tokens differ by .1 and .2 in the first row and by .6 in the second; the forced token does not count.
    Mean of the three: .3. Of a mixture of experts the (lower) median of the rows' means .15 and .6: .15."""
    rows = [TokenRow([1], [5, 6, 7], [1, 0, 1]), TokenRow([1], [5], [1])]
    own = torch.tensor([[-1.0, 0.0, -2.0], [-1.0, 0.0, 0.0]])
    behaviour = [[-1.1, -9.0, -1.8], [-1.6]]
    gaps = logprob_gaps(own, behaviour, rows)
    assert [gap.tolist() for gap in gaps] == [pytest.approx([0.1, 0.2]), pytest.approx([0.6])]
    assert logprob_gap(gaps, False) == pytest.approx(0.3) and logprob_gap(gaps, True) == pytest.approx(0.15)


def test_weights_that_did_not_move_end_the_run(run):
    """Log-probs may differ by 1e-4 (bfloat16: 0.1)."""
    with pytest.raises(RunFailed, match=r"weights check: at version 0 .* by 2\.0e-04 .* than 0.0001 \(float32\)"):
        run({"logprob": -2e-4})
    with pytest.raises(RunFailed, match="weights check: 10 evaluation completions have tokens that version 0 did not"):
        run({"mixed": True})
    played = run({"logprob": -5e-5})
    assert played.steps[0]["logprob_gap"] == pytest.approx(5e-5) and played.progress.step == 8
    assert played.steps[0]["mismatch_rms"] == pytest.approx(5e-5)
    assert run({"logprob": -0.08}, dtype="bfloat16").progress.step == 8
    with pytest.raises(RunFailed, match=r"by 1\.2e-01 .* than 0.1 \(bfloat16\): .* weights .* precision"):
        run({"logprob": -0.12}, dtype="bfloat16")


def test_a_run_ends_with_eq_1_on_its_own_evaluations(tmp_path):
    """R(C) = .1 + .6 C^2 / (9 + C^2) at 0, 1, ... 24 thousand tokens: A = .7, B = 2, C_mid = 3,000. A data set that came
    with a resume has three points, too few."""
    folder = Folder(tmp_path)
    for C in range(25):
        row = {"step": C, "tokens": 1000 * C, "pass_rate": 0.1 + 0.6 * C**2 / (9 + C**2), "n_prompts": 4096}
        row["n_samples"] = 4
        if C >= 22:
            row["data_sets"] = {"aime": {"pass_rate": 0.3, "n_prompts": 30, "n_samples": 4}}
        folder.append("eval.jsonl", row)
    text = law(folder, "cpu")
    assert f"The law on this run ({tmp_path}/curve.png):" in text and (tmp_path / "curve.png").exists()
    assert "ceiling       A      0.700" in text and "steepness     B      2.00" in text and " 3,000 " in text
    assert "aime: no fit: 3 usable points are too few" in text
    assert text.endswith(
        "pass rate       0.100 -> 0.691 (mean of the last two 0.690)\n"
        "                0.300 -> 0.300 (mean of the last two 0.300) of aime"
    )
