"""What happened when: a trace of a run that https://ui.perfetto.dev opens, and evidence/timeline.py draws.

PROBLEM. Lag, idle shares and stalls are numbers of a step. Why they are so shows only in the order of events: which
slot held which completion, which weights sampled it, and what the trainer did meanwhile.

The file has one event a line, in the JSON array format of Chrome's traces, whose last bracket may be missing: what a
killed run leaves can be read. Times are microseconds of the wall clock.

    process 1, the engine     a lane for each slot; a request is a span for each version that sampled it, named by the
                              version, so that the viewer gives each a color of its own
    process 2, the pacer      marks: a group is admitted, finished, taken; a span for each update of the weights and
                              each evaluation
    process 3, the trainer    spans: waits for groups, the steps, checkpoints

SIMPLIFIED. When a token came is not known, only when a request entered and left: engines send whole completions. So a
version's span ends where the next one is live. (Requests freeze while an update lasts.)
"""

import heapq
import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pipeline_rl import Generator

ENGINE, PACER, TRAINER = 1, 2, 3


class Trace:
    """Appends to the file `path`. Both threads may call its methods: a buffered binary file takes each line whole."""

    def __init__(self, path: Path):
        self.file = path.open("ab", buffering=1 << 16)
        if not self.file.tell():
            self.file.write(b"[\n")
        for process, name in ((ENGINE, "engine"), (PACER, "pacer"), (TRAINER, "trainer")):
            self.write(ph="M", name="process_name", pid=process, args={"name": name})
        self.updates = deque[tuple[float, int]](maxlen=64)  # when an update was live, and its version

    def write(self, **event: object) -> None:
        """One event, in the names of the format: ph kind, ts begin and dur length in microseconds, pid and tid lane."""
        self.file.write(f"{json.dumps(event)},\n".encode())

    def span(self, name: str, begin: float, process: int, lane: int = 0, end: float | None = None) -> None:
        """What lasted from `begin` to `end`, in seconds of the wall clock, or until now."""
        length = (time.time() if end is None else end) - begin
        self.write(ph="X", name=name, ts=1e6 * begin, dur=1e6 * length, pid=process, tid=lane)

    def mark(self, name: str) -> None:
        """What happened now, in the pacer's lane."""
        self.write(ph="i", name=name, ts=1e6 * time.time(), pid=PACER, tid=0, s="p")

    def close(self) -> None:
        """Writes what is still in memory."""
        self.file.close()

    def watch(self, generator: Generator) -> None:
        """From now on every request, update, evaluation, admission, finish and take of `generator` is written."""
        engine, pacer = generator.engine, generator.pacer
        sample, update, evaluate = engine.sample, engine.update, generator.evaluate
        free = [list(range(engine.slots)) for _ in range(engine.replicas)]  # heaps: the lowest lane first

        async def request(
            prompt: object, most: int, salt: str, replica: int = 0, temperature: float | None = None
        ) -> Any:
            lane, begin, first = heapq.heappop(free[replica]), time.time(), engine.version
            try:
                found = await sample(prompt, most, salt, replica, temperature)
            finally:
                heapq.heappush(free[replica], lane)
            self.request(replica * engine.slots + lane, begin, first)
            return found

        async def new_weights() -> None:
            begin, version = time.time(), engine.prepared
            await update()
            self.updates.append((time.time(), version))
            self.span(f"update to {version}", begin, PACER, 1)

        def evaluation(*args: Any, **options: Any) -> Future:
            begin, found = time.time(), evaluate(*args, **options)
            found.add_done_callback(lambda _: self.span("evaluation", begin, PACER, 2))
            return found

        def marked(method: Callable, name: Callable[..., str]) -> Callable:
            """`method`, which leaves a mark: its name from what the method returned and was given; none if empty."""

            def call(*given: object) -> object:
                found = method(*given)
                if text := name(found, *given):
                    self.mark(text)
                return found

            return call

        vars(engine).update(sample=request, update=new_weights)
        vars(generator).update(evaluate=evaluation)
        vars(pacer).update(
            admit=marked(pacer.admit, lambda number: f"admit {number}"),
            finish=marked(pacer.finish, lambda _, group: f"finish {group.number}"),
            take=marked(pacer.take, lambda some, _: f"take {some[0].number} to {some[-1].number}" if some else ""),
        )

    def request(self, lane: int, begin: float, version: int) -> None:
        """A request that has ended: a span for each version that sampled, of which `version` was the first. There are
        hundreds in a step, so the lines are put together by hand."""
        end, updates = time.time(), self.updates
        inside = [(at, v) for at, v in updates if at > begin] if updates and updates[-1][0] > begin else []
        for (at, v), (until, _) in itertools.pairwise([(begin, version), *inside, (end, 0)]):
            times = f'"ts":{1e6 * at:.0f},"dur":{1e6 * (until - at):.0f}'
            self.file.write(b'{"ph":"X","name":"version %d",%s,"pid":1,"tid":%d},\n' % (v, times.encode(), lane))
