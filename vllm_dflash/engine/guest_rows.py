# SPDX-License-Identifier: Apache-2.0
"""Rows of a small draft head for the tokens that requests have just used: the words of their own subject, which come again.

They lie behind the listed rows, in a ring that all requests share. Every step shows its input tokens: what the target wrote, and
of prompts what no prefix cache holds. Those without a row take the place of the oldest guests. Under tensor parallelism a rank
has guests of its shard.
"""

from typing import Any

import torch

from dflash_kernels.fp8_linear import quantise_rows
from dflash_kernels.guest_rows import admit_guests


class GuestRows:
    """The guests of one private head.

    Args:
        private: the head; ``num_listed`` rows of its tensors are taken, the next ``count`` are for guests.
        count: rows.
        rows: int64 [n], rows of this rank's shard of the whole head that may come; as places in the head's weight.
        tokens: int64 [n], their target ids.
    """

    def __init__(self, private: Any, count: int, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        self.count, self._private = count, private
        size = int(tokens.max()) + 1 if len(tokens) else 1
        self._home_on_host = torch.full((size,), -1, dtype=torch.int32).index_put((tokens,), rows.to(torch.int32))
        device = private.weight.device
        self._home = torch.empty(size, dtype=torch.int32, device=device)
        self._slot_of = torch.empty(size, dtype=torch.int32, device=device)
        self._owner = torch.empty(count, dtype=torch.int32, device=device)
        self._cursor = torch.empty(1, dtype=torch.int64, device=device)  # 2^31 admissions are a few days

    @property
    def nbytes(self) -> int:
        """Bytes of the maps."""
        return sum(t.numel() * t.element_size() for t in (self._home, self._slot_of, self._owner, self._cursor))

    def reset(self, *, fp8: bool) -> None:
        """Send all guests away. The logits of an empty row are NaN in fp8, which never wins and counts for nothing.

        On CPUs, whose argmax would take a NaN, it repeats the first listed row, which comes first.
        """
        private, first = self._private, self._private.num_listed
        self._home.copy_(self._home_on_host)
        self._slot_of.fill_(-1)
        self._owner.fill_(-1)
        self._cursor.zero_()
        rows = slice(first, first + self.count)
        private.weight[rows] = 0.0 if fp8 else private.weight[:1]
        private.scale[rows] = float("nan") if fp8 else 1.0
        private.offsets[rows] = private.offsets[:1] - torch.arange(first, first + self.count, device=private.offsets.device)

    def admit(self, ids: torch.Tensor, head_weight: torch.Tensor, *, fp8: bool, rounded: bool) -> None:
        """Give rows to those of ``ids`` (int [n], on the head's device) that have none; nothing waits on a GPU."""
        private = self._private
        ids = ids[-4 * self.count :]  # of a long prefill the last ones; a launch takes as many as there are rows
        if fp8:
            maps = self._home, self._slot_of, self._owner, self._cursor
            out = private.weight, private.scale, private.offsets
            admit_guests(ids, head_weight, *maps, *out, first_row=private.num_listed)
            return
        ids = torch.unique(ids).long()
        ids = ids[(ids >= 0) & (ids < len(self._home))]
        ids = ids[(self._home[ids] >= 0) & (self._slot_of[ids] < 0)][: self.count]
        if not len(ids):
            return
        slots = (torch.arange(len(ids)) + self._cursor) % self.count
        self._cursor += len(ids)
        evicted = self._owner[slots]
        self._slot_of[evicted[evicted >= 0].long()] = -1
        self._owner[slots], self._slot_of[ids] = ids.to(torch.int32), slots.to(torch.int32)
        rows = head_weight[self._home[ids].long()]
        if rounded:
            numbers, scales = quantise_rows(rows)
            rows = (numbers.float() * scales[:, None]).to(rows.dtype)
        places = private.num_listed + slots
        private.weight[places], private.offsets[places] = rows, ids - places
