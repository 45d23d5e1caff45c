# SPDX-License-Identifier: Apache-2.0
"""Whether scheduler and worker share a process: what a worker measures reaches the planner there alone."""

from types import SimpleNamespace

import pytest

from vllm_dflash.engine.workers import share_process


def parallel(world_size, backend):
    return SimpleNamespace(world_size=world_size, distributed_executor_backend=backend)


@pytest.mark.parametrize(
    ("world_size", "backend", "shared"),
    [
        (1, "uni", True),
        (1, None, True),  # vLLM takes "uni" then
        (1, "external_launcher", True),
        (1, "mp", False),
        (1, "ray", False),
        (1, "somebody.elses.Executor", False),  # it may be one of several processes
        (2, "uni", False),
    ],
)
def test_one_worker_that_is_called_directly(world_size, backend, shared):
    """Breaks if an engine waits for confidences from a worker in another process, or a planner is given up on for no reason."""
    assert share_process(parallel(world_size, backend)) == shared
