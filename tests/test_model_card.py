"""runtime/model_card.py: what a model says of itself, and that it reaches the hub on request only."""

import json

import huggingface_hub
import pytest
import yaml

from runtime.flags import Flags
from runtime.model_card import model_card
from runtime.run_folder import Folder


def evaluation(rate: float, aime: float | None = None) -> dict:
    record = {"step": int(100 * rate), "tokens": 1_234_567, "flops": 3e12, "pass_rate": rate, "n_samples": 4}
    return record if aime is None else record | {"data_sets": {"aime": {"pass_rate": aime}}}


def test_a_card_by_hand():
    """From .1 to .5, the last two .4; aime, which came with a resume, from .2 to .3."""
    flags = Flags(
        model="org/base",
        dataset="org/set:main,rows.jsonl",
        eval_dataset="aime=a.jsonl",
        lr=1e-6,
        k=4,
        prompt_template="Q: {prompt}",
    )
    evaluations = [evaluation(0.1), evaluation(0.3, 0.2), evaluation(0.5, 0.3)]
    text = model_card("gsm8k", flags, evaluations, "A     ceiling   0.612")
    _, metadata, body = text.split("---\n")
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["reinforcement-learning", "scalerl"],
        "base_model": "org/base", "datasets": ["org/set"],
    }  # fmt: skip
    for part in (
        "# gsm8k\n", "org/base, trained on org/set:main,rows.jsonl by", "50 steps, 1,234,567 sampled tokens, 3.00e+12",
        "mean@4 at temperature 1", "| held-out prompts | 0.100 -> 0.500 (mean of the last two 0.400) |",
        "| aime | 0.200 -> 0.300 (mean of the last two 0.250) |", "```\nA     ceiling   0.612\n```",
        "--lr 1e-06", "--k 4", "--prompt_template 'Q: {prompt}'", "torch 2.", "accelerate 1.",
    ):  # fmt: skip
        assert part in body
    assert "--loss" not in body and "--output_dir" not in body and "--push_to_hub" not in body


def test_what_is_not_on_the_hub_is_not_named_as_if_it_were(tmp_path, monkeypatch):
    """The built-in model; a folder whose name looks like an id; a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    for flags, base in (
        (Flags(), "the built-in model (--size m), trained on graded"),
        (Flags(model="runs/model", dataset="my/rows.jsonl"), "runs/model, trained on my/rows.jsonl"),
    ):
        if flags.dataset != "graded":
            (tmp_path / "my").mkdir()
            (tmp_path / "my" / "rows.jsonl").touch()
        _, metadata, body = model_card("x", flags, [evaluation(0.1)], "").split("---\n")
        assert not {"base_model", "datasets"} & set(yaml.safe_load(metadata)) and base in body
        assert "--lr 0.0007" in body  # which is not the default of each


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub's two calls: a list of them, each with its arguments. `hub.fails` names one that raises."""

    class Calls(list):
        fails = ""

        def call(self, name, *args, **options):
            self.append((name, *args, options))
            if name == self.fails:
                raise ConnectionError("no route to the hub\nsecond line")

    calls = Calls()
    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub, name, lambda *a, name=name, **o: calls.call(name, *a, **o))
    return calls


def test_a_run_ends_with_a_card_and_pushes_nothing(program, hub, tmp_path):
    _, out, _ = program("--max_steps", "2")
    card, report = (
        (tmp_path / "run" / "model" / "README.md").read_text(),
        out.split("curve.png):\n")[1].split("\n\n")[0],
    )
    rates = [record["pass_rate"] for record in Folder(tmp_path / "run").read("eval.jsonl")]
    assert report in card and f"{rates[0]:.3f} -> {rates[-1]:.3f}" in card and "--max_steps 2" in card
    assert (tmp_path / "run" / "model" / "curve.png").exists() and hub == []


@pytest.mark.long
def test_a_model_is_pushed_on_request_and_only_in_that_call(program, hub, tmp_path):
    """The repository is made before the run, private; the folder with its card goes there at the end. A resumed run must
    be asked again; an evaluation never pushes."""
    assert program("--max_steps", "2", "--push_to_hub", "me/model")[0] == 0
    assert hub == [
        ("create_repo", "me/model", {"private": True, "exist_ok": True}),
        ("upload_folder", {"repo_id": "me/model", "folder_path": tmp_path / "run" / "model"}),
    ]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["push_to_hub"] == "me/model"
    del hub[:]
    program("--resume", "--max_steps", "3")
    program("--resume", "--eval_only", "--push_to_hub", "me/model")
    assert hub == []


def test_a_hub_that_cannot_be_reached(program, hub, tmp_path):
    """At the start: exit code 2, before a step. At the end: exit code 1, and the command to do it by hand. A name that is
    no id is refused before the hub is asked."""
    hub.fails = "create_repo"
    code, _, err = program("--push_to_hub", "me/model")
    assert code == 2 and "--push_to_hub me/model: no route to the hub; `hf auth login`, or leave it out" in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    hub.fails = "upload_folder"
    code, _, err = program("--max_steps", "2", "--push_to_hub", "me/model")
    model = tmp_path / "run" / "model"
    assert code == 1 and f"not pushed (no route to the hub); try `hf upload me/model {model}`" in err
    assert (model / "README.md").exists()
    del hub[:]
    assert program("--push_to_hub", "model", folder=tmp_path / "other")[0] == 2 and hub == []
