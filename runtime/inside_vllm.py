"""Code that vLLM imports into its own processes, because the engine's arguments name it. runtime/engine.py has the
table of what it changes in vLLM, and who is at the other end.

    RunWeightReceiver    mixed into vLLM's worker (`worker_extension_cls`): vllm_engine's, and mixtures of experts
    exit_with_trainer    ends the engine's process when its trainer has ended

Source: vLLM 0.32, vllm/model_executor/model_loader/reload. A faster scheduler: lab/fast_vllm.py.
"""

import os
import threading
import time
from pathlib import Path

import torch
from torch.nn.functional import linear
from tqdm import tqdm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

import vllm_engine


class RunWeightReceiver(vllm_engine.WeightReceiver):
    """Loads new weights into the running model."""

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copies the tensors to where the model has its weights. Raises RuntimeError if one is missing."""
        model = self.model_runner.get_model()
        for layer in model.modules():
            if not torch.cuda.is_available() and hasattr(getattr(layer, "quant_method", None), "moe_kernel"):
                layer.quant_method.moe_kernel = None  # a layer repacks its experts only for a new kernel
        self.repacked = is_repacked(model)
        super().load_tensors(tensors)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the trainer writes to this memory next


def is_repacked(model: torch.nn.Module) -> bool:
    """Whether a layer computes with anything but its parameters, so that copying into these would not reach it."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        is_plain = getattr(layer, "cpu_linear", None) is linear
        if torch.cuda.is_available():
            is_plain = isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
        splits_weights = hasattr(layer, "kv_b_proj")  # latent attention
        if splits_weights or (method is not None and not is_plain):
            return True
    return False


def exit_with_trainer(trainer: int) -> None:
    """Ends this process within a second of the trainer's death: SIGKILL leaves a parent no time to end its children."""
    is_child = os.getppid() == trainer  # else this is the engine's own child, as under tensor parallelism

    def trainer_lives() -> bool:
        return os.getppid() == trainer if is_child else Path(f"/proc/{trainer}").exists()

    def watch() -> None:
        while trainer_lives():
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="exit_with_trainer", daemon=True).start()


trainer_pid = os.environ.get("SCALERL_TRAINER_PID", "")
if trainer_pid.isdigit() and int(trainer_pid) != os.getpid():  # this is an engine's process, started by a trainer
    os.setpgid(0, 0)  # own process group: a signal sent to the trainer's group must not reach the engine
    tqdm.set_lock(threading.RLock())  # its own is a semaphore in shared memory, which a SIGKILL would leave there
    exit_with_trainer(int(trainer_pid))
