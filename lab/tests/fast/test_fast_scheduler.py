"""lab/fast_scheduler.py by hand: what a request sampled over several steps and pauses arrives once. It needs vLLM's
classes, but no engine; real engines use it in test_fast_engine.py, where versions are compared with log-probs."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def module():
    """lab/fast_scheduler.py. It imports vLLM, which every test process that collects this file would wait for."""
    from lab import fast_scheduler

    return fast_scheduler


def output(request, tokens, done=False, prefill=None):
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    reason = FinishReason.STOP if done else None
    return EngineCoreOutput(request, list(tokens), finish_reason=reason, prefill_stats=prefill)


def sampled(*logprobs):
    """What the model runner returns: a row a token, two columns, of which the sampled token's own comes first. Several
    tokens a request, as under speculative decoding, have their starts beside them."""
    from vllm.v1.outputs import LogprobsLists

    rows = [x for one in logprobs for x in one]
    starts = list(itertools.accumulate([len(one) for one in logprobs], initial=0))
    values = np.array([[x, -0.5] for x in rows], dtype=np.float64)
    several = starts if len(rows) > len(logprobs) else None
    return SimpleNamespace(logprobs=LogprobsLists(np.zeros((len(rows), 2)), values, np.zeros(len(rows)), several))


@pytest.fixture
def scheduler(module, monkeypatch):
    """Without vLLM's own scheduling: `steps` are the messages of its `update_from_output`, before the log-probs."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs

    def update_from_output(self, step, runner):
        for index, one in enumerate(step):
            if runner.logprobs:
                one.new_logprobs = runner.logprobs.slice_request(index, len(one.new_token_ids))
        return {0: EngineCoreOutputs(outputs=step)}

    scheduler = object.__new__(module.WholeCompletions)
    scheduler._partial, scheduler._pauses, scheduler._pause_state = {}, 0, module.PauseState.UNPAUSED
    monkeypatch.setattr(Scheduler, "update_from_output", update_from_output)
    monkeypatch.setattr(Scheduler, "finish_requests", lambda self, ids, status: ids)
    return scheduler


def test_a_completion_over_two_pauses(scheduler, module):
    """A step that was under way when the second pause began ends in it, and is by the weights before it. Said twice, a
    pause is one, and so is its end."""
    sent, paused, unpaused = [], module.PauseState.PAUSED_ALL, module.PauseState.UNPAUSED
    for step, runner in (
        ([output("a", [5], prefill="stats"), output("b", [6])], sampled([-1.0], [-2.0])),
        (paused, None),
        (paused, None),
        (unpaused, None),
        ([output("a", [7]), output("b", [9], done=True)], sampled([-0.25], [-8.0])),
        (paused, None),
        ([output("a", [8])], sampled([-4.0])),
        (unpaused, None),
        (unpaused, None),
        ([output("a", [3, 2], done=True)], sampled([-0.125, -0.0625])),
    ):
        if runner is None:
            scheduler.set_pause_state(step)
        else:
            sent.append(scheduler.update_from_output(step, runner)[0].outputs)
    assert [[one.request_id for one in step] for step in sent] == [[], ["b"], [], ["a"]]
    (b,), _, (a,) = sent[1:]
    assert a.new_token_ids == [5, 7, 8, 3, 2] and b.new_token_ids == [6, 9]
    assert a.kv_transfer_params == {"logprobs": [-1.0, -0.25, -4.0, -0.125, -0.0625], "pauses": [0, 1, 1, 2, 2]}
    assert b.kv_transfer_params == {"logprobs": [-2.0, -8.0], "pauses": [0, 1]}
    assert a.prefill_stats == "stats" and a.new_logprobs is None and scheduler._partial == {}


def test_another_vllm_is_refused_with_the_fix(module, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.32\.x, not 0\.33\.1: .*pyproject\.toml.*--engine vllm"):
        module.WholeCompletions()


@pytest.mark.parametrize(
    ("shape", "dtype", "plain"),
    [
        ((512, 128), torch.float32, True),
        ((512, 129), torch.float32, False),
        ((64, 64), torch.bfloat16, False),
        ((64, 4, 64), torch.float32, False),
    ],
)
def test_only_small_float32_layers_keep_their_weights(module, shape, dtype, plain):
    """One layer that vLLM repacks is enough for a model whose weights must be loaded its way."""
    from runtime.inside_vllm import is_repacked

    asked = []
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    layer.quant_method = "unquantized"
    module.plain_if_small(lambda layer, remove_weight: asked.append(remove_weight))(layer, True)
    assert asked == ([] if plain else [True])
    assert is_repacked(torch.nn.ModuleList([torch.nn.LayerNorm(4), layer])) is not plain


@pytest.mark.parametrize(("aborted", "left"), [("a", {"b"}), (["a", "b"], set()), (None, set())])
def test_aborted_requests_leave_nothing_behind(scheduler, aborted, left):
    scheduler.update_from_output([output("a", [5]), output("b", [6])], sampled([-1.0], [-2.0]))
    scheduler.finish_requests(aborted, None)
    assert set(scheduler._partial) == left


@pytest.mark.parametrize("length", [1, 4, 6])
def test_vllm_is_asked_at_the_borders_of_blocks_only(module, length):
    """Blocks of four: for the prompt, then for the first token in a block, which needs a new one, and for the last, with
    which the block goes into the cache. (That vLLM needs no more: log-probs and prefills in test_fast_engine.py.)"""
    asked, request = [], SimpleNamespace(num_computed_tokens=0)
    allocate = module.skip_inner_tokens(lambda one, _: asked.append(one.num_computed_tokens) or "new", "none", 4)
    blocks = [allocate(request, length)]
    for request.num_computed_tokens in range(length, 12):
        blocks.append(allocate(request, 1))
    assert asked == [0, *(x for x in range(length, 12) if x % 4 in (0, 3))]
    assert blocks.count("new") == len(asked) and blocks.count("none") == len(blocks) - len(asked)
