"""lab/law/decide.py: a winner where runs lie apart, a stop where the band's top is near, and refusals in one sentence."""

import json

import decide
import numpy as np
import pytest
from curves import short, span
from decide import Place, highest, place_of
from forecast import continued, curve

from fit_sigmoid import sigmoid

EVERY = 50.0


def rows(A, n=24, C_mid=300.0, seed=0):
    """Evaluations of 4,096 samples on Eq. 1 with this ceiling."""
    C = EVERY * np.arange(n)
    R = np.random.default_rng(seed).binomial(4096, sigmoid(C, 0.1, A, 2.0, C_mid)) / 4096
    return [
        {"step": i, "tokens": float(c), "pass_rate": float(r), "n_prompts": 1024, "n_samples": 4, "device": "cpu"}
        for i, (c, r) in enumerate(zip(C, R, strict=True))
    ]


def folder(path, A, flags=None, **options):
    path.mkdir()
    (path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(A, **options)))
    if flags:
        (path / "config.json").write_text(json.dumps(flags))
    return str(path)


A, NEAR, FAR = Place(0.6, 0.5, 1), Place(0.509, 0, 0.609), Place(0.507, 0, 0.607)


@pytest.mark.parametrize(
    ("places", "best"), [([A, NEAR], None), ([A, FAR], 0), ([FAR, A], 1), ([A, FAR, NEAR], None), ([A, None], None)]
)
def test_reaches_are_added_as_squares(places, best):
    """A reaches .1 down, the others .1 up: .65 sqrt(.02) = .0919, between .091 and .093. The far ends do not count."""
    assert highest(places) == best


def test_the_place_of_a_run_by_hand():
    """The number, in the band of the curve; the mean of the last half -+ 3.5 sd of a run that does not rise; none of one
    that falls, or whose points are all alike."""
    risen = curve(rows(0.9)).forecast
    low, high = risen.interval(5e4)[:, 0]
    assert place_of(risen, 5e4) == pytest.approx((risen.number(5e4), low, high))
    early = curve(rows(0.9, n=40, C_mid=2000.0)).forecast  # the last third lies below what the run has reached
    last = early.fit.C[-1]
    low, high = early.interval(last)[:, 0]
    assert early.number(last) < low and place_of(early, last) == pytest.approx((low, low, high))
    R = 0.05 + 0.002 * np.resize([1, -1, 0], 24)
    level, reach = R[12:].mean(), 3.5 * R.std(ddof=1)
    level_run = [row | {"pass_rate": r} for row, r in zip(rows(0.5), R, strict=True)]
    assert place_of(curve(level_run).forecast, 1e4) == pytest.approx((level, level - reach, level + reach))
    for late in (0.0, 0.4):
        other = [row | {"pass_rate": 0.4 if i < 20 else late} for i, row in enumerate(rows(0.5))]
        assert place_of(curve(other).forecast, 1e4) is None
    assert decide.winner([curve(rows(0.9), name="a"), curve(level_run, name="b")], 1e4).startswith(
        "a ends higher than b"
    )


def test_a_winner_is_named_only_where_runs_lie_apart():
    """At twice the compute .9 is above .5 for sure, and .51 is not."""
    low, high, near = (
        curve(rows(A, seed=i), name=name) for i, (A, name) in enumerate([(0.5, "b"), (0.9, "a"), (0.51, "c")])
    )
    C = 2 * low.end
    sentence = decide.winner([low, high], C)
    assert sentence.startswith(f"a ends higher than b at {short(C)} in nine of ten cases: b 0.")
    for r in (low, high):
        number, *ends = place_of(r.forecast, C)
        assert f"{r.name} {number:.3f} {span(ends, 3)}" in sentence
    assert decide.winner([high, low, near], C).startswith("a ends higher than b and c at")
    assert decide.winner([low, near], C).startswith(f"no winner at {short(C)}, the runs may end alike: b 0.")
    assert decide.parts_at([low, near], low.end).endswith("more compute up to there does not tell either")


