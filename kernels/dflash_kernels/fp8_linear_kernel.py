# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton pointers have no Python type.)
"""Device code of `fp8_linear` and `draft_head_fp8`: a skinny product that reads fp8 weights once.

With 16 rows of activations the time is the reading of the weights, 18 bytes per clock and multiprocessor. Widening them costs
registers, shared-memory loads of two bytes and 8-byte copies (2.4 TB/s on an H200 at best), so where tensor cores take e4m3 the
few activations are narrowed instead, and weights go from memory to the tensor cores untouched.
"""

import triton
import triton.language as tl

from .draft_head_kernel import _store_tile_winner

# Four bytes `s eeee mmm` of one register become two registers of two 16-bit floats: the byte goes to the top of a half, the
# sign stays, the rest moves down to where the wider exponent ends. The difference of the exponents' biases is the factor.
_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, e, z;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 c, c, 0x07F007F0;
    and.b32 d, d, 0x07F007F0;
    lop3.b32 c, a, 0x80008000, c, 0xEA;
    lop3.b32 d, b, 0x80008000, d, 0xEA;
    mov.b32 e, 0x7B807B80;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, c, e, z;
    fma.rn.bf16x2 $1, d, e, z;
    }"""
)
_TO_FP16 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, e;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 1;
    shr.u32 d, b, 1;
    and.b32 c, c, 0x3F803F80;
    and.b32 d, d, 0x3F803F80;
    lop3.b32 c, a, 0x80008000, c, 0xEA;
    lop3.b32 d, b, 0x80008000, d, 0xEA;
    mov.b32 e, 0x5C005C00;
    mul.f16x2 $0, c, e;
    mul.f16x2 $1, d, e;
    }"""
)


@triton.jit
def _widen(weight, dtype: tl.constexpr, HOW: tl.constexpr):
    """Tile of e4m3 numbers, as bytes under "bits" and Triton's interpreter -> `dtype`."""
    if HOW == "bits" and dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(_TO_BF16, "=r,=r,r", [weight], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif HOW == "bits" and dtype == tl.float16:
        wide = tl.inline_asm_elementwise(_TO_FP16, "=r,=r,r", [weight], dtype=tl.float16, is_pure=True, pack=4)
    else:
        wide = weight.to(tl.float8e4nv, bitcast=True).to(dtype)
    return wide


@triton.jit
def _to_nearest(x):
    """fp32 -> the nearest e4m3 number, as fp32: what the hardware's conversion does and Triton's interpreter does not."""
    step = tl.exp2(tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(x), 1e-30))), -6.0) - 3.0)
    return tl.floor(x / step + 0.5) * step


@triton.jit
def _scaled_product(weight, x, HOW: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):
    """fp32 [BLOCK_N, BLOCK_M] of one block of depth, activations [BLOCK_M, BLOCK_K] brought to a common size per row first.

    "a8": activations become e4m3, so both sides go to the tensor cores as they are. "half": they become fp16, for which one
    instruction widens two weights, and cannot overflow.
    """
    x = x.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    x = x * (448.0 / largest)[:, None]
    if WIDEN:
        narrow = _to_nearest(x) if HOW == "a8" else x
        product = tl.dot(_widen(weight, tl.float32, HOW), tl.trans(narrow), input_precision=PRECISION)
    elif HOW == "a8":
        product = tl.dot(weight, tl.trans(x.to(tl.float8e4nv)), out_dtype=tl.float32)
    else:
        product = tl.dot(weight.to(tl.float16), tl.trans(x.to(tl.float16)), out_dtype=tl.float32)
    return product * (largest * (1.0 / 448.0))[None, :]


@triton.jit
def _fp8_product(
    x_ptr,  # [m, depth]
    weight_ptr,  # e4m3 or bytes [n, depth]
    x_at,  # [BLOCK_M] offsets of rows
    weight_at,  # [BLOCK_N] offsets of rows
    first,
    depth,
    steps,
    DEPTH_FITS: tl.constexpr,
    HOW: tl.constexpr,
    WIDEN: tl.constexpr,  # Triton's interpreter has no bf16 product
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_N, BLOCK_M] without the weights' scales, over `steps` blocks of depth from `first` on."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(steps):
        k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        if DEPTH_FITS:
            weight = tl.load(weight_ptr + weight_at[:, None] + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + x_at[:, None] + k[None, :])
        else:
            inside = (k < depth)[None, :]
            weight = tl.load(weight_ptr + weight_at[:, None] + k[None, :], mask=inside, other=0.0)
            x = tl.load(x_ptr + x_at[:, None] + k[None, :], mask=inside, other=0.0)
        if HOW == "a8" or HOW == "half":
            total += _scaled_product(weight, x, HOW, WIDEN, PRECISION)
        elif WIDEN:
            total = tl.dot(_widen(weight, tl.float32, HOW), tl.trans(x.to(tl.float32)), total, input_precision=PRECISION)
        else:
            total = tl.dot(_widen(weight, x.dtype, HOW), tl.trans(x), total, input_precision=PRECISION)
    return total


