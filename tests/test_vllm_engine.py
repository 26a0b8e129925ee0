"""vllm_engine.py with a real vLLM, which starts once for all of this file: a version and a log-prob for every token, and
weights that change while a request runs. The only lesson that needs vLLM; the rest is in tests/deep/engine.

Oracles are forward passes in transformers. Weights are random and differ wholly between versions, so that a token of a
wrong version is nats away, not 1e-4.
"""

import asyncio
import math
import os
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from stale_cache import stale_cache_logprobs
from tiny_model import TinyModel

from vllm_engine import VLLMEngine, WeightFile, check_sample

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
PROMPT = [9, 10, 11, 12, 13]
CLOSE = 1e-5  # nats a token, mean; measured 1e-6


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Version 0 samples 12 tokens. Then a request of 600 tokens runs, and new weights come as often as they can. When it is
    done, the last version samples 12 tokens after the same prompt."""
    tiny = TinyModel(tmp_path_factory.mktemp("model"), tied=True)
    engine = VLLMEngine(tiny.folder, [], 1024, max_num_seqs=4)  # no stop token: requests have the length asked for
    weights = {0: tiny.weights(0)}

    async def run():
        engine.prepare(weights[0], 0)
        await engine.start()
        before = await engine.sample(PROMPT, 12, "0")
        salts = [(await engine.sample([9] * 40, 2, salt)).prefilled for salt in ("0", "0", "other")]
        with pytest.raises(ValueError, match="1000 prompt tokens and 25 more exceed max_model_len = 1024"):
            await engine.sample([9] * 1000, 25, "0")
        full = await engine.sample([9] * 1000, 24, "0")
        running = asyncio.create_task(engine.sample(PROMPT, 600, "0"))
        version = 0
        while not running.done():
            await asyncio.sleep(0.05)
            version += 1
            weights[version] = tiny.weights(version)
            engine.prepare(weights[version], version)
            await engine.update()
        after = await engine.sample(PROMPT, 12, str(version))
        lacking = r"no weights for .*layers\.1\.mlp\.down_proj"
        incomplete = dict(weights[0])  # vLLM would keep the old tensor and say nothing
        del incomplete["model.layers.1.mlp.down_proj.weight"]
        with pytest.raises(RuntimeError, match=lacking):  # the memory has the old one, too
            engine.prepare(incomplete, version + 1)
        engine.channel.close()
        engine.channel = WeightFile()
        engine.prepare(incomplete, version + 1)
        with pytest.raises(Exception, match=lacking):
            await engine.update()
        during = await running
        return SimpleNamespace(before=before, salts=salts, full=full, during=during, after=after, last=version)

    with mock.patch.dict(os.environ):  # the engine leaves its settings there
        try:
            story = asyncio.run(run())
        finally:
            engine.shutdown()
    story.tiny, story.weights, story.folder = tiny, weights, engine.channel.folder
    return story


def gap(story, sample, versions) -> torch.Tensor:
    """(T,) between a sample's log-probs and those if these versions sampled it, each over the keys and values of those
    before."""
    oracle = stale_cache_logprobs(story.tiny.model, story.weights, PROMPT, sample.completion_ids, versions)
    return (oracle - torch.tensor(sample.logprobs)).abs()


def test_each_token_carries_the_version_that_sampled_it(story):
    """In time 0 0 ... 1 1 ... 2: versions only grow. Before the first update all is version 0, after the last one all is
    the last."""
    assert story.before.versions == [0] * 12 and story.after.versions == [story.last] * 12
    assert story.during.versions == sorted(story.during.versions) and len(story.during.versions) == 600
    assert len(set(story.during.versions)) >= 3
    assert {story.before.finish_reason, story.during.finish_reason} == {"length"} and story.before.prefilled == 5


def test_one_versions_log_probs_are_those_of_a_forward_pass(story):
    """The last weights came in flight, into a model with a tied head, whose own copy could stay stale."""
    for sample in (story.before, story.after):
        assert gap(story, sample, sample.versions).mean() < CLOSE
    assert gap(story, story.after, [story.last - 1] * 12).mean() > 0.1  # the check can fail


def test_a_running_request_goes_on_over_the_keys_and_values_of_old_weights(story):
    """Nothing is computed twice: piece by piece the log-probs are those of each version over what the versions before
    it left. With the boundaries one token earlier or later they would not be."""
    sample, versions = story.during, story.during.versions
    assert gap(story, sample, versions).mean() < CLOSE and gap(story, sample, versions).max() < 1e-4
    for moved in (versions[:1] + versions[:-1], versions[1:] + versions[-1:]):
        assert gap(story, sample, moved).max() > 0.1


def test_a_prompt_is_computed_once_for_each_salt(story):
    """40 tokens are a block of 32 and 8 more. The second request with the same salt finds the block, one with another
    salt does not. A request may fill `max_model_len`, and no more."""
    assert story.salts == [40, 8, 40] and len(story.full.completion_ids) == 24


def test_the_end_leaves_nothing(story):
    """No folder of weights; that weights which lack a tensor are refused by its name is asked in the story above."""
    assert not story.folder.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [], "logprobs": [], "versions": []}, "0 tokens"),
        ({"logprobs": [-0.5]}, "2 tokens, 1 log-probs, 2 versions"),
        ({"versions": [3]}, "2 tokens, 2 log-probs, 1 versions"),
        ({"logprobs": [-0.5, math.nan]}, "above 0 or not finite"),
        ({"logprobs": [-math.inf, -0.5]}, "above 0 or not finite"),
        ({"logprobs": [-0.5, 0.01]}, "above 0 or not finite"),
        ({"finish_reason": "abort"}, "'abort'"),
    ],
)
def test_what_is_missing_in_an_answer_is_an_error_and_no_zero(change, message):
    sample = {"ids": [5, 6], "logprobs": [-0.5, 0.0], "versions": [3, 3], "finish_reason": "length"}
    check_sample(**sample)
    with pytest.raises(RuntimeError, match=message):
        check_sample(**sample | change)
    check_sample([5], [1e-6], [0], "stop")  # rounding: log-softmax of a sure token may end just above 0