def test_where_runs_may_end_alike_it_says_when_they_would_lie_apart():
    """After a fifth of the runs nobody knows; the runs as they went on, .9 and .6, part before their end."""
    early = [curve(rows(A, n=40, seed=seed), 0.2, name) for A, seed, name in ((0.9, 1, "a"), (0.6, 2, "b"))]
    C = early[0].end
    sentence = decide.winner(early, C)
    assert "may end alike" in sentence

    def apart(share):
        now = early[0].forecast.fit.C[-1]
        return highest([place_of(continued(r.forecast, 1 + share * (C / now - 1)), C) for r in early]) is not None

    first = next(share for share in decide.SHARES[1:] if apart(share))
    now = early[0].forecast.fit.C[-1]
    assert sentence.endswith(f"ask again at {short(now + first * (C - now))}")


def test_a_run_without_a_forecast_wins_and_stops_nothing():
    flat = curve([row | {"pass_rate": 0.4} for row in rows(0.5)], name="flat")
    risen = curve(rows(0.9), name="risen")
    assert decide.winner([risen, flat], 5000.0).startswith(
        "no winner at 5k: flat has no forecast: the pass rate does not"
    )
    assert decide.stops(flat, 5000.0, 0.03).startswith(
        "flat: no forecast, so nothing says stop: the pass rate does not"
    )


def test_it_may_stop_where_the_top_of_the_band_is_near():
    late = curve(rows(0.8, n=60), name="late")
    C = 1.1 * late.end
    f = late.forecast
    reached = float(f.predict(f.fit.C[-1], f.form))
    most = float(f.interval(C)[1, 0]) - reached
    assert 0 < most < 0.05
    assert "it may stop" in decide.stops(late, C, most + 1e-6)
    assert decide.stops(late, C, most - 1e-6).endswith(f"that is more than --stop-at {most - 1e-6:g}")
    assert "it goes on" in decide.stops(curve(rows(0.8), 0.3, "early"), 2000.0, 0.03)


def test_the_command(tmp_path, capsys):
    a = folder(tmp_path / "a", 0.9, {"dataset": "graded", "held_out": 256}, n=40)
    b = folder(tmp_path / "b", 0.5, {"dataset": "graded", "held_out": 256}, n=20)
    assert decide.main([a, b, "--at", "2x", "--stop-at", "0.03"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "at 1.9k sampled tokens:"  # twice the 19 intervals of the shorter run
    assert lines[1].startswith(f"{a} ends higher than {b} at 1.9k") and len(lines) == 4


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("a", "one run has no rival: name another, or ask for --stop-at 0.03"),
        ("a other", "evaluated on other problems than {a}: dataset discover, not graded"),
        ("a hours", "compute is device_hours and tokens: name one column for all runs with --x"),
        ("a b --at x", "could not convert string to float"),
        ("a b --at 0x", "--at must be a compute above 0, such as 2e6 or 4x, not 0x"),
        ("a b --stop-at 3", "--stop-at is a gain of the pass rate from 0 to 1, not 3"),
        ("a missing", "No such file"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, arguments, sentence):
    a = folder(tmp_path / "a", 0.9, {"dataset": "graded"})
    folder(tmp_path / "b", 0.5)
    folder(tmp_path / "other", 0.5, {"dataset": "discover"})
    hours = folder(tmp_path / "hours", 0.5)
    text = "".join(json.dumps(row | {"device": "H100", "device_hours": row["tokens"]}) + "\n" for row in rows(0.5))
    (tmp_path / "hours" / "eval.jsonl").write_text(text)
    words = [str(tmp_path / w) if w in ("a", "b", "other", "hours", "missing") else w for w in arguments.split()]
    assert decide.main(words) == 2
    error = capsys.readouterr().err
    assert sentence.format(a=a) in error and len(error.splitlines()) == 1 and hours
