# SPDX-License-Identifier: Apache-2.0
"""Where the worker of an engine runs: what it measures reaches the planner through the memory of one process only."""

from typing import Any

_DIRECT = (None, "uni", "external_launcher")
"""Executors that call their worker (``ParallelConfig.distributed_executor_backend``); vLLM takes "uni" for one by itself."""


def share_process(parallel_config: Any) -> bool:
    """Whether scheduler and worker run in one process: one worker, called directly.

    ``"mp"`` starts a process for a single worker too; that is what vLLM takes on CPUs where the engine core has its own.
    """
    backend = parallel_config.distributed_executor_backend
    if parallel_config.world_size > 1:
        return False
    if not isinstance(backend, type):
        return backend in _DIRECT
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return issubclass(backend, UniProcExecutor)
