# SPDX-License-Identifier: Apache-2.0
"""What `query_block` reads and writes, as typed groups of tensors; no kernel here.

| class | lifetime | who fills it |
| --- | --- | --- |
| `DraftBlockTables` | once per KV-cache allocation | the engine's block tables of the draft KV groups |
| `QueryBlockSpec` | once per engine | configuration |
| `TargetStep` | one step | the model runner, after verification |
| `QueryBlockBuffers` | allocated once | `query_block`, every step |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAD_SLOT = -1
"""Slot of a row whose K and V must not be stored."""


@dataclass(frozen=True, slots=True)
class QueryBlockSpec:
    """Constants of the query block.

    Attributes:
        num_query_per_req: Q, rows per request (the anchor and the mask tokens).
        num_speculative_tokens: K, drafts per request; at most Q - 1, or Q under `sample_from_anchor`.
        mask_token_id: input id of the rows to predict.
        max_model_len: first position that may not be stored.
        sample_from_anchor: whether the anchor row predicts too.
        draft_mid_prefill: whether requests that sampled nothing get a query block (their drafts are never verified).
    """

    num_query_per_req: int
    num_speculative_tokens: int
    mask_token_id: int
    max_model_len: int
    sample_from_anchor: bool = False
    draft_mid_prefill: bool = True

    def __post_init__(self) -> None:
        needed = self.num_speculative_tokens + self.sample_offset
        if needed > self.num_query_per_req:
            raise ValueError(
                f"num_speculative_tokens {self.num_speculative_tokens} needs num_query_per_req of at least {needed}; "
                f"got {self.num_query_per_req}"
            )

    @property
    def sample_offset(self) -> int:
        """First query row that predicts a token."""
        return 0 if self.sample_from_anchor else 1


@dataclass(frozen=True, slots=True)
class TargetStep:
    """Device tensors of the target step that has just been verified; B real requests, `num_tokens` rows.

    Attributes:
        query_start_loc: int32 [>= B + 1], first row of each request; entry B is the real token count.
        positions: int64 [>= num_tokens], absolute positions.
        idx_mapping: int64 or int32 [>= B], batch row -> request-state index, -1 for a dummy request.
        num_sampled: int32 [>= B], tokens sampled in this step, 0 in mid-prefill.
        num_rejected: int32 [>= B], trailing rows of the request's span that were rejected.
        last_sampled: int64 [max_num_reqs, 1], by request-state index.
        next_prefill_tokens: int32 [lookahead, max_num_reqs], row 0 is read, by request-state index.
        num_blocks: int32 [all groups, max_num_reqs], allocated pages by request-state index, or None. With it, columns
            that hold stale ids of earlier batches give PAD_SLOT instead of a store into another request's page.
    """

    query_start_loc: torch.Tensor
    positions: torch.Tensor
    idx_mapping: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    num_blocks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftBlockTables:
    """Block tables of the G draft KV groups and their device-side description; built once when the KV cache is allocated.

    Attributes:
        tables: per group int32 [max_num_reqs, width_g], batch order, contents refreshed every step, address fixed.
        kv_block_sizes: tokens per page of each group; they may differ and need not be powers of two.
        group_ids: row of each group in the engine's `num_blocks` array.
        layout: int64 [G, 5] on the device: table address, row stride, page size, columns, group id.
    """

    tables: tuple[torch.Tensor, ...]
    kv_block_sizes: tuple[int, ...]
    group_ids: tuple[int, ...]
    layout: torch.Tensor

    @classmethod
    def build(
        cls, tables: Sequence[torch.Tensor], kv_block_sizes: Sequence[int], group_ids: Sequence[int] | None = None
    ) -> "DraftBlockTables":
        """Describe the tables on their device (synchronises; never call it in a step).

        Raises:
            ValueError: no table, a table that is not int32 [*, width] with unit column stride, or a page size below 1.
        """
        ids = tuple(range(len(tables)) if group_ids is None else group_ids)
        if not tables or not len(tables) == len(kv_block_sizes) == len(ids):
            raise ValueError(
                f"tables, kv_block_sizes and group_ids need one entry per draft KV group; got {len(tables)}, "
                f"{len(kv_block_sizes)} and {len(ids)}"
            )
        rows = []
        for table, kv_block_size, group_id in zip(tables, kv_block_sizes, ids, strict=True):
            if table.dtype != torch.int32 or table.dim() != 2 or table.stride(1) != 1:
                raise ValueError(
                    f"block table of group {group_id} must be int32 [max_num_reqs, columns] with column stride 1; "
                    f"got {table.dtype} {tuple(table.shape)} with strides {table.stride()}"
                )
            if kv_block_size < 1:
                raise ValueError(f"kv_block_size of group {group_id} must be at least 1; got {kv_block_size}")
            rows.append([table.data_ptr(), table.stride(0), kv_block_size, table.shape[1], group_id])
        layout = torch.tensor(rows, dtype=torch.int64, device=tables[0].device)
        return cls(tuple(tables), tuple(kv_block_sizes), ids, layout)


@dataclass(frozen=True, slots=True)
class QueryBlockBuffers:
    """Outputs of `query_block`, allocated once for `max_num_reqs` requests *after graph padding*.

    Attributes (Q = query rows, K = drafts per request, G = draft KV groups):
        input_ids: int32 [max_num_reqs * Q].
        positions: int64 [max_num_reqs * Q], clamped to max_model_len - 1 (they index the RoPE cache).
        slots: int64 [G, max_num_reqs * Q], PAD_SLOT where nothing may be stored.
        query_start_loc: int32 [max_num_reqs + 1].
        seq_lens: int32 [max_num_reqs], keys that the query rows of a request may see.
        sample_positions: int64 [max_num_reqs * K], position *before* the sampled token (the key of a random draw).
        sample_req_state: int64 [max_num_reqs * K], request-state index, -1 = inert.
        context_positions: int64 [max_num_context_rows].
        context_slots: int64 [G, max_num_context_rows].
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    sample_positions: torch.Tensor
    sample_req_state: torch.Tensor
    context_positions: torch.Tensor
    context_slots: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_num_reqs: int,
        num_query_per_req: int,
        num_speculative_tokens: int,
        max_num_context_rows: int,
        num_groups: int,
        device: torch.device | str,
    ) -> "QueryBlockBuffers":
        """Allocate all outputs in the padded state."""
        num_rows = max_num_reqs * num_query_per_req
        num_samples = max_num_reqs * num_speculative_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        buffers = cls(
            input_ids=zeros(num_rows, dtype=torch.int32),
            positions=zeros(num_rows),
            slots=zeros(num_groups, num_rows),
            query_start_loc=zeros(max_num_reqs + 1, dtype=torch.int32),
            seq_lens=zeros(max_num_reqs, dtype=torch.int32),
            sample_positions=zeros(num_samples),
            sample_req_state=zeros(num_samples),
            context_positions=zeros(max_num_context_rows),
            context_slots=zeros(num_groups, max_num_context_rows),
        )
        buffers.reset()
        return buffers

    def reset(self) -> None:
        """Bring every row back to the padded state, e.g. before capture, so that a capture run stores nothing."""
        for zeroed in (self.input_ids, self.positions, self.query_start_loc, self.seq_lens):
            zeroed.zero_()
        self.sample_positions.zero_()
        self.context_positions.zero_()
        self.sample_req_state.fill_(-1)
        self.slots.fill_(PAD_SLOT)
        self.context_slots.fill_(PAD_SLOT)
