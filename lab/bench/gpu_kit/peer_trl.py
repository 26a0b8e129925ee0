"""TRL's GRPOTrainer with vLLM inside its process: seconds of each step. `python peer_trl.py FOLDER JSON`."""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import random
    from functools import partial

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    extra = options.pop("llm", {})
    if extra:
        vllm_generation.LLM = partial(vllm_generation.LLM, **extra)
    generations, prompts_a_step, length, steps, micro = (
        options.pop(n) for n in ("generations", "prompts", "length", "steps", "micro")
    )
    lengths = []

    def coin(completion_ids, **_):
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return [float(random.random() < 0.5) for _ in completion_ids]

    class Times(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **__):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0
            print(
                json.dumps(
                    {
                        "trl_step": state.global_step,
                        "s": round(time.perf_counter() - self.started, 3),
                        "length": lengths[-1],
                        "peak_GB": round(peak, 1),
                    }
                ),
                flush=True,
            )

    rows = [{"prompt": row["question"]} for row in map(json.loads, (folder / "problems.jsonl").open())]
    completions = generations * prompts_a_step
    config = {
        "output_dir": str(folder / "trl"),
        "seed": 0,
        "max_steps": steps,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "loss_type": "cispo",
        "epsilon_high": 5.0,
        "scale_rewards": "batch",
        "num_generations": generations,
        "max_completion_length": length,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": completions // micro,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.01,
        "beta": 0.0,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.35,
        "vllm_max_model_length": length + 64,
        "vllm_importance_sampling_correction": False,
        "generation_kwargs": {"ignore_eos": True},
    }
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    from transformers import AutoTokenizer

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=coin,
        args=GRPOConfig(**config | options),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Times()],
    )
    started = time.perf_counter()
    trainer.train()
    print(json.dumps({"trl": "done", "completions": completions, "seconds": time.perf_counter() - started}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