# Batch-dependent integers are not specialised: one compiled kernel per shape and tile, nothing compiles after warm-up.
@triton.jit(do_not_specialize=["num_rows", "steps"])
def _fp8_linear_kernel(
    x_ptr,  # [m, depth]
    weight_ptr,  # e4m3 or bytes [n, depth]
    scale_ptr,  # fp32 [n]
    bias_ptr,  # [n]
    out_ptr,  # [m, n]
    partial_ptr,  # fp32 [tiles, SPLIT, BLOCK_N, BLOCK_M]
    counter_ptr,  # int32 [tiles], zero before and after
    num_rows,
    width,
    depth,
    steps,  # blocks of depth per program
    stride_x,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPTH_FITS: tl.constexpr,
    HOW: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    m_tiles = tl.cdiv(num_rows, BLOCK_M)  # row tiles of one weight tile are neighbours: its weights then come from L2
    rows = (tile % m_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile // m_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Clamped rows cost nothing and need no mask in the loop; their results are dropped below.
    x_at = tl.minimum(rows, num_rows - 1).to(tl.int64) * stride_x
    weight_at = tl.minimum(columns, width - 1).to(tl.int64) * depth
    total = _fp8_product(
        x_ptr, weight_ptr, x_at, weight_at, part * steps * BLOCK_K, depth, steps,
        DEPTH_FITS, HOW, WIDEN, PRECISION, BLOCK_N, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    last = True
    if SPLIT > 1:
        square = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        partial_at = partial_ptr + tile.to(tl.int64) * SPLIT * BLOCK_N * BLOCK_M + square
        tl.store(partial_at + part * BLOCK_N * BLOCK_M, total)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            # All parts from memory, in their order: the sum does not depend on who arrives last.
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(SPLIT):
                total += tl.load(partial_at + other * BLOCK_N * BLOCK_M, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)
        total *= tl.load(scale_ptr + columns, mask=columns < width, other=0.0)[:, None]
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[:, None]
        at = rows.to(tl.int64)[None, :] * width + columns[:, None]
        inside = (rows < num_rows)[None, :] & (columns < width)[:, None]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["states_ptr"])
def _head_tiles_fp8_kernel(
    hidden_ptr,  # [m, HIDDEN]
    weight_ptr,  # e4m3 or bytes [V, HIDDEN]
    scale_ptr,  # fp32 [V]
    values_ptr,  # fp32 [num_tiles, m]
    indices_ptr,  # int32 [num_tiles, m]
    others_ptr,  # fp32 [num_tiles, m]; this and the next two with ODDS
    states_ptr,  # int64 [m]
    temperature_ptr,  # fp32, by state
    num_rows,
    num_valid,
    stride_hidden,
    HIDDEN: tl.constexpr,
    HOW: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ODDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0) // m_tiles
    rows = (tl.program_id(0) % m_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    hidden_at = tl.minimum(rows, num_rows - 1).to(tl.int64) * stride_hidden
    weight_at = tl.minimum(ids, num_valid - 1).to(tl.int64) * HIDDEN
    logits = _fp8_product(
        hidden_ptr, weight_ptr, hidden_at, weight_at, 0, HIDDEN, tl.cdiv(HIDDEN, BLOCK_K),
        HIDDEN % BLOCK_K == 0, HOW, WIDEN, PRECISION, BLOCK_V, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    logits *= tl.load(scale_ptr + ids, mask=ids < num_valid, other=0.0)[:, None]
    at = tile.to(tl.int64) * num_rows + rows
    _store_tile_winner(
        logits, ids, num_valid, rows, num_rows, at, values_ptr, indices_ptr, others_ptr, states_ptr, temperature_ptr, ODDS
    )
