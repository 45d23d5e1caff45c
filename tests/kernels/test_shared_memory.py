# SPDX-License-Identifier: Apache-2.0
"""Chosen tiles fit into the shared memory of the device, whatever the dtype: launches that do not fit end in OutOfResources.

Bytes are those that Triton 3.9 allocates when it compiles the kernels for compute capability 9.0 and 8.0.
"""

import itertools

import pytest
import torch

from dflash_kernels import reference, reference_fp8
from dflash_kernels.block_attention_tile import Tuning
from dflash_kernels.block_attention_tile import choose_tile as attention_tile
from dflash_kernels.draft_head import HeadWorkspace, _fused_tile, draft_head
from dflash_kernels.draft_head_fp8 import _head_tile, draft_head_fp8
from dflash_kernels.fp8_linear import choose_tile, quantise_rows
from dflash_kernels.shared_memory import HOPPER, SharedMemory

AMPERE, ADA = SharedMemory(166_912, False), SharedMemory(101_376, False)
FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
ROWS = (1, 8, 16, 17, 32, 33, 64)


def attention(rows, head_dim, dtype, cache_dtype):
    return lambda memory: attention_tile(rows, head_dim, dtype, Tuning(), cache_dtype=cache_dtype, memory=memory)


def head(rows, dtype):
    return lambda memory: _fused_tile(rows, dtype, memory)


def fp8_head(rows, dtype, how):
    return lambda memory: _head_tile(rows, dtype, how, memory)


def linear(rows, width, depth, how, dtype=BF16):
    return lambda memory: choose_tile(rows, width, depth, how, dtype, memory)


@pytest.mark.parametrize(
    ("choose", "wgmma", "measured"),
    [
        (head(15, BF16), True, 110_592), (head(15, BF16), False, 73_728), (head(15, FP32), True, 147_456),
        (head(32, BF16), True, 102_400), (head(32, BF16), False, 81_920), (head(32, FP32), True, 163_840),
        (head(64, BF16), True, 196_608), (head(64, BF16), False, 147_456), (head(64, FP32), True, 294_912),
        (fp8_head(16, BF16, "a8"), True, 59_392), (fp8_head(32, BF16, "a8"), True, 69_632),
        (fp8_head(64, BF16, "a8"), True, 139_264), (fp8_head(64, BF16, "bits"), False, 98_304),
        (fp8_head(16, FP32, "cvt"), True, 114_688), (fp8_head(32, FP32, "cvt"), True, 131_072),
        (fp8_head(64, FP32, "cvt"), True, 262_144),
        (linear(16, 24_576, 4096, "a8"), True, 69_632), (linear(16, 4096, 20_480, "a8"), True, 159_744),
        (linear(32, 4096, 20_480, "a8"), True, 188_416), (linear(64, 4096, 4096, "a8"), True, 90_112),
        (linear(64, 4096, 4096, "bits"), False, 49_152), (linear(64, 4096, 4096, "cvt", FP32), True, 114_688),
        (attention(16, 128, BF16, BF16), True, 21_504), (attention(32, 128, BF16, BF16), True, 78_336),
        (attention(64, 128, BF16, BF16), True, 65_792), (attention(128, 128, BF16, BF16), True, 82_176),
        (attention(64, 256, BF16, BF16), True, 98_304), (attention(128, 128, BF16, FP8), True, 65_792),
        (attention(32, 128, FP32, FP32), True, 53_248), (attention(32, 256, FP32, FP32), True, 102_528),
        (attention(32, 256, FP32, FP8), True, 114_688),
    ],
)  # fmt: skip
def test_a_tile_is_taken_where_it_fits_and_made_smaller_below(choose, wgmma, measured):
    """Breaks when fewer bytes are counted than Triton allocates (launches fail), or far more (fast tiles stay unused)."""
    best = choose(SharedMemory(1 << 30, wgmma))
    assert choose(SharedMemory(measured + 6144, wgmma)) == best
    assert choose(SharedMemory(measured - 1, wgmma)) != best


@pytest.mark.parametrize("memory", [HOPPER, AMPERE, ADA], ids=["H200", "A100", "L40S"])
def test_something_fits_every_device(memory):
    """Breaks when for a dtype, head size or number of rows even the smallest tile is too large."""
    sizes = itertools.product(
        (1, 16, 32, 64, 128, 500), (64, 80, 128, 192, 256), ((BF16, BF16), (BF16, FP8), (FP32, FP32), (FP32, FP8))
    )
    choices = [attention(rows, head_dim, *dtypes) for rows, head_dim, dtypes in sizes]
    choices += [head(rows, dtype) for rows, dtype in itertools.product(ROWS, (BF16, FP32))]
    ways = (("a8", BF16), ("half", BF16), ("bits", BF16), ("cvt", FP32))
    shapes = ((24_576, 4096), (4096, 20_480), (4096, 4096), (576, 1536))
    for rows, (how, dtype) in itertools.product(ROWS, ways):
        choices += [linear(rows, *shape, how, dtype) for shape in shapes]
        choices.append(fp8_head(16 if rows <= 16 else 32 if rows <= 32 else 64, dtype, how))
    for choose in choices:
        assert choose(memory) != choose(memory._replace(limit=0)), "the last resort was taken"


def test_tuned_tiles_stay_on_the_device_they_were_tuned_on():
    """Breaks when too many bytes are counted: 16-bit launches on an H200 then lose the tiles that won there."""
    unlimited = SharedMemory(1 << 30, True)
    choices = [head(rows, BF16) for rows in ROWS] + [fp8_head(rows, BF16, "a8") for rows in (16, 32, 64)]
    choices += [linear(rows, *shape, "a8") for rows in ROWS for shape in ((24_576, 4096), (4096, 20_480), (4096, 4096))]
    choices += [attention(rows, 128, BF16, cache) for rows in (16, 32, 64, 128) for cache in (BF16, FP8)]
    for choose in choices:
        assert choose(HOPPER) == choose(unlimited)


def test_full_tiles_of_fp32_rows(device):
    """Breaks on a device when the largest tile is chosen as if fp32 numbers were 16 bits: the launch ends in OutOfResources."""
    hidden, weight = torch.randn(64, 512, device=device), torch.randn(300, 512, device=device)
    workspace = HeadWorkspace(max_rows=64, vocab_rows=300, dtype=FP32, device=device)
    expected = reference.draft_head(hidden.double(), weight.double())
    assert torch.equal(draft_head(hidden, weight, workspace=workspace).tokens, expected.tokens)
    numbers, scale = quantise_rows(weight)
    expected = reference_fp8.draft_head_fp8(hidden.double(), numbers, scale, None)
    assert torch.equal(draft_head_fp8(hidden, numbers, scale, None, workspace=workspace).tokens, expected.tokens)
