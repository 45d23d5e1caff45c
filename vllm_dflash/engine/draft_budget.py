# SPDX-License-Identifier: Apache-2.0
"""The cut of vLLM's adaptive verification in one kernel: which drafts of a batch are verified, once the budget is known.

vLLM's own compiles again while serving whenever a budget, a number of requests or two equal sizes are met for the first time, and
takes some 15 launches beside it in a step that the host bounds. Ours needs a copy and a launch.
"""

import itertools
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from dflash_kernels.draft_budget import MAX_DRAFTS, TILES, Admission, draft_budget


class DraftBudget:
    """Stands for ``reallocate_drafts`` of an ``AdaptiveVerificationManager``, whose tensors it fills as vLLM does.

    Args:
        manager: vLLM's; its method is replaced on this one object by :meth:`install`.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._out = Admission(manager._batch_draft_capacity, manager._cu_num_logits, manager.query_start_loc)
        self._scheduled = torch.empty(2 * len(self._out.admitted), dtype=torch.int32, device=self._out.admitted.device)
        # vLLM 0.32 has no copy of what was admitted, nor its place in the result.
        self._rest = (None,) if hasattr(manager, "_copy_admitted_drafts_to_host") else ()

    @torch.inference_mode()
    def install(self) -> None:
        """Compile the kernel for every tile that a batch can need, then take over; a fault leaves vLLM's in place."""
        confidences, device = self._manager._confidence_probs, self._scheduled.device
        most = len(self._out.admitted)
        scratch = Admission.empty(most, device)
        for requests in sorted({min(tile, most) for tile in TILES}):
            mapping = torch.arange(requests, device=device)
            scheduled = torch.ones(2, requests, dtype=torch.int32, device=device)
            draft_budget(torch.ones_like(confidences), mapping, scheduled, requests // 2, self._manager.num_bonus_tokens, scratch)
        self._manager.reallocate_drafts = self.reallocate_drafts

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """As vLLM's: (first rows to sample from int32 [R + 1], first tokens int32 [M + 1], budget, None), for R of M requests.

        Args:
            req_ids: the batch, in its order.
            idx_mapping: int64 [R], request states.
        """
        manager = self._manager
        batch_budget, manager._batch_budget = manager._batch_budget, None
        assert batch_budget is not None
        drafts, others, budget = batch_budget
        count = len(req_ids)
        numbers = itertools.chain(map(drafts.__getitem__, req_ids), map(others.__getitem__, req_ids))
        # Pinned by vLLM's helper, in memory that torch does not hand out again before this copy is done.
        scheduled = async_tensor_h2d(np.fromiter(numbers, np.int32, 2 * count), out=self._scheduled[: 2 * count])
        out, bonus = self._out, manager.num_bonus_tokens
        draft_budget(manager._confidence_probs, idx_mapping, scheduled.view(2, count), budget, bonus, out)
        return out.cu_num_logits[: count + 1], out.query_start_loc, budget, *self._rest


def prepare_cut(manager: Any) -> None:
    """Put the kernel in vLLM's place where it serves; compile vLLM's cut elsewhere. Once per manager."""
    if isinstance(getattr(manager.reallocate_drafts, "__self__", None), DraftBudget):
        return
    too_large = manager.req_states.max_num_reqs > TILES[-1] or manager.num_speculative_steps > MAX_DRAFTS
    # Batch-sharded sampling wants the counts on the host too, by a copy and an event of vLLM's.
    if too_large or getattr(manager, "_copy_admitted_drafts_to_host", False):
        compile_cuts(manager)
        return
    try:
        DraftBudget(manager).install()
    except Exception:
        compile_cuts(manager)  # vLLM's serves then
        raise


@torch.inference_mode()
def compile_cuts(manager: Any) -> None:
    """Compile vLLM's cut for every kind of batch: one request or one draft is a program of its own, a second while serving."""
    cut = adaptive_verification._assign_draft_token_budget_compiled
    drafts, device = manager.num_speculative_steps, manager.query_start_loc.device
    if device.type != "cuda":
        return
    # Sizes that are equal in the example are taken to be equal ever after, so none of the larger ones is K or another's.
    for requests in {1, min(drafts + 2, manager.req_states.max_num_reqs)}:
        for budget in {1, min(drafts + 3, requests * drafts - 1) or 1}:
            capacities = manager._batch_draft_capacity[:requests].fill_(drafts)
            cut(manager._confidence_probs, torch.arange(requests, device=device), capacities, budget, drafts)
