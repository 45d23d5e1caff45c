# SPDX-License-Identifier: Apache-2.0
"""The few places where vLLM 0.32 and 0.33 differ for the speculator. Features are probed, versions never compared.

Each probe says when it can go: when the oldest supported vLLM has the feature, its branch is dead and is deleted.
"""

import functools
import inspect
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


@functools.cache
def sample_draft_extra(num_speculative_tokens: int) -> dict[str, Any]:
    """Keywords of ``DraftModelSpeculator.sample_draft`` beyond the common ones; ``num_steps`` came with 0.33."""
    parameters = inspect.signature(DraftModelSpeculator.sample_draft).parameters
    return {"num_steps": num_speculative_tokens} if "num_steps" in parameters else {}


def max_step_requests(vllm_config: VllmConfig, num_query_per_req: int) -> int:
    """Most requests in one step that the runner can make, of the scheduler or of its own (profiling, kernel warm-up).

    0.33 bounds the scheduler's by ``max_num_active_seqs``, never above ``max_num_batched_tokens // (K + 1)`` for DFlash. Its
    profile and warm-up runs do not know that bound: they fill ``max_num_batched_tokens`` with ``num_query_per_req`` rows each.
    """
    scheduler = vllm_config.scheduler_config
    limit: int = scheduler.max_num_seqs
    active: int | None = getattr(scheduler, "max_num_active_seqs", None)
    if active is None:
        return limit
    own: int = scheduler.max_num_batched_tokens // num_query_per_req
    return min(limit, max(active, own))


def compact_request_states(vllm_config: VllmConfig, req_states: Any, max_requests: int) -> int:
    """Rows that tensors indexed by request state need, with ``max_requests`` at a time; has low states handed out first.

    The runner pops states from the end of a free list that starts as ``0 .. max_num_seqs - 1``. With the order reversed while
    nothing is taken, at most as many states are ever touched as requests are active, counted from 0.
    """
    total: int = vllm_config.scheduler_config.max_num_seqs
    free = getattr(req_states, "free_indices", None)
    if max_requests >= total or free != list(range(total)):
        return total
    free.reverse()
    return max_requests
