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


def max_active_requests(vllm_config: VllmConfig) -> int:
    """Most requests in one step. 0.33 lets the scheduler run fewer than ``max_num_seqs`` (``max_num_active_seqs``)."""
    scheduler = vllm_config.scheduler_config
    limit: int = scheduler.max_num_seqs
    return min(limit, getattr(scheduler, "max_num_active_seqs", None) or limit)


def compact_request_states(vllm_config: VllmConfig, req_states: Any) -> int:
    """Rows that tensors indexed by request state need; makes low states the first to be handed out.

    The runner pops states from the end of a free list that starts as ``0 .. max_num_seqs - 1``. With the order reversed while
    nothing is taken, at most as many states are ever touched as requests are active, counted from 0.
    """
    total: int = vllm_config.scheduler_config.max_num_seqs
    free = getattr(req_states, "free_indices", None)
    if getattr(vllm_config.scheduler_config, "max_num_active_seqs", None) is None or free != list(range(total)):
        return total
    free.reverse()
    return max_active_requests(vllm_config)
