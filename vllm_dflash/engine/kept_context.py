# SPDX-License-Identifier: Apache-2.0
"""Context side of the V1 proposer: which rows of a step are written to the draft's KV cache, and when."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_dflash.checkpoint import DraftConfig
from vllm_dflash.engine.pending_context import PendingContext, why_at_once
from vllm_dflash.engine.query_block import CommittedRows, drafted_for, within_limit


class KeptContext:
    """Part of the proposer, whose attributes it reads."""

    model: Any
    vllm_config: Any
    kv_cache_gid: int
    block_size: int
    dtype: torch.dtype
    draft: DraftConfig
    _runner: Any
    _limit: int | None
    _compact: bool
    _skip_prefill: bool
    _idle: frozenset[str]
    _pending: PendingContext | None = None  # without one, and where context may not wait

    def _bind_context(self, kv_cache_config: KVCacheConfig) -> None:
        """Begin with a new KV cache."""
        at_once = why_at_once(self.vllm_config, kv_cache_config, on_host=self._compact)
        self._pending = None
        if at_once is None:
            self._pending = PendingContext(kv_cache_config.num_blocks, self.block_size, self._write_context, self._owned_blocks)
            self._pending.reserve(torch.empty(0, self._aux_size, dtype=self.dtype))

    def _keep_context(self, committed: CommittedRows, target_hidden_states: torch.Tensor) -> None:
        """Write what a step has committed, or let it wait."""
        if self._limit is not None:
            committed = within_limit(committed, self._limit, compact=self._compact)
        if self._pending is not None:
            self._pending.add(committed, target_hidden_states)
            return
        if committed.rows is not None:
            if committed.rows.numel() == 0:
                return
            target_hidden_states = target_hidden_states[committed.rows]
        self._write_context(target_hidden_states, committed.positions, committed.slots)

    def _catch_up(self, committed: CommittedRows, common: CommonAttentionMetadata, drafting: torch.Tensor | None) -> float:
        """Write what waits and will be read by the requests that draft, bool [B] or None for all; after :meth:`_keep_context`.

        Returns the seconds that rows of earlier steps took.
        """
        if self._pending is None or not (drafting is None or bool(drafting.any())):
            return 0.0
        return self._pending.write_for(common.block_table_tensor, committed.anchors, drafting)

    @property
    def _aux_size(self) -> int:
        """U * H_target, values per row of aux states."""
        return self.draft.target_hidden_size * len(self.model.captured_layers)

    def _write_context(self, target_hidden_states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Steps 1 and 2: fc over committed rows' aux states, then K/V of all layers into the cache."""
        states = self.model.combine_hidden_states(target_hidden_states)
        self.model.precompute_and_store_context_kv(states, positions, slots)

    def _owned_blocks(self) -> Iterator[int]:
        """Blocks of the draft's KV cache that requests hold."""
        for request in self._runner.requests.values():
            yield from request.block_ids[self.kv_cache_gid]

    def _drafting(self, anchors: torch.Tensor) -> torch.Tensor | None:
        """Requests whose drafts will be verified, bool [B]; None for all."""
        mask = getattr(self._runner, "discard_request_mask", None)
        if not self._skip_prefill or mask is None:
            return None
        return drafted_for(anchors, mask.gpu[: anchors.shape[0]], self._limit, self._idle, self._runner.input_batch.req_ids)
