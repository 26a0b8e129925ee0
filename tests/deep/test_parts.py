"""runtime/parts.py: the parts of a run made from its flags, and what is refused by the flag's name."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from processes import alive, family, wait_for_end

import train
from runtime import parts
from runtime.flags import Flags, UsageError
from runtime.folder import Folder
from runtime.parts import Run, load_task, new_interruption
from tasks import arithmetic

OPERATIONS = Path(__file__).resolve().parents[2] / "docs/operations.md"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A folder with a word tokenizer that knows `</think>` and has a chat template, and rows whose answer is `7`."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = arithmetic.word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %} wait"
    thinks = "{% if enable_thinking %} <think>{% else %} </think>{% endif %}"
    tokenizer.chat_template += "{% if enable_thinking is defined %}" + thinks + "{% endif %}"
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"{a} {b} again", "answer": "7"} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def data_flags(folder, **changes):
    options = {"dataset": str(folder / "rows.jsonl"), "model": str(folder), "held_out": 4}
    return Flags(**options | {"reward": "exact", "interruption_phrase": "time up </think>"} | changes)


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("phrase", ["", "time up </think>"])
def test_a_tokenizer_of_few_words_is_one_sentence(chat_model, tmp_path, template, phrase):
    """The model of a demo run cannot write other prompts, nor the paper's phrase: its tokenizer raises a bare
    Exception."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "6 * 7?", "answer": "42"}\n' * 2)
    flags = data_flags(chat_model, dataset=str(rows), interruption_phrase=phrase, apply_chat_template=template)
    with pytest.raises(
        UsageError, match=r"^--model: its tokenizer cannot write .* \(Exception: WordLevel error: .*\); "
    ):
        load_task(flags)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "prompt_ends", "correct"),
    [
        ({}, "again wait", [False, True]),
        ({"thinking": "true"}, "again wait <think>", [False, True]),
        ({"thinking": "false", "interruption_phrase": ""}, "again wait </think>", [True, False]),
        ({"apply_chat_template": False}, "again", [False, True]),
        ({"thinking": "up", "interruption_phrase": "time up"}, "again wait", [False, False]),
    ],
)
def test_flags_say_how_a_data_set_is_asked_and_judged(chat_model, changes, prompt_ends, correct):
    """The end of the prompts, and the verdicts on `7` and on `wait </think> 7`."""
    task = load_task(data_flags(chat_model, **changes))
    try:
        assert all(task.text(problem.prompt_ids).endswith(prompt_ends) for problem in task.train)
        completions = [task.tokenizer(text)["input_ids"] for text in ("7", "wait </think> 7")]
        assert [right for _, right in task.score(task.train[0], completions)] == correct
    finally:
        task.close()


def test_a_function_of_yours_says_what_no_flag_does(monkeypatch, tmp_path, chat_model):
    """The one of docs/operations.md, on this model and these rows of four tokens; an end that no token has is added."""
    [block] = re.findall("```py\n(.*?)```", OPERATIONS.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, limit, usable in (("mine4", 4, 12), ("mine3", 3, 0)):
        code = block.replace('"MODEL"', repr(str(chat_model))).replace("rows.jsonl", str(chat_model / "rows.jsonl"))
        options = f"max_prompt_tokens={limit}, interruption_phrase='time up </think>'"
        Path(f"{name}.py").write_text(code.replace("max_prompt_tokens=8192", options))
        flags = Flags(task=f"{name}:make", model=str(chat_model), held_out=4)
        if not usable:
            with pytest.raises(UsageError, match="has 0 usable prompts.*'prompt_too_long': 16"):
                load_task(flags)
            return
        task = load_task(flags)
        assert len(task.train) == usable and task.stop_ids == (arithmetic.IDS["<eos>"],)
        ids = task.tokenizer("wait </think> 7 <eos>")["input_ids"]
        assert task.score(task.train[0], [ids]) == [(1.0, True)]
        task.close()


@pytest.mark.parametrize("main", [True, False])
def test_only_rank_0_has_reward_workers_and_they_end_with_a_start_that_fails(monkeypatch, tmp_path, chat_model, main):
    """On the other ranks the rows are checked all the same. The folder is free again, too."""
    ranks, workers, before = SimpleNamespace(is_main_process=main, num_processes=1), [], set(family(os.getpid()))

    def no_trainer(*_):
        workers.extend(pid for pid in set(family(os.getpid())) - before if alive(pid))
        raise ZeroDivisionError

    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: ranks)
    monkeypatch.setattr(parts, "Trainer", no_trainer)
    flags = data_flags(chat_model, output_dir=str(tmp_path / "run"))
    with pytest.raises(ZeroDivisionError) as caught:
        Run(flags)
    assert bool(workers) == main
    wait_for_end(workers)
    assert caught  # whose traceback holds the task: no collection of garbage has ended them
    Folder(flags.output_dir).lock()


