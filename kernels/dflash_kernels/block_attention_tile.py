# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of `block_attention`: what was fastest, as far as the device's shared memory holds it."""

import functools
from typing import NamedTuple

import torch
import triton

from .shared_memory import HOPPER, SharedMemory, first_that_fits


class Tuning(NamedTuple):
    """Launch parameters; `kernels/benchmarks/sweep_block_attention.py` compares them. Results differ by rounding only.

    At 8 requests (64 programs per split with 8 KV heads, 132 multiprocessors) the splits are a bargain between parallel loads and
    scratch: each split writes and the merge reads R * Q * Hq * hd numbers, at 1,024 keys and 6 splits in fp32 25 MB beside 34 MB
    of keys and values. Hence scratch in the query's dtype.

    Attributes:
        keys: BLOCK_N, keys per step; the address of a key comes from the block table. None: as `_TILES` says, like the next two.
        stages: prefetch depth, shared between two loads: 3 prefetch one tile of keys (and its table entries before that), 5
            prefetch two. With 2 the table is read in line, 0.6 us per tile of 64 packed rows.
        warps: per program.
        programs_per_sm: what splits aim at; 3 fit beside each other at 128 registers and 65 KiB of shared memory each.
        min_keys: least keys of a split, below which the merge costs more than the keys; a multiple of `keys`.
        max_splits: most splits per request.
        merge_splits, merge_heads: tile of a merging program; 8 and 4 are 32 registers per thread at head_dim 128.
        short_scratch: splits leave their results in the query's dtype; False: in fp32.
    """

    keys: int | None = None
    stages: int | None = None
    warps: int | None = None
    programs_per_sm: int = 3
    min_keys: int = 64
    max_splits: int = 32
    merge_splits: int = 8
    merge_heads: int = 4
    short_scratch: bool = True


class Tile(NamedTuple):
    """Launch parameters of one program: packed query rows, keys per step, prefetch depth, warps."""

    rows: int
    keys: int
    stages: int
    warps: int


# By packed rows, for 16-bit numbers and heads of up to 128: winners of `sweep_block_attention.py` on an H200 with 4 query heads
# per KV head, where 2 and 4 query rows are 16 packed rows (padded), 8 are 32 and 16 are 64. Few rows leave a program little to
# do per key: short loops of small tiles win for 16, large tiles far ahead for 32.
_TILES = {16: Tile(16, 32, 2, 4), 32: Tile(32, 64, 5, 4), 64: Tile(64, 32, 5, 4), 128: Tile(128, 32, 5, 8)}
MOST_KEYS = 64


def choose_tile(
    packed_rows: int,
    head_dim: int,
    dtype: torch.dtype,
    tuning: Tuning,
    *,
    cache_dtype: torch.dtype | None = None,
    memory: SharedMemory = HOPPER,
) -> Tile:
    """Tile of one program, as far as `tuning` leaves it open one that fits into the device's shared memory.

    Queries are `dtype`, keys and values `cache_dtype` (None: the same).
    """
    wide = head_dim > 128 or dtype == torch.float32
    # More rows spill registers: fp32 products run on plain FMA units, and at head_dim 256 the accumulator is 64 KiB.
    most = 32 if dtype == torch.float32 else 64 if wide else 128
    rows = min(max(16, triton.next_power_of_2(packed_rows)), most)
    best = _TILES[rows]._replace(keys=32, stages=2) if wide else _TILES[rows]
    smaller = (
        best._replace(rows=fewer, keys=keys, stages=stages)
        for fewer in dict.fromkeys((rows, max(16, rows // 2), 16))
        for keys in dict.fromkeys((best.keys, best.keys // 2, 16))
        for stages in range(best.stages, 1, -1)
    )
    measure = functools.partial(_tile_bytes, head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype or dtype, memory=memory)
    best = first_that_fits(smaller, measure, memory.limit)
    return Tile(best.rows, tuning.keys or best.keys, tuning.stages or best.stages, tuning.warps or best.warps)


def _tile_bytes(tile: Tile, *, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, memory: SharedMemory) -> int:
    """Shared memory of one program; the two loads share the stages, see `Tuning`."""
    width, size = max(16, triton.next_power_of_2(head_dim)), dtype.itemsize
    wgmma = memory.wgmma and tile.rows >= 64 and size == 2  # the softmax's weights then stay in registers
    tiles = max(1, (tile.stages - 1) // 2) + (
        wgmma and cache_dtype == dtype
    )  # products read what was widened, not what was loaded
    loaded = 2 * tile.keys * width * cache_dtype.itemsize
    widened = 2 * tile.keys * width * size if cache_dtype != dtype else 0
    query, weights = tile.rows * width * size, 0 if wgmma else tile.rows * tile.keys * size
    return int(tiles * loaded + widened + query + weights) + 1024  # table entries, sums of rows across warps
