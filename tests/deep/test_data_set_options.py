"""Data sets: every option, ids with gaps, evaluation sets in other words, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
from recorded import record_rollouts
from test_data_sets import is_correct_in_prose, keys, smallest, sums
from test_rows import write_rows
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import runtime.run
import train
from runtime.folder import Folder
from tasks import data_sets, judges
from tasks.judges import RewardPool
from tasks.prompts import stable_key

pytestmark = pytest.mark.long


def test_exact_sees_neither_one_stop_token_nor_the_gap_of_an_id_without_a_token(tokenizer, load):
    """A stop token at the end is not judged, a second one and another token are. `</think>1?2` must not be judged as
    12, as `decode` would have it."""
    task = load(sums(20))
    problem = next(problem for problem in task.train if problem.answer == "12")
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("</think>1", "2"))
    body = first + second
    stop = tokenizer.eos_token_id
    spoiled = [*first, len(tokenizer), len(tokenizer) + 9999, *second]
    assert task.text(spoiled) == "</think>1\ufffd2"
    assert tokenizer.decode(spoiled) == "</think>12"
    endings = [[], [stop], [stop, stop], [tokenizer.pad_token_id]]
    verdicts = task.score(problem, [*(body + ending for ending in endings), spoiled])
    assert [correct for _, correct in verdicts] == [True, True, False, False, False]


def test_ids_with_gaps_have_their_text(tokenizer, load, tmp_path):
    """Tokens may stand beyond the length of the vocabulary; a search by length once lost `</think>` there."""
    tokenizer.save_pretrained(tmp_path / "gaps")
    file = tmp_path / "gaps" / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        if token["content"] == "</think>":
            token["id"] += 500
            content["model"]["vocab"]["</think>"] = token["id"]
    file.write_text(json.dumps(content))
    task = load(sums(20), tokenizer=AutoTokenizer.from_pretrained(tmp_path / "gaps"))
    problem = task.train[0]
    ids = task.tokenizer.encode(f"</think>{problem.answer}", add_special_tokens=False)
    assert max(ids) >= 500
    assert task.score(problem, [ids]) == [(1.0, True)]


def test_a_prompt_without_tokens_is_left_out(load):
    """A tokenizer that drops what it does not know: the engine would refuse the prompt of no token at every restart."""
    letters = tokenizers.models.BPE({"<eos>": 0, "a": 1}, [])
    known = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(letters), eos_token="<eos>")
    rows = [{"question": f"a {i}", "answer": "1"} for i in range(20)] + [{"question": "?", "answer": "1"}]
    task = load(rows, tokenizer=known, held_out=2)
    assert task.skipped == {"prompt_without_tokens": 1}


def test_the_users_function_gets_prompt_completion_and_the_rows_own_answer(tokenizer, load):
    judge = "judge = lambda prompt, text, answer: [prompt, text] == [x + answer['say'] for x in ('Say ', 'no</think>')]"
    Path("judge_rows.py").write_text(judge)
    rows = [{"prompt": f"Say {i}", "answer": {"say": str(i)}} for i in range(12)]
    task = load(rows, reward="judge_rows:judge", prompt_template="<<{prompt}>>")
    for problem in task.train:
        ids = tokenizer.encode(f"no</think>{problem.answer['say']}<|end|>", add_special_tokens=False)
        assert task.score(problem, [ids, ids[:-2]]) == [(1.0, True), (0.0, False)]


def test_long_prompts_and_unreadable_answers_are_counted(monkeypatch, tokenizer, load):
    """A prompt as long as the limit stays. `math` cannot read `\\frac{`. A process that does not judge counts the same
    and keeps no worker. (Every rank once kept its workers: see test_parts.py.)"""
    bad = [{"question": "unreadable", "answer": "\\frac{"}, {"question": "long " * 200, "answer": "1"}]
    message = [{"role": "user", "content": "What is 10 + 2?"}]
    length = len(tokenizer.apply_chat_template(message, return_dict=False, add_generation_prompt=True))
    for judge in (True, False):
        if not judge:
            monkeypatch.setattr(data_sets, "RewardPool", RewardPool)
        task = load([*sums(12, 10), *bad, *sums(1, 10)], reward="math", max_prompt_tokens=length, judge=judge)
        assert task.skipped == {"duplicate_prompt": 1, "unreadable_answer": 1, "prompt_too_long": 1}
        assert {len(p.prompt_ids) for p in task.train + task.held_out} == {length}
        assert len(task.train + task.held_out) == 12
    with pytest.raises(RuntimeError, match="the reward workers are closed|cannot schedule new futures"):
        task.score(task.train[0], [[1]])


def test_no_option_carries_a_prompt_from_training_into_the_held_out(load):
    """The keys are taken over all prompts, whatever is left out later: by a limit, an answer column, a reward. What one
    data set holds out, the other trains on in no order of the two. (Of 40 held-out prompts 18 were once trained on.)"""
    rows = sums(90)
    for i, row in enumerate(rows):
        row["question"] += " please" * (i % 30)
        row["other"] = None if i % 3 else "1"
        if i % 7 == 0:
            row["answer"] = "\\frac{"
    more = rows[60:] + sums(200, 200)  # so many that some of what `a` holds out is not among its smallest
    write_rows(Path("a.jsonl"), rows)
    write_rows(Path("b.jsonl"), more)
    of_a = smallest(rows, 20)
    of_both = of_a | smallest(more, 20)
    for names, held_out, options in (
        ("a.jsonl", of_a, {}),
        ("a.jsonl", of_a, {"max_prompt_tokens": 60}),
        ("a.jsonl", of_a, {"answer_column": "other"}),
        ("a.jsonl", of_a, {"reward": "math"}),
        ("a.jsonl,b.jsonl", of_both, {}),
        ("b.jsonl:exact,a.jsonl:math", of_both, {}),
    ):
        task = load(names, held_out=20, **options)
        every = task.train + task.held_out
        assert keys(task.held_out) <= held_out
        assert not keys(task.train) & held_out
        assert len(keys(every)) == len(every)
        assert {p.source for p in task.train} == set(re.findall(r"\w\.jsonl", names))


def test_an_evaluation_set_is_known_in_other_words_around_the_question(load):
    """A system message, or an instruction behind the question, on either side. `What is 1 + 2?` is no part of
    `What is 11 + 2?`, nor `s 11 + 2?`, and a prompt of one word is in none that holds the word."""
    rows = sums(40)
    wrapped = [{**row, "question": f"Be  brief. {row['question']} Think step by step."} for row in rows]
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 2?"}]
    for trained, evaluated, numbers in (
        (rows, wrapped[:9], set(map(str, range(9)))),
        (wrapped, rows[:9], set(map(str, range(9)))),
        (rows, [{"question": asked, "answer": "3"}], {"1"}),
    ):
        own = write_rows(
            Path("own.jsonl"),
            [*evaluated, {"question": "What", "answer": "1"}, {"question": "s 11 + 2?", "answer": "1"}],
        )
        task = load(trained, held_out=1, eval_dataset=f"own={own}")
        left = {re.search(r"is (\d+) ", task.question(problem))[1] for problem in task.train}
        assert not left & numbers
        assert len(left) >= 39 - len(numbers)


def test_an_evaluation_set_has_a_reward_of_its_own(load):
    """`exact` for the sums, `math` for the set, also on a prompt that both have."""
    own = write_rows(Path("own.jsonl"), sums(40))
    task = load(sums(60), eval_dataset=f"own={own}:math")
    problems = {(p.key, p.source): p for p in task.held_out}
    key = next(p.key for p in task.held_out if p.source != "own" and (p.key, "own") in problems)
    assert is_correct_in_prose(task, problems[key, "own"])
    assert not is_correct_in_prose(task, problems[key, task.sources[0]])


def test_a_run_with_an_evaluation_set(monkeypatch, tmp_path, model, capsys):
    """A run without the set, then resumed with it: the evaluations from then on have it beside the held-out prompts, which
    alone are the pass rate, and its curve is fitted at the end. A set that has a prompt of the checkpoint is refused."""
    record_rollouts(monkeypatch)
    monkeypatch.setattr(runtime.run.signal, "signal", lambda number, handler: None)
    rows = [{"prompt": f"{a} {b} again", "answer": "7"} for a in range(4) for b in range(4)]
    run = tmp_path / "run"
    data = write_rows(tmp_path / "rows.jsonl", rows)
    own = write_rows(tmp_path / "own.jsonl", [{"prompt": f"{a} {a} {a} again", "answer": "7"} for a in range(3)])
    flags = f"--model {model} --dataset {data} --output_dir {run} --held_out 4 --reward exact"
    flags += " --batch_prompts 3 --rollouts 4 --max_steps 2 --eval_every 1 --save_every 1 --lr 0.01"
    assert train.main([*flags.split(), "--interruption_phrase", "time up </think>"]) == 0
    assert f"12 prompts to train on; held out: 4 of {data}; left out: no row" in capsys.readouterr().out
    assert train.main(["--resume", str(run), "--max_steps", "4", "--eval_dataset", f"own={own}"]) == 0
    assert "\nown: no fit" in capsys.readouterr().out
    evaluations = Folder(run).read("eval.jsonl")
    assert [sorted(record.get("data_sets", {})) for record in evaluations] == [[], [], [], ["own"], ["own"]]
    for record in evaluations[3:]:
        of_own = record["data_sets"]["own"]
        assert (record["n_prompts"], of_own["n_prompts"]) == (4, 3)
        assert record["pass_rate"] == sum(record["correct"]) / 4 and of_own["pass_rate"] == sum(of_own["correct"]) / 3
    trained = {key for record in Folder(run).read("metrics.jsonl") if "step" in record for key, *_ in record["groups"]}
    again = write_rows(tmp_path / "again.jsonl", [row for row in rows if stable_key(row["prompt"]) in trained][:1])
    assert train.main(["--resume", str(run), "--max_steps", "5", "--eval_dataset", f"again={again}"]) == 2
    assert "does not fit this run" in capsys.readouterr().err


LONG = {"data": "long.jsonl", "held_out": 1, "max_prompt_tokens": 100}


REFUSED = [
    ({"data": "missing.jsonl"}, "`dataset` missing.jsonl: there is no such file"),
    ({"held_out": 12}, "12 usable prompts.*`held_out` 12 leaves 0 to train on and 12 to evaluate"),
    (LONG, "3 usable prompts.*'prompt_too_long': 40.*`held_out` 1 leaves 3 to train on and 0 to evaluate"),
    ({"prompt_template": "{question}"}, "`prompt_template` must hold {prompt}"),
    ({"reward": "exact,math"}, "`reward` must be one of math, exact or module:function, got 'exact,math'"),
    ({"eval_dataset": "own=missing.jsonl"}, "`eval_dataset` missing.jsonl: there is no such file"),
    ({"eval_dataset": "own=empty.jsonl"}, "`eval_dataset` own has no usable prompt"),
    ({"eval_dataset": "own=all.jsonl"}, "all.jsonl has .*'in_eval_dataset': .* leaves 0 to train on"),
    ({"eval_dataset": "all.jsonl=few.jsonl"}, "a name is that of a data set to train on"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_bad_options_are_refused_by_name_and_leave_no_process(monkeypatch, load, change, words):
    long = [{"question": f"long {i} " * 200, "answer": "1"} for i in range(40)]
    write_rows(Path("all.jsonl"), sums(12))
    write_rows(Path("few.jsonl"), sums(5))
    write_rows(Path("empty.jsonl"), [{"question": " ", "answer": "1"}])
    write_rows(Path("long.jsonl"), sums(3) + long)
    pools = []

    class Pool(judges.RewardPool):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            pools.append(self)

    monkeypatch.setattr(data_sets, "RewardPool", Pool)
    with pytest.raises(ValueError, match=words):
        load(**{"data": "all.jsonl"} | change)
    assert all(worker.process.poll() is not None for pool in pools for worker in pool._workers)
