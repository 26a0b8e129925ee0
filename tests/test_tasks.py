"""Chain mod 10 (problems, exact reward, split, demonstrations, cached warm start) and the tasks made of data sets."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from length_control import PHRASE as PAPERS_PHRASE
from length_control import Interruption
from tasks import data_sets, judges, tokens
from tasks.chain import (
    IDS,
    ChainTask,
)
from tasks.data_sets import PromptOptions, load_dataset_task
from tasks.prompts import epoch_order, stable_key
from tasks.rows import DataSet, final_answer, parse_data_sets
from tasks.warm_start import WarmStart

ROOT = Path(__file__).resolve().parents[1]
# A warm start of a few steps: the loss bound is met at once.
QUICK = WarmStart(clean_loss=99.0, corrupted_steps=2, batch_size=4)


@pytest.fixture(scope="module")
def task() -> ChainTask:
    return ChainTask(seed=0)


def ids_of(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


# ---------------------------------------------------------------------------------------------------------------------
# Data sets


def bpe_tokenizer(chat: bool, think: bool = True):
    """A byte-level BPE tokenizer trained on the spot."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>"] + ["<think>", "</think>"] * think
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["What is 1 + 2? It is boxed. Okay, time is up. Let me stop."] * 10, trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    if chat:
        found.chat_template = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}[assistant]{% endif %}")
    return found


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer(chat=True)


