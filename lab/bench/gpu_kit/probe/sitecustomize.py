"""Times a few methods of the project while it runs unchanged: one JSON line a call, in the file that PROBE_FILE names."""

import os
import sys

if os.environ.get("PROBE_FILE"):
    import functools
    import importlib.abc
    import importlib.machinery
    import inspect
    import json
    import time

    TARGETS = {
        "vllm_engine": [("WeightFile", "prepare"), ("WeightReceiver", "load_weight_file")],
        "runtime.engine": [("RunEngine", "update"), ("RunEngine", "start")],
        "runtime.trainer": [("Trainer", "backward"), ("Trainer", "update"), ("Trainer", "score")],
    }

    def note(name, started, extra=None):
        line = {
            "pid": os.getpid(),
            "name": name,
            "at": round(time.time(), 3),
            "s": round(time.perf_counter() - started, 4),
        }
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            line["allocated_MB"] = round(torch.cuda.memory_allocated() / 1e6, 1)
            line["peak_MB"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
            free, total = torch.cuda.mem_get_info()
            line["card_used_MB"] = round((total - free) / 1e6)
        with open(os.environ["PROBE_FILE"], "a") as file:
            file.write(json.dumps(line) + "\n")

    def wrapped(name, function):
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed(*args, **options):
                started = time.perf_counter()
                try:
                    return await function(*args, **options)
                finally:
                    note(name, started)
        else:

            @functools.wraps(function)
            def timed(*args, **options):
                started = time.perf_counter()
                try:
                    return function(*args, **options)
                finally:
                    if name.endswith("load_weight_file"):
                        import torch

                        if torch.cuda.is_available():
                            torch.cuda.synchronize()
                    note(name, started)

        return timed

    class Hook(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path=None, target=None):
            if fullname not in TARGETS:
                return None
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is None or spec.loader is None:
                return None
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                for cls, method in TARGETS[fullname]:
                    owner = getattr(module, cls, None)
                    if owner is not None and method in vars(owner):
                        setattr(owner, method, wrapped(f"{cls}.{method}", vars(owner)[method]))

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Hook())
