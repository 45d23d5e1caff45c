# SPDX-License-Identifier: Apache-2.0
"""Products of an 8B-shaped draft: bf16 cuBLAS against fp8 weights, with ours in one launch and with cutlass.

Every arm runs as a chain inside one CUDA graph over copies of the weight that together exceed the L2 cache, so each product
reads its weights from memory, as in a draft step. Times are per product. `w8a8` includes the quantisation of the activations,
`w8a8-gemm` does not: what a fused quantisation would leave. `--sweep` searches the tiles of our kernel at 16, 32 and 64 rows.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels import draft_head_fp8 as draft_head_fp8_module
from dflash_kernels.draft_head import HeadWorkspace, draft_head
from dflash_kernels.draft_head_fp8 import draft_head_fp8
from dflash_kernels.fp8_linear import MAX_ROWS, Fp8Workspace, Tile, fp8_linear, quantise_rows
from harness import Ceilings, print_row, row_of, save

SHAPES = {  # name -> (N, K)
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "fc": (4096, 20480),
    "context_kv": (10240, 4096),
}
ROWS = (16, 32, 64, 128, 512, 1024, 2048)
QUICK_SHAPES, QUICK_ROWS = ("qkv", "gate_up", "fc"), (16, 64, 512)
_COLD_BYTES = 300 << 20
Chain = Callable[[], object]


def chain_us(calls: list[Chain], replays: int = 20) -> float:
    """Microseconds per call of `calls` run back to back in one CUDA graph, median over replays."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times[2:])[replays // 2]