def write_rows(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def sums(n, start=0, prompt="question", answer="answer"):
    return [{prompt: f"What is {i} + 2?", answer: str(i + 2)} for i in range(start, start + n)]


def load(path, tokenizer, held_out=10, reward="exact", reward_workers=1, **options):
    names = {k: options.pop(k) for k in list(options) if k in PromptOptions.__dataclass_fields__}
    return load_dataset_task(path, tokenizer, PromptOptions(held_out=held_out, **names), reward=reward,
                             reward_workers=reward_workers, **options)


def test_parse_data_sets():
    assert parse_data_sets("a.jsonl") == [DataSet("a.jsonl")]
    assert parse_data_sets("openai/gsm8k:main=2, my/own.parquet=0.5") == [
        DataSet("openai/gsm8k", "main", None, 2.0), DataSet("my/own.parquet", None, None, 0.5)]
    assert parse_data_sets("a:main:test=3,b::train[:100]=1") == [
        DataSet("a", "main", "test", 3.0), DataSet("b", None, "train[:100]", 1.0)]
    for bad in ("", "a=0", "a=-1", "a=x", "a=inf", "a=nan", "a,,b", "=1", "a=", ":main"):
        with pytest.raises(ValueError, match="`dataset` must be"):
            parse_data_sets(bad)
    with pytest.raises(ValueError, match="twice"):
        parse_data_sets("a=1,b=2,a=3")
    for some in ("a=1,b", "a,b=2", "a=1,b,c=1"):
        with pytest.raises(ValueError, match="give every data set a weight, or none"):
            parse_data_sets(some)
    for file in ("rows.jsonl::test", "rows.parquet:main", "rows.jsonl:main:test=2"):
        with pytest.raises(ValueError, match=r"`dataset` rows\.\S+: a file has no configuration and no split"):
            parse_data_sets(file)


def test_final_answer():
    assert final_answer("We add 40 and 2.\n#### 42") == "42"
    assert final_answer("#### 1 #### 2,000 ") == "2,000"
    assert final_answer(" x ") == "x"
    assert (final_answer(42), final_answer(42.0), final_answer(0.5), final_answer(-3)) == ("42", "42", "0.5", "-3")
    assert (final_answer(1e-05), final_answer(-2.5e-6), final_answer(12.5)) == ("0.00001", "-0.0000025", "12.5")
    assert (final_answer(1e22), final_answer(1e23)) == ("1" + 22 * "0", "1" + 23 * "0")
    assert (final_answer(-0.0), final_answer(100.0), final_answer(-0.5)) == ("0", "100", "-0.5")
    assert final_answer("\ud800") == "\ufffd"
    for bad in (None, True, [1], {"a": 1}, float("nan"), float("inf")):
        assert final_answer(bad) is None


SHAPES = {
    "gsm8k": {"question": "Tom has {i} + 2?", "answer": "He adds <<{i}+2={s}>>.\n#### {s}"},
    "polaris": {"problem": "Tom has {i} + 2?", "answer": "{s}", "difficulty": "3/8"},
    "deepscaler": {"problem": "Tom has {i} + 2?", "answer": "{s}", "solution": "Clearly \\boxed{{1}}."},
    "chat": {"prompt": [{"role": "user", "content": "Tom has {i} + 2?"}], "reward_model": {"ground_truth": "{s}"}},
}


def shaped(value, i):
    if isinstance(value, str):
        return value.format(i=i, s=i + 2) if "{{" not in value else value
    if isinstance(value, dict):
        return {key: shaped(x, i) for key, x in value.items()}
    return [shaped(x, i) for x in value]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_row_shapes_out_of_the_box(tmp_path, tokenizer, shape, kind):
    rows = [shaped(SHAPES[shape], i) for i in range(30)]
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_rows(path, rows)
    task = load(str(path), tokenizer)
    assert (len(task.train), len(task.held_out), task.skipped) == (20, 10, {})
    for problem in task.train + task.held_out:
        i = int(problem.answer) - 2
        assert task.text(problem.prompt_ids) == f"[user]Tom has {i} + 2?[assistant]"
        assert problem.key == stable_key(f"Tom has {i} + 2?")
        assert problem.source == str(path)
    task.close()


def test_a_folder_in_the_hubs_format_loads_through_datasets(tmp_path, tokenizer, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_rows(folder / "train.jsonl", sums(15))
    write_rows(folder / "test.jsonl", sums(12, 100))
    task = load(str(folder), tokenizer)
    assert {int(p.answer) for p in task.train + task.held_out} == set(range(2, 17))
    task.close()
    task = load(f"{folder}::test", tokenizer)
    assert {int(p.answer) for p in task.train + task.held_out} == set(range(102, 114))
    task.close()


def test_the_split_is_by_hash_whatever_the_order_and_the_template(tmp_path, tokenizer):
    """The ten smallest SHA-256 of the prompts are held out; order, duplicates and template change nothing."""
    rows = sums(60)
    smallest = sorted(hashlib.sha256(row["question"].encode()).hexdigest() for row in rows)[:10]
    expected = {digest[:16] for digest in smallest}
    random.Random(0).shuffle(rows)
    again = [{**row, "question": "  " + row["question"].replace(" ", "  ") + "\n"} for row in rows[:25]]
    for name, some, options in (
        ("one", sums(60), {}),
        ("two", rows + again + again, {"prompt_template": "Solve: {prompt} Thanks {x}."}),
        ("three", rows, {"apply_chat_template": False}),
    ):
        task = load(write_rows(tmp_path / f"{name}.jsonl", some), tokenizer, **options)
        assert {p.key for p in task.held_out} == expected
        assert len(task.train) == 50
        assert not {p.key for p in task.train} & expected
        assert task.skipped == ({"duplicate_prompt": 50} if name == "two" else {})
        task.close()


def test_by_default_a_thousand_are_held_out(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", sums(1003))
    task = load_dataset_task(path, tokenizer, reward="exact", reward_workers=1)
    assert (len(task.held_out), len(task.train)) == (1000, 3)
    task.close()


def test_template_and_chat_template(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [{"question": "What is {prompt} + {x}?", "answer": "1"}, *sums(11)])
    options = {"prompt_template": "Q: {prompt} Box it: \\boxed{}."}
    with_chat, without = load(path, tokenizer, **options), load(path, tokenizer, apply_chat_template=False, **options)
    plain = load(path, bpe_tokenizer(chat=False), **options)
    key = stable_key("What is {prompt} + {x}?")
    text = "Q: What is {prompt} + {x}? Box it: \\boxed{}."
    for task, expected in ((with_chat, f"[user]{text}[assistant]"), (without, text), (plain, text)):
        problem = next(p for p in task.train + task.held_out if p.key == key)
        assert task.text(problem.prompt_ids) == expected
        task.close()


def test_bad_rows_are_counted_by_kind(tmp_path, tokenizer):
    bad = [
        "{not json", "[" * 100_000, "[1, 2]", '"text"', "",
        {"question": "", "answer": "1"}, {"question": " \n", "answer": "1"}, {"question": 5, "answer": "1"},
        {"question": [{"role": "user"}], "answer": "1"}, {"question": [], "answer": "1"},
        {"question": "no answer"}, {"question": "null", "answer": None}, {"question": "list", "answer": [1]},
        {"question": "bool", "answer": True}, {"question": "empty", "answer": " "},
        {"question": "empty2", "answer": "#### "},
        {"question": "unreadable", "answer": "\\frac{"}, {"question": "long " * 200, "answer": "1"},
        {"question": "What is 3 + 2?", "answer": "5"}, {"question": "lone \ud800", "answer": "7"},
        {"answer": "1"},
    ]  # fmt: skip
    path = write_rows(tmp_path / "a.jsonl", [{"other": 1}, *sums(20), *bad])
    task = load(path, tokenizer, reward="math", max_prompt_tokens=60)
    assert task.skipped == {
        "not_json": 2, "not_an_object": 2, "empty_prompt": 2, "prompt_is_no_text": 5, "no_answer": 2,
        "answer_is_no_text": 2, "empty_answer": 2, "unreadable_answer": 1, "prompt_too_long": 1, "duplicate_prompt": 1,
    }  # fmt: skip
    assert len(task.train) + len(task.held_out) == 21
    assert all(len(p.prompt_ids) <= 60 for p in task.train + task.held_out)
    task.close()


def test_a_prompt_as_long_as_the_limit_stays(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", sums(12, 10))
    length = len(tokenizer.apply_chat_template([{"role": "user", "content": "What is 10 + 2?"}], return_dict=False,
                                               add_generation_prompt=True))
    task = load(path, tokenizer, max_prompt_tokens=length)
    assert not task.skipped
    task.close()
    with pytest.raises(ValueError, match="prompt_too_long"):
        load(path, tokenizer, max_prompt_tokens=length - 1)


@pytest.mark.parametrize(("change", "words"), [
    ({"datasets": "missing.jsonl"}, "`dataset` missing.jsonl: there is no such file"),
    ({"datasets": "notes.txt"}, "must end with .jsonl or .parquet"),
    ({"datasets": "broken.parquet"}, "`dataset` broken.parquet cannot be loaded"),
    ({"datasets": "empty.jsonl"}, "(?s)no row has prompt, problem.*none at all.*`prompt_column`"),
    ({"prompt_column": "text"}, "(?s)no row has text.*columns are answer, question.*`prompt_column`"),
    ({"answer_column": "label"}, "(?s)no row has label.*columns are answer, question.*`answer_column`"),
    ({"datasets": "nocolumn.jsonl"}, "(?s)no row has answer, ground_truth.*`answer_column`"),
    ({"held_out": 12}, "(?s)12 usable prompts.*`held_out` 12"),
    ({"prompt_template": "{question}"}, "`prompt_template` must hold {prompt}"),
    ({"interruption_phrase": "Stop."}, "`interruption_phrase` must end with"),
    ({"stop_tokens": "<|end|>, <nope>,<|END|>"}, "`stop_tokens`: the tokenizer has no token '<nope>', '<|END|>'; "),
    ({"stop_tokens": ""}, "`stop_tokens`: the tokenizer has no token ''"),
    ({"thinking": False, "end_of_thinking": "</think>"}, "`end_of_thinking` is for models that think"),
    ({"reward": "exact,exact"}, "`reward` must be one name or one for each of the 1"),
    ({"reward": "exactly"}, "`reward` must be one of"),
])  # fmt: skip
def test_bad_options_name_the_flag_and_leave_no_process(tmp_path, monkeypatch, tokenizer, change, words):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "good.jsonl", sums(12))
    write_rows(tmp_path / "nocolumn.jsonl", [{"question": "a", "b": 1}])
    for name in ("notes.txt", "broken.parquet", "empty.jsonl"):
        (tmp_path / name).write_text("")
    pools = []
    real = judges.RewardPool
    monkeypatch.setattr(data_sets, "RewardPool", lambda *a, **k: pools.append(real(*a, **k)) or pools[-1])
    with pytest.raises(ValueError, match=words):
        load(change.pop("datasets", "good.jsonl"), tokenizer, **change)
    assert all(worker.process.poll() is not None for pool in pools for worker in pool._workers)


def test_a_data_set_that_the_hub_does_not_have(tokenizer, monkeypatch, tmp_path):
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    def offline(*_, **__):
        raise DatasetNotFoundError("Dataset 'no/such' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"(?s)`dataset` no/such cannot be loaded.*NAME:CONFIG"):
        load("no/such:main", tokenizer)


def test_named_columns_and_nested_ones(tmp_path, tokenizer):
    rows = [{"prompt": "ignored", "in": {"text": f"Say {i}"}, "a.b": str(i), "answer": "ignored"} for i in range(12)]
    task = load(write_rows(tmp_path / "a.jsonl", rows), tokenizer, prompt_column="in.text", answer_column="a.b")
    assert all(p.key == stable_key(f"Say {p.answer}") for p in task.train + task.held_out)
    task.close()


def test_scores_are_of_what_follows_the_thinking(tmp_path, tokenizer):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer, reward="math")
    problem = task.train[0]

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    right = [ids(f"thinking</think>It is \\boxed{{{problem.answer}}}.<|end|>"), ids(f"</think>{problem.answer}")]
    unfinished, other = ids(f"\\boxed{{{problem.answer}}}"), ids("</think>\\boxed{-1}<|end|>")
    wrong = [unfinished, other, ids(f"</think>{problem.answer}1"), []]
    assert task.score(problem, right + wrong) == [(1.0, True)] * 2 + [(-1.0, False)] * 4
    assert task.reward(problem, tuple(right[0])) == (1.0, True)
    assert task.reward(problem, wrong[1]) == (-1.0, False)
    assert task.counts == Counter(correct=3, unfinished=2, wrong=3)
    assert task.end_of_thinking_ids == tuple(ids("</think>"))
    assert task.phrase_ids[-1:] == task.end_of_thinking_ids
    assert task.text(task.phrase_ids) == (
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>")
    task.close()


def test_exact_does_not_see_the_stop_token_but_sees_another(tmp_path, tokenizer):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer)
    problem = task.train[0]
    body = tokenizer.encode(f"</think>{problem.answer}", add_special_tokens=False)
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert task.score(problem, [body, [*body, stop], [*body, stop, stop], [*body, pad]]) == [
        (1.0, True), (1.0, True), (-1.0, False), (-1.0, False)]
    task.close()


def test_a_model_that_does_not_think_apart(tmp_path):
    tokenizer = bpe_tokenizer(chat=True, think=False)
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer)
    assert task.end_of_thinking_ids == task.phrase_ids == ()
    ids = tokenizer.encode(task.train[0].answer, add_special_tokens=False)
    assert task.reward(task.train[0], ids) == (1.0, True)
    task.close()
    task = load(write_rows(tmp_path / "b.jsonl", sums(12)), tokenizer, end_of_thinking="</think>")
    assert len(task.end_of_thinking_ids) > 1
    assert task.thinking_end(task.phrase_ids) == len(task.phrase_ids)
    assert task.reward(task.train[0], ids) == (-1.0, False)
    assert task.reward(task.train[0], [*task.end_of_thinking_ids, *ids]) == (1.0, True)
    task.close()


def test_stop_tokens_come_from_the_generation_config_too(tmp_path):
    """Chat models end a turn with one token and a text with another; the model's generation_config.json names both."""
    from transformers import AutoTokenizer, GenerationConfig

    bpe_tokenizer(chat=True).save_pretrained(tmp_path)
    assert tokens.default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0,)
    GenerationConfig(eos_token_id=[7, 0]).save_pretrained(tmp_path)
    assert tokens.default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0, 7)
    GenerationConfig(eos_token_id=9).save_pretrained(tmp_path)
    assert tokens.default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0, 9)


