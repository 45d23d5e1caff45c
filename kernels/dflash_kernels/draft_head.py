# SPDX-License-Identifier: Apache-2.0
"""Greedy draft tokens straight from the LM head: the argmax is fused with the GEMM, logits never reach memory.

A decode step samples at least 7 rows against 0.1 to 0.3 million vocabulary rows: up to some 64 rows the time is the reading
of the weights once (1.245 GB for Qwen3-8B), and what the fused kernel saves is the logits (written, read, and under tensor
parallelism gathered) with the argmax kernel. Above `FUSED_MAX_ROWS` rows the product leaves that bound and cuBLAS is faster: it
writes the logits of a chunk of rows into scratch, and an argmax at the speed of memory reads them once.

Soft-capping and a positive logit scale are monotone: they change no argmax and are ignored. Values are raw logits, and so are
those that the odds against the winner (`Temperatures`) are made of.

CUDA graphs: scratch is allocated once in `HeadWorkspace`; all launch shapes follow from tensor shapes. The fused
kernel has one variant per entry of `_FUSED_TILES`; a call with as many rows as each entry warms all of them.
"""

from typing import NamedTuple

import torch
import triton

from .draft_head_kernel import _head_tiles_kernel, _logit_tiles_kernel
from .draft_head_winner import Temperatures, Winner, combine_shards, pick_winner
from .shared_memory import HOPPER, SharedMemory, first_that_fits, shared_memory

__all__ = [
    "FUSED_MAX_ROWS",
    "HeadWorkspace",
    "Temperatures",
    "Winner",
    "combine_shards",
    "draft_head",
    "draft_head_local",
    "pick_winner",
]


class _Tile(NamedTuple):
    vocab: int
    rows: int
    depth: int
    warps: int
    stages: int


# All the tuning there is: the winners of `kernels/benchmarks/bench_draft_head.py --sweep` on an H200 with Qwen3-8B's head
# (V = 151,936, H = 4096, bf16). Microseconds; "torch" is the product with torch's argmax:
#     rows       15    32    64    96   120   192   480   960   1920
#     fused     284   294   306   391   395     -     -     -      -    (96 and 120: the best tile of 128 rows)
#     matmul    309   314   321   333   350   447   991  1842   3697
#     torch     315   323   337     -   375   465  1011  1956   3833
FUSED_MAX_ROWS = 64
VOCAB_TILE = 128  # every fused tile's: sizes the scratch
# One or two programs per multiprocessor keep 64 KiB of weights and more in flight: 4.3 TB/s at 1 us of latency needs 32.
_FUSED_TILES = (
    _Tile(VOCAB_TILE, 16, 128, 4, 3),
    _Tile(VOCAB_TILE, 32, 64, 4, 5),
    _Tile(VOCAB_TILE, 64, 128, 8, 4),  # 306 us; 317 with depth 64
)
# 12, 39 and 74 us for 120, 480 and 960 rows, as 4096 with 4 warps; torch.argmax takes 32, 95 and 166.
LOGIT_TILE, LOGIT_WARPS = 8192, 8
# Chunks of 960 rows at this vocabulary: as fast per row as 1,920 within 2 %; 480 rows cost 7 % more.
LOGIT_BYTES = 320 << 20
_STRIDE = 64  # rows of logits start at multiples of this: cuBLAS and the argmax want 16-byte alignment
_INTERPRETED = not isinstance(_head_tiles_kernel, triton.JITFunction)


