# SPDX-License-Identifier: Apache-2.0
"""Greedy draft tokens from a private copy of the LM head: e4m3 rows of the tokens that matter, mapped back to target ids.

The full bf16 head of an 8B model is 1.245 GB per step; 32,768 of its rows in fp8 are 134 MB. Only drafts come from it, so a
token without a row costs acceptance and never correctness. Up to `FUSED_MAX_ROWS` rows the argmax is fused with the product;
above, the caller makes logits with the platform's fp8 product and `winner_of_logits` reads them once.
"""

import torch
import triton

from .draft_head import (
    LOGIT_TILE,
    LOGIT_WARPS,
    VOCAB_TILE,
    HeadWorkspace,
    Temperatures,
    Winner,
    check_odds,
    odds_pointers,
    pick_winner,
)
from .draft_head_kernel import _logit_tiles_kernel
from .fp8_linear import block_rows, default_how, numbers, tile_bytes
from .fp8_linear_kernel import _head_tiles_fp8_kernel
from .shared_memory import HOPPER, SharedMemory, first_that_fits, shared_memory

FUSED_MAX_ROWS = 64
_INTERPRETED = not isinstance(_head_tiles_fp8_kernel, triton.JITFunction)
# (vocabulary rows, depth, warps, stages) by rows of a tile; VOCAB_TILE sizes the scratch, so no tile may be narrower. Winners of
# `bench_draft_gemm.py --sweep` on an H200, H = 4096, microseconds for all 151,936 rows and for 32,768 of them:
#     sample rows 16: 159 and 40      64: 222 and 49      full bf16 head: 285 and 298
_TILES = {16: (VOCAB_TILE, 128, 4, 3), 32: (VOCAB_TILE, 128, 4, 3), 64: (2 * VOCAB_TILE, 128, 8, 3)}


