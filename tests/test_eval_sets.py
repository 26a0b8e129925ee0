"""tasks/eval_sets.py: sets that are only evaluated, from their names to the curve at a run's end."""

from collections import Counter

import pytest
from bpe import bpe_tokenizer
from replay import record_rollouts
from test_rows import write_rows

import train
from runtime.run_folder import Folder
from tasks.data_sets import PromptOptions, load_dataset_task
from tasks.eval_sets import parse_eval_sets
from tasks.prompts import stable_key
from tasks.rows import DataSet

pytestmark = pytest.mark.long


def sums(n, start=0):
    return [{"question": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(start, start + n)]


@pytest.fixture
def load(tmp_path):
    """A task of 40 sums, ten of them held out, and of the evaluation sets that are given; closed at the end."""
    loaded, tokenizer, path = [], bpe_tokenizer(), write_rows(tmp_path / "sums.jsonl", sums(40))

    def load(eval_dataset, reward="exact", dataset=path):
        options = {"reward": reward, "reward_workers": 1, "eval_dataset": eval_dataset}
        loaded.append(load_dataset_task(dataset, tokenizer, PromptOptions(held_out=10), **options))
        return loaded[-1]

    yield load
    for task in loaded:
        task.close()


def test_names_by_hand():
    assert parse_eval_sets("") == {}
    assert parse_eval_sets("aime24=a.jsonl, math-500 = HuggingFaceH4/MATH-500::test") == {
        "aime24": DataSet("a.jsonl"), "math-500": DataSet("HuggingFaceH4/MATH-500", None, "test"),
    }  # fmt: skip
    assert parse_eval_sets("mbpp=b.jsonl:code") == {"mbpp": DataSet("b.jsonl", reward="code")}
    for bad in ("a.jsonl", "=a.jsonl", "a=", "a/b=c.jsonl", "a b=c.jsonl", "a=c.jsonl=2"):
        with pytest.raises(ValueError, match="`eval_dataset` must be NAME=DATA"):
            parse_eval_sets(bad)
    with pytest.raises(ValueError, match="has the name a twice"):
        parse_eval_sets("a=b.jsonl,a=c.jsonl")


def test_an_evaluation_set_is_whole_and_its_prompts_are_not_trained_on(tmp_path, load):
    """Of 40 sums ten are held out. The set has 14: all of ten trained or held-out ones, and four others. It is whole;
    the split of the rest stays as it was, but training goes without the prompts that the set has."""
    alone = load("")
    own = write_rows(tmp_path / "own.jsonl", [*sums(10), *sums(4, start=90)])
    task = load(f"own={own}")
    in_set = {p.key for p in task.held_out if p.source == "own"}
    assert task.eval_sources == ["own"] and task.sources == alone.sources and len(in_set) == 14
    held_out = [p for p in task.held_out if p.source != "own"]
    assert held_out == alone.held_out and {p.key for p in held_out} & in_set  # evaluated in both
    trained_before = {p.key for p in alone.train}
    assert {p.key for p in task.train} == trained_before - in_set != trained_before
    assert task.skipped == {"in_eval_dataset": len(trained_before & in_set)} and alone.skipped == {}


def test_an_evaluation_set_has_a_reward_of_its_own(tmp_path, load):
    """`exact` for the sums, `math` for the set, also on a prompt that both have."""
    own = write_rows(tmp_path / "own.jsonl", sums(40))
    task = load(f"own={own}", reward="exact,math", dataset=write_rows(tmp_path / "more.jsonl", sums(60)))
    answers = {(p.key, p.source): p for p in task.held_out}
    key = next(p.key for p in task.held_out if p.source != "own" and (p.key, "own") in answers)
    for source, correct in (("own", True), (task.sources[0], False)):
        problem = answers[key, source]
        ids = task.tokenizer.encode(f"</think>The answer is {problem.answer}.", add_special_tokens=False)
        assert task.reward(problem, ids)[1] == correct


@pytest.mark.parametrize(
    ("eval_dataset", "reward", "words"),
    [
        ("own=missing.jsonl", "exact", "`eval_dataset` missing.jsonl: there is no such file"),
        ("own=empty.jsonl", "exact", "`eval_dataset` own has no usable prompt"),
        ("own=all.jsonl", "exact", "`eval_dataset` has every prompt that `dataset` all.jsonl would train on"),
        ("all.jsonl=few.jsonl", "exact", "a name is that of a data set to train on"),
        ("own=few.jsonl", "exact,math,math", "`reward` must be one name or one for each of the 2 data sets"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_name(tmp_path, monkeypatch, load, eval_dataset, reward, words):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("all", sums(20)), ("few", sums(5)), ("empty", [{"question": " ", "answer": "1"}])):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    with pytest.raises(ValueError, match=words):
        load(eval_dataset, reward, "all.jsonl")


def test_a_run_with_an_evaluation_set(monkeypatch, tmp_path, model, capsys):
    """A run without the set, then resumed with it: the evaluations from then on have it beside the held-out prompts, which
    alone are the pass rate; its correct samples are logged; its curve is fitted at the end. A set that has a prompt of
    the checkpoint is refused."""
    record_rollouts(monkeypatch)
    monkeypatch.setattr(train.signal, "signal", lambda number, handler: None)
    rows = [{"prompt": f"{a} {b} again", "answer": "7"} for a in range(4) for b in range(4)]
    data, run = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "run"
    own = write_rows(tmp_path / "own.jsonl", [{"prompt": f"{a} {a} {a} again", "answer": "7"} for a in range(3)])
    flags = f"--model {model} --dataset {data} --output_dir {run} --held_out 4 --reward exact --reward_workers 1"
    flags += " --batch_prompts 3 --rollouts 4 --max_steps 2 --eval_every 1 --save_every 1 --lr 0.01"
    assert train.main([*flags.split(), "--interruption_phrase", "time up </think>"]) == 0
    out = capsys.readouterr().out
    assert f"12 prompts to train on; held out: 4 of {data}; left out: no row" in out
    assert train.main(["--resume", str(run), "--max_steps", "4", "--eval_dataset", f"own={own}"]) == 0
    out = capsys.readouterr().out
    assert f"4 of {data}, 3 of own" in out and f"{run}, own: " in out and ") of own\n" in out
    evaluations, counts = Folder(run).read("eval.jsonl"), Folder(run).read("eval_counts.jsonl")
    assert [sorted(r.get("data_sets", {})) for r in evaluations] == [[], [], [], ["own"], ["own"]]
    for record, count in zip(evaluations[3:], counts[3:], strict=True):
        assert (record["n_prompts"], record["data_sets"]["own"]["n_prompts"]) == (4, 3)
        assert record["pass_rate"] == sum(count["correct"]) / 4
        rate = sum(count["data_sets"]["own"]) / 3
        assert record["data_sets"]["own"]["pass_rate"] == record["pass_rate_of"]["own"] == rate
    trained = Counter(key for r in Folder(run).read("groups.jsonl") for key, *_ in r["groups"])
    taken = next(row for row in rows if stable_key(row["prompt"]) in trained)
    again = write_rows(tmp_path / "again.jsonl", [taken])
    assert train.main(["--resume", str(run), "--max_steps", "5", "--eval_dataset", f"again={again}"]) == 2
    assert "no --eval_dataset that has prompts of it" in capsys.readouterr().err
