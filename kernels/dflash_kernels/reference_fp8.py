# SPDX-License-Identifier: Apache-2.0
"""Torch oracles of the fp8 ops: weights are widened first, activations rounded where the tile says so."""

import torch

from .draft_head import Temperatures, Winner
from .fp8_linear import E4M3_MAX, Tile, quantise_rows
from .reference_compute import _winner


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    workspace: object = None,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Oracle of `dflash_kernels.fp8_linear.fp8_linear`; see there for shapes and meaning."""
    del workspace
    if tile is not None and tile.how == "a8":
        x = _rounded(x, tile.depth)
    product = (x @ weight.to(x.dtype).T) * scale.to(x.dtype)
    product = product if bias is None else product + bias.to(x.dtype)
    return product if out is None else out.copy_(product)


def draft_head_fp8(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    d2t: torch.Tensor | None,
    *,
    workspace: object = None,
    num_valid: int | None = None,
    temperatures: Temperatures | None = None,
    out: Winner | None = None,
) -> Winner:
    """Oracle of `dflash_kernels.draft_head_fp8.draft_head_fp8`; see there for shapes and meaning."""
    del workspace
    logits = fp8_linear(hidden, weight, scale)
    return winner_of_logits(logits, d2t, num_valid=num_valid, temperatures=temperatures, out=out)


def winner_of_logits(
    logits: torch.Tensor,
    d2t: torch.Tensor | None,
    *,
    workspace: object = None,
    num_valid: int | None = None,
    temperatures: Temperatures | None = None,
    out: Winner | None = None,
) -> Winner:
    """Oracle of `dflash_kernels.draft_head_fp8.winner_of_logits`; see there for shapes and meaning."""
    del workspace
    return _winner(logits[:, :num_valid], 0, d2t, None, out, temperatures)


def _rounded(x: torch.Tensor, depth: int) -> torch.Tensor:
    """`x` [m, K] after rounding to e4m3 with one scale per row and `depth` columns; at least fp32, as inside the kernel."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % depth)).view(x.shape[0], -1, depth)
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    narrow = (blocks.float() * (E4M3_MAX / largest.float())).to(torch.float8_e4m3fn).to(x.dtype)
    return (narrow * (largest / E4M3_MAX)).view(x.shape[0], -1)[:, : x.shape[1]]


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
    """Oracle of `dflash_kernels.guest_rows.admit_guests`; see there. Tokens are taken one by one, in their order."""
    for token in ids.tolist():
        if not 0 <= token < home.numel() or home[token] < 0 or slot_of[token] >= 0:
            continue
        slot = int(cursor) % owner.numel()
        cursor += 1
        if owner[slot] >= 0:
            slot_of[owner[slot]] = -1
        owner[slot], slot_of[token] = token, slot
        row = first_row + slot
        numbers, scales = quantise_rows(head[home[token]][None])
        weight[row], scale[row], offsets[row] = numbers[0], scales[0], token - row