def _fused_tile(num_rows: int, dtype: torch.dtype, memory: SharedMemory = HOPPER) -> _Tile:
    """Tile of `_FUSED_TILES` for `num_rows` rows; in fp32, or on a small device, with fewer stages or less depth."""
    best = next((tile for tile in _FUSED_TILES if num_rows <= tile.rows), _FUSED_TILES[-1])
    depths, stages = (best.depth, best.depth // 2, best.depth // 4), range(best.stages, 1, -1)
    smaller = (best._replace(depth=depth, stages=stage) for depth in depths for stage in stages)

    def num_bytes(tile: _Tile) -> int:
        buffers = tile.stages if memory.wgmma and dtype.itemsize == 2 else tile.stages - 1
        return buffers * (tile.vocab + tile.rows) * tile.depth * dtype.itemsize

    return first_that_fits(smaller, num_bytes, memory.limit)


class HeadWorkspace:
    """Fixed-address scratch of `draft_head` and `draft_head_local`.

    Args:
        max_rows: largest m of any call, graph padding included.
        vocab_rows: rows of the head's weight on this rank, V.
        dtype: dtype of the hidden states (and of the logits).
        device: where they live.
        logit_bytes: most memory for logits, which calls of more than `FUSED_MAX_ROWS` rows write in chunks of rows.
        fused_rows: largest m of the fused method; more than `FUSED_MAX_ROWS` only to measure it.
        odds: calls with `temperatures` will come.
    """

    __slots__ = ("indices", "logits", "max_rows", "others", "values", "vocab_rows")

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        logit_bytes: int = LOGIT_BYTES,
        fused_rows: int = FUSED_MAX_ROWS,
        odds: bool = False,
    ) -> None:
        self.max_rows, self.vocab_rows = max_rows, vocab_rows
        fused_pairs = min(max_rows, fused_rows) * triton.cdiv(vocab_rows, VOCAB_TILE)
        pairs = max(fused_pairs, max_rows * triton.cdiv(vocab_rows, LOGIT_TILE))
        self.values = torch.empty(pairs, dtype=torch.float32, device=device)
        self.indices = torch.empty(pairs, dtype=torch.int32, device=device)
        self.others = torch.empty(pairs if odds else 0, dtype=torch.float32, device=device)
        stride = _row_stride(vocab_rows)
        rows = min(max_rows, logit_bytes // (stride * dtype.itemsize)) if max_rows > FUSED_MAX_ROWS else 0
        self.logits = torch.empty(rows * stride, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        tensors = (self.values, self.indices, self.others, self.logits)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def draft_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    workspace: HeadWorkspace,
    num_valid: int | None = None,
    d2t: torch.Tensor | None = None,
    target_ids: torch.Tensor | None = None,
    temperatures: Temperatures | None = None,
    method: str = "auto",
    out: Winner | None = None,
) -> Winner:
    """Greedy token of each sample row: `argmax_v hidden @ weight[v]`, the lowest v on ties.

    Args:
        hidden: `[m, H]`, bf16 | fp16 | fp32, last stride 1.
        weight: `[V, H]`, hidden's dtype, last stride 1; no bias.
        workspace: scratch for at least m rows and V vocabulary rows.
        num_valid: rows of `weight` from here on are padding and never win; None: all V are real.
        d2t: int64 `[num_valid]`, offsets from a reduced draft vocabulary: `target = draft + d2t[draft]`.
        target_ids: int64 `[num_valid]`, the same as a table: `target = target_ids[draft]`. One of the two at most.
        temperatures: of the rows; given, `Winner.against` is filled. The workspace needs `odds`.
        method: "fused", "matmul" (cuBLAS and an argmax), or "auto": the faster one by `FUSED_MAX_ROWS`.
        out: tensors to write; allocated where None.

    Returns:
        `Winner`: target tokens (draft tokens without a map) and their raw logits. NaN logits count as -inf, so that a
        token is always inside the vocabulary.

    Raises:
        ValueError: a shape, dtype or stride that the kernels do not take.
    """
    num_valid = weight.shape[0] if num_valid is None else num_valid
    if num_valid < 1:
        raise ValueError(f"num_valid must be at least 1; got {num_valid}. Only draft_head_local takes an empty shard.")
    num_tiles = _tile_winners(hidden, weight, workspace, num_valid, method, temperatures)
    pairs = (workspace.values, workspace.indices, num_tiles, hidden.shape[0])
    others = workspace.others
    return pick_winner(*pairs, d2t=d2t, target_ids=target_ids, others=others, temperatures=temperatures, out=out)


def draft_head_local(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    workspace: HeadWorkspace,
    vocab_start: int = 0,
    num_valid: int | None = None,
    temperatures: Temperatures | None = None,
    method: str = "auto",
    out: Winner | None = None,
) -> Winner:
    """`draft_head` over one rank's shard of the vocabulary; ranks exchange two numbers per row instead of logits.

    Args:
        hidden: `[m, H]`, as in `draft_head`, the same on every rank.
        weight: `[V / tp, H]`, this rank's rows of the head.
        workspace: as in `draft_head`.
        vocab_start: global index of the shard's first row.
        num_valid: real rows of this shard; 0 where the shard is padding only.
        temperatures: as in `draft_head`; the odds are those among the tokens of this shard.
        method: as in `draft_head`.
        out: tensors to write; allocated where None.

    Returns:
        `Winner` with global (draft) indices, for `combine_shards`. An empty shard returns -inf and `vocab_start`.

    Raises:
        ValueError: a shape, dtype or stride that the kernels do not take.
    """
    num_valid = weight.shape[0] if num_valid is None else num_valid
    if num_valid == 0:
        out = Winner.empty(hidden.shape[0], hidden.device, odds=temperatures is not None) if out is None else out
        out.tokens.fill_(vocab_start)
        out.values.fill_(float("-inf"))
        if out.against is not None:
            out.against.fill_(float("inf"))
        return out
    num_tiles = _tile_winners(hidden, weight, workspace, num_valid, method, temperatures)
    pairs, others = (workspace.values, workspace.indices, num_tiles, hidden.shape[0]), workspace.others
    return pick_winner(*pairs, vocab_start=vocab_start, others=others, temperatures=temperatures, out=out)


def _tile_winners(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    workspace: HeadWorkspace,
    num_valid: int,
    method: str,
    temperatures: Temperatures | None,
) -> int:
    """First stage: fill the workspace with tile winners; returns the number of tiles."""
    _check_head(hidden, weight, workspace, num_valid)
    check_odds(workspace, temperatures, hidden.shape[0])
    if method not in ("auto", "fused", "matmul"):
        raise ValueError(f'method must be "auto", "fused" or "matmul"; got {method!r}.')
    if method == "auto":
        method = "fused" if hidden.shape[0] <= FUSED_MAX_ROWS else "matmul"
    if hidden.shape[0] == 0:
        return 1
    return (_fused_tiles if method == "fused" else _matmul_tiles)(hidden, weight, workspace, num_valid, temperatures)


def odds_pointers(
    workspace: HeadWorkspace, temperatures: Temperatures | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """What a first stage needs for the odds besides `ODDS`: sums to write, states, and temperatures by state."""
    return (None, None, None) if temperatures is None else (workspace.others, temperatures.states, temperatures.by_state)


def _row_stride(vocab_rows: int) -> int:
    """Elements from one row of logits to the next."""
    return int(triton.cdiv(vocab_rows, _STRIDE)) * _STRIDE


def _fused_tiles(
    hidden: torch.Tensor, weight: torch.Tensor, workspace: HeadWorkspace, num_valid: int, temperatures: Temperatures | None
) -> int:
    num_rows, depth = hidden.shape
    tile = _fused_tile(num_rows, hidden.dtype, shared_memory(hidden.device))
    num_tiles = int(triton.cdiv(num_valid, tile.vocab))
    if num_rows * num_tiles > workspace.values.numel():
        raise ValueError(
            f"the fused method needs scratch for {num_rows} rows; this workspace has it for "
            f'{workspace.values.numel() // num_tiles}. Raise fused_rows, or use method "auto".'
        )
    _head_tiles_kernel[(num_tiles * triton.cdiv(num_rows, tile.rows),)](
        hidden,
        weight,
        workspace.values,
        workspace.indices,
        *odds_pointers(workspace, temperatures),
        num_rows,
        num_valid,
        hidden.stride(0),
        weight.stride(0),
        HIDDEN=depth,
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",  # concerns fp32 only
        WIDEN=_INTERPRETED,
        ODDS=temperatures is not None,
        BLOCK_V=tile.vocab,
        BLOCK_M=tile.rows,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return num_tiles


def _matmul_tiles(
    hidden: torch.Tensor, weight: torch.Tensor, workspace: HeadWorkspace, num_valid: int, temperatures: Temperatures | None
) -> int:
    num_rows, vocab_rows = hidden.shape[0], weight.shape[0]
    stride = _row_stride(vocab_rows)
    most = workspace.logits.numel() // stride
    if not most:
        raise ValueError(
            f"more than {FUSED_MAX_ROWS} rows need a workspace with logits; this one was made for max_rows = "
            f"{workspace.max_rows} and holds none. Raise max_rows or logit_bytes."
        )
    size = int(triton.cdiv(num_rows, triton.cdiv(num_rows, most)))  # chunks of one size: no short last product
    for start in range(0, num_rows, size):
        part = hidden[start : start + size]
        logits = workspace.logits[: part.shape[0] * stride].view(part.shape[0], stride)
        torch.mm(part, weight.T, out=logits[:, :vocab_rows])
        _logit_tiles(logits, workspace, num_rows, start, num_valid, temperatures)
    return int(triton.cdiv(num_valid, LOGIT_TILE))


def _logit_tiles(
    logits: torch.Tensor,
    workspace: HeadWorkspace,
    num_rows: int,
    start: int,
    num_valid: int,
    temperatures: Temperatures | None = None,
) -> None:
    """Tile winners of `logits` [n, stride], which are the rows from `start` on of `num_rows`."""
    _logit_tiles_kernel[(triton.cdiv(num_valid, LOGIT_TILE), logits.shape[0])](
        logits,
        workspace.values,
        workspace.indices,
        *odds_pointers(workspace, temperatures),
        num_rows,
        start,
        num_valid,
        logits.shape[1],
        ODDS=temperatures is not None,
        BLOCK_V=LOGIT_TILE,
        num_warps=LOGIT_WARPS,
    )


def _check_head(hidden: torch.Tensor, weight: torch.Tensor, workspace: HeadWorkspace, num_valid: int) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [m, H] and weight [V, H] with one H; got {list(hidden.shape)} and {list(weight.shape)}."
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"hidden and weight must share bf16, fp16 or fp32; got {hidden.dtype} and {weight.dtype}. "
            "A quantised head goes through its own linear method and torch.argmax."
        )
    if hidden.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(
            f"hidden and weight need last stride 1; got strides {hidden.stride()} and {weight.stride()}. "
            "Call .contiguous() once at load for the weight."
        )
    if hidden.shape[0] > workspace.max_rows or weight.shape[0] > workspace.vocab_rows:
        raise ValueError(
            f"the workspace was made for {workspace.max_rows} rows and {workspace.vocab_rows} vocabulary rows; got "
            f"{hidden.shape[0]} and {weight.shape[0]}. Make it for the largest padded batch and the rank's shard."
        )
    if not 0 < num_valid <= weight.shape[0]:
        raise ValueError(f"num_valid must be between 1 and the {weight.shape[0]} rows of weight; got {num_valid}.")


def check_odds(workspace: HeadWorkspace, temperatures: Temperatures | None, num_rows: int) -> None:
    """Raise ValueError where odds are asked for that the workspace has no room for, or with states of other rows."""
    if temperatures is None:
        return
    if not workspace.others.numel():
        raise ValueError("temperatures ask for odds, which this workspace has no scratch for. Make it with odds=True.")
    if temperatures.states.shape != (num_rows,):
        raise ValueError(
            f"temperatures need one state per row, [{num_rows}]; got {list(temperatures.states.shape)}. Slice the states to the "
            "rows of this call."
        )
