# SPDX-License-Identifier: Apache-2.0
"""Between the QKV projection and attention of one draft layer: Q and K normed and rotated, K and V cached, in one launch.

The query block's rows [anchor, mask, ...] go through q norm, k norm, RoPE (half-split or interleaved, full or partial), value
scale and the paged store with all arithmetic in fp32 and one rounding. K and V are not written back: attention reads them
from the cache. It is neither the GEMM nor the attention. It replaces 4 or 5 kernels per layer of vLLM's chain (two RMSNorms,
RoPE, value scale, `reshape_and_cache`), which at 16 rows are launches with hardly any work in them.

Registered as `torch.ops.dflash.query_kv` with mutated arguments for layers under torch.compile: CUDA runs the Triton kernel,
a CPU plain torch. The caches are arguments of the op, so the graph that calls it must be given them.

Invariants for a captured draft step: the number of rows is baked in, everything else is read at replay from fixed
addresses. A row whose slot is negative stores no K or V, but its Q is defined, so that padded rows give finite attention.

Cost model (H200, 4.3 TB/s; 32 + 8 + 8 heads of 128, bf16, 24 KB per row in and out together): 16 rows move 0.4 MB,
latency-bound at 2 us; 2,048 rows 50 MB, 12 us. Tile: 2,048 elements per program, 16 bytes per access of 4 warps; a program
has heads of one kind only, so the branch between Q and K/V is uniform: 40 programs at 16 rows, 5,120 at 2,048.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from dflash_kernels.reference_inputs import query_kv as _query_kv_torch
from dflash_kernels.rotary import CACHE_DTYPES, INPUT_DTYPES, check_cos_sin, load_heads, rotate, store_heads, store_tile

__all__ = ["query_kv"]

_TILE_ELEMENTS = 2048
_MAX_ROWS = 16
_NUM_WARPS = 4


# Row counts and views differ between graphs and steps; specialising on them would compile while serving.
@triton.jit(
    do_not_specialize=["num_rows", "max_position"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def _query_kv_kernel(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    qkv_ptr, qkv_stride, num_rows, positions_ptr, slots_ptr, cos_sin_ptr, cos_sin_stride, max_position,
    q_norm_ptr, k_norm_ptr, eps, k_cache_ptr, k_page_stride, k_token_stride, k_head_stride,
    v_cache_ptr, v_page_stride, v_token_stride, v_head_stride, value_scale, k_scale_ptr, v_scale_ptr,
    q_out_ptr, q_out_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr, IS_NEOX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, head groups: first those of Q, then those of K and V). A lane is one head of one row."""
    q_groups: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    group = tl.program_id(1)
    lane = tl.arange(0, BLOCK_ROWS * BLOCK_HEADS)
    row = tl.program_id(0) * BLOCK_ROWS + lane // BLOCK_HEADS
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=0)
    source = qkv_ptr + row.to(tl.int64) * qkv_stride
    if group < q_groups:
        head = group * BLOCK_HEADS + lane % BLOCK_HEADS
        kept = (row < num_rows) & (head < NUM_HEADS)
        first, second, rest = load_heads(
            source + head * HEAD_DIM, kept, q_norm_ptr, 0, eps, HEAD_DIM, NUM_PAIRS, IS_NEOX, BLOCK_PAIRS, BLOCK_REST
        )
        first, second = rotate(first, second, position, kept, cos_sin_ptr, cos_sin_stride, max_position, NUM_PAIRS, BLOCK_PAIRS)
        queries = q_out_ptr + row.to(tl.int64) * q_out_stride + head * HEAD_DIM
        store_heads(queries, kept, first, second, rest, None, 0, HEAD_DIM, NUM_PAIRS, IS_NEOX, BLOCK_PAIRS, BLOCK_REST)
    else:
        head = (group - q_groups) * BLOCK_HEADS + lane % BLOCK_HEADS
        slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
        stored = (slot >= 0) & (head < NUM_KV_HEADS)
        # A cache never holds 2^31 tokens, and 32-bit division is several times cheaper.
        page = (slot.to(tl.int32) // KV_BLOCK_SIZE).to(tl.int64)
        offset = slot.to(tl.int32) % KV_BLOCK_SIZE
        source += (NUM_HEADS + head) * HEAD_DIM

        dim = tl.arange(0, BLOCK_DIM)
        dim_mask = stored[:, None] & (dim < HEAD_DIM)[None, :]
        values = source + NUM_KV_HEADS * HEAD_DIM
        # Loaded before K is stored: the compiler may not move a load across a store.
        value = tl.load(values[:, None] + dim[None, :], mask=dim_mask, other=0.0).to(tl.float32)
        first, second, rest = load_heads(
            source, stored, k_norm_ptr, 0, eps, HEAD_DIM, NUM_PAIRS, IS_NEOX, BLOCK_PAIRS, BLOCK_REST
        )
        first, second = rotate(first, second, position, stored, cos_sin_ptr, cos_sin_stride, max_position, NUM_PAIRS, BLOCK_PAIRS)
        keys = k_cache_ptr + page * k_page_stride + offset * k_token_stride + head * k_head_stride
        store_heads(keys, stored, first, second, rest, k_scale_ptr, 0, HEAD_DIM, NUM_PAIRS, IS_NEOX, BLOCK_PAIRS, BLOCK_REST)
        if value_scale is not None:
            value *= value_scale
        values = v_cache_ptr + page * v_page_stride + offset * v_token_stride + head * v_head_stride
        store_tile(values, dim, value, dim_mask, v_scale_ptr, 0)


def _check_rows(qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, width: int) -> None:
    """Refuse rows that are not what the projection gives, or that lack a position or a slot."""
    if qkv.dim() != 2 or qkv.shape[1] != width or qkv.stride(1) != 1 or qkv.dtype not in INPUT_DTYPES:
        raise ValueError(
            f"qkv must be bf16, fp16 or fp32 [n, (heads + 2 * kv heads) * head size = {width}] with unit column stride; got "
            f"{qkv.dtype} {tuple(qkv.shape)} with strides {qkv.stride()}"
        )
    for name, rows in (("positions", positions), ("slots", slots)):
        if rows.dtype != torch.int64 or rows.dim() != 1 or rows.shape[0] < qkv.shape[0] or rows.stride(0) != 1:
            raise ValueError(
                f"{name} must be contiguous int64 [>= {qkv.shape[0]} rows]; got {rows.dtype} {tuple(rows.shape)} with strides "
                f"{rows.stride()}"
            )


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, num_kv_heads: int, head_dim: int) -> None:
    """Refuse caches for which the kernel would store out of place."""
    if k_cache.dtype not in CACHE_DTYPES:
        raise ValueError(
            f"the KV cache is {k_cache.dtype}; the fused write serves bf16, fp16, fp32 and fp8 e4m3 (view a uint8 fp8 cache as "
            "torch.float8_e4m3fn)"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        same = cache.dtype == k_cache.dtype and cache.shape[:2] == k_cache.shape[:2]
        if cache.dim() != 4 or cache.shape[2:] != (num_kv_heads, head_dim) or cache.stride(3) != 1 or not same:
            raise ValueError(
                f"{name} must be a view [pages, page size, kv heads = {num_kv_heads}, head size = {head_dim}] with unit stride "
                f"in the last dimension, alike for K and V; got {cache.dtype} {tuple(cache.shape)} with strides {cache.stride()} "
                f"beside {k_cache.dtype} {tuple(k_cache.shape)}"
            )


def _check_vectors(head_dim: int, **vectors: torch.Tensor | None) -> None:
    """Refuse norm weights that are not one per element of a head, and scales that are not one fp32 number."""
    for name, vector in vectors.items():
        if vector is None:
            continue
        if name.endswith("_scale"):
            if vector.numel() != 1 or vector.dtype != torch.float32:
                raise ValueError(f"{name} must be one fp32 number; got {vector.dtype} {tuple(vector.shape)}")
        elif vector.shape != (head_dim,) or not vector.is_contiguous():
            raise ValueError(f"{name} must be contiguous [head size = {head_dim}]; got {tuple(vector.shape)}")


def _check_q_out(q_out: torch.Tensor, num_rows: int, width: int) -> None:
    """Refuse an output that Q does not fit."""
    if tuple(q_out.shape) != (num_rows, width) or q_out.stride(1) != 1 or q_out.dtype not in INPUT_DTYPES:
        raise ValueError(
            f"q_out must be bf16, fp16 or fp32 [n = {num_rows}, heads * head size = {width}] with unit column stride; got "
            f"{q_out.dtype} {tuple(q_out.shape)} with strides {q_out.stride()}"
        )


def _launch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    value_scale: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_out: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    is_neox: bool,
) -> None:
    """Check the arguments, choose the tile and launch."""
    num_rows, width, block_dim = qkv.shape[0], num_heads * head_dim, triton.next_power_of_2(head_dim)
    _check_rows(qkv, positions, slots, width + 2 * num_kv_heads * head_dim)
    _check_caches(k_cache, v_cache, num_kv_heads, head_dim)
    check_cos_sin(cos_sin_cache, head_dim)
    _check_vectors(head_dim, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, k_scale=k_scale, v_scale=v_scale)
    _check_q_out(q_out, num_rows, width)
    if num_rows == 0:
        return
    rot_dim, lanes = cos_sin_cache.shape[1], max(1, _TILE_ELEMENTS // block_dim)
    block_heads = min(lanes, triton.next_power_of_2(num_kv_heads))
    block_rows = min(_MAX_ROWS, lanes // block_heads)
    head_groups = triton.cdiv(num_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads)
    _query_kv_kernel[(triton.cdiv(num_rows, block_rows), head_groups)](
        qkv, qkv.stride(0), num_rows, positions, slots, cos_sin_cache, cos_sin_cache.stride(0), cos_sin_cache.shape[0],
        q_norm_weight, k_norm_weight, eps, k_cache, *k_cache.stride()[:3], v_cache, *v_cache.stride()[:3], value_scale,
        k_scale, v_scale, q_out, q_out.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, KV_BLOCK_SIZE=k_cache.shape[1],
        NUM_PAIRS=rot_dim // 2, IS_NEOX=is_neox, BLOCK_ROWS=block_rows, BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=triton.next_power_of_2(rot_dim // 2),
        BLOCK_REST=triton.next_power_of_2(head_dim - rot_dim) if rot_dim < head_dim else 0, BLOCK_DIM=block_dim,
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def query_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    is_neox: bool = True,
    value_scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate Q and K of one layer, store K and V in its paged cache; no synchronisation.

    Args:
        qkv: bf16, fp16 or fp32 [n, (num_heads + 2 * num_kv_heads) * head_dim]; Q, then K, then V. Any row stride.
        positions: int64 [>= n], absolute, below the rows of `cos_sin_cache`.
        slots: int64 [>= n]; negative = K and V of the row are not stored.
        cos_sin_cache: float [positions, rot_dim], cosines then sines (vLLM's layout); a rot_dim below head_dim rotates only
            the first rot_dim elements.
        q_norm_weight: float [head_dim], or None for drafts without Q norm.
        k_norm_weight: the same for K.
        k_cache: bf16, fp16, fp32 or fp8 e4m3 view [pages, kv_block_size, num_kv_heads, head_dim], any strides but unit last
            (of an "HND" cache: `transpose(1, 2)`).
        v_cache: the same for V; it shares no element with `k_cache`.
        num_heads: query heads of this rank.
        num_kv_heads: KV heads of this rank.
        head_dim: size of a head.
        eps: of both norms.
        is_neox: half-split (True) or interleaved (False) pairs.
        value_scale: V is multiplied by it; None = 1.
        k_scale: one fp32 number, stored K is K / k_scale; None = 1. Meant for fp8 caches, which saturate at 448.
        v_scale: the same for V.
        q_out: bf16, fp16 or fp32 [n, num_heads * head_dim], any row stride, no element in common with `qkv`; None
            allocates one like `qkv`.

    Returns:
        `q_out`, defined for all n rows.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    if q_out is None:
        q_out = qkv.new_empty(qkv.shape[0], num_heads * head_dim)
    _launch(
        qkv, positions, slots, cos_sin_cache, q_norm_weight, k_norm_weight, k_cache, v_cache, value_scale, k_scale, v_scale,
        q_out, num_heads, num_kv_heads, head_dim, eps, is_neox,
    )  # fmt: skip
    return q_out


def _mutating(function: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """The op's calling convention: `q_out` is the last positional argument and nothing is returned."""

    def op(*arguments: Any, **options: Any) -> None:
        *inputs, q_out = arguments
        function(*inputs, q_out=q_out, **options)

    return op


def _query_kv_fake(*arguments: Any, **options: Any) -> None:
    """Shape-only implementation: the op returns nothing."""


# A Library rather than torch.library.custom_op: no Python dispatch layer on the eager path. It must stay referenced.
# The ignores: torch.library's methods carry no annotations.
_LIBRARY = torch.library.Library("dflash", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "query_kv(Tensor qkv, Tensor positions, Tensor slots, Tensor cos_sin_cache, Tensor? q_norm_weight, "
    "Tensor? k_norm_weight, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) q_out, *, int num_heads, int num_kv_heads, "
    "int head_dim, float eps, bool is_neox=True, float? value_scale=None, Tensor? k_scale=None, Tensor? v_scale=None) -> ()"
)
_LIBRARY.impl("query_kv", _mutating(query_kv), "CUDA")  # type: ignore[no-untyped-call]
_LIBRARY.impl("query_kv", _mutating(_query_kv_torch), "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("dflash::query_kv", _query_kv_fake, lib=_LIBRARY)
