"""A pytest plugin: engines with a cache of fixed size, so that several can start at the same time on one GPU."""

import runtime.engine

start = runtime.engine.RunEngine.__post_init__


def with_small_cache(self):
    self.engine_args = (
        {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.1}
        | self.engine_args
        | {"gpu_memory_utilization": 0.1}
    )
    start(self)


runtime.engine.RunEngine.__post_init__ = with_small_cache
