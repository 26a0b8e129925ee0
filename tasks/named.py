"""Your own code by name: `module:function`, or `module:Class`, as --loss, --engine, --task and --reward take it.

>>> named("loss", "losses:cispo").__name__
'cispo'
"""

import os
import sys
from importlib import import_module
from typing import Any


def named(option: str, name: str) -> Any:
    """The function or class of the working directory or of anything installed. Raises ValueError, in one sentence."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file there must not hide an installed package from other imports
    try:
        value = getattr(import_module(module), function)
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} is no function and no class")
        return value
    except (Exception, SystemExit) as error:  # somebody's module, which may raise anything
        raise ValueError(f"`{option}` {name}: {type(error).__name__}: {str(error).split(chr(10))[0]}.") from error
