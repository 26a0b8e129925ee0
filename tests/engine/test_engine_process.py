"""runtime/engine_process.py by hand: what a request sampled over several steps and pauses arrives once. It needs vLLM's
classes, but no engine; real engines use it in the other files of this folder, where versions are compared with log-probs.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from runtime.engine_process import WholeCompletions, skip_inner_tokens

PauseState = pytest.importorskip("vllm.v1.core.sched.interface").PauseState


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
def scheduler(monkeypatch):
    """Without vLLM's own scheduling: `steps` are the messages of its `update_from_output`, before the log-probs."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs

    def update_from_output(self, step, runner):
        for index, one in enumerate(step):
            if runner.logprobs:
                one.new_logprobs = runner.logprobs.slice_request(index, len(one.new_token_ids))
        return {0: EngineCoreOutputs(outputs=step)}

    made = object.__new__(WholeCompletions)
    made._partial, made._pauses, made._pause_state = {}, 0, PauseState.UNPAUSED
    monkeypatch.setattr(Scheduler, "update_from_output", update_from_output)
    monkeypatch.setattr(Scheduler, "finish_requests", lambda self, ids, status: ids)
    return made


def test_a_completion_over_two_pauses(scheduler):
    """A step that was under way when the second pause began ends in it, and is by the weights before it. Said twice, a
    pause is one, and so is its end."""
    sent = []
    for step, runner in (
        ([output("a", [5], prefill="stats"), output("b", [6])], sampled([-1.0], [-2.0])),
        (PauseState.PAUSED_ALL, None),
        (PauseState.PAUSED_ALL, None),
        (PauseState.UNPAUSED, None),
        ([output("a", [7]), output("b", [9], done=True)], sampled([-0.25], [-8.0])),
        (PauseState.PAUSED_ALL, None),
        ([output("a", [8])], sampled([-4.0])),
        (PauseState.UNPAUSED, None),
        (PauseState.UNPAUSED, None),
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


def test_another_vllm_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.32\.x, not 0\.33\.1: .*requirements.*scheduler_cls=null"):
        WholeCompletions()


@pytest.mark.parametrize(("aborted", "left"), [("a", {"b"}), (["a", "b"], set()), (None, set())])
def test_aborted_requests_leave_nothing_behind(scheduler, aborted, left):
    scheduler.update_from_output([output("a", [5]), output("b", [6])], sampled([-1.0], [-2.0]))
    scheduler.finish_requests(aborted, None)
    assert set(scheduler._partial) == left


def history(prompt, spared):
    """(blocks held, blocks free, whether vLLM was asked) after each token of one request, by vLLM's own manager of
    blocks of four tokens, with and without `skip_inner_tokens`; then how much of it a second request finds in the cache."""
    import torch
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    hashing = get_hash_fn_by_name("sha256")
    init_none_hash(hashing)
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=20, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
    manager = KVCacheManager(config, max_model_len=64, scheduler_block_size=4, hash_block_size=4)
    asked = []

    def whole(request, count, *args, **options):
        asked.append(request.num_computed_tokens)
        return manager.allocate_slots(request, count, *args, **options)

    allocate = skip_inner_tokens(whole, manager.empty_kv_cache_blocks, 4) if spared else whole

    def request(name):
        hasher = get_request_block_hasher(4, hashing)
        return Request(name, list(prompt), SamplingParams(max_tokens=50), None, block_hasher=hasher)

    first, seen, count = request("a"), [], len(prompt)
    for token in range(14):
        new = allocate(first, count)
        seen.append((new.get_block_ids(), manager.get_block_ids("a"), manager.block_pool.get_num_free_blocks()))
        first.num_computed_tokens += count
        first.append_output_token_ids(token)
        count = 1
    again = request("b")
    again.append_output_token_ids(list(range(14)))
    return seen, manager.get_computed_blocks(again)[1], asked


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_sparing_vllm_the_middle_of_a_block_changes_nothing(length):
    (seen, cached, asked), (less, cached_less, asked_less) = history(range(length), False), history(range(length), True)
    assert less == seen and cached_less == cached >= 8
    assert len(asked) == 14 and asked_less == [0, *(x for x in asked[1:] if x % 4 in (0, 3))]
