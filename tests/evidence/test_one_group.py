"""docs/one_group.md and the pictures: the page is what the script prints, its numbers are the run's own."""

import json
import re
from pathlib import Path

import one_group
import pictures
import pytest
import torch
from one_group import PAGE, RECORD, B, G, K
from pictures import WhicheverIsFirst, factor, schedule

import losses
from pipeline_rl import Pacer

pytestmark = pytest.mark.medium

DOCS = Path(__file__).parents[2] / "docs"
STEP = json.loads(RECORD.read_text())


def test_the_page_is_the_scripts():
    """And the completion that it tells of shows what the page says of it."""
    assert PAGE.read_text() == one_group.page(STEP)
    told = STEP["groups"][one_group.PLACE]["rollouts"][one_group.CUT]
    assert 0 in told["mask"] and told["words"].endswith("<eos>") and len({*told["versions"]} - {-1}) == 2
    assert len(PAGE.read_text().splitlines()) <= 150


def test_numbers_by_hand():
    """Rewards, mean and std in plain Python; every lag within the bound; the loss that the run logged."""
    rewards = [[r["reward"] for r in group["rollouts"]] for group in STEP["groups"]]
    varied = [row for row in rewards if len({*row}) > 1]
    centered = [r - sum(row) / G for row in varied for r in row]
    std = (sum(x * x for x in centered) / len(centered)) ** 0.5
    batch = one_group.batch_of(STEP["groups"])
    assert batch["advantages"].tolist() == pytest.approx([x / std for x in centered], abs=1e-5)
    assert len(STEP["groups"]) == B and 0 < len(varied) < B
    versions = [r["versions"] for group in STEP["groups"] for r in group["rollouts"]]
    assert all(0 <= STEP["version"] - v <= K for row in versions for v in row if v >= 0)
    loss, _ = losses.cispo(*(batch[name] for name in ("now", "then", "advantages", "mask")))
    assert float((batch["token_weights"] * loss).sum()) == pytest.approx(STEP["loss"], abs=1e-5)


def test_the_order_is_what_bounds_the_lag():
    """B = 2, k = 1. Group 0 has 26 tokens. By whichever finishes first, steps begin at ticks 5, 14 and 22, so at tick 26
    three were made, and the first token is three versions old."""
    strict, first = (schedule(kind(2, 1), 26, 40) for kind in (Pacer, WhicheverIsFirst))
    assert max(group.lag for group in strict if group.trained is not None) == 1
    assert (first[0].trained, first[0].lag) == (26, 3)
    assert len(first) > len(strict) > 6


def test_factors_are_those_of_the_table():
    """losses.py: rho = 8 and .5."""
    rho = torch.tensor([8.0, 0.5])
    found = {(loss.__name__, A): factor(loss, rho, A).tolist() for loss in (losses.cispo, losses.dapo) for A in (1, -1)}
    by_hand = {("cispo", 1): [5, 0.5], ("cispo", -1): [5, 0.5], ("dapo", 1): [0, 0.5], ("dapo", -1): [8, 0]}
    assert {name: pytest.approx(row) for name, row in by_hand.items()} == found


def test_every_picture_is_drawn_small_and_shown(tmp_path):
    pictures.main(["--output", str(tmp_path)])
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "pictures").iterdir()}
    assert all(path.stat().st_size < 100_000 for path in (*tmp_path.iterdir(), *(DOCS / "pictures").iterdir()))
    text = "".join(path.read_text() for path in (DOCS.parent / "README.md", *DOCS.glob("*.md")))
    assert drawn == set(re.findall(r"pictures/(\w+\.png)", text))
