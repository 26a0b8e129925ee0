"""vLLM's Ray executor in a run. Imported by the trainer, in the engine's process and in Ray's processes on other hosts.

    RayWorker      vLLM's, as the class of Ray's actors: unpickling it imports this module there
    RayExecutor    vLLM's, but the engine's process ends when a worker has died: its main thread may wait for that
                   worker's answer forever, while whoever waits for the engine sees a dead process at once

Source: vLLM 0.32, vllm/v1/executor/ray_executor_v2.py.
"""

import os

from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2, ray_utils

from runtime import inside_vllm  # noqa: F401  (the engine's process ends with its trainer)

if not current_platform.ray_device_key:  # a CPU has no name in Ray: a node started with --num-gpus 1 has one device
    type(current_platform).ray_device_key = "GPU"
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # SIGTERM, by which an engine ends, is no failure
# Two variables of the trainer's host stay there: its process, and its folder for sockets. Workers get all others.
ray_utils.WORKER_SPECIFIC_ENV_VARS.update({"SCALERL_TRAINER_PID", "VLLM_RPC_BASE_PATH"})


class RayWorker(ray_executor_v2.RayWorkerProc):
    """The class of Ray's actors."""


class RayExecutor(ray_executor_v2.RayExecutorV2):
    """The executor in the engine's process."""

    def shutdown(self) -> None:
        """Also called by vLLM's monitor, when a worker has died."""
        if self.is_failed:
            os._exit(1)
        super().shutdown()


ray_executor_v2.RayWorkerProc = RayWorker