def test_stop_tokens_are_given_by_name(tmp_path, tokenizer):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer, stop_tokens="<|pad|>, <|end|>")
    assert task.stop_ids == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    task.close()


def test_a_tokenizer_without_an_end_needs_a_stop_token(tmp_path):
    tokenizer = bpe_tokenizer(chat=True)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token; name one with `stop_tokens`"):
        load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer)


def test_thinking_decides_what_is_judged(tmp_path, tokenizer):
    """The tokenizer knows `</think>`, as those of instruct models do that never think. A right answer at once is
    unfinished for `None` and `True`, and right for `False`; one behind `</think>` is right for a model that thinks."""
    path = write_rows(tmp_path / "a.jsonl", sums(12))
    for thinking, expected in ((None, [False, True]), (True, [False, True]), (False, [True, False])):
        task = load(path, tokenizer, thinking=thinking)
        answer = task.train[0].answer
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in (answer, f"so</think>{answer}")]
        assert [correct for _, correct in task.score(task.train[0], ids)] == expected
        assert (task.end_of_thinking_ids == ()) == (thinking is False)
        task.close()


def test_a_model_that_thinks_without_a_token_for_its_end(tmp_path):
    """`True` needs no `</think>` in the vocabulary; another end of thinking replaces it."""
    tokenizer = bpe_tokenizer(chat=False, think=False)
    for end in ("</think>", "DONE"):
        task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer, thinking=True,
                    end_of_thinking=None if end == "</think>" else end)
        ids = tokenizer.encode(f"so {end} {task.train[0].answer}", add_special_tokens=False)
        assert task.reward(task.train[0], ids) == (1.0, True)
        assert tokenizer.decode(task.end_of_thinking_ids) == end
        task.close()


