"""Packages whose own `__init__` needs a GPU, Ray or DeepSpeed, and single functions of files that do."""

import ast
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


def absent(*modules: str) -> None:
    """Modules that are imported and never called."""
    for name in modules:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))


def bare(*packages: str) -> None:
    """The packages without their `__init__`."""
    for name in packages:
        top, *inner = name.split(".")
        root = next(Path(folder) / top for folder in sys.path if (Path(folder) / top).is_dir())
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*inner))]
        sys.modules[name] = module


def function(file: str, name: str, **names: Any) -> Any:
    """A function or method of a file on sys.path, compiled alone with these global names."""
    path = next(Path(folder) / file for folder in sys.path if (Path(folder) / file).is_file())
    [node] = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", "") == name]
    exec(compile(ast.Module([node], []), str(path), "exec"), names)
    return names[name]
