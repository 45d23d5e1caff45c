# SPDX-License-Identifier: Apache-2.0
"""fp8 product for few rows: bf16 or fp16 activations times e4m3 weights with one scale per output channel, in one launch.

A draft step at batch 1 multiplies 16 rows with every weight of the draft, so its time is the reading of the weights: half the
bytes, half the time. Activations come in as they are: where the tensor cores take e4m3, they are rounded inside the kernel, with
a scale per row and 128 values, which needs no launch of its own; elsewhere the weights are widened. Many rows are bound by
compute: there the platform's fp8 product is faster.

CUDA graphs: scratch has fixed addresses (`Fp8Workspace`); launch shapes follow from tensor shapes. One compiled kernel per
tile shape; a call with 16, 32 and 64 rows warms all that a weight can use.
"""

from typing import NamedTuple

import torch
import triton

from .fp8_linear_kernel import _fp8_linear_kernel
from .shared_memory import HOPPER, SharedMemory, first_that_fits, shared_memory

MAX_ROWS = 64
"""Most rows of activations; more are bound by compute."""
E4M3_MAX = 448.0
_INTERPRETED = not isinstance(_fp8_linear_kernel, triton.JITFunction)
# Partial sums of at most this many programs are kept: enough for two per multiprocessor, and then some.
_SPLIT_PROGRAMS = 528
_SPLITS = (8, 4, 2)
_FEW_PROGRAMS = 100  # fewer leave multiprocessors idle


class Tile(NamedTuple):
    """Launch parameters of one call; `split` programs share one tile's depth.

    `how`: "a8" rounds activations to e4m3, scaled per row and block of depth, so that both sides reach the tensor cores as they
    are (sm_89 and newer). The others widen the weights: "half" to fp16 against scaled activations, "cvt" to the activations'
    dtype, "bits" the same by moving bits (sm_80 and newer).
    """

    width: int
    depth: int
    split: int
    warps: int
    stages: int
    how: str


class Fp8Workspace:
    """Fixed-address scratch of `fp8_linear`: partial sums, and the counters that tell the last program of a tile.

    One is enough for all calls of one stream: kernels of a stream do not overlap.
    """

    __slots__ = ("counters", "partial")

    def __init__(self, device: torch.device | str) -> None:
        self.partial = torch.empty(_SPLIT_PROGRAMS * 128 * MAX_ROWS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(_SPLIT_PROGRAMS, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.partial, self.counters))