def copies(num_bytes: int) -> int:
    """Copies of a weight that the L2 cache cannot hold."""
    return max(2, -(-_COLD_BYTES // num_bytes))


def w8a8(numbers: list[torch.Tensor], scales: list[torch.Tensor], x: torch.Tensor) -> dict[str, list[Chain]]:
    """Cutlass with dynamic scales per token, with and without the quantisation; torch's rowwise product."""
    pairs = list(zip(numbers, scales, strict=True))
    try:
        from vllm import _custom_ops as ops
    except ImportError:
        x8, row_scales = quantise_rows(x)
        product_of = functools.partial(torch._scaled_mm, out_dtype=x.dtype, use_fast_accum=True)
        return {"torch-gemm": [functools.partial(product_of, x8, n.T, row_scales[:, None], s[None, :]) for n, s in pairs]}

    def whole(number: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x8, x_scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        return ops.cutlass_scaled_mm(x8, number.T, x_scale, scale.view(-1, 1), x.dtype)

    x8, x_scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)

    def product(number: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ops.cutlass_scaled_mm(x8, number.T, x_scale, scale.view(-1, 1), x.dtype)

    def torch_product(number: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x8, number.T, x_scale, scale.view(1, -1), out_dtype=x.dtype, use_fast_accum=True)

    found = {"w8a8": whole, "w8a8-gemm": product, "torch-gemm": torch_product}
    return {name: [functools.partial(call, *pair) for pair in pairs] for name, call in found.items()}


def weights_of(shape: tuple[int, int], fp8_bytes: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Copies of a random weight: bf16, e4m3, scales."""
    count = copies(shape[0] * shape[1] * (1 if fp8_bytes else 2))
    plain = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
    numbers, scales = zip(*(quantise_rows(weight) for weight in plain), strict=True)
    return plain, list(numbers), list(scales)


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, name: str) -> None:
    """Fails when a product is wrong, not merely rounded."""
    truth = x.double() @ weight.double().T
    error = ((found.double() - truth).norm() / truth.norm()).item()
    assert error < 0.06, f"{name}: relative error {error:.3f}"


def measure_shape(
    name: str, shape: tuple[int, int], workspace: Fp8Workspace, sizes: tuple[int, ...], ceilings: Ceilings
) -> list[dict[str, Any]]:
    """All arms of one weight at every number of rows."""
    plain, numbers, scales = weights_of(shape, fp8_bytes=True)
    rows = []
    for num_rows in sizes:
        x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
        arms: dict[str, list[Chain]] = {"bf16": [functools.partial(torch.mm, x, w.T) for w in plain]}
        arms |= w8a8(numbers, scales, x)
        if num_rows <= MAX_ROWS:
            arms["ours"] = [
                functools.partial(fp8_linear, x, n, s, workspace=workspace) for n, s in zip(numbers, scales, strict=True)
            ]
        for arm, calls in arms.items():
            check(calls[0](), x, plain[0], f"{name} {arm}")
            num_bytes = shape[0] * shape[1] * (2 if arm == "bf16" else 1) + 2 * num_rows * sum(shape)
            flops = 2 * num_rows * shape[0] * shape[1]
            rows.append(row_of("draft_gemm", f"{name} rows={num_rows}", arm, chain_us(calls), num_bytes, flops, ceilings))
            print_row(rows[-1])
    return rows


def measure_head(sizes: tuple[int, ...], ceilings: Ceilings) -> list[dict[str, Any]]:
    """Head with argmax: bf16 full, fp8 full, fp8 32k rows."""
    weight = torch.randn(151_936, 4096, device="cuda", dtype=torch.bfloat16) * 0.02
    numbers, scales = quantise_rows(weight)
    rows = []
    for num_rows in sizes:
        hidden = torch.randn(num_rows, 4096, device="cuda", dtype=torch.bfloat16)
        workspace = HeadWorkspace(max_rows=64, vocab_rows=151_936, dtype=torch.bfloat16, device="cuda")
        arms = {"bf16": functools.partial(draft_head, hidden, weight, workspace=workspace)}
        for count in (151_936, 32_768):
            ids = torch.arange(count, device="cuda")
            arms[f"fp8 {count}"] = functools.partial(
                draft_head_fp8, hidden, numbers[:count], scales[:count], ids - ids, workspace=workspace
            )
        for arm, call in arms.items():
            us = (
                chain_us([call] * 6)
                if "32768" not in arm
                else chain_us([call, arms["bf16"]] * 3) * 2 - chain_us([arms["bf16"]] * 6)
            )
            vocab = 32_768 if "32768" in arm else 151_936
            num_bytes = vocab * 4096 * (2 if arm == "bf16" else 1) + 2 * hidden.numel()
            rows.append(row_of("draft_gemm", f"head rows={num_rows}", arm, us, num_bytes, 2 * num_rows * vocab * 4096, ceilings))
            print_row(rows[-1])
    return rows


def benchmark(ceilings: Ceilings, *, thorough: bool) -> list[dict[str, Any]]:
    """All arms; three weights and sizes, or all of them."""
    workspace, names = Fp8Workspace("cuda"), tuple(SHAPES) if thorough else QUICK_SHAPES
    sizes = ROWS if thorough else QUICK_ROWS
    rows = [row for name in names for row in measure_shape(name, SHAPES[name], workspace, sizes, ceilings)]
    return rows + measure_head((15, 16, 32, 64) if thorough else (16, 64), ceilings)


def sweep(workspace: Fp8Workspace) -> list[dict[str, Any]]:
    """Tiles of our kernel; prints the best eight of every weight and number of rows."""
    rows = []
    for name, shape in SHAPES.items():
        _, numbers, scales = weights_of(shape, fp8_bytes=True)
        for num_rows in (16, 32, 64):
            x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
            found = []
            for tile in tiles(num_rows, shape):
                calls: list[Chain] = [
                    functools.partial(fp8_linear, x, n, s, workspace=workspace, tile=tile)
                    for n, s in zip(numbers, scales, strict=True)
                ]
                try:
                    us = chain_us(calls, 10)
                except Exception as error:  # noqa: BLE001  # a tile that does not fit the machine
                    print(f"{tile}: {type(error).__name__}")
                    continue
                found.append((us, tile))
            found.sort()
            num_bytes = shape[0] * shape[1]
            shown = [
                f"{us:.1f}us/{num_bytes / us / 1e6:.2f}TB {t.how}/{t.width}/{t.depth}/s{t.split}/w{t.warps}/st{t.stages}"
                for us, t in found[:6] + [next((f for f in found if f[1].how == how), found[0]) for how in ("half", "cvt")]
            ]
            print(f"{name:10} M={num_rows:<3} " + "  ".join(shown), flush=True)
            rows += [{"op": name, "rows": num_rows, "tile": t._asdict(), "us": round(us, 2)} for us, t in found]
    return rows


_CANDIDATES = (  # how, width, depths, splits, (warps, stages)
    ("a8", 64, (128, 256), (1, 2, 4, 8), ((4, 3), (4, 4), (4, 6))),
    ("a8", 128, (128, 256), (1, 2, 4, 8), ((4, 3), (4, 4), (8, 4))),
    ("half", 64, (128,), (1, 2, 4), ((4, 3),)),
    ("cvt", 64, (128,), (1, 2, 4), ((4, 3),)),
    ("bits", 32, (256,), (1, 2), ((4, 5),)),
)


_HEAD_TILES = (
    (128, 128, 4, 3),
    (128, 128, 4, 4),
    (128, 128, 4, 6),
    (128, 256, 4, 3),
    (128, 128, 8, 4),
    (256, 128, 8, 3),
    (256, 128, 4, 3),
)


def sweep_head() -> list[dict[str, Any]]:
    """Tiles of the fp8 head: (vocabulary rows, depth, warps, stages)."""
    weight = torch.randn(151_936, 4096, device="cuda", dtype=torch.bfloat16) * 0.02
    numbers, scales = quantise_rows(weight)
    workspace = HeadWorkspace(max_rows=64, vocab_rows=151_936, dtype=torch.bfloat16, device="cuda")
    rows = []
    for num_rows, count in itertools.product((16, 64), (151_936, 32_768)):
        hidden = torch.randn(num_rows, 4096, device="cuda", dtype=torch.bfloat16)
        parts = [slice(i * count, (i + 1) * count) for i in range(151_936 // count)]  # one after the other: never in the L2 cache
        found = []
        for tile in _HEAD_TILES:
            with mock.patch.object(draft_head_fp8_module, "_TILES", dict.fromkeys((16, 32, 64), tile)):
                calls: list[Chain] = [
                    functools.partial(draft_head_fp8, hidden, numbers[p], scales[p], None, workspace=workspace) for p in parts
                ]
                try:
                    found.append((chain_us(calls if len(calls) > 1 else calls * 3, 10), tile))
                except Exception as error:  # noqa: BLE001  # a tile that does not fit the machine
                    print(f"{tile}: {type(error).__name__}")
        found.sort()
        line = "  ".join(f"{us:.1f}us {'/'.join(map(str, tile))}" for us, tile in found)
        print(f"head {count:<6} M={num_rows:<3} {line}", flush=True)
        rows += [{"op": f"head {count}", "rows": num_rows, "tile": tile, "us": round(us, 2)} for us, tile in found]
    return rows


def tiles(num_rows: int, shape: tuple[int, int]) -> list[Tile]:
    """Candidates that fit a weight: enough programs for the machine, shared memory for the stages."""
    found = []
    for how, width, depths, splits, launches in _CANDIDATES:
        for depth, split, (warps, stages) in itertools.product(depths, splits, launches):
            programs = -(-shape[0] // width) * split
            fits = shape[1] % (split * depth) == 0 and shape[1] // split // depth >= 4
            if fits and 60 <= programs <= 528 and depth * (width + 2 * max(16, num_rows)) * stages <= 200_000:
                found.append(Tile(width, depth, split, warps, stages, how))
    return found


def main() -> None:
    """Time the arms, or the tiles with `--sweep`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write rows and provenance here")
    parser.add_argument("--thorough", action="store_true", help="every weight and size")
    parser.add_argument("--sweep", action="store_true", help="search the tiles instead")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark times CUDA kernels; torch sees no CUDA device here, so nothing was run.")
        return
    rows = sweep(Fp8Workspace("cuda")) + sweep_head() if args.sweep else benchmark(Ceilings.measure(), thorough=args.thorough)
    if args.json:
        save(args.json, rows)


if __name__ == "__main__":
    main()
