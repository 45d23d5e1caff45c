# SPDX-License-Identifier: Apache-2.0
"""Context of the V1 runner that is written when it is read: hidden states wait until their request is drafted for.

While nothing is drafted, nobody reads the draft's K/V; computing them for each new token reads the weights of ``fc`` and of all
K/V projections once more in every step. So the committed rows of every step are kept, by KV slot, and those in the blocks of the
requests that draft are computed in one pass right before. Requests that end without a draft never pay.

By slot, since that holds through all that a scheduler does. A block that changes hands is written by its new owner from the
front, and a row that comes later replaces the one that waited for the same slot; a block that is shared as a cached prefix
brings its waiting rows along. A row that waits for a slot which is nobody's any more may be written: its new owner overwrites it
before anything reads it. That last part needs a KV cache whose blocks are the draft's in any hands (see :func:`why_at_once`).
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_dflash.engine.query_block import CommittedRows
from vllm_dflash.planner import measured

MOST_BYTES = 64 << 20
"""Hidden states that wait at most: 5,825 rows of the demo pair in float32, 1,638 of 5 layers of 4096 in bfloat16."""
CHUNK = 512
"""Rows that are computed at a time: their intermediate values stay in a core's cache, and weights are read once for many."""

Ints = npt.NDArray[np.int64]
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(aux states [n, U * H_target], positions int64 [n], slots int64 [n]): compute K and V of all layers and store them."""


def why_at_once(vllm_config: Any, kv_cache_config: KVCacheConfig, *, on_host: bool) -> str | None:
    """Why context is written in the step that it comes from; None where it may wait.

    ``on_host``: slots can be read without waiting for a device.
    """
    reasons = {
        "slots are on a device": not on_host,
        "every step drafts": not vllm_config.speculative_config.num_speculative_tokens_per_batch_size,
        "a block may hold other layers in other hands": len(kv_cache_config.kv_cache_groups) > 1,
        "KV blocks are sent elsewhere": vllm_config.kv_transfer_config is not None,
        "some slots are of another rank": vllm_config.parallel_config.decode_context_parallel_size > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class PendingContext:
    """Committed rows whose K and V are not computed yet.

    Args:
        num_blocks: of the KV cache. kv_block_size: tokens in each.
        write: computes and stores.
        owned: numbers of the blocks that requests hold now, and of more at will; asked when the memory is full.
        most_bytes: of hidden states that wait.
    """

    def __init__(
        self,
        num_blocks: int,
        kv_block_size: int,
        write: Write,
        owned: Callable[[], Iterable[int]],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._kv_block_size = kv_block_size
        self._write, self._owned = write, owned
        self._most_bytes = most_bytes
        self._row_of = np.full((num_blocks, kv_block_size), -1, dtype=np.int64)
        self._full = np.zeros(num_blocks, dtype=bool)  # blocks that may be shared: nobody need hold them
        self._waiting = self._used = self._new = 0  # rows: that wait, that are taken, of the last step
        self._states: torch.Tensor | None = None
        self._positions = self._slots = torch.empty(0, dtype=torch.int64)

    def reserve(self, like: torch.Tensor) -> None:
        """Get the memory for rows as wide as those of ``like`` [any, U * H_target], every page of it.

        Before requests come: each page that is touched for the first time while they decode is a fault of the processor.
        """
        rows = max(self._most_bytes // (like.shape[1] * like.element_size()), 1)
        self._states = like.new_zeros(rows, like.shape[1])
        self._positions = torch.zeros(rows, dtype=torch.int64)
        self._slots = torch.zeros(rows, dtype=torch.int64)

    def add(self, committed: CommittedRows, states: torch.Tensor) -> None:
        """Take over the ``committed`` rows of a step whose aux states are ``states`` [T, U * H_target]."""
        count = self._new = committed.slots.shape[0]
        if count == 0:
            return
        blocks, inside = np.divmod(committed.slots.numpy(), self._kv_block_size)
        self._full[blocks[inside == 0]] = False
        self._full[blocks[inside == self._kv_block_size - 1]] = True
        self._waiting -= int((self._row_of[blocks, inside] >= 0).sum())
        if self._states is None:
            self.reserve(states)
        assert self._states is not None
        if count > self._states.shape[0]:
            rows = slice(None) if committed.rows is None else committed.rows
            self._write(states[rows], committed.positions, committed.slots)
            self._row_of[blocks, inside] = -1
            return
        if self._used + count > self._states.shape[0]:
            self._row_of[blocks, inside] = -1
            self._make_room(count)
        new = slice(self._used, self._used + count)
        if committed.rows is None:
            self._states[new] = states
        else:
            torch.index_select(states, 0, committed.rows, out=self._states[new])
        self._positions[new], self._slots[new] = committed.positions, committed.slots
        self._row_of[blocks, inside] = np.arange(new.start, new.stop)
        self._waiting += count
        self._used += count

    def write_for(self, block_table: torch.Tensor, anchors: torch.Tensor, drafting: torch.Tensor | None) -> float:
        """Compute and store the context of the requests that draft; return the seconds that rows of earlier steps took.

        Args:
            block_table: int32 [B, blocks].
            anchors: int64 [B] tokens of context.
            drafting: bool [B], None for all.
        """
        if drafting is not None:
            block_table, anchors = block_table[drafting], anchors[drafting]
        if not self._waiting or not anchors.shape[0]:
            return 0.0
        columns = -(-int(anchors.max()) // self._kv_block_size)
        rows = self._row_of[block_table[:, :columns].numpy()].ravel()
        rows = np.unique(rows[rows >= 0])
        began, older = time.perf_counter(), int(np.searchsorted(rows, self._used - self._new))
        self._store(rows)
        seconds = (time.perf_counter() - began) * older / len(rows) if older else 0.0
        measured.record_catch_up(seconds)
        return seconds

    def _make_room(self, count: int) -> None:
        """Forget rows that nobody will read: neither a request that is there, nor one that finds them as a cached prefix.

        What remains moves to the front. It is written where it leaves no room for ``count`` rows, or would soon leave none.
        """
        assert self._states is not None
        blocks, inside = np.divmod(self._slots[: self._used].numpy(), self._kv_block_size)
        waits = self._row_of[blocks, inside] == np.arange(self._used)
        held = self._full.copy()
        held[np.fromiter(self._owned(), dtype=np.int64)] = True
        kept = np.flatnonzero(waits & held[blocks])
        if max(2 * len(kept), len(kept) + count) > self._states.shape[0]:
            began = time.perf_counter()
            self._store(kept)
            measured.record_catch_up(time.perf_counter() - began)
            kept = kept[:0]
        self._row_of[blocks, inside] = -1
        self._waiting = self._used = len(kept)
        rows = torch.from_numpy(kept)
        for kind in (self._states, self._positions, self._slots):
            kind[: len(kept)] = kind[rows]
        self._row_of[blocks[kept], inside[kept]] = np.arange(len(kept))

    def _store(self, rows: Ints) -> None:
        """Compute and store rows, by their ascending numbers; they wait no more."""
        assert self._states is not None
        for begin in range(0, len(rows), CHUNK):
            some = rows[begin : begin + CHUNK]
            dense = int(some[-1]) - int(some[0]) + 1 == len(some)
            at = slice(int(some[0]), int(some[-1]) + 1) if dense else torch.from_numpy(some)
            self._write(self._states[at], self._positions[at], self._slots[at])
        blocks, inside = np.divmod(self._slots.numpy()[rows], self._kv_block_size)
        self._row_of[blocks, inside] = -1
        self._waiting -= len(rows)
        if not self._waiting:
            self._used = 0
