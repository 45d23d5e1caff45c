# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2: requests whose context is longer than the draft serves become padding of the draft step.

They read no keys and store nothing, and no rotary table is read behind its end. Their drafts are never verified:
:mod:`vllm_dflash.engine.scheduling` drops them by the same limit.
"""

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dflash_kernels.query_block import QueryBlockBuffers


class ContextGate:
    """Compares the requests of each step with ``limit``, the most tokens of context that are drafted for; None lets all pass.

    Nothing is launched while no request of the batch can be beyond the limit.
    """

    def __init__(self, limit: int | None, num_speculative_tokens: int) -> None:
        self.limit = limit
        # The runner's bound takes the drafts of this step and of one in flight for accepted.
        self._slack = 2 * (num_speculative_tokens + 1)

    def closes_all(self, batch: InputBatch, num_reqs: int) -> bool:
        """Whether every request is surely beyond the limit with all of its rows, so that nothing is left to do."""
        if self.limit is None:
            return False
        first = torch.from_numpy(batch.num_computed_tokens_np[:num_reqs])
        return bool((first - self._slack > self.limit).all())

    def _limit_of(self, batch: InputBatch, num_reqs: int) -> int | None:
        """The limit where a request may be beyond it, else None."""
        if self.limit is None or int(batch.seq_lens_cpu_upper_bound[:num_reqs].max()) <= self.limit:
            return None
        return self.limit

    def sampled(self, batch: InputBatch, num_reqs: int, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
        """``num_sampled`` int32 [B], 0 for requests beyond the limit: the query block then has padding in their place."""
        limit = self._limit_of(batch, num_reqs)
        if limit is None:
            return num_sampled
        last = batch.query_start_loc[1 : num_reqs + 1] - 1 - num_rejected[:num_reqs]
        anchors = batch.positions[last.clamp(min=0).long()] + 1
        return torch.where(anchors <= limit, num_sampled[:num_reqs], 0)

    def drop_context(self, batch: InputBatch, num_reqs: int, query: QueryBlockBuffers, num_rows: int) -> None:
        """Turn context rows at positions from the limit on into padding; no drafted request reads them."""
        limit = self._limit_of(batch, num_reqs)
        if limit is None:
            return
        positions = query.context_positions[:num_rows]
        beyond = positions >= limit
        positions.masked_fill_(beyond, 0)
        query.context_slots[:, :num_rows].masked_fill_(beyond, -1)
