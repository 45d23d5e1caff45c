# SPDX-License-Identifier: Apache-2.0
"""Everything integer that a draft step reads, for all draft KV groups, in one launch.

`query_block` turns the target step just verified into the inputs of the draft: the query block `[anchor, mask x K]` of
every request with its slots in each KV group, the rows to sample from, and positions and slots of the context rows.
It does not touch hidden states. Source: paper arXiv 2602.06036 (block layout); `prepare_dflash_inputs` of vLLM 0.32/0.33
does the same for one group with one program padding everything, which costs 20 us at batch 1 on an H200.

Invariants that a captured draft step relies on:

* every output has a fixed address and is in the padded state before the first real batch;
* of R = `num_reqs_padded` requests every row is written on every call; nothing behind them is touched, so a replay for
  R requests sees no stale value and a smaller launch does no useless work;
* a padded row is inert: slot PAD_SLOT, sequence length 0, request state -1, position 0, a valid token id.

Cost model: at 128 requests and 2 groups about 0.1 MB moves, so the time is the chain of four dependent loads
(starts -> last position -> block table -> store): 3-4 us expected on an H200 at any decode batch. Hence one warp per
request and no tuning; a prefill chunk is spread over the second grid axis, 8,192 rows being 32 programs of 2 tiles.
"""

import triton
import triton.language as tl

from dflash_kernels.query_layout import PAD_SLOT, DraftBlockTables, QueryBlockBuffers, QueryBlockSpec, TargetStep

__all__ = ["PAD_SLOT", "DraftBlockTables", "QueryBlockBuffers", "QueryBlockSpec", "TargetStep", "query_block"]

# 128 context rows per tile: 4 per lane of the single warp, and at least Q rows for every published block length.
_BLOCK_CONTEXT = 128
# Programs per request along the token axis; 32 x 128 rows hide an 8k chunk, more only adds idle programs to a mixed batch.
_MAX_SPLITS = 32
_NUM_WARPS = 1


@triton.jit
def _group_slots(layout_ptr, group, request, state, num_blocks_ptr, num_blocks_stride, positions, writable):  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    """Slots of `positions` in one group: PAD where not writable, outside the allocated columns, or in the null block."""
    entry = layout_ptr + group * 5
    table_ptr = tl.load(entry).to(tl.pointer_type(tl.int32))
    row_ptr = table_ptr + request * tl.load(entry + 1)
    kv_block_size = tl.load(entry + 2).to(tl.int32)
    num_columns = tl.load(entry + 3).to(tl.int32)
    if num_blocks_ptr is not None:
        # Columns behind the allocated ones hold block ids of earlier batches: a store there corrupts another request.
        allocated = tl.load(num_blocks_ptr + tl.load(entry + 4) * num_blocks_stride + state)
        num_columns = tl.minimum(num_columns, allocated)
    # 32-bit division: int64 division by a run-time value is several times slower, and positions fit.
    position = positions.to(tl.int32)
    column = position // kv_block_size
    block_id = tl.load(row_ptr + column, mask=writable & (column < num_columns), other=0).to(tl.int64)
    return tl.where(block_id > 0, block_id * kv_block_size + position % kv_block_size, -1)


@triton.jit
def _write_query_rows(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    out_ids, out_positions, out_slots, slots_stride, out_sample_positions, out_states,
    layout_ptr, num_blocks_ptr, num_blocks_stride, request, state, live, anchor, first, mask_token_id, max_model_len,
    num_query, num_spec, NUM_GROUPS: tl.constexpr, BLOCK_QUERY: tl.constexpr,
):  # fmt: skip
    """Query rows and sample rows of one request whose anchor sits at position `first`; inert ones when not `live`."""
    offset = tl.arange(0, BLOCK_QUERY)
    inside = offset < num_query
    # A limit per request, not a broadcast flag: the interpreter's masks cannot be splat from a boolean scalar.
    alive = offset < tl.where(live, num_query, 0)
    row = request.to(tl.int64) * num_query + offset
    position = first + offset
    tl.store(out_ids + row, tl.where(alive & (offset == 0), anchor, mask_token_id).to(tl.int32), mask=inside)
    tl.store(out_positions + row, tl.where(alive, tl.minimum(position, max_model_len - 1), 0), mask=inside)
    writable = alive & (position < max_model_len)
    for group in tl.static_range(NUM_GROUPS):
        slots = _group_slots(
            layout_ptr, group, request, state, num_blocks_ptr, num_blocks_stride, position, writable
        )  # fmt: skip
        tl.store(out_slots + group * slots_stride + row, slots, mask=inside)
    sampled = offset < num_spec
    sample = request.to(tl.int64) * num_spec + offset
    tl.store(out_sample_positions + sample, tl.where(alive, position, 0), mask=sampled)
    tl.store(out_states + sample, tl.where(alive, tl.zeros_like(row) + state, -1), mask=sampled)