def quantise_rows(weight: torch.Tensor, *, chunk_rows: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 numbers and scales of a weight `[N, K]`: `weight[n]` is about `numbers[n] * scales[n]`.

    Returns:
        `[N, K]` float8_e4m3fn and fp32 `[N]`, on the weight's device. A row of zeros has the scale 1. Works on `chunk_rows`
        rows at a time, so that the fp32 copy stays small.
    """
    narrow = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], chunk_rows):
        rows = weight[start : start + chunk_rows].float()
        largest = rows.abs().amax(1)
        scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
        scales[start : start + chunk_rows] = scale
        narrow[start : start + chunk_rows] = (rows / scale[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return narrow, scales


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    workspace: Fp8Workspace,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ (weight * scale[:, None]).T + bias` for at most `MAX_ROWS` rows.

    Args:
        x: `[m, K]`, bf16 | fp16 | fp32, last stride 1.
        weight: float8_e4m3fn `[N, K]`, contiguous.
        scale: fp32 `[N]`.
        workspace: scratch on the same device.
        bias: `[N]`.
        tile: launch parameters; chosen by shape where None.
        out: as returned, contiguous; allocated where None.

    Returns:
        `[m, N]` in x's dtype, summed in fp32; the order depends on shapes only.

    Raises:
        ValueError: a shape, dtype or stride that the kernel does not take.
    """
    _check(x, weight, scale)
    (rows, depth), width = x.shape, weight.shape[0]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return out
    tile = tile or choose_tile(rows, width, depth, default_how(x), x.dtype, shared_memory(x.device))
    tiles = triton.cdiv(width, tile.width) * triton.cdiv(rows, block_rows(rows))
    _fp8_linear_kernel[(tiles * tile.split,)](
        x,
        numbers(weight, tile.how),
        scale,
        bias,
        out,
        workspace.partial,
        workspace.counters,
        rows,
        width,
        depth,
        triton.cdiv(depth, tile.depth * tile.split),
        x.stride(0),
        HAS_BIAS=bias is not None,
        SPLIT=tile.split,
        DEPTH_FITS=depth % (tile.depth * tile.split) == 0,
        HOW=tile.how,
        WIDEN=_INTERPRETED or x.dtype == torch.float32,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",  # concerns fp32 only
        BLOCK_N=tile.width,
        BLOCK_M=block_rows(rows),
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def default_how(x: torch.Tensor) -> str:
    """How weights meet activations like `x` on its device; see `Tile`."""
    if x.dtype == torch.float32 or not x.is_cuda:
        return "cvt"
    return "a8" if torch.cuda.get_device_capability(x.device) >= (8, 9) else "bits"


def numbers(weight: torch.Tensor, how: str) -> torch.Tensor:
    """The e4m3 weight as the kernel wants it: bytes where it moves bits, or where Triton has no such pointer."""
    return weight.view(torch.uint8) if _INTERPRETED or how == "bits" else weight


def choose_tile(
    rows: int, width: int, depth: int, how: str, dtype: torch.dtype = torch.bfloat16, memory: SharedMemory = HOPPER
) -> Tile:
    """Launch parameters for `[rows, depth]` times `[width, depth]`; winners of `bench_draft_gemm.py --sweep` on an H200.

    Microseconds at 16 rows, with bf16 cuBLAS and with cutlass' fp8 product including the quantisation of activations:
        (6144, 4096) 11.5, 16.0, 11.7    (24576, 4096) 29.6, 52.3, 34.6    (4096, 20480) 26.7, 46.6, 34.3
        (4096, 4096)  9.4, 13.4, 10.5    (4096, 12288) 17.9, 30.3, 22.1    (10240, 4096) 16.3, 24.5, 20.6
    At 32 rows it is ahead of both too, at 64 rows cutlass is ahead. Activations of `dtype` on a device with less shared memory
    get fewer stages or less depth.
    """
    wide, deep = width >= 16384, depth >= 8192
    if how != "a8":
        tile = Tile(64, 128, 1 if wide else 4, 4, 3, how)
    elif rows <= 16 and wide:
        tile = Tile(64, 256, 1, 4, 3, how)
    elif rows <= 16 and (deep or 2048 < width <= 4096):
        tile = Tile(128, 256, 4, 4, 4, how)
    elif rows <= 16 and width <= 8192:
        tile = Tile(64, 128, 4, 4, 4, how)
    elif rows <= 32 and deep:
        tile = Tile(128, 256, 4, 8, 4, how)
    else:
        tile = Tile(128, 128, 4 if not wide else 2 if rows <= 32 else 1, 4, 3, how)
    smaller = (
        tile._replace(depth=k, stages=stages)
        for k in (tile.depth, tile.depth // 2, tile.depth // 4)
        for stages in range(tile.stages, 1, -1)
    )

    def num_bytes(tile: Tile) -> int:
        return tile_bytes(tile.width, block_rows(rows), tile.depth, tile.stages, dtype=dtype, how=how, memory=memory)

    tile = first_that_fits(smaller, num_bytes, memory.limit)
    return tile._replace(split=_split(tile, rows, width, depth))


def tile_bytes(
    width: int, rows: int, depth: int, stages: int, *, dtype: torch.dtype, how: str, memory: SharedMemory = HOPPER
) -> int:
    """Shared memory of a program that multiplies e4m3 `[width, depth]` with `[rows, depth]` of `dtype` per step."""
    weight, x = width * depth, rows * depth
    if how in ("a8", "half"):  # narrowed activations; for "half" weights that were widened, too
        narrow = x if how == "a8" else 2 * (weight + x)
        return (stages if memory.wgmma else stages - 1) * weight + (stages - 1) * x * dtype.itemsize + narrow
    # Plain FMA units read fp32 weights from shared memory; tensor cores take widened ones from registers, but for wgmma.
    widened = weight * dtype.itemsize if dtype == torch.float32 or memory.wgmma else 0
    return (stages - 1) * (weight + x * dtype.itemsize) + widened


def _split(tile: Tile, rows: int, width: int, depth: int) -> int:
    """`tile.split`, adjusted to the shape: enough programs for the machine, whole blocks of depth, scratch for all."""
    tiles = int(triton.cdiv(width, tile.width) * triton.cdiv(rows, block_rows(rows)))
    wanted = 8 if tiles * tile.split < _FEW_PROGRAMS else tile.split
    fits = (s for s in _SPLITS if s <= wanted and tiles * s <= _SPLIT_PROGRAMS and depth % (s * tile.depth) == 0)
    return next((s for s in fits if depth // (s * tile.depth) >= 4), 1)


def block_rows(rows: int) -> int:
    """Rows of the tile that `rows` rows are padded to."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _check(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.shape[0] > MAX_ROWS:
        raise ValueError(
            f"x must be [m, K] with at most {MAX_ROWS} rows and weight [N, K] with one K; got {list(x.shape)} and "
            f"{list(weight.shape)}. More rows go through the platform's fp8 product."
        )
    if weight.dtype != torch.float8_e4m3fn or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous float8_e4m3fn; got {weight.dtype}. Make it with quantise_rows.")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.stride(1) != 1:
        raise ValueError(f"x must be bf16, fp16 or fp32 with last stride 1; got {x.dtype}, strides {x.stride()}.")
    if scale.dtype != torch.float32 or scale.shape != weight.shape[:1] or not scale.is_contiguous():
        raise ValueError(f"scale must be fp32 [{weight.shape[0]}]; got {scale.dtype} {list(scale.shape)}.")
