# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN201
# (Triton pointers have no Python type.)
"""Heads that are normed, rotated and stored: the device functions that `context_kv` and `query_kv` share.

A lane is one head of one row, in fp32. The first and the second elements of its rotary pairs are two tensors, so that a
rotation needs no exchange between threads; what lies behind the rotary size is a third, the rest. Half-split pairs are two
contiguous loads. Interleaved pairs are one contiguous load, split in registers and joined again for the store: loading
every other element took five times as long as half-split pairs (47 us against 9 us for 2,048 rows on an H200).
"""

import torch
import triton
import triton.language as tl

__all__ = ["CACHE_DTYPES", "INPUT_DTYPES", "check_cos_sin", "load_heads", "rotate", "store_heads", "store_tile"]

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CACHE_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
}
"""Element types of K and V caches that the kernels write."""


@triton.jit
def _load_pairs(rows, keep, NUM_PAIRS: tl.constexpr, IS_NEOX: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """First and second elements fp32 [lanes, BLOCK_PAIRS] of the pairs that begin at `rows` [lanes]; 0 where not kept."""
    if IS_NEOX:
        pair = tl.arange(0, BLOCK_PAIRS)
        mask = keep[:, None] & (pair < NUM_PAIRS)[None, :]
        first = tl.load(rows[:, None] + pair[None, :], mask=mask, other=0.0)
        second = tl.load(rows[:, None] + (pair + NUM_PAIRS)[None, :], mask=mask, other=0.0)
    else:
        dim = tl.arange(0, 2 * BLOCK_PAIRS)
        mask = keep[:, None] & (dim < 2 * NUM_PAIRS)[None, :]
        both = tl.load(rows[:, None] + dim[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, [rows.shape[0], BLOCK_PAIRS, 2]))
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def load_heads(
    rows, keep, norm_ptr, norm_offset, eps, HEAD_DIM: tl.constexpr, NUM_PAIRS: tl.constexpr, IS_NEOX: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Heads at `rows` [lanes], RMS-normed by `norm_ptr + norm_offset` unless None: pairs' first, second, and the rest."""
    first, second = _load_pairs(rows, keep, NUM_PAIRS, IS_NEOX, BLOCK_PAIRS)
    square = tl.sum(first * first + second * second, axis=1)
    rest = first
    if BLOCK_REST > 0:
        dim = 2 * NUM_PAIRS + tl.arange(0, BLOCK_REST)
        mask = keep[:, None] & (dim < HEAD_DIM)[None, :]
        rest = tl.load(rows[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        square += tl.sum(rest * rest, axis=1)
    if norm_ptr is not None:
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        weight = norm_ptr + norm_offset
        one = tl.arange(0, 1)
        weight_first, weight_second = _load_pairs(weight + one, one == 0, NUM_PAIRS, IS_NEOX, BLOCK_PAIRS)
        first *= inverse * weight_first
        second *= inverse * weight_second
        if BLOCK_REST > 0:
            rest *= inverse * tl.load(weight + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    return first, second, rest


@triton.jit
def rotate(
    first, second, position, keep, cos_sin_ptr, cos_sin_stride, max_position,
    NUM_PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """The pairs turned by the angles of `position` int64 [lanes]; out of range gives a wrong rotation, not a fault."""
    position = tl.minimum(tl.maximum(position, 0), max_position - 1)
    pair = tl.arange(0, BLOCK_PAIRS)
    mask = keep[:, None] & (pair < NUM_PAIRS)[None, :]
    turn = cos_sin_ptr + position[:, None] * cos_sin_stride + pair[None, :]
    cos = tl.load(turn, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(turn + NUM_PAIRS, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def store_tile(rows, dim, x, mask, scale_ptr, scale_offset):
    """Store x fp32 [lanes, dims] as the type that `rows` points to; fp8 saturates. A scale, unless None, divides."""
    if scale_ptr is not None:
        x = x / tl.load(scale_ptr + scale_offset)
    if rows.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)  # largest e4m3 value; the cast alone would give NaN
    tl.store(rows[:, None] + dim[None, :], x.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def store_heads(
    rows, keep, first, second, rest, scale_ptr, scale_offset, HEAD_DIM: tl.constexpr, NUM_PAIRS: tl.constexpr,
    IS_NEOX: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Put what `load_heads` took apart back together at `rows` [lanes]."""
    if IS_NEOX:
        pair = tl.arange(0, BLOCK_PAIRS)
        mask = keep[:, None] & (pair < NUM_PAIRS)[None, :]
        store_tile(rows, pair, first, mask, scale_ptr, scale_offset)
        store_tile(rows, pair + NUM_PAIRS, second, mask, scale_ptr, scale_offset)
    else:
        dim = tl.arange(0, 2 * BLOCK_PAIRS)
        mask = keep[:, None] & (dim < 2 * NUM_PAIRS)[None, :]
        store_tile(rows, dim, tl.interleave(first, second), mask, scale_ptr, scale_offset)
    if BLOCK_REST > 0:
        behind = 2 * NUM_PAIRS + tl.arange(0, BLOCK_REST)
        rest_mask = keep[:, None] & (behind < HEAD_DIM)[None, :]
        store_tile(rows, behind, rest, rest_mask, scale_ptr, scale_offset)


def check_cos_sin(cos_sin_cache: torch.Tensor, head_dim: int) -> None:
    """Refuse a rotary table that is not [positions, even size <= head_dim] with unit column stride.

    Raises:
        ValueError: the shape found and the one needed.
    """
    rot_dim = cos_sin_cache.shape[-1]
    if cos_sin_cache.dim() != 2 or rot_dim % 2 or not 0 < rot_dim <= head_dim or cos_sin_cache.stride(1) != 1:
        raise ValueError(
            f"cos_sin_cache must be [positions, rotary size] with an even size up to {head_dim} and unit column stride; "
            f"got {tuple(cos_sin_cache.shape)} with strides {cos_sin_cache.stride()}"
        )