@triton.jit
def _write_context_tile(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    out_positions, out_slots, slots_stride, positions_ptr, layout_ptr, num_blocks_ptr, num_blocks_stride,
    request, state, row, inside, committed, NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Positions and slots of one tile of context rows; rows that are inside but not committed become padding."""
    position = tl.load(positions_ptr + row, mask=committed, other=0)
    tl.store(out_positions + row, position, mask=inside)
    for group in tl.static_range(NUM_GROUPS):
        slots = _group_slots(
            layout_ptr, group, request, state, num_blocks_ptr, num_blocks_stride, position, committed
        )  # fmt: skip
        tl.store(out_slots + group * slots_stride + row, slots, mask=inside)


# Sizes change from step to step, the width of the block with the planner: specialising on them (1, multiples of 16) or on
# alignment would compile while serving.
_RUNTIME_INTS = [
    "slots_stride", "context_slots_stride", "num_blocks_stride", "num_reqs", "num_context_rows", "mask_token_id",
    "max_model_len", "num_query", "num_spec",
]  # fmt: skip
_STEP_TENSORS = [
    "starts_ptr", "positions_ptr", "mapping_ptr", "num_sampled_ptr", "num_rejected_ptr", "last_sampled_ptr",
    "prefill_ptr", "num_blocks_ptr",
]  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME_INTS, do_not_specialize_on_alignment=_STEP_TENSORS)
def _query_block_kernel(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    out_ids, out_positions, out_slots, slots_stride, out_starts, out_seq_lens, out_sample_positions,
    out_states, out_context_positions, out_context_slots, context_slots_stride,
    layout_ptr, starts_ptr, positions_ptr, mapping_ptr, num_sampled_ptr, num_rejected_ptr, last_sampled_ptr,
    prefill_ptr, num_blocks_ptr, num_blocks_stride, num_reqs, num_context_rows, mask_token_id, max_model_len, num_query, num_spec,
    DRAFT_MID_PREFILL: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK_QUERY: tl.constexpr, BLOCK_CONTEXT: tl.constexpr,
):  # fmt: skip
    """Grid (R, splits). Split 0 of a request writes its query block; all splits share context rows and padding."""
    request = tl.program_id(0)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    real = request < num_reqs
    num_tokens = tl.load(starts_ptr + num_reqs)  # on the device: the host only knows an upper bound
    start = tl.load(starts_ptr + request, mask=real, other=0)
    end = tl.load(starts_ptr + request + 1, mask=real, other=0)
    state = tl.load(mapping_ptr + request, mask=real, other=-1).to(tl.int64)
    owned = state >= 0
    safe_state = tl.maximum(state, 0)
    committed_end = end - tl.load(num_rejected_ptr + request, mask=real, other=0)
    tile = tl.arange(0, BLOCK_CONTEXT)

    if split == 0:
        num_sampled = tl.load(num_sampled_ptr + request, mask=real, other=0)
        live = owned & (committed_end > start)
        if not DRAFT_MID_PREFILL:
            live = live & (num_sampled > 0)
        sampled = tl.load(last_sampled_ptr + safe_state, mask=live, other=0)
        prompt = tl.load(prefill_ptr + safe_state, mask=live, other=0).to(tl.int64)
        anchor = tl.where(num_sampled > 0, sampled, prompt)
        first = tl.load(positions_ptr + committed_end - 1, mask=live, other=-1) + 1
        _write_query_rows(
            out_ids, out_positions, out_slots, slots_stride, out_sample_positions, out_states,
            layout_ptr, num_blocks_ptr, num_blocks_stride, request, safe_state, live, anchor, first, mask_token_id,
            max_model_len, num_query, num_spec, NUM_GROUPS, BLOCK_QUERY,
        )  # fmt: skip
        length = tl.where(live, tl.minimum(first + num_query, max_model_len), 0)
        tl.store(out_seq_lens + request, length.to(tl.int32))
        if request == 0:
            tl.store(out_starts, 0)
        tl.store(out_starts + request + 1, tl.minimum(request + 1, num_reqs) * num_query)

    for base in range(start + split * BLOCK_CONTEXT, end, num_splits * BLOCK_CONTEXT):
        row = base + tile
        _write_context_tile(
            out_context_positions, out_context_slots, context_slots_stride, positions_ptr, layout_ptr,
            num_blocks_ptr, num_blocks_stride, request, safe_state, row, row < end,
            row < tl.where(owned, committed_end, 0),
            NUM_GROUPS,
        )  # fmt: skip

    # Padding of the context rows: every program takes its share, so no row waits for a serial tail.
    program = request * num_splits + split
    num_programs = tl.num_programs(0) * num_splits
    for base in range(num_tokens + program * BLOCK_CONTEXT, num_context_rows, num_programs * BLOCK_CONTEXT):
        row = base + tile
        inside = row < num_context_rows
        tl.store(out_context_positions + row, tl.zeros_like(row).to(tl.int64), mask=inside)
        for group in tl.static_range(NUM_GROUPS):
            tl.store(out_context_slots + group * context_slots_stride + row, tl.full([BLOCK_CONTEXT], -1, tl.int64), mask=inside)


def _check(out: QueryBlockBuffers, spec: QueryBlockSpec, num_groups: int, num_reqs: int, padded: int, rows: int) -> None:
    """Refuse sizes for which the kernel would write outside a buffer."""
    max_num_reqs = out.seq_lens.shape[0]
    if not 0 <= num_reqs <= padded <= max_num_reqs:
        raise ValueError(
            f"num_reqs <= num_reqs_padded <= {max_num_reqs} (the buffers' requests) is needed; got {num_reqs} and "
            f"{padded}: allocate QueryBlockBuffers for the largest request count after graph padding"
        )
    num_rows, num_samples = padded * spec.num_query_per_req, padded * spec.num_speculative_tokens
    if num_rows > out.input_ids.shape[0] or num_samples > out.sample_positions.shape[0]:
        raise ValueError(
            f"{padded} requests need {num_rows} query rows and {num_samples} drafts; the buffers have "
            f"{out.input_ids.shape[0]} and {out.sample_positions.shape[0]}: allocate them for the largest num_query_per_req"
        )
    if rows > out.context_positions.shape[0]:
        raise ValueError(f"num_context_rows {rows} exceeds the buffers' {out.context_positions.shape[0]} context rows")
    if out.slots.shape[0] != num_groups:
        raise ValueError(f"buffers are for {out.slots.shape[0]} KV groups, the block tables for {num_groups}")


def query_block(
    out: QueryBlockBuffers,
    tables: DraftBlockTables,
    spec: QueryBlockSpec,
    step: TargetStep,
    *,
    num_reqs: int,
    num_reqs_padded: int,
    num_context_rows: int,
    max_query_len: int,
) -> None:
    """Write the integer inputs of one draft step into `out`; no synchronisation.

    B = `num_reqs` real requests, R = `num_reqs_padded` >= B that the draft step runs, `num_context_rows` >= the real token
    count that it reads. A request is *live* when its state index is >= 0, at least one of its rows is committed (not
    rejected), and it has sampled a token or `draft_mid_prefill` is set. With p the position of its last committed row:

    * query row j: id `last_sampled` (mid-prefill: the next prompt token) for j = 0, else `mask_token_id`; position
      min(p + 1 + j, max_model_len - 1); slot of the unclamped position, PAD_SLOT from max_model_len on;
    * `seq_lens` min(p + 1 + Q, max_model_len); `query_start_loc[i]` = min(i, B) * Q for i = 0..R;
    * sample row k, read from hidden-state row r * Q + sample_offset + k: position (before the sampled token) p + 1 + k.

    Every other request is padding. Context rows keep the target step's numbering: committed rows of requests with a
    state get position and slots (mid-prefill ones always); rejected rows and rows from the real token count, which is
    read on the device, to `num_context_rows` are padding. Null pages (id 0) and columns outside the table give PAD_SLOT.

    `max_query_len` (longest span) only sets the parallelism: any value is correct. CUDA graphs: meant to run before the
    replay; if captured, the integers freeze, and all tensors are read at replay from the addresses given here.

    Raises:
        ValueError: sizes that do not fit the buffers.
    """
    _check(out, spec, len(tables.tables), num_reqs, num_reqs_padded, num_context_rows)
    if num_reqs_padded == 0:
        return
    splits = min(max(1, triton.cdiv(max_query_len, _BLOCK_CONTEXT)), _MAX_SPLITS)
    num_blocks = step.num_blocks
    _query_block_kernel[(num_reqs_padded, splits)](
        out.input_ids, out.positions, out.slots, out.slots.stride(0), out.query_start_loc, out.seq_lens,
        out.sample_positions, out.sample_req_state,
        out.context_positions, out.context_slots, out.context_slots.stride(0),
        tables.layout, step.query_start_loc, step.positions, step.idx_mapping, step.num_sampled, step.num_rejected,
        step.last_sampled, step.next_prefill_tokens, num_blocks, 0 if num_blocks is None else num_blocks.stride(0),
        num_reqs, num_context_rows, spec.mask_token_id, spec.max_model_len, spec.num_query_per_req, spec.num_speculative_tokens,
        DRAFT_MID_PREFILL=spec.draft_mid_prefill, NUM_GROUPS=len(tables.tables),
        # Of the widest block that the buffers hold: narrower ones then run the same compiled kernel.
        BLOCK_QUERY=triton.next_power_of_2(max(out.input_ids.shape[0] // out.seq_lens.shape[0], spec.num_query_per_req)),
        BLOCK_CONTEXT=_BLOCK_CONTEXT, num_warps=_NUM_WARPS,
    )  # fmt: skip