def test_the_chat_template_is_told_whether_to_think(tmp_path):
    """A template as Qwen3's: thinking unless `enable_thinking` is false, which closes it in the prompt."""
    tokenizer = bpe_tokenizer(chat=True)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer.chat_template += "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    path = write_rows(tmp_path / "a.jsonl", sums(12))
    for thinking, end in ((None, "[assistant]"), (True, "[assistant]<think>"), (False, "[assistant]<think></think>")):
        task = load(path, tokenizer, thinking=thinking)
        assert all(task.text(problem.prompt_ids).endswith(f"+ 2?{end}") for problem in task.train)
        task.close()


QWEN2_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
               r"\s+(?!\S)|\s+")  # fmt: skip


def qwen2_tokenizer(texts):
    """A byte-level BPE tokenizer with Qwen2's pre-tokenizer, trained on `texts`; `</think>` is no token of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def test_the_end_of_thinking_is_found_however_it_is_tokenized(tmp_path):
    """`</think>` is `</ think >` alone, `</ think >\\n\\n` before a blank line and ` </ think >` behind a space. Thinking
    that ended so by itself gets no phrase, and the answer's tokens are those behind the token that completes the mark.
    The paper's phrase ends with ` </think>`, encoded as a whole."""
    tokenizer = qwen2_tokenizer(["I think </think>\n\nThe answer is 5", "think</think> 5", PAPERS_PHRASE] * 20)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    forms = {text: [tokenizer.decode([i]) for i in encode(text)] for text in
             ("</think>", "</think>\n\n", " </think>", " </think>\n\n")}
    assert forms == {"</think>": ["</", "think", ">"], "</think>\n\n": ["</", "think", ">\n\n"],
                     " </think>": [" </", "think", ">"], " </think>\n\n": [" </", "think", ">\n\n"]}  # fmt: skip
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer, thinking=True)
    assert task.phrase_ids == tuple(encode(PAPERS_PHRASE))
    for phrase_ids in (task.phrase_ids, (*encode(PAPERS_PHRASE[:-8]), *task.end_of_thinking_ids)):
        control = Interruption(50, 50, 9, phrase_ids, task.end_of_thinking_ids, task.thinking_end)
        for between in forms:
            for answer in ("", "7", "The answer is 5"):
                ids = encode(f"I think{between}{answer}")
                leg = control.second_leg([1], ids, "length")
                assert (leg.prompt_ids, leg.forced_ids) == ([1, *ids], [])
                assert leg.max_tokens == 9 - len(encode(answer))
        for text in ("I think", "I think </", "I think </think", "\u20ac"):
            assert control.second_leg([1], encode(text), "length").forced_ids == list(phrase_ids)
        assert control.second_leg([1], encode("\u20ac")[:1], "length").forced_ids  # half a character
    task.close()


