# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton pointers have no Python type.)
"""Device code of `block_attention`: attention of the query block over the paged cache, and the merge of its splits.

Tile layout: one program holds the query rows of one request that share one KV head, packed as
`row = query * GROUP + head_in_group`, so that each key is read once for all of them. Splits cut the keys of a request
into equal parts by its length *on the device*; how many splits there are is fixed by the launch. A split without keys
leaves at once and the merge never reads its scratch, so that stale scratch is harmless.

Scores and log-sum-exps are kept in base 2 (`exp2` is one instruction).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _split_keys(seq_len, num_splits, NUM_QUERY: tl.constexpr, WINDOW: tl.constexpr, MIN_KEYS: tl.constexpr):
    """First key that any row sees, and the keys per split (a multiple of MIN_KEYS, itself a multiple of BLOCK_N)."""
    first = seq_len * 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - NUM_QUERY - WINDOW + 1, 0)
    per_split = tl.cdiv(tl.cdiv(seq_len - first, num_splits), MIN_KEYS) * MIN_KEYS
    return first, per_split


@triton.jit
def _row_bounds(seq_len, query, NUM_QUERY: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """Half-open key range [low, high) that each row sees."""
    position = seq_len - NUM_QUERY + query
    low = position * 0
    high = low + seq_len
    if CAUSAL:
        high = tl.minimum(position + 1, seq_len)
    if WINDOW > 0:
        low = position - WINDOW + 1
        high = tl.minimum(high, position + WINDOW)
    return low, high


@triton.jit
def _soft_cap(scores, softcap):
    """Cap scores: softcap * tanh(scores / softcap), by exp2 with its argument cut where tanh is 1 in fp32 anyway."""
    return softcap * (1.0 - 2.0 / (tl.exp2(tl.minimum(scores * (2.0 * LOG2E) / softcap, 64.0)) + 1.0))


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Return acc + a @ b. WIDEN serves Triton's interpreter, which has no bf16 product; the operands are rounded already."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _load_slots(cache_ptr, strides, page, slot, kv_head, mask, dims):
    """Rows [BLOCK_N, BLOCK_D] of one KV head; masked rows are zero whatever the cache holds there."""
    at = page * strides[0] + slot * strides[1] + kv_head * strides[2]
    return tl.load(cache_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _accumulate(scores, v, acc, top, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """One step of the running softmax: fold scores [BLOCK_M, BLOCK_N] and values [BLOCK_N, BLOCK_D] into acc, top and total."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet has top = -inf; 0 stands in, so that -inf - -inf never happens.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    acc = _dot(weights.to(v.dtype), v, acc * shrink[:, None], PRECISION, WIDEN)
    return acc, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def _normalise(acc, top, total, sinks_ptr, head, head_mask, HAS_SINKS: tl.constexpr):
    """Divide by the softmax's denominator; a sink joins it without a value. A row that saw nothing is zero."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=head_mask, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - new_top)
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


# One compiled kernel for every number of splits and for sliced tables: nothing compiles after warm-up.
@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["block_table_ptr", "seq_lens_ptr"])
def _block_attention_kernel(
    q_ptr,  # [R*Q, Hq, hd]
    k_ptr,  # [num_blocks, PAGE, Hkv, hd]
    v_ptr,
    block_table_ptr,  # int32 [R, max_blocks]
    seq_lens_ptr,  # int32 [R]
    sinks_ptr,  # [Hq]
    k_scale_ptr,  # fp32 [1]
    v_scale_ptr,
    out_ptr,  # [R*Q, Hq, hd]
    partial_ptr,  # fp32 or q's dtype [num_splits, R*Q, Hq, hd]
    lse_ptr,  # fp32 [num_splits, R*Q, Hq]
    scale,
    softcap,
    num_splits,
    q_strides,  # (row, head)
    k_strides,  # (page, slot, head)
    v_strides,
    table_stride,
    out_strides,  # (row, head)
    NUM_QUERY: tl.constexpr,
    GROUP: tl.constexpr,
    M_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAUSAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_KV_SCALE: tl.constexpr, SPLIT: tl.constexpr,
    MIN_KEYS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + request)
    first, per_split = _split_keys(seq_len, num_splits, NUM_QUERY, WINDOW, MIN_KEYS)
    start = first + tl.program_id(2) * per_split
    end = tl.minimum(start + per_split, seq_len)
    if SPLIT:  # noqa: SIM102 - decided when compiling, the inner test when running
        if start >= end:
            return

    kv_head = tl.program_id(0) // M_TILES
    packed = (tl.program_id(0) % M_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = packed < NUM_QUERY * GROUP
    query = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    token = (request * NUM_QUERY + query).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = token * q_strides[0] + head * q_strides[1]
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=mask, other=0.0)
    low, high = _row_bounds(seq_len, query, NUM_QUERY, WINDOW, CAUSAL)
    if HAS_KV_SCALE:
        scale *= tl.load(k_scale_ptr)
    if not HAS_SOFTCAP:
        scale *= LOG2E

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key0 in range(start, end, BLOCK_N):
        keys = key0 + tl.arange(0, BLOCK_N)
        # Slots past the length can hold NaN of an earlier owner: they are never loaded (0 * NaN would poison the sum).
        live = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
        page = tl.load(block_table_ptr + request * table_stride + keys // PAGE, mask=keys < end, other=0).to(tl.int64)
        k = _load_slots(k_ptr, k_strides, page, keys % PAGE, kv_head, live, dims).to(q.dtype)
        v = _load_slots(v_ptr, v_strides, page, keys % PAGE, kv_head, live, dims).to(q.dtype)
        scores = _dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION, WIDEN) * scale
        if HAS_SOFTCAP:
            scores = _soft_cap(scores, softcap) * LOG2E
        seen = (keys < end)[None, :]
        if CAUSAL or WINDOW > 0:
            seen &= (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        acc, top, total = _accumulate(scores, v, acc, top, total, PRECISION, WIDEN)

    result = _normalise(acc, top, total, sinks_ptr, head, row_mask, HAS_SINKS and not SPLIT)
    if HAS_KV_SCALE:
        result *= tl.load(v_scale_ptr)
    if SPLIT:
        rows = (tl.program_id(2) * tl.num_programs(1) + request) * NUM_QUERY + query
        at = rows.to(tl.int64) * (tl.num_programs(0) // M_TILES * GROUP) + head
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], result.to(partial_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_ptr + at, top + tl.log2(total), mask=row_mask)
    else:
        at = token * out_strides[0] + head * out_strides[1]
        tl.store(out_ptr + at[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _merge_splits_kernel(
    partial_ptr,  # fp32 or q's dtype [num_splits, R*Q, Hq, hd]
    lse_ptr,  # fp32 [num_splits, R*Q, Hq]
    seq_lens_ptr,  # int32 [R]
    sinks_ptr,  # [Hq]
    out_ptr,  # [R*Q, Hq, hd]
    num_heads,
    num_splits,
    out_strides,  # (row, head)
    NUM_QUERY: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = head < num_heads
    seq_len = tl.load(seq_lens_ptr + token // NUM_QUERY)
    first, per_split = _split_keys(seq_len, num_splits, NUM_QUERY, WINDOW, MIN_KEYS)
    num_live = tl.cdiv(seq_len - first, tl.maximum(per_split, 1))
    dims = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    # BLOCK_S splits, their weights and values alike, are in flight at once: mostly that is all of them.
    for split0 in range(0, num_live, BLOCK_S):
        split = split0 + tl.arange(0, BLOCK_S)
        at = (split[:, None] * rows + token) * num_heads + head[None, :]
        live = (split < num_live)[:, None] & inside[None, :]
        lse = tl.load(lse_ptr + at, mask=live, other=float("-inf"))
        partial_mask = live[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        partial = tl.load(partial_ptr + at[:, :, None] * HEAD_DIM + dims[None, None, :], mask=partial_mask, other=0.0)
        partial = partial.to(tl.float32)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - base[None, :])
        shrink = tl.exp2(top - base)
        acc = acc * shrink[:, None] + tl.sum(partial * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = token * out_strides[0] + head[:, None] * out_strides[1] + dims[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (dims < HEAD_DIM)[None, :])
