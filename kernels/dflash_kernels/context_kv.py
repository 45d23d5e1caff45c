# SPDX-License-Identifier: Apache-2.0
"""Context K and V of all draft layers, from the fused projection straight into the paged caches, in one launch.

One GEMM gives K and V of every layer for every context row. This kernel finishes them: K RMSNorm, RoPE (half-split or
interleaved, full or partial), value scale, fp8 scale, and the paged store, with all arithmetic in fp32 and one rounding at
the store. It is not the GEMM, and it does not norm the hidden states. It replaces 5 + L kernels of vLLM's
`precompute_and_store_context_kv`, about 20 us of small launches inside the graph.

Invariants for a captured draft step: the number of rows is baked in, everything else is read at replay from fixed
addresses; a row whose slot is negative is neither read nor written, so padding and rejected rows cost one slot load.

Cost model (H200, 4.3 TB/s; 5 layers, 8 heads of 128, bf16, 20 KB per row in and out each): 16 rows move 0.7 MB, a
latency-bound 3-4 us; 2,048 rows (128 requests, K = 15) 84 MB, 20 us, or 11 us where two thirds are rejected; an 8k prefill
chunk 336 MB, 78 us. Tile: 2,048 elements per program, 16 per thread of 4 warps, which is two rows of 8 x 128: 40 programs
at 16 rows, where halving the tile again buys no occupancy, and 5,120 at 2,048 rows, enough loads in flight.
"""

import torch
import triton
import triton.language as tl

from dflash_kernels.kv_layout import LayerCaches
from dflash_kernels.rotary import CACHE_DTYPES, INPUT_DTYPES, check_cos_sin, load_heads, rotate, store_heads, store_tile

__all__ = ["LayerCaches", "context_kv"]

_TILE_ELEMENTS = 2048
_MAX_ROWS = 16
_NUM_WARPS = 4


@triton.jit
def _row_addresses(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    entry, base, strides, page, offset, head, CACHE_TYPE: tl.constexpr, ALIGN: tl.constexpr, ALIGN_BYTES: tl.constexpr,
):  # fmt: skip
    """Address of (page, offset, head) in one cache; `base` and `strides` are columns of the layer table."""
    pointer = tl.load(entry + base).to(tl.pointer_type(CACHE_TYPE))
    page_stride = tl.multiple_of(tl.load(entry + strides), ALIGN)
    token_stride = tl.multiple_of(tl.load(entry + strides + 1), ALIGN)
    head_stride = tl.multiple_of(tl.load(entry + strides + 2), ALIGN)
    pointer = tl.multiple_of(pointer, ALIGN_BYTES)
    return pointer + page * page_stride + offset * token_stride + head * head_stride


