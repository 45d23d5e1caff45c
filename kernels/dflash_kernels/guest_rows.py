# SPDX-License-Identifier: Apache-2.0
"""Rows that come and go behind the listed ones of a private draft head: those of tokens that the requests have just used.

A fixed list misses the words of a conversation's own subject, and those come again. Each step shows its input tokens; one whose
row is missing takes the oldest guest's place. Nothing of it is known to the host: no step waits, and captured graphs stay.
"""

import torch
import triton
import triton.language as tl

from .fp8_linear import E4M3_MAX


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])  # the part of a buffer that starts anywhere
def _admit_guests_kernel(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    ids_ptr,
    head_ptr,
    home_ptr,
    slot_ptr,
    owner_ptr,
    cursor_ptr,
    numbers_ptr,
    scale_ptr,
    offset_ptr,
    vocab_size,
    first_row,
    num_guests,
    head_stride,
    E4M3_LARGEST: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per input token; nearly all end at the second load.

    There are at most as many programs as guests, so that no slot is taken twice in a launch.
    """
    token = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    known = (token >= 0) & (token < vocab_size)
    home = tl.load(home_ptr + token, mask=known, other=-1)
    if home >= 0:  # noqa: SIM102  # Triton's "and" evaluates both sides
        if tl.atomic_cas(slot_ptr + token, -1, -2) == -1:  # several programs may hold the same token
            slot = tl.atomic_add(cursor_ptr, 1) % num_guests
            evicted = tl.load(owner_ptr + slot)
            tl.store(slot_ptr + evicted, -1, mask=evicted >= 0)
            tl.store(owner_ptr + slot, token.to(tl.int32))
            row = (first_row + slot).to(tl.int64)
            columns = tl.arange(0, BLOCK_H)
            inside = columns < HIDDEN
            values = tl.load(head_ptr + home.to(tl.int64) * head_stride + columns, mask=inside, other=0.0).to(tl.float32)
            largest = tl.max(tl.abs(values), axis=0)
            scale = tl.where(largest > 0, largest / E4M3_LARGEST, 1.0)
            values = tl.minimum(tl.maximum(values / scale, -E4M3_LARGEST), E4M3_LARGEST)
            # e4m3 by hand, which needs no hardware for it: sign, four bits of exponent, three of a mantissa rounded to even
            # (below 2^-6 halves go up: one step of 2^-9 beside the listed rows, in exact ties alone).
            bits = tl.abs(values).to(tl.int32, bitcast=True)
            normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponents from -6 on: 127 - 7 = 120, times 8
            small = (tl.abs(values) * 512.0 + 0.5).to(tl.int32)  # below 2^-6 in steps of 2^-9
            byte = tl.where(tl.abs(values) < 0.015625, small, normal) + tl.where(values < 0, 128, 0)
            tl.store(numbers_ptr + row * HIDDEN + columns, byte.to(tl.uint8), mask=inside)
            tl.store(scale_ptr + row, scale)
            tl.store(offset_ptr + row, token - row)
            tl.store(slot_ptr + token, slot.to(tl.int32))


def admit_guests(
    ids: torch.Tensor,
    head: torch.Tensor,
    home: torch.Tensor,
    slot_of: torch.Tensor,
    owner: torch.Tensor,
    cursor: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    *,
    first_row: int,
) -> None:
    """Copy the rows of those ``ids`` that have none into the guest rows, the oldest guests' first.

    Args:
        ids: int32 | int64 `[n]`, contiguous; ids outside the map are passed over.
        head: `[V_head, H]`, bf16 | fp16 | fp32, last stride 1: where rows are copied from.
        home: int32 `[V]`, row of `head` for a token that may be a guest, -1 for all others.
        slot_of: int32 `[V]`, guest row of a token, -1 where it has none.
        owner: int32 `[E]`, token of a guest row, -1 where it is free.
        cursor: int64 `[1]`, guests so far; never wraps.
        weight: float8_e4m3fn `[R, H]`, contiguous; guests are its rows `first_row` to `first_row + E`.
        scale: fp32 `[R]`.
        offsets: int64 `[R]`, as `draft_head_fp8` wants them: row r is token `r + offsets[r]`.
        first_row: see `weight`.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    guests = owner.numel()
    if weight.dtype != torch.float8_e4m3fn or not weight.is_contiguous() or head.shape[1] != weight.shape[1]:
        raise ValueError(f"weight must be contiguous e4m3 [R, {head.shape[1]}]; got {weight.dtype} {list(weight.shape)}.")
    if home.shape != slot_of.shape or not guests or first_row + guests > weight.shape[0] or not ids.is_contiguous():
        raise ValueError(f"first_row {first_row} and {guests} guests must lie in {weight.shape[0]} rows, with one map of tokens.")
    for start in range(0, ids.numel(), guests):
        part = ids[start : start + guests]
        _admit_guests_kernel[(part.numel(),)](
            part,
            head,
            home,
            slot_of,
            owner,
            cursor,
            weight.view(torch.uint8),
            scale,
            offsets,
            home.numel(),
            first_row,
            guests,
            head.stride(0),
            E4M3_LARGEST=E4M3_MAX,
            HIDDEN=head.shape[1],
            BLOCK_H=triton.next_power_of_2(head.shape[1]),
            num_warps=4,
        )