@pytest.mark.parametrize(("threads", "count"), [("", 1), ("0", 1), ("3,2", 3), ("2", 2), ("many", 1)])
def test_any_number_of_threads_in_the_environment_starts(monkeypatch, threads, count):
    counts = []
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: None)
    parts.new_accelerator(Flags())
    assert counts == [count]


def test_the_generator_finds_the_end_of_thinking_as_the_task_does():
    """A task that knows none cannot be interrupted."""
    task = arithmetic.ChainTask(pool_size=8, held_out_size=8)
    task.thinking_end = lambda ids: ids.index(task.end_of_thinking_ids[0]) + 1
    assert new_interruption(Flags(), task).thinking_end is task.thinking_end
    task.end_of_thinking_ids = ()
    assert new_interruption(Flags(length_control="none"), task) is None
    with pytest.raises(UsageError, match="--length_control interruption: end_of_thinking_ids is empty"):
        new_interruption(Flags(), task)


def test_devices_that_cannot_work_end_the_run_before_anything_else(monkeypatch, capsys, tmp_path):
    """Not even the process group or the run's folder is made."""
    monkeypatch.setattr(parts, "new_accelerator", lambda flags: 1 / 0)

    def choose_devices(flags):
        raise UsageError("--engine_args: no GPU.")

    monkeypatch.setattr(parts, "choose_devices", choose_devices)
    assert train.main(["--output_dir", str(tmp_path / "run"), "--engine", "torch"]) == 2
    assert capsys.readouterr().err == "train.py: --engine_args: no GPU.\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [None, "0"])
def test_one_process_on_a_gpu_needs_no_process_group(monkeypatch, rank):
    """Without LOCAL_RANK, as under plain `python train.py`, a backend of ours would make accelerate ask a process group
    that nobody made. With it, objects travel by gloo."""
    from accelerate.state import AcceleratorState

    groups = []
    handlers = accelerate.InitProcessGroupKwargs
    monkeypatch.setattr(accelerate, "InitProcessGroupKwargs", lambda **k: groups.append(handlers(**k)) or groups[-1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setattr(accelerate, "Accelerator", lambda **k: SimpleNamespace(is_main_process=True))
    AcceleratorState._reset_state(True)
    try:
        parts.new_accelerator(Flags())
    finally:
        AcceleratorState._reset_state(True)
    assert groups[0].backend == ("nccl" if rank is None else "cpu:gloo,cuda:nccl")  # accelerate's own, not asked for


@pytest.mark.parametrize("variable", ["MIXED_PRECISION=bf16", "GRADIENT_ACCUMULATION_STEPS=4", "USE_DEEPSPEED=true"])
def test_what_the_environment_says_to_accelerate_changes_no_gradient(monkeypatch, variable):
    """accelerate would divide each gradient by the accumulation, and cast under an FP32 run."""
    name, value = f"ACCELERATE_{variable}".split("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"^{name}={value} would change the training; unset it"):
        parts.new_accelerator(Flags())