# Row counts and views differ between graphs and steps; specialising on them would compile while serving.
@triton.jit(
    do_not_specialize=["num_rows", "slots_stride", "max_position"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def _context_kv_kernel(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    table_ptr, kv_ptr, kv_stride, num_rows, positions_ptr, slots_ptr, slots_stride, cos_sin_ptr, cos_sin_stride,
    max_position, norm_ptr, norm_stride, value_scale_ptr, k_scale_ptr, v_scale_ptr, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_PAIRS: tl.constexpr, IS_NEOX: tl.constexpr,
    CACHE_TYPE: tl.constexpr, ALIGN: tl.constexpr, ALIGN_BYTES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, L). A lane of the first axis is one head of one row."""
    layer = tl.program_id(1)
    entry = table_ptr + layer * 10
    lane = tl.arange(0, BLOCK_ROWS * BLOCK_HEADS)
    row = tl.program_id(0) * BLOCK_ROWS + lane // BLOCK_HEADS
    head = lane % BLOCK_HEADS
    slot = tl.load(slots_ptr + tl.load(entry + 9) * slots_stride + row, mask=row < num_rows, other=-1)
    if tl.max(slot, axis=0) < 0:
        return
    stored = (slot >= 0) & (head < NUM_HEADS)
    # A cache never holds 2^31 tokens, and 32-bit division is several times cheaper.
    kv_block_size = tl.load(entry + 8).to(tl.int32)
    page = (slot.to(tl.int32) // kv_block_size).to(tl.int64)
    offset = slot.to(tl.int32) % kv_block_size
    source = kv_ptr + row.to(tl.int64) * kv_stride + layer * (2 * NUM_HEADS * HEAD_DIM) + head * HEAD_DIM

    first, second, rest = load_heads(
        source, stored, norm_ptr, layer * norm_stride, eps, HEAD_DIM, NUM_PAIRS, IS_NEOX, BLOCK_PAIRS, BLOCK_REST
    )
    position = tl.load(positions_ptr + row, mask=stored, other=0)
    first, second = rotate(first, second, position, stored, cos_sin_ptr, cos_sin_stride, max_position, NUM_PAIRS, BLOCK_PAIRS)
    keys = _row_addresses(entry, 0, 2, page, offset, head, CACHE_TYPE, ALIGN, ALIGN_BYTES)
    store_heads(keys, stored, first, second, rest, k_scale_ptr, layer, HEAD_DIM, NUM_PAIRS, IS_NEOX, BLOCK_PAIRS, BLOCK_REST)

    dim = tl.arange(0, BLOCK_DIM)
    dim_mask = stored[:, None] & (dim < HEAD_DIM)[None, :]
    source += NUM_HEADS * HEAD_DIM
    value = tl.load(source[:, None] + dim[None, :], mask=dim_mask, other=0.0).to(tl.float32)
    if value_scale_ptr is not None:
        value *= tl.load(value_scale_ptr + layer)
    values = _row_addresses(entry, 1, 5, page, offset, head, CACHE_TYPE, ALIGN, ALIGN_BYTES)
    store_tile(values, dim, value, dim_mask, v_scale_ptr, layer)


def _check(caches: LayerCaches, kv: torch.Tensor, slots: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Refuse shapes and types for which the kernel would read or write out of place."""
    width = len(caches.k_caches) * 2 * caches.num_kv_heads * caches.head_dim
    if kv.dim() != 2 or kv.shape[1] != width or kv.stride(1) != 1 or kv.dtype not in INPUT_DTYPES:
        raise ValueError(
            f"kv must be bf16, fp16 or fp32 [n, layers * 2 * kv heads * head size = {width}] with unit column stride; got "
            f"{kv.dtype} {tuple(kv.shape)} with strides {kv.stride()}"
        )
    if caches.dtype not in CACHE_DTYPES:
        raise ValueError(f"the kernel stores {sorted(map(str, CACHE_DTYPES))}; the caches are {caches.dtype}")
    if slots.dim() != 2 or slots.shape[0] <= max(caches.layer_groups) or slots.shape[1] < kv.shape[0]:
        raise ValueError(
            f"slots must be int64 [groups > {max(caches.layer_groups)}, >= {kv.shape[0]} rows]; got {tuple(slots.shape)}"
        )
    check_cos_sin(cos_sin_cache, caches.head_dim)


def context_kv(
    caches: LayerCaches,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_norm_weight: torch.Tensor | None,
    *,
    eps: float,
    is_neox: bool = True,
    value_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Norm, rotate, scale and store the context K and V of all L layers; no synchronisation.

    Args:
        caches: paged caches of the L layers, fixed addresses.
        kv: bf16, fp16 or fp32 [n, L * 2 * num_kv_heads * head_dim]; per layer K, then V. Any row stride.
        positions: int64 [>= n], absolute, below the rows of `cos_sin_cache`; read for stored rows only.
        slots: int64 [G, >= n]; negative = the row is not stored. Any row stride.
        cos_sin_cache: float [positions, rot_dim], cosines then sines (vLLM's layout); rot_dim below head_dim rotates only
            the first rot_dim elements.
        k_norm_weight: float [L, head_dim], or None for drafts without K norm.
        eps: of the K norm.
        is_neox: half-split (True) or interleaved (False) pairs.
        value_scale: fp32 [L], multiplies V; None = 1.
        k_scale: fp32 [L], stored K is K / k_scale; None = 1. Meant for fp8 caches, which saturate at 448.
        v_scale: the same for V.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    _check(caches, kv, slots, cos_sin_cache)
    num_rows, head_dim, num_heads = kv.shape[0], caches.head_dim, caches.num_kv_heads
    if num_rows == 0:
        return
    rot_dim = cos_sin_cache.shape[-1]
    block_heads, block_dim = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim)
    block_rows = max(1, min(_MAX_ROWS, _TILE_ELEMENTS // (block_heads * block_dim)))
    rest = head_dim - rot_dim
    _context_kv_kernel[(triton.cdiv(num_rows, block_rows), len(caches.k_caches))](
        caches.table, kv, kv.stride(0), num_rows, positions, slots, slots.stride(0), cos_sin_cache,
        cos_sin_cache.stride(0), cos_sin_cache.shape[0], k_norm_weight,
        0 if k_norm_weight is None else k_norm_weight.stride(0), value_scale, k_scale, v_scale, eps,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, NUM_PAIRS=rot_dim // 2, IS_NEOX=is_neox,
        CACHE_TYPE=CACHE_DTYPES[caches.dtype], ALIGN=caches.alignment,
        ALIGN_BYTES=caches.alignment * caches.k_caches[0].element_size(), BLOCK_ROWS=block_rows, BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=triton.next_power_of_2(rot_dim // 2), BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        BLOCK_DIM=block_dim, num_warps=_NUM_WARPS,
    )  # fmt: skip
