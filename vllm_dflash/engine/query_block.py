# SPDX-License-Identifier: Apache-2.0
"""Inputs of one draft step on the V1 runner: which target rows are context, and the query rows ``[anchor, mask x K]``.

Plain vectorised torch, one path for every batch the runner makes (padded or not, chunked prefill, mixed, preempted and
resumed requests): a request's span of target rows, minus its rejected tail, is committed; the anchor follows the last
committed position. Two ways out:

* ``compact`` (CPUs, where shapes are free): rows that no one needs are left out. Rejected rows, requests in mid-prefill (their
  drafts would be thrown away) and positions beyond ``max_model_len`` cost nothing.
* fixed shapes (accelerators, no device-to-host sync): the same rows stay in and carry the slot PAD.
"""

import dataclasses
from collections.abc import Collection, Sequence

import torch

PAD_SLOT = -1


@dataclasses.dataclass(frozen=True, slots=True)
class CommittedRows:
    """Target rows whose tokens are final.

    Attributes:
        rows: int64 [n] row numbers, None for all rows of the step.
        positions: int64 [n].
        slots: int64 [n] KV-cache slots; PAD for rejected rows that were not left out.
        anchors: int64 [B], the position after each request's last committed row.
    """

    rows: torch.Tensor | None
    positions: torch.Tensor
    slots: torch.Tensor
    anchors: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class QueryBlock:
    """Query rows of the requests that draft, request-major.

    Attributes:
        input_ids: int64 [n]. positions: int64 [n]. slots: int64 [n], PAD beyond ``max_model_len``.
        requests: int64 [R] batch rows of the drafting requests, None for all.
        query_start_loc: int32 [R + 1]. seq_lens: int32 [R], context plus query rows.
        sample_rows: int64 [m] query rows that predict a draft token, None for every row but each block's first ``skip``.
        places: int64 [m] where these tokens go in the flat [B, K] result, None when ``sample_rows`` is None.
        width: query rows of a full block.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    requests: torch.Tensor | None
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    sample_rows: torch.Tensor | None
    places: torch.Tensor | None
    width: int


def committed_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    num_rejected: torch.Tensor | None,
    *,
    compact: bool,
) -> CommittedRows:
    """Split the target step's rows into committed and rejected ones.

    Positions are token indices, counted from the sequence lengths. The target's own positions will not do: after an image,
    those of an M-RoPE target lag behind the token index, which is what slots and the draft's context are laid out by.

    Args:
        query_start_loc: int32 [B + 1] spans of the requests.
        seq_lens: int32 [B] tokens of every request up to the end of its span, rejected rows included.
        slots: int64 [T] slots in the draft's KV-cache group, T rows in all spans.
        num_rejected: int32 [B] trailing rejected rows, None when the runner left them out already.
        compact: leave rejected rows out instead of padding them.
    """
    total = slots.shape[0]
    if compact and num_rejected is None and total == seq_lens.shape[0]:  # one row of each request
        anchors = seq_lens.long()
        return CommittedRows(None, anchors - 1, slots, anchors)
    starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
    rows = torch.arange(total, device=slots.device)
    positions = rows + torch.repeat_interleave(seq_lens.long() - ends, ends - starts, output_size=total)
    if num_rejected is None:
        return CommittedRows(None, positions, slots, seq_lens.long())
    anchors = (seq_lens - num_rejected).long()
    committed = rows < torch.repeat_interleave(ends - num_rejected, ends - starts, output_size=total)
    if not compact:
        padded = torch.where(committed, slots, PAD_SLOT)
        return CommittedRows(None, torch.where(committed, positions, 0), padded, anchors)
    rows = rows[committed]
    return CommittedRows(rows, positions[rows], slots[rows], anchors)


def within_limit(committed: CommittedRows, limit: int, *, compact: bool) -> CommittedRows:
    """``committed`` without (``compact``), or with padding for, its rows at positions from ``limit`` on."""
    kept = committed.positions < limit
    if not compact:
        positions = torch.where(kept, committed.positions, 0)
        return dataclasses.replace(committed, positions=positions, slots=torch.where(kept, committed.slots, PAD_SLOT))
    if bool(kept.all()):
        return committed
    rows = kept.nonzero().squeeze(1) if committed.rows is None else committed.rows[kept]
    return dataclasses.replace(committed, rows=rows, positions=committed.positions[kept], slots=committed.slots[kept])


def query_block(
    anchors: torch.Tensor,
    next_token_ids: torch.Tensor,
    block_table: torch.Tensor,
    drafting: torch.Tensor | None,
    *,
    num_speculative_tokens: int,
    skip: int,
    mask_token_id: int,
    kv_block_size: int,
    max_model_len: int,
    compact: bool,
) -> QueryBlock:
    """Build the query rows.

    Args:
        anchors: int64 [B] anchor positions.
        next_token_ids: int32 [B] anchor tokens.
        block_table: int32 [B, >= ceil(max_model_len / kv_block_size)].
        drafting: bool [B], requests whose drafts will be used; None for all. Heeded when ``compact``.
        num_speculative_tokens: K.
        skip: rows of a block that draft nothing: 1 (the anchor), or 0 for ``sample_from_anchor`` drafts.
        mask_token_id: id of the rows behind the anchor.
        kv_block_size: tokens per block of ``block_table``.
        max_model_len: positions from here on have no slot.
        compact: leave useless rows out instead of padding them.
    """
    device = anchors.device
    width = num_speculative_tokens + skip
    positions = anchors.unsqueeze(1) + torch.arange(width, device=device)  # [B, Q]
    inside = positions < max_model_len
    # A position beyond the end has no slot of its own; clamping it only keeps the table look-up in bounds.
    clamped = positions.clamp(max=max_model_len - 1)
    columns = clamped // kv_block_size
    blocks = block_table.gather(1, columns).long()
    slots = torch.where(inside, blocks * kv_block_size + clamped % kv_block_size, PAD_SLOT)
    input_ids = torch.full_like(positions, mask_token_id)
    input_ids[:, 0] = next_token_ids
    seq_lens = (anchors + width).clamp(max=max_model_len)
    wanted = inside if drafting is None else inside & drafting.unsqueeze(1)
    if not compact or bool(wanted.all()):
        starts = torch.arange(0, (anchors.shape[0] + 1) * width, width, dtype=torch.int32, device=device)
        return QueryBlock(
            input_ids.flatten(), clamped.flatten(), slots.flatten(), None, starts, seq_lens.int(), None, None, width
        )
    return _only_wanted(input_ids, positions, slots, seq_lens, wanted, skip)


def _only_wanted(
    input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, seq_lens: torch.Tensor, wanted: torch.Tensor, skip: int
) -> QueryBlock:
    """The rows of ``wanted`` bool [B, Q] out of full blocks [B, Q]; requests without any are left out."""
    lengths = wanted.sum(1)
    requests = lengths.nonzero().squeeze(1)
    starts = torch.cat([lengths.new_zeros(1), lengths[requests].cumsum(0)]).int()
    drafted = wanted.clone()
    drafted[:, :skip] = False
    return QueryBlock(
        input_ids[wanted],
        positions[wanted],
        slots[wanted],
        requests,
        starts,
        seq_lens[requests].int(),
        sample_rows=drafted[wanted].nonzero().squeeze(1),
        places=drafted[:, skip:].flatten().nonzero().squeeze(1),
        width=wanted.shape[1],
    )


def place(values: torch.Tensor, places: torch.Tensor | None, size: int) -> torch.Tensor:
    """Scatter rows ``values`` [m, ...] to ``places`` of a zero tensor [size, ...]; unchanged when no row was left out."""
    if places is None:
        return values
    result = values.new_zeros(size, *values.shape[1:])
    result[places] = values
    return result


def drafted_for(
    anchors: torch.Tensor, prefilling: torch.Tensor, limit: int | None, idle: Collection[str], names: Sequence[str]
) -> torch.Tensor | None:
    """Requests whose drafts will be verified, bool [B]; None for all.

    The scheduler drops drafts made in mid-prefill, those of requests with more context than the draft serves, and those that
    the planner does not want.

    Args:
        anchors: int64 [B].
        prefilling: bool [B].
        limit: most tokens of context that are drafted for, None for any.
        idle: requests that the planner leaves out, by name.
        names: of the requests, B or more.
    """
    dropped = prefilling
    if limit is not None:
        dropped = dropped | (anchors > limit)
    if idle:
        dropped = dropped | torch.tensor([name in idle for name in names[: anchors.shape[0]]])
    return ~dropped if bool(dropped.any()) else None