def test_a_token_of_its_own_is_found_by_its_id(tmp_path, tokenizer):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer)
    assert task.thinking_end is None and len(task.end_of_thinking_ids) == 1
    task.close()


def children():
    """Ids of this process's children that run."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        found |= set((thread / "children").read_text().split())
    return found


def test_a_process_that_does_not_judge_keeps_no_worker(tmp_path, tokenizer):
    """Bad rows are counted all the same; a process that judges has its worker."""
    path = write_rows(tmp_path / "a.jsonl", [*sums(12), {"question": "unreadable", "answer": "\\frac{"}])
    before = children()
    task = load(path, tokenizer, reward="math", judge=False)
    assert task.skipped == {"unreadable_answer": 1}
    assert children() == before
    with pytest.raises(RuntimeError, match="the reward workers are closed|cannot schedule new futures"):
        task.reward(task.train[0], [1])
    task.close()
    task = load(path, tokenizer, reward="math")
    assert len(children() - before) == 1
    task.close()
    assert children() == before


def test_the_users_function_gets_prompt_completion_and_the_rows_own_answer(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "judge_rows.py").write_text(
        "def judge(prompt, completion, answer):\n"
        "    return prompt == 'Say ' + answer['say'] and completion == 'no</think>' + answer['say']\n")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {i}", "answer": {"say": str(i)}} for i in range(12)]
    task = load(write_rows(tmp_path / "a.jsonl", rows), tokenizer, reward="judge_rows:judge", prompt_template="<<{prompt}>>")
    for problem in task.train:
        ids = tokenizer.encode(f"no</think>{problem.answer['say']}<|end|>", add_special_tokens=False)
        assert task.score(problem, [ids, ids[:-2]]) == [(1.0, True), (-1.0, False)]
    task.close()


def test_several_data_sets_with_their_own_rewards_and_no_shared_prompt(tmp_path, tokenizer):
    """The second has ten prompts of the first: they stay with the first, on whichever side of its split they fell."""
    one = write_rows(tmp_path / "one.jsonl", sums(40))
    two = write_rows(tmp_path / "two.jsonl", sums(40, start=30))
    task = load(f"{one}=3,{two}=1", tokenizer, reward="exact,math")
    assert task.sources == [one, two]
    assert task.weights == {one: 3.0, two: 1.0}
    assert task.skipped == {"duplicate_prompt": 10}
    assert Counter(p.source for p in task.train) == {one: 30, two: 20}
    assert Counter(p.source for p in task.held_out) == {one: 10, two: 10}
    keys = [p.key for p in task.train + task.held_out]
    assert len(keys) == len(set(keys)) == 70
    for source, expected in ((one, (-1.0, False)), (two, (1.0, True))):
        problem = next(p for p in task.train if p.source == source)
        ids = tokenizer.encode(f"</think>The answer is {problem.answer}.", add_special_tokens=False)
        assert task.reward(problem, ids) == expected
    task.close()


def test_data_sets_without_weights_are_drawn_by_their_sizes(tmp_path, tokenizer):
    """`epoch_order` without weights is a shuffle of everything: 20 and 5 prompts to train on, all in one epoch. A single
    data set has all the places whatever its weight."""
    one, two = write_rows(tmp_path / "one.jsonl", sums(30)), write_rows(tmp_path / "two.jsonl", sums(15, 50))
    task = load(f"{one},{two}", tokenizer)
    assert task.weights == {} and task.sources == [one, two]
    order = epoch_order(task.train, task.weights, 0, 0)
    assert Counter(task.train[i].source for i in order) == {one: 20, two: 5} and len(set(order)) == 25
    task.close()
    task = load(f"{one}=5", tokenizer)
    assert task.weights == {}
    task.close()
