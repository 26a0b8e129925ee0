"""Does vLLM start here at all? One variant of its settings: `python smoke.py MODEL NAME`."""

import os
import sys
import time

VARIANTS = {
    "default": {},
    "eager": {"enforce_eager": True},
    "triton": {"attention_backend": "TRITON_ATTN"},
    "triton eager": {"attention_backend": "TRITON_ATTN", "enforce_eager": True},
    "runner v1": {},
    "runner v1 triton eager": {"attention_backend": "TRITON_ATTN", "enforce_eager": True},
    "float32": {"dtype": "float32"},
}

if __name__ == "__main__":
    model, name = sys.argv[1:3]
    if "runner v1" in name:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    started = time.time()
    from vllm import LLM, SamplingParams

    options = {
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 2**28,
        "gpu_memory_utilization": 0.05,
    }
    options |= {
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
        "disable_log_stats": True,
    } | VARIANTS[name]
    llm = LLM(model, **options)
    up = time.time() - started
    out = llm.generate(
        [{"prompt_token_ids": [5, 6, 7]}],
        SamplingParams(max_tokens=20, logprobs=0, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    tokens = out[0].outputs[0].token_ids
    print(f"SMOKE {name}: ok, up after {up:.1f} s, {len(tokens)} tokens", flush=True)
    os._exit(0)
