"""Program of test_two_hosts.py, on the trainer's host: python engine_on_ray.py FOLDER."""

import sys
from pathlib import Path
from typing import Any

from fake_engine import problems
from real_engine import SharedEngine, new_engine, started
from test_weights_in_flight import LongTraining, check_weights_move
from tiny_model import TinyModel

from pipeline_rl import Pacer
from runtime.weights import MessageWeights

RAY = {"distributed_executor_backend": "ray"}


def one_by_one(host: Any) -> list[Any]:
    """Samples at temperature 1, none beside another: a seed gives the same ones again."""
    return [host.ask(lambda engine, p=p: engine.sample(p.prompt_ids, 40, "0")) for p in problems(12)]


def main(folder: str) -> None:
    tiny = TinyModel(Path(folder), tied=True)
    here, there = new_engine(tiny), new_engine(tiny, channel=MessageWeights(), engine_args=RAY)
    found = []
    for engine in (here, there):
        with started(engine, tiny.weights(0)) as host:
            found.append(one_by_one(host))
            if engine is there:
                long, options = problems(2), {"pacer": Pacer(2, 0), "length_control": LongTraining(700), "stop_ids": []}
                with SharedEngine(host, tiny).generator(long, **options) as generator:
                    check_weights_move(generator, tiny, long)
    assert found[0] == found[1] and len({len(sample.completion_ids) for sample in found[0]}) > 1
    print("as a local engine's:", sum(len(sample.completion_ids) for sample in found[1]), "tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