def _head_tile(block_m: int, dtype: torch.dtype, how: str, memory: SharedMemory = HOPPER) -> tuple[int, int, int, int]:
    """Tile of `_TILES`; with fewer stages, less depth or fewer vocabulary rows where that does not fit into shared memory.

    fp32 states have the weights widened in shared memory: 256 KiB for 64 rows of the tile as it is.
    """
    best, depth, warps, most = _TILES[block_m]
    smaller = (
        (vocab, k, warps, stages)
        for vocab in dict.fromkeys((best, VOCAB_TILE))
        for k in (depth, depth // 2, depth // 4)
        for stages in range(most, 1, -1)
    )

    def num_bytes(tile: tuple[int, int, int, int]) -> int:
        return tile_bytes(tile[0], block_m, tile[1], tile[3], dtype=dtype, how=how, memory=memory)

    return first_that_fits(smaller, num_bytes, memory.limit)


def draft_head_fp8(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    d2t: torch.Tensor | None,
    *,
    workspace: HeadWorkspace,
    num_valid: int | None = None,
    temperatures: Temperatures | None = None,
    out: Winner | None = None,
) -> Winner:
    """Greedy target token of each sample row over the rows of a private head.

    Args:
        hidden: `[m, H]`, bf16 | fp16 | fp32, last stride 1, m at most `FUSED_MAX_ROWS`.
        weight: float8_e4m3fn `[R, H]`, contiguous.
        scale: fp32 `[R]`, positive.
        d2t: int64 `[R]`, offsets to target ids: row r is token `r + d2t[r]`; None where rows are tokens.
        workspace: scratch for at least m rows and R vocabulary rows.
        num_valid: rows from here on are padding and never win; None: all R are real.
        temperatures: of the rows; given, `Winner.against` is filled, over the rows of this head. The workspace needs `odds`.
        out: tensors to write; allocated where None.

    Returns:
        `Winner`: target tokens and their logits; the lowest row on ties, NaN logits count as -inf.

    Raises:
        ValueError: a shape, dtype or stride that the kernel does not take.
    """
    num_valid = weight.shape[0] if num_valid is None else num_valid
    _check(hidden, weight, scale, workspace, num_valid, temperatures)
    num_rows, width = hidden.shape
    block_m = block_rows(num_rows)
    how = default_how(hidden)
    vocab, depth, warps, stages = _head_tile(block_m, hidden.dtype, how, shared_memory(hidden.device))
    num_tiles = int(triton.cdiv(num_valid, vocab))
    if num_rows:
        _head_tiles_fp8_kernel[(num_tiles * triton.cdiv(num_rows, block_m),)](
            hidden,
            numbers(weight, how),
            scale,
            workspace.values,
            workspace.indices,
            *odds_pointers(workspace, temperatures),
            num_rows,
            num_valid,
            hidden.stride(0),
            HIDDEN=width,
            HOW=how,
            WIDEN=_INTERPRETED or hidden.dtype == torch.float32,
            PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",  # concerns fp32 only
            ODDS=temperatures is not None,
            BLOCK_V=vocab,
            BLOCK_M=block_m,
            BLOCK_K=depth,
            num_warps=warps,
            num_stages=stages,
        )
    pairs, others = (workspace.values, workspace.indices, num_tiles, num_rows), workspace.others
    return pick_winner(*pairs, d2t=d2t, others=others, temperatures=temperatures, out=out)


def winner_of_logits(
    logits: torch.Tensor,
    d2t: torch.Tensor | None,
    *,
    workspace: HeadWorkspace,
    num_valid: int,
    temperatures: Temperatures | None = None,
    out: Winner | None = None,
) -> Winner:
    """Winner of each row of `logits` [m, R], contiguous, R a multiple of 16; the other arguments as in `draft_head_fp8`."""
    num_rows = logits.shape[0]
    if logits.ndim != 2 or logits.shape[1] % 16 or not logits.is_contiguous() or num_rows > workspace.max_rows:
        raise ValueError(
            f"logits must be contiguous [m, R], m at most {workspace.max_rows}, R a multiple of 16; got {list(logits.shape)}."
        )
    check_odds(workspace, temperatures, num_rows)
    num_tiles = int(triton.cdiv(num_valid, LOGIT_TILE))
    if num_rows:
        _logit_tiles_kernel[(num_tiles, num_rows)](
            logits,
            workspace.values,
            workspace.indices,
            *odds_pointers(workspace, temperatures),
            num_rows,
            0,
            num_valid,
            logits.shape[1],
            ODDS=temperatures is not None,
            BLOCK_V=LOGIT_TILE,
            num_warps=LOGIT_WARPS,
        )
    pairs, others = (workspace.values, workspace.indices, num_tiles, num_rows), workspace.others
    return pick_winner(*pairs, d2t=d2t, others=others, temperatures=temperatures, out=out)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    workspace: HeadWorkspace,
    num_valid: int,
    temperatures: Temperatures | None,
) -> None:
    check_odds(workspace, temperatures, hidden.shape[0])
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or hidden.stride(1) != 1:
        raise ValueError(
            f"hidden must be [m, H] with last stride 1 and weight [R, H] with one H; got {list(hidden.shape)} and "
            f"{list(weight.shape)}."
        )
    if weight.dtype != torch.float8_e4m3fn or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous float8_e4m3fn; got {weight.dtype}. Make it with quantise_rows.")
    if scale.dtype != torch.float32 or scale.shape != weight.shape[:1]:
        raise ValueError(f"scale must be fp32 [{weight.shape[0]}]; got {scale.dtype} {list(scale.shape)}.")
    if hidden.shape[0] > min(FUSED_MAX_ROWS, workspace.max_rows) or weight.shape[0] > workspace.vocab_rows:
        raise ValueError(
            f"at most {min(FUSED_MAX_ROWS, workspace.max_rows)} rows and {workspace.vocab_rows} vocabulary rows fit; got "
            f"{hidden.shape[0]} and {weight.shape[0]}. Larger batches go through logits (winner_of_logits)."
        )
    if not 1 <= num_valid <= weight.shape[0]:
        raise ValueError(f"num_valid must be between 1 and the {weight.shape[0]} rows of the weight; got {num_valid}.")
