# SPDX-License-Identifier: Apache-2.0
"""Model runner V1: the draft's context K/V, written at once where drafts follow, later where none do.

A step that drafts nothing (the planner's width 0) still has to leave the context whole for the day when drafting resumes. On a
CPU the projections of one token cost nearly what those of many do, as their weights are read either way. So such steps only keep
the hidden states; the first draft, or ``LATEST`` rows, has all of them projected in one pass.
"""

from typing import Any

import torch

from vllm_dflash.engine.query_block import CommittedRows, within_limit

LATEST = 256
"""Rows that wait at most: 5 MB of a 135M target's states, 21 MB of an 8B target's."""


class ContextWriter:
    """Steps 1 and 2 of the draft step for one KV cache.

    Args:
        model: the draft network.
        limit: positions from here on are drafted for by nobody and not stored; None: all are.
        compact: leave such rows out instead of padding them.
        may_wait: whether nothing but the draft reads the cache, and shapes are free.
    """

    def __init__(self, model: Any, limit: int | None, *, compact: bool, may_wait: bool) -> None:
        self._model, self._limit, self._compact, self._may_wait = model, limit, compact, may_wait
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._slots: set[int] = set()

    @property
    def rows_waiting(self) -> int:
        """Rows whose K and V are not written yet."""
        return len(self._slots)

    def store(self, committed: CommittedRows, hidden_states: torch.Tensor, *, drafts: bool) -> None:
        """K and V of the committed rows of a step, and of those that wait.

        Args:
            committed: rows, positions and slots.
            hidden_states: [T, U * H_target] captured layers of the target step; not changed by anyone afterwards.
            drafts: whether the context is read in this step.
        """
        if self._limit is not None:
            committed = within_limit(committed, self._limit, compact=self._compact)
        states = hidden_states if committed.rows is None else hidden_states[committed.rows]
        if not self._may_wait or (drafts and not self._waiting):
            self._write(states, committed.positions, committed.slots)
            return
        slots = committed.slots.tolist()
        if not self._slots.isdisjoint(slots):  # a block has changed hands: what was there comes first
            self.catch_up()
        self._slots.update(slots)
        self._waiting.append((states, committed.positions, committed.slots))
        if drafts or len(self._slots) >= LATEST:
            self.catch_up()

    def catch_up(self) -> None:
        """Write all rows that wait."""
        waiting, self._waiting = self._waiting, []
        self._slots.clear()
        if waiting:
            states, positions, slots = (torch.cat(parts) for parts in zip(*waiting, strict=True))
            self._write(states, positions, slots)

    def _write(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Combine aux states [n, U * H_target] by ``fc``, and write K/V of all layers."""
        if states.shape[0]:
            self._model.precompute_and_store_context_kv(self._model.combine_hidden_states(states), positions, slots)
