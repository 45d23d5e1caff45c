# SPDX-License-Identifier: Apache-2.0
"""`fp8_linear` against float64: tiles, shared depth, odd sizes, every e4m3 number."""

import pytest
import torch

from dflash_kernels import reference_fp8 as reference
from dflash_kernels.fp8_linear import MAX_ROWS, Fp8Workspace, Tile, choose_tile, fp8_linear, quantise_rows


def make_case(rows, width, depth, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator).to(device, dtype)
    numbers, scales = quantise_rows(torch.randn(width, depth, generator=generator).to(device))
    return x, numbers, scales, Fp8Workspace(device)


@pytest.mark.parametrize(
    ("rows", "width", "depth", "dtype", "tile"),
    [
        (1, 64, 128, torch.bfloat16, None),
        (16, 130, 512, torch.bfloat16, Tile(64, 64, 4, 4, 3, "bits")),
        (17, 200, 96, torch.float16, Tile(64, 64, 1, 4, 3, "bits")),  # depth is no multiple of the tile's
        (33, 70, 256, torch.bfloat16, Tile(32, 64, 2, 4, 3, "half")),
        (9, 70, 320, torch.bfloat16 if torch.cuda.is_available() else torch.float32, Tile(64, 64, 1, 4, 3, "a8")),
        (64, 64, 256, torch.float32, Tile(64, 64, 2, 4, 3, "cvt")),
    ],
)
def test_product_is_as_accurate_as_plain_torch(rows, width, depth, dtype, tile, device, assert_accurate):
    """Breaks on a wrong row, tile, part of the depth or scale, or when the bits of a number are moved wrongly."""
    x, weight, scale, workspace = make_case(rows, width, depth, dtype, device)
    bias = torch.randn(width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    tile = tile or Tile(64, 128, 1, 4, 3, "cvt")
    found = fp8_linear(x, weight, scale, workspace=workspace, bias=bias, tile=tile)
    truth = reference.fp8_linear(x.double(), weight, scale, bias=bias, tile=tile)
    assert_accurate(found, reference.fp8_linear(x, weight, scale, bias=bias, tile=tile).to(dtype), truth)
    assert found.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_number_is_widened_exactly(dtype, device):
    """Breaks when one of the 254 numbers, subnormal ones included, becomes another: identity activations return them all."""
    codes = torch.arange(256, dtype=torch.uint8)
    weight = codes[~codes.view(torch.float8_e4m3fn).float().isnan()][:252].view(torch.float8_e4m3fn).reshape(63, 4)
    weight = torch.nn.functional.pad(weight.view(torch.uint8), (0, 60)).view(torch.float8_e4m3fn).contiguous().to(device)
    x = torch.eye(64, device=device, dtype=dtype)[:4]
    how = "bits" if device.type == "cuda" and dtype != torch.float32 else "cvt"
    tile = Tile(64, 64, 1, 4, 3, how)
    found = fp8_linear(x, weight, torch.ones(63, device=device), workspace=Fp8Workspace(device), tile=tile)
    assert torch.equal(found.T.double(), weight[:, :4].double())


def test_shared_depth_leaves_the_counters_at_zero_and_repeats(device):
    """Breaks when the last program of a tile does not reset its counter: the next call of a captured graph would never finish."""
    x, weight, scale, workspace = make_case(5, 128, 512, torch.float32, device)
    tile = Tile(64, 64, 8, 4, 3, "bits")
    first, second = (fp8_linear(x, weight, scale, workspace=workspace, tile=tile) for _ in range(2))
    assert torch.equal(first, second)
    assert not workspace.counters.any()


def test_chosen_tiles_fit_their_scratch():
    """Breaks when a shape gets more programs than there are counters and partial sums for."""
    workspace = Fp8Workspace("cpu")
    for rows in (1, 16, 17, 64):
        for width, depth in ((64, 64), (4096, 4096), (6144, 4096), (4096, 20480), (24576, 4096), (151936, 4096), (576, 1536)):
            tile = choose_tile(rows, width, depth, "a8")
            block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
            tiles = -(-width // tile.width)
            assert tile.split == 1 or tiles <= workspace.counters.numel()
            assert tile.split == 1 or tiles * tile.split * tile.width * block_m <= workspace.partial.numel()
            assert tile.split == 1 or depth % (tile.split * tile.depth) == 0


def test_rows_are_quantised_by_their_own_scale():
    """Breaks when one large row costs the others their precision, or a row of zeros divides by zero."""
    weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    weight[1] *= 1000
    weight[3] = 0
    numbers, scales = quantise_rows(weight, chunk_rows=2)
    back = numbers.float() * scales[:, None]
    assert torch.equal(back[3], torch.zeros(32))
    error = (back - weight).abs().amax(1) / weight.abs().amax(1).clamp_min(1e-9)
    assert error.max() < 2**-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(MAX_ROWS + 1, 64)}, "at most 64 rows"),
        ({"x": torch.zeros(2, 32)}, "with one K"),
        ({"x": torch.zeros(64, 2).T}, "last stride 1"),
        ({"weight": torch.zeros(8, 64)}, "contiguous float8_e4m3fn; got torch.float32"),
        ({"scale": torch.ones(7)}, r"scale must be fp32 \[8\]"),
    ],
)
def test_errors_say_what_was_needed(change, message, device):
    """Breaks when a bad argument reaches the kernel (which assumes) instead of a sentence."""
    x, weight, scale, workspace = make_case(2, 8, 64, torch.float32, device)
    moved = {name: value.to(device) for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        fp8_linear(**({"x": x, "weight": weight, "scale": scale} | moved), workspace=workspace)
