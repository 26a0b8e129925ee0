"""Your own code by name: `module:function`, or `module:Class`, as --loss, --engine, --task and --reward take it.

>>> named("loss", "losses:cispo", "logprobs, behaviour_logprobs, advantages, mask").__name__
'cispo'
"""

import inspect
import os
import sys
import traceback
from importlib import import_module
from typing import Any


def named(option: str, name: str, arguments: str) -> Any:
    """The function or class `module:function` of the working directory or of anything installed, which is called with
    `arguments`, by position. Raises ValueError: one sentence that begins with the option, says what was looked for, and
    what is there instead."""
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file there must not hide an installed package from other imports
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # somebody's module, which may raise anything
        raise ValueError(f"`{option}` {name}: {module_name} cannot be imported ({place_of(error)}).") from error
    function = getattr(module, function_name, None)
    here = getattr(module, "__file__", None) or module_name
    if not callable(function):
        problem = f"has no {function_name!r}" if function is None else f"has {function_name!r}, which is no function"
        raise ValueError(f"`{option}` {name}: {here} {problem}.")
    try:
        signature = inspect.signature(function)
    except ValueError:  # one that is written in C need not have one
        return function
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        takes = f"it is called with ({arguments}), and takes {signature}"
        raise ValueError(f"`{option}` {name}: {takes}.") from error
    return function


def place_of(error: BaseException) -> str:
    """Kind, first line and place of an error that a module raised: `ZeroDivisionError: division by zero, mine.py:3`."""
    first_line = (str(error).splitlines() or [""])[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_import = frame.filename.startswith("<")  # of Python's importer, which finds no such module
    place = "" if is_import else f", {frame.filename}:{frame.lineno}"
    return f"{type(error).__name__}: {first_line}{place}"
