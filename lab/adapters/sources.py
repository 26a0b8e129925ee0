"""The code of other trainers, read from a folder of wheels and sources, and run without their packages.

A wheel or a folder is called NAME-VERSION..., such as trl-1.16.0-py3-none-any.whl or slime-624b824. Nothing of it is
installed: `functions` compiles what an adapter names out of a file, with the globals that the adapter gives, and `run`
executes some statements of a long method. Annotations are not evaluated; a decorator stays if its name is a global.
"""

import ast
import collections
import contextlib
import math
import os
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

FOLDER = Path(os.environ.get("TRAINER_SOURCES", "sources"))
GLOBALS = {
    "torch": torch,
    "np": np,
    "math": math,
    "nn": torch.nn,
    "F": torch.nn.functional,
    "dist": torch.distributed,
    "defaultdict": collections.defaultdict,
    "Any": Any,
}


class Source:
    """A trainer's code, and whether it is of the version that its adapter was written for. FileNotFoundError: none."""

    def __init__(self, name: str, written_for: str) -> None:
        found = sorted(FOLDER.glob(f"{name}-*"))
        if not found:
            raise FileNotFoundError(f"{FOLDER} has no {name}-VERSION: put the wheel or source of {written_for} there")
        self.path = found[-1]
        self.name = name
        self.version = self.path.name.split("-")[1]
        self.note = "" if self.version == written_for else f"the adapter was written for {written_for}"

    @cache  # noqa: B019  (few, and they live as long as the program)
    def tree(self, path: str) -> ast.Module:
        """The syntax tree of a file, by its path in the repository or in the wheel."""
        if self.path.is_dir():
            return ast.parse((self.path / path).read_text())
        with zipfile.ZipFile(self.path) as wheel:
            # what a wheel has in NAME.data/purelib is installed beside the rest
            (member,) = [name for name in wheel.namelist() if name == path or name.endswith(f"/purelib/{path}")]
            return ast.parse(wheel.read(member).decode())

    def node(self, path: str, name: str) -> Any:
        """The function, class, Class.method or constant of this name. LookupError if the file has none."""
        node: Any = self.tree(path)
        for part in name.split("."):
            named = (child for child in ast.walk(node) if part in names_of(child))
            node = next(named, None)
            if node is None:
                raise LookupError(f"{self.path.name} has no {name} in {path}")
        return node

    def functions(self, path: str, *names: str, **variables: Any) -> SimpleNamespace:
        """These of a file, compiled in this order; a method as a function."""
        space = GLOBALS | variables
        nodes = [self.node(path, name) for name in names]
        for node in nodes:
            node.decorator_list = [mark for mark in getattr(node, "decorator_list", []) if keeps(mark, space)]
        execute(nodes, space, path)
        return SimpleNamespace(**{(last := name.split(".")[-1]): space[last] for name in names})

    def run(self, path: str, name: str, first: str, last: str = "", /, **variables: Any) -> Any:
        """The variables after the statements of function or Class.method `name`, from the first one that begins with
        `first` to the next that begins with `last`; whitespace and quotes as ast.unparse has them. If they return,
        what they return."""
        return self.compiled(path, name, first, last, tuple(variables))(**variables)

    @cache  # noqa: B019
    def compiled(self, path: str, name: str, first: str, last: str, variables: tuple[str, ...]) -> Callable:
        """These statements as a function of the variables."""
        for parent in ast.walk(self.node(path, name)):
            for block in ("body", "orelse"):
                statements = getattr(parent, block, [])
                lines = [ast.unparse(statement) for statement in statements] if isinstance(statements, list) else []
                start = next((i for i, line in enumerate(lines) if line.startswith(first)), None)
                if start is not None:
                    end = next(i for i, line in enumerate(lines) if i >= start and line.startswith(last))
                    (function,) = ast.parse(f"def part({', '.join(variables)}): return locals()").body
                    function.body[:0] = statements[start : end + 1]
                    space = dict(GLOBALS)
                    execute([function], space, path)
                    return space["part"]
        raise LookupError(f"{self.path.name} has no statement {first!r} in {name} of {path}")

    def defaults(self, path: str, name: str) -> SimpleNamespace:
        """The defaults of a class of settings, as far as they are literals."""
        values: dict[str, Any] = {}
        for line in self.node(path, name).body:
            if isinstance(line, ast.AnnAssign) and line.value is not None:
                given = [word.value for word in getattr(line.value, "keywords", []) if word.arg == "default"]
                given += getattr(line.value, "args", [])[:1]  # of pydantic's Field
                with contextlib.suppress(ValueError):
                    values[ast.unparse(line.target)] = ast.literal_eval(given[0] if given else line.value)
        return SimpleNamespace(**values)


def names_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def keeps(decorator: ast.expr, space: dict[str, Any]) -> bool:
    words = ast.unparse(decorator)
    return words.split(".")[0].split("(")[0] in space and "compile" not in words


def execute(body: list[ast.stmt], space: dict[str, Any], path: str) -> None:
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(body=[*future, *body], type_ignores=[]), path, "exec"), space)


def group_size(group_ids: torch.Tensor) -> int:
    """G of a batch in which groups stand one after another; NotImplementedError where trainers cannot be given it."""
    ids, sizes = torch.unique_consecutive(group_ids, return_counts=True)
    if len(ids) != len(group_ids.unique()) or len(sizes.unique()) != 1:
        raise NotImplementedError
    return int(sizes[0])


def equal_rows(step) -> None:
    """NotImplementedError unless all microbatches have as many rows: other ones cannot occur in this trainer."""
    if len({len(rows) for parts in step.layout for rows in parts}) > 1:
        raise NotImplementedError


def each_token(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(N,) as (N, T)."""
    return values[:, None].expand_as(mask)


def at_the_end(rewards: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token rewards, mask), (N, T) each: the reward of a row on its last token."""
    mask = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).float()
    tokens = torch.zeros_like(mask)
    tokens[torch.arange(len(rewards)), lengths - 1] = rewards
    return tokens, mask
