"""The bound, the driver and an engine, with nothing else from here: pipeline_rl.py, generator.py in its folder,
and vllm_engine.py lie beside this file. `python pipeline_rl_alone.py [MODEL_FOLDER]`."""

import itertools
import sys
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from generator import Generator
from pipeline_rl import Pacer, lags
from vllm_engine import VLLMEngine


def tiny_model(folder: str) -> str:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = Qwen3Config(vocab_size=64, hidden_size=64, intermediate_size=128, tie_word_embeddings=True, **shape)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":  # vLLM starts a process that imports this file
    folder = sys.argv[1] if len(sys.argv) > 1 else tiny_model("tiny-model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(model.named_parameters())  # without a tied head, which is the embedding table
    problems = (SimpleNamespace(prompt_ids=[9, 10 + i % 50, 12]) for i in itertools.count())
    engine = VLLMEngine(folder, stop_ids=[1], max_model_len=200, max_num_seqs=32)
    pacer, score = Pacer(batch_prompts=4, k=2), lambda problem, completions: [(0.0, False)] * len(completions)
    generator = Generator(engine, problems, score, pacer, rollouts=4, max_completion=150)
    try:
        generator.start(weights)
        for version in range(6):
            groups = generator.take(4)  # rollouts with log-probs, versions and rewards: a step of yours comes here
            found = [lag for group in groups for rollout in group.rollouts for lag in lags(rollout, version)]
            with torch.no_grad():
                for weight in weights.values():
                    weight += 0.01 * torch.randn_like(weight)
            generator.push(weights, version + 1, release=4)  # in flight: the requests inside go on with these
            print(f"step {version}: lag {sum(found) / len(found):.2f}, at most {max(found)}")
    finally:
        generator.close()
