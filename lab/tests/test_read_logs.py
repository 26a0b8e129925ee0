"""Tests of `lab/law/read_logs.py`: the logs of other frameworks, what is refused."""

import json
import subprocess
import time
from pathlib import Path

import curves
import forecast
import numpy as np
import pytest
import read_logs as fit_logs
from read_logs import main

from fit_sigmoid import sigmoid

pytestmark = pytest.mark.medium

C = 50_000.0 * np.arange(20)
R = sigmoid(C, 0.1, 0.8, 2.0, 200_000.0).round(5)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(head, *columns, by=","):
    return "".join(by.join(map(str, row)) + "\n" for row in [head, *zip(*columns, strict=True)])


def load(path, text, **flags):
    """Name of x, and the points of each run."""
    path.write_text(text)
    words = []
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", *(value.split() if name == "range" else [value])]
    return fit_logs.load(str(path), fit_logs.command_line([str(path), *words])[0])


ROWS = [{"step": 5 * i, "tokens": C[i], "pass_rate": R[i], "n_prompts": 50, "n_samples": 2} for i in range(20)]
TRL = [{"step": 5 * i, "eval_reward": r, "eval_rewards/judge/mean": r, "epoch": 0.1} for i, r in enumerate(R)]
NAMES = "val-core/openai/gsm8k/reward/mean@1", "val-core/openai/gsm8k/acc/best@4"
VERL = [{"step": 5 * i, "data": dict(zip(NAMES, (r, 1.0), strict=True))} for i, r in enumerate(R)]
OTHERS = [{"step": 1, "loss": 0.5}, {"step": 5, "loss": 0.4}]  # of training
STEPS = 5.0 * np.arange(20)
REWARD_NAMES = [  # a rate of success, and another column that looks like one
    ("reward/hard_pass_rate", "reward/valid_rate"),
    ("reward", "rewards / fn1_valid / mean"),
    ("rewards/correctness_reward", "rewards/valid_json_reward"),
    ("valid/acc", "score"),
    ("valid_reward", "reward"),
    ("run-1 - valid/accuracy", "run-1 - train/accuracy"),
    ("eval/accuracy", "eval/valid_answer_rate"),
    ("mean_reward", "reward/checker_failure_rate"),
    ("train_reward", "reward/schema_ok"),
    ("solved", "answer_retry_rate"),
    ("reward", "eval/correct_eligible"),
    ("score", "gradient_accumulation_steps"),
    ("val/minerva/acc", "val/incorrect_rate"),
    ("reward_mean", "loss_correction_accelerator"),
]

# ---- what is read with flags: (text, flags, name of x, C, samples)

READ = {
    "ours": (lines(ROWS), {}, "tokens", C, 100),
    "ours, another x and a number of samples": (lines(ROWS), {"x": "step", "samples": "77"}, "step", STEPS, 77),
    "a column of samples": (lines(ROWS), {"samples": "n_prompts"}, "tokens", C, 50),
    "a data set of ours": (
        lines(
            [
                row
                | {
                    "pass_rate": 1.0,
                    "data_sets": {"aime": {"pass_rate": row["pass_rate"], "n_prompts": 30, "n_samples": 4}},
                }
                for row in ROWS
            ]
        ),
        {"y": "aime/pass_rate"},
        "tokens",
        C,
        120,
    ),
    "trainer_state.json of TRL": (
        json.dumps({"best_metric": None, "global_step": 95, "log_history": [*OTHERS, *TRL]}, indent=2),
        {},
        "step",
        STEPS,
        None,
    ),
    "verl": (
        lines([{"step": 1, "data": {"actor/loss": 1.0}}, *VERL]),
        {"y": "mean@1", "samples": "1319"},
        "step",
        STEPS,
        1319,
    ),
    "what verl prints": (
        "".join(
            f"(pid=1) step:{5 * i} - perf/all:tokens:{C[i]} - val-core/openai/gsm8k/reward/mean@1:{r!r}\n(pid=1) INFO\n"
            for i, r in enumerate(R.tolist())
        ),
        {"x": "all:tokens", "y": "mean@1"},
        "perf/all:tokens",
        C,
        None,
    ),
    "a spreadsheet": (
        "\ufeff" + csv(("gpu hours ", "acc"), C, R, by=";"),
        {"x": "gpu hours", "y": "acc"},
        "gpu hours",
        C,
        None,
    ),
    "wandb": (
        csv(("Step", "run-1 - eval/acc", "run-1 - eval/acc__MIN"), STEPS, R, 0 * R),
        {"y": "eval/acc"},
        "Step",
        STEPS,
        None,
    ),
    "padded cells, one of them empty": (csv(("tokens", "pass_rate"), C, R, by=", ") + "7,  \n", {}, "tokens", C, None),
    "tabs, quotes and empty cells": (
        csv(("tokens", "grad", "pass_rate", "loss", "name"), C, [""] * 20, R, R / 2, ['"a"'] * 20, by="\t"),
        {},
        "tokens",
        C,
        None,
    ),
    "two columns of one name: the last": (
        csv(("tokens", "pass_rate", "pass_rate"), C, 0 * R, R),
        {},
        "tokens",
        C,
        None,
    ),
    "TensorBoard, percent, seconds since 1970": (
        csv(("Wall time", "Step", "Value"), 1763410000 + C / 1000, STEPS, 100 * R),
        {"x": "Wall time", "range": "0 100", "x_start": "first"},
        "Wall time",
        C / 1000,
        None,
    ),
}


@pytest.mark.parametrize("name", READ)
def test_one_run_in_the_files_of_many_frameworks(tmp_path, name):
    text, flags, x, expected, samples = READ[name]
    name_of_x, runs = load(tmp_path / "log", text, **flags)
    (points,) = runs.values()
    assert name_of_x == x and points["C"].to_numpy() == pytest.approx(expected)
    assert points["R"].to_numpy() == pytest.approx(R)
    assert points["n"].isna().all() if samples is None else points["n"].tolist() == [samples] * 20


# ---- the kinds of files that public repositories keep, without a flag

K = range(20)
TRAINING = [{"loss": 0.1, "reward": R[i], "reward_std": 0.2, "rewards/fn/std": 0.1, "epoch": 0.5, "step": i} for i in K]


def trainer_state(rows):
    return json.dumps({"best_metric": None, "log_history": [{"loss": 1.0}, *rows], "max_steps": 500}, indent=2)


def records(x, **columns):
    """Records with the step `x` and columns; a value of None is R."""
    return [{x: i} | {name: R[i] if value is None else value for name, value in columns.items()} for i in K]


def rename(rows, **names):
    return [{names.get(name, name): value for name, value in row.items()} for row in rows]


def console(*names, value="{:.5f}"):
    """What verl prints."""
    texts = [" - ".join(f"{name}:{value.format(R[i])}" for name in names) for i in K]
    return "".join(f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{i} - actor/lr:1e-06 - {texts[i]}\n" for i in K)


def notebook(*outputs):
    cells = [{"cell_type": "code", "source": ["num_generations = 8"], "outputs": [output]} for output in outputs]
    return json.dumps({"cells": cells, "nbformat": 4}, indent=1)


def table(*head):
    """The table that the trainer leaves in a notebook."""
    rows = [head, *((i, 0.1, R[i]) for i in K)]
    tag = ["th"] + ["td"] * 20
    text = "".join(
        "<tr>\n" + "".join(f"  <{t}>{v}</{t}>\n" for v in row) + "</tr>\n" for t, row in zip(tag, rows, strict=True)
    )
    return {"data": {"text/html": [f'<table border="1">\n{text}</table>']}}


PRINTED = "".join(
    f"  5%|# | {i}/20 [00:10<01:00]\r{{'loss': 0.1, 'grad_norm': nan, 'reward': {R[i]}, 'epoch': 0.0}}\n" for i in K
)
STRINGS = "".join(f"{{'loss': '0.1', 'reward': '{R[i]}', 'reward_std': '0.1', 'epoch': '{i / 100}'}}\n" for i in K)
SWEEP = csv(
    ("run", "phase", "learning_rate", "grpo_step", "minutes", "answer_accuracy", "format_accuracy"),
    ["e1"] * 20 + ["e2"] * 20,
    ["broad"] * 40,
    [4e-5] * 40,
    [*K, *K],
    [""] * 40,
    [*R, *R],
    [0.9] * 40,
)
RUNS = [{"step": i, "run": run, "split": s, "acc": R[i]} for i in K for run in (1, 2) for s in ("train", "eval")]
RUN_AND_SPLIT = [f"run={run} split={s}" for run in (1, 2) for s in ("train", "eval")]
LOSSES_AND_SCORES = notebook(
    table("Step", "Training Loss", "Validation Loss"), {"text": [f"step {i}: acc={R[i]}\n" for i in K]}
)
TEST = "val/test_score/math__math/unknown"
LISTS = {"rewards_avg": [0.5] * 60, "accuracies_avg": [0.4] * 60, "val_accuracies_avg": R.tolist()}
KINDS = {  # (text, column of the reward, of compute: the step unless it is named, runs: one)
    "TRL, evaluations": (trainer_state([*TRAINING, *TRL]), "eval_reward"),
    "TRL, reward functions": (
        trainer_state(records("step", **{"reward": 1.5, "rewards/correctness/mean": None, "rewards/format/mean": 0.5})),
        "rewards/correctness/mean",
    ),
    "TRL, three evaluations": (trainer_state([*TRAINING, *TRL[:3]]), "reward"),
    "TRL, PPO": (
        json.dumps(
            records(
                "step",
                **{"objective/scores": None, "objective/rlhf_reward": -3.0, "val/ratio": 1.0, "val/num_eos_tokens": 0},
            )
        ),
        "objective/scores",
    ),
    "TRL, printed strings": (STRINGS, "reward", "epoch"),
    "verl, printed with numpy 2": (console(*NAMES, value="np.float64({})"), NAMES[0]),
    "verl, training alone": (
        console("critic/rewards/mean", "critic/score/mean", "critic/score/min"),
        "critic/score/mean",
    ),
    "verl, another name at step 0": (
        "step:0 - test_score/openai/gsm8k:0.1\n" + console("val/test_score/openai/gsm8k"),
        "val/test_score/openai/gsm8k",
    ),
    "wandb, all columns": (
        csv(("_step", "_runtime", "actor/lr", TEST, "critic/score/mean"), K, K, K, R, R / 2),
        TEST,
        "_step",
    ),
    "wandb, evaluations beside training": (
        csv(("step", "eval/objective/verifiable_correct_rate", "objective/verifiable_correct_rate"), K, R, R / 2),
        "eval/objective/verifiable_correct_rate",
    ),
    "JSON, a list of records with runs of their own": (json.dumps({"log": RUNS}), "acc", "step", RUN_AND_SPLIT),
    "JSON, two lists of records with runs of their own": (
        json.dumps({"a": RUNS[::2], "b": RUNS[::2]}),
        "acc",
        "step",
        [f"list={name} run={run}" for name in "ab" for run in (1, 2)],
    ),
    "columns of compute that are proportional": (
        lines([{"eval_step": 20 * i, "grpo_step": 5 * i, "acc": R[i]} for i in K]),
        "acc",
        "eval_step",
    ),
    "sets and dictionaries that hold no score": (
        "".join(f"{{'generate', 'reward'}} {{'reward': None}}\nIteration {i}\nAverage reward: {R[i]}\n" for i in K),
        "reward",
        "Iteration",
    ),
    "a table of losses beside printed scores": (LOSSES_AND_SCORES, "acc"),
    "a sweep in one file": (SWEEP, "answer_accuracy", "grpo_step", ["run=e1", "run=e2"]),
    "Tinker": (
        lines(records("step", **{"progress/done_frac": 0.1, "test/env/all/pass_rate": None, "env/all/pass_rate": 0.3})),
        "test/env/all/pass_rate",
    ),
    "JSON lines, mean_reward": (
        lines(records("step", mean_reward=None, min_reward=0.0, pg_loss=0.1, prompt="at step:3 - x:1")),
        "mean_reward",
    ),
    "JSON, epochs": (
        json.dumps({"config": {"lr": 1e-5}, "history": records("epoch", average_reward=None, hack_fraction=0.5)}),
        "average_reward",
        "epoch",
    ),
    "JSON, lists of numbers": (json.dumps(LISTS), "val_accuracies_avg", "record"),
    "JSON, a list for each task": (
        json.dumps({"answering": records("step", reward=None), "cleaning": records("step", reward=None)}),
        "reward",
        "step",
        ["run=answering", "run=cleaning"],
    ),
    "notebook, of fine-tuning and of two runs": (
        notebook(
            table("Step", "Training Loss", "Validation Loss"),
            *[table("Step", "Training Loss", "rewards / check_answer / mean")] * 2,
        ),
        "rewards / check_answer / mean",
        "Step",
        ["run 1", "run 2"],
    ),
    "notebook, printed": (notebook({"text": PRINTED.splitlines(keepends=True)}), "reward", "record"),
    "printed lines": (
        "Loading: lr=0.1\n"
        + "".join(f"[Step {i}/500] loss=0.1 reward_avg={R[i]} kl=0.0 avg_resp_len=200.5\n" for i in K),
        "reward_avg",
        "Step",
    ),
    "a counter on a line of its own, three runs": (
        "".join(f"-- Episode {i}/20 --\nbatch=8\nsolved: {R[i]}\n" for _ in range(3) for i in K),
        "solved",
        "Episode",
        ["run 1", "run 2", "run 3"],
    ),
    "a counter behind its reward": (
        "".join(f"INFO | avg_reward: {R[i]}\n{{'trainer/global_step': {i}, 'loss': 0.1}}\n" for i in K),
        "avg_reward",
        "trainer/global_step",
    ),
    "padded steps": ("".join(f"Step {i:4d}/200 | acc {R[i]} acc={R[i]}\n" for i in K), "acc", "Step"),
    "a name that ends in step": (
        "".join(f"[qwen_100step]  {i:3d}/20 | loss=0.1 | reward={R[i]}\n" for i in K),
        "reward",
        "record",
    ),
    "verl, with what a model wrote": (
        "".join(
            f"[response] Correct: {i % 2}\n{line}\n" for i, line in enumerate(console("critic/score/mean").splitlines())
        ),
        "critic/score/mean",
    ),
    "TRL, with what a model wrote": (PRINTED.replace("\r", "\nThe answer: 1\n"), "reward", "record"),
    "pass@k, normalised and constant columns": (
        lines(
            records(
                "step", **{"val/pass@8": 0.9 * R[3], "val_pass_at_16": 1.0, "reward/scores": 0.0, "raw_score": None}
            )
        ),
        "raw_score",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_files_are_read_without_a_flag(tmp_path, capsys, kind):
    text, y, x, names = (*KINDS[kind], *("step", [""])[len(KINDS[kind]) - 2 :])
    path = tmp_path / "log"
    name_of_x, runs = load(path, text)
    assert name_of_x == x
    assert list(runs) == [f"{path} {name}".strip() for name in names]
    first, *others = runs.values()
    assert first["R"].to_numpy() == pytest.approx(R, abs=1e-5)
    assert (np.diff(first["C"]) > 0).all()
    assert all(len(run) == 20 for run in others)
    assert f": {y} against {x}, 20 of " in capsys.readouterr().out


@pytest.mark.parametrize(("right", "wrong"), REWARD_NAMES)
def test_a_name_that_only_looks_like_a_rate_of_success_is_not_chosen(tmp_path, capsys, right, wrong):
    load(tmp_path / "log", csv(("step", wrong, right), K, R / 2, R))
    assert f": {right} against step" in capsys.readouterr().out


def test_a_record_that_stands_there_twice_counts_once(tmp_path):
    """Two evaluations of one step that agree are two; a clock that ran before step 0 has trained nothing; a last line
    that is being written is no record, and an empty reward no evaluation."""
    again = ROWS[3] | {"n_prompts": 51}
    late = ROWS[0] | {"tokens": 700.0}
    rows = [late, *ROWS[1:4], ROWS[3], again, *ROWS[4:], ROWS[4] | {"pass_rate": None}]
    text = lines(rows)
    _, runs = load(tmp_path / "log", text + '{"step": 100, "tokens": 1e6, "pass')
    (points,) = runs.values()
    assert points["C"].tolist() == sorted([*C, C[3]]) and points["n"].tolist().count(102) == 1
    _, runs = load(tmp_path / "log", text.rstrip("\n"))  # whole, but for the end of its line
    assert len(*runs.values()) == 21


@pytest.mark.parametrize("text", [csv(("step", "acc"), K, R), "".join(f"step {i}: acc={R[i]}\n" for i in K)])
def test_a_last_line_that_is_still_being_written_does_not_count(tmp_path, text):
    """`0.7` may be the beginning of `0.75`."""
    _, runs = load(tmp_path / "log", text[:-2])
    assert len(*runs.values()) == 19


def test_steps_without_a_name_that_look_alike_are_all_steps(tmp_path):
    """GRPO's loss is 0 where a group has equal rewards. A record that names its step and stands there twice is one."""
    _, runs = load(tmp_path / "log", "".join(f"{i}/20 | loss=0.0 | reward={i // 5 / 10}\n" for i in K))
    assert len(*runs.values()) == 20
    _, runs = load(tmp_path / "log", "".join(f"step={i // 2} | loss=0.0 | reward={i // 10 / 10}\n" for i in range(40)))
    assert len(*runs.values()) == 20


def test_an_exact_name_comes_before_one_in_other_capitals(tmp_path):
    text = csv(("Step", "step", "Reward", "reward"), STEPS, K, 0 * R, R)
    name_of_x, runs = load(tmp_path / "log", text, x="step", y="reward")
    (points,) = runs.values()
    assert name_of_x == "step" and points["C"].tolist() == [*K] and points["R"].tolist() == R.tolist()


@pytest.mark.parametrize(
    "junk", ["a-" * 80_000, "<table " * 20_000, "np.a(" * 30_000, "step " + " " * 100_000, "+/x9" * 40_000]
)
def test_a_long_line_is_read_in_linear_time(tmp_path, junk):
    """A picture in a notebook of 160 kB took more than nine seconds, and one of 1 MB seven minutes."""
    start = time.process_time()
    _, runs = load(tmp_path / "log", "".join(f"step:{i} - acc:{R[i]}\n" for i in K) + junk + "\n")
    assert len(*runs.values()) == 20 and time.process_time() - start < 5


def test_a_resumed_run_replaces_what_it_had_done(tmp_path, capsys):
    """Steps 0 to 12, then 10 to 19 again from a checkpoint."""
    rows = [{"step": i, "acc": 0.1} for i in range(13)] + [{"step": i, "acc": 0.5} for i in range(10, 20)]
    _, runs = load(tmp_path / "log", lines(rows))
    (points,) = runs.values()
    assert points["C"].tolist() == [*K] and points["R"].tolist() == [0.1] * 10 + [0.5] * 10
    assert "20 of 23 records" in capsys.readouterr().out


def test_shuffled_records_are_refused(tmp_path):
    rows = [{"step": 7 * i % 20, "acc": R[i]} for i in K]
    with pytest.raises(ValueError, match=r"compute goes back 6 times in 20 records: sort them"):
        load(tmp_path / "log", lines(rows))


def test_a_table_with_sentences_in_it_is_a_table(tmp_path):
    """`x = 5` in the answer of a model is no printed value."""
    text = csv(("step", "acc", "text"), K, R, ["so x = 5 and y: 3"] * 20)
    _, runs = load(tmp_path / "log", text)
    assert [run["R"].tolist() for run in runs.values()] == [R.tolist()]
    _, runs = load(tmp_path / "log", LOSSES_AND_SCORES, y="Validation Loss")
    assert [run["R"].tolist() for run in runs.values()] == [R.tolist()]


def test_runs_that_nothing_tells_apart_are_refused(tmp_path):
    """With --block their neighbors are averaged, as was asked for; --label names what no rule can know."""
    rows = [{"step": i, "acc": acc, "lr": lr} for i in K for lr, acc in ((1, R[i]), (2, 0.5))]
    path = tmp_path / "log"
    with pytest.raises(ValueError, match=r"step is repeated in 20 of 40 records: .* --label, .* --block"):
        load(path, lines(rows))
    _, runs = load(path, lines(rows), block="2")
    assert runs[str(path)]["R"].to_numpy() == pytest.approx((R + 0.5) / 2)
    _, runs = load(path, lines(rows), label="lr")
    assert list(runs) == [f"{path} lr=1", f"{path} lr=2"]
    assert runs[f"{path} lr=2"]["R"].tolist() == [0.5] * 20
    _, runs = load(path, lines(RUNS), label="split")
    assert list(runs) == [f"{path} split={s} run={run}" for s in ("train", "eval") for run in (1, 2)]


@pytest.mark.parametrize(
    ("y", "flags", "points"), [("reward", {}, 41), ("eval_acc", {}, 166), ("reward", {"block": "100"}, 5)]
)
def test_rewards_of_training_are_averaged_in_blocks(tmp_path, y, flags, points):
    """Blocks of 500 // 40 = 12 leave 41 means of 500 rewards, blocks of 500 // 150 = 3 leave 166 of held-out scores. The
    mean stays, and the samples of a block add up."""
    values = np.linspace(0, 1, 500).round(3)
    _, runs = load(tmp_path / "log", csv(("step", y, "n"), range(500), values, [8] * 500), **flags)
    (run,) = runs.values()
    assert len(run) == points and (np.diff(run["R"]) > 0).all()
    assert run["R"].mean() == pytest.approx(values.mean(), abs=0.002)
    _, runs = load(tmp_path / "log", csv(("step", y, "n"), range(500), values, [8] * 500), samples="n", **flags)
    (run,) = runs.values()
    assert run["n"].sum() == 8 * 500


def test_a_reward_with_a_sign_and_percent_signs(tmp_path):
    """-1 becomes 0, and 1 stays; a percent sign needs no flag."""
    _, runs = load(tmp_path / "log", "tokens,reward\n0,-1\n100,0\n200,1\n", range="-1 1")
    assert [run["R"].tolist() for run in runs.values()] == [[0, 0.5, 1]]
    _, runs = load(tmp_path / "log", "tokens,acc\n0,5%\n100,20 %\n200,\n300,0.4\n")
    (run,) = runs.values()
    assert run["C"].tolist() == [0, 100, 300] and run["R"].to_numpy() == pytest.approx([0.05, 0.2, 0.4])


def test_the_report_is_that_of_forecast(tmp_path, monkeypatch, capsys):
    """It gets the flags that are its own and, under the name of each run, what it would read itself. A line for each run
    says what was read."""
    files, calls = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], []
    for file in files:
        Path(file).write_text(lines(ROWS))
    monkeypatch.setattr(forecast, "main", lambda *call: calls.append(call) or 0)
    assert main([*files, "--predict-at", "2e6", "--fit-until", "0.5", "1"]) == 0
    [(argv, sources)] = calls
    assert argv == [*files, "--x", "tokens", "--predict-at", "2e6", "--fit-until", "0.5", "1"]
    for file in files:
        for ours, theirs in zip(curves.load(sources[file]), curves.load(file), strict=True):
            assert np.array_equal(ours, theirs)
    assert capsys.readouterr().out == "".join(f"{file}: pass_rate against tokens, 20 of 20 records\n" for file in files)


# ---- what is refused


GOOD = csv(("tokens", "pass_rate"), C, R)
BAD = [  # (text of the file, more of the command line, words of the sentence)
    (trainer_state([row | {"reward": 2 * row["reward"] - 1} for row in TRAINING]), "", "reward goes from -0.8 to 0.5"),
    (
        csv(("_step", TEST, "val/test_score/gpqa", "lr"), K, R, R, R),
        "",
        f"2 columns fit: name one with --y; there are val/test_score/gpqa, {TEST}\n",
    ),
    (csv(("step", "accuracy"), K, 100 * R), "", "--range 0 100 for percents"),
    (csv(("step", "loss", "lr"), K, R, R), "", "no columns fit: name one with --y; there are loss, lr, step\n"),
    (GOOD, "--fit-until 0.1", "too few points"),
    (GOOD, "--range nan 1", "--range 0 100 for percents"),
    (GOOD, "--samples -5", "n_samples > 0"),
    (GOOD, "--samples many", "no columns fit: name one with --samples; there are pass_rate, tokens"),
    (GOOD, "--label seed", "no columns fit: name one with --label; there are pass_rate, tokens"),
    (GOOD, "--x-start soon", "soon"),
    (GOOD, "--x-start 60000", "need compute >= 0"),
    (GOOD, "--plot a.xyz", "xyz"),
    (GOOD, "--y acc", "no columns fit: name one with --y; there are pass_rate\n"),
    (GOOD.replace("tokens", "hours"), "", "name one with --x; there are hours, pass_rate"),
    (csv(("tokens", "a/acc", "b/acc"), C, R, R), "--y acc", "2 columns fit: name one with --y; there are a/a"),
    (csv(("tokens", "pass_rate"), 1e9 + C, R), "", "--x-start first"),
    (GOOD.replace("0.1\n", "high\n", 1), "", "pass_rate has what is no number: "),
    ("", "", "name one with --y; there are none at all"),
    (lines(ROWS[:3]) + '{"tokens": 1, "pass_\n' + lines(ROWS[3:]), "", "line 4 is not JSON"),
    (lines(ROWS[:3]) + "[3]\n", "", "a.log: "),
    ('{"log_history": []}', "", "name one with --y"),
    ("[" * 100_000 + "\n", "", "recursion"),
    ("\x00\x01", "", "a.log"),
]


@pytest.mark.parametrize(("text", "more", "words"), BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, text, more, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.log").write_text(text)
    assert main(["a.log", *more.split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith(("read_logs.py: ", "forecast.py: ")) and words in err


def test_many_rows_are_read_in_linear_time(tmp_path):
    """It took half a minute to find the rows of 30,000 that stand there twice. Now a million take about five seconds."""
    rows = "".join(f"{i},0.{i % 7}\n" for i in range(100_000))
    start = time.process_time()
    _, runs = load(tmp_path / "log", "tokens,pass_rate\n" + rows)
    (run,) = runs.values()
    assert len(run) == 150 and run["R"].to_numpy() == pytest.approx(0.3, abs=0.003)
    assert time.process_time() - start < 15


@pytest.mark.parametrize("text", ["\x1b[31mx,y\n1,2\n", '{"\\u001b[31mx": 1, "y": 2}\n'])
def test_names_of_columns_reach_the_terminal_without_their_escapes(tmp_path, capsys, text):
    (tmp_path / "a.log").write_text(text)
    assert main([str(tmp_path / "a.log")]) == 2
    assert "there are ?[31mx, y\n" in capsys.readouterr().err


def test_make_takes_a_log_of_any_name(tmp_path):
    """A name with a semicolon is no second command."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "Makefile").write_text((Path(curves.__file__).parents[1] / "Makefile").read_text())
    for name in (".venv/bin/python", "requirements.txt", ".venv/installed"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/bin/sh\nprintf "<%s>" "$@"')
        (tmp_path / name).chmod(0o755)
    command = ["make", "-s", "--no-print-directory", "-C", "lab", "fit", "LOG=x;touch y z.csv", "FLAGS=--y acc"]
    output = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert output == "<lab/law/read_logs.py><x;touch y z.csv><--y><acc>" and not (tmp_path / "y").exists()


OTHER = {  # files of other tools: words of the sentence
    "none.csv": "No such file",
    "weights.bin": "this is no text; to make one: export it as CSV",
    "run-abc.wandb": "wandb.Api().run('ENTITY/PROJECT/RUN').history(",
    "events.out.tfevents.17": "E('FILE').Reload().Scalars('TAG')",
    "a.csv b.csv": "files of different compute do not compare: ",
}


@pytest.mark.parametrize("names", OTHER)
def test_files_that_are_none_or_of_another_tool_are_refused(tmp_path, capsys, names):
    (tmp_path / "a.csv").write_text(GOOD)
    (tmp_path / "b.csv").write_text(GOOD.replace("tokens", "step"))
    for name in "weights.bin", "run-abc.wandb", "events.out.tfevents.17":
        (tmp_path / name).write_bytes(b":W&B" + bytes(range(256)))
    assert main([str(tmp_path / name) for name in names.split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and OTHER[names] in err
