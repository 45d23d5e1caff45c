# SPDX-License-Identifier: Apache-2.0
"""Compare launch parameters of `block_attention` on Qwen3-8B's draft heads, for blocks of 2, 4, 8 and 16 query rows.

Tiles (keys, stages, warps) with the default splits: four for each block, some 40 s on an H200, mostly compiling. `--thorough`
takes more tiles and shapes, then splits and scratch for the three best of each block, with FlashAttention 3 beside them where
vLLM has it; several minutes. Prints one line per case: the default and the fastest candidates as keys/stages/warps/programs per
SM/least keys/scratch bytes; then those that are best over all cases of a block. `--json` writes after each block.

usage: sweep_block_attention.py [--json PATH] [--thorough] [--rows 2,4]
"""

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from bench_block_attention import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, kernel_case, make_inputs
from dflash_kernels.block_attention import Tuning
from dflash_kernels.block_attention_tile import choose_tile
from harness import Ceilings, row_of, save

CAPACITY = 40960
ROWS = (2, 4, 8, 16)
SHAPES = {False: ((1, 1024), (8, 1024), (8, 4096)), True: ((1, 1024), (4, 1024), (8, 1024), (32, 1024), (1, 4096), (8, 4096))}
WIDTHS = {False: ((32, 64), (2, 5), (4,)), True: ((32, 64, 128), (2, 3, 4, 5), (4, 8))}
SPLITS = list(itertools.product((1, 2, 3, 4), (1, 2, 4), (True, False)))  # programs per SM, tiles per split, short scratch
_MOST = 320  # keys times stages; more does not fit into shared memory


def tiles_of(num_query: int, *, thorough: bool) -> dict[str, Tuning]:
    """Candidates by name; the first is what the launcher chooses by itself, spelled out."""
    best = choose_tile(num_query * NUM_HEADS // NUM_KV_HEADS, HEAD_DIM, torch.bfloat16, Tuning())
    found = [Tuning(keys=best.keys, stages=best.stages, warps=best.warps)]
    found += [
        Tuning(keys=keys, stages=stages, warps=warps, min_keys=max(64, keys))
        for keys, stages, warps in itertools.product(*WIDTHS[thorough])
        if keys * stages <= _MOST
    ]
    return {name_of(tuning): tuning for tuning in found}


def name_of(tuning: Tuning) -> str:
    """The parameters that vary here, in a few characters."""
    scratch = 2 if tuning.short_scratch else 4
    return f"{tuning.keys}/{tuning.stages}/{tuning.warps}/{tuning.programs_per_sm}/{tuning.min_keys}/{scratch}"


def microseconds(run: Any) -> float:
    """Median of graph replays."""
    run()
    return float(triton.testing.do_bench_cudagraph(run, rep=4, return_mode="median")) * 1e3


def flash_attention(inputs: Any) -> float | None:
    """Time of vLLM's FlashAttention 3 on the same pages; None where it is not to be had."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
    except ImportError:
        return None
    q, keys, values, table, lens = inputs.args
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=q.device) * inputs.num_query
    options = {"cu_seqlens_q": starts, "max_seqlen_q": inputs.num_query, "seqused_k": lens, "max_seqlen_k": CAPACITY}
    options |= {
        "softmax_scale": HEAD_DIM**-0.5,
        "causal": False,
        "block_table": table,
        "fa_version": 3,
        "out": torch.empty_like(q),
    }
    try:
        calls = [functools.partial(flash_attn_varlen_func, q, keys, values, num_splits=splits, **options) for splits in (0, 1)]
        return min(map(microseconds, calls))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        print(f"FlashAttention 3 does not run here: {error}")
        return None


def time_all(inputs: Any, candidates: dict[str, Tuning], done: Iterable[str] = ()) -> dict[str, float]:
    """Microseconds of every candidate that fits this GPU and is not done; a wrong result stops the sweep."""
    expected = kernel_case(inputs, None, CAPACITY).run()
    times: dict[str, float] = {}
    for name in candidates.keys() - set(done):
        run = kernel_case(inputs, None, CAPACITY, tuning=candidates[name]).run
        try:
            found = run()
        except OutOfResources:
            continue
        assert (found - expected).abs().max() < 0.02, f"{name} differs from the default"
        times[name] = microseconds(run)
    return times


def best_over(results: dict[str, dict[str, float]], count: int) -> list[str]:
    """Names of the `count` arms with the least geometric mean over all cases, among those that ran in all."""
    shared = set.intersection(*(set(times) for times in results.values()))
    return sorted(shared, key=lambda arm: sum(math.log(times[arm]) for times in results.values()))[:count]


def with_splits(tile: Tuning) -> list[Tuning]:
    """All splits for one tile."""
    return [
        tile._replace(programs_per_sm=per_sm, min_keys=max(64, tile.keys or 0) * tiles, short_scratch=short)
        for per_sm, tiles, short in SPLITS
    ]


def sweep(num_query: int, ceilings: Ceilings, *, thorough: bool) -> Iterator[dict[str, Any]]:
    """Time, print, and yield the rows of one block size; the parameters are in a row's name."""
    shapes = SHAPES[thorough]
    cases = {shape: make_inputs(*shape, None, torch.bfloat16, CAPACITY, num_query) for shape in shapes}
    candidates = tiles_of(num_query, thorough=thorough)
    default = next(iter(candidates))
    results = {inputs.name: time_all(inputs, candidates) for inputs in cases.values()}
    if thorough:
        candidates |= {name_of(t): t for best in best_over(results, 3) for t in with_splits(candidates[best])}
        for inputs in cases.values():
            results[inputs.name] |= time_all(inputs, candidates, results[inputs.name])
    for inputs in cases.values():
        times = results[inputs.name]
        flash = flash_attention(inputs) if thorough else None
        line = "  ".join(f"{arm} {times[arm]:.1f}" for arm in sorted(times, key=lambda arm: times[arm])[:5])
        print(
            f"{inputs.name:44} FA3 {'-' if flash is None else f'{flash:.1f}'}  default {times[default]:.1f}  | {line}", flush=True
        )
        for arm, us in times.items() if flash is None else {**times, "FlashAttention 3": flash}.items():
            row = row_of("block_attention", inputs.name, arm, us, inputs.num_bytes, inputs.flops, ceilings)
            yield row | {"default": arm == default}
    print(f"Q={num_query}: best over all cases: " + "  ".join(best_over(results, 5)), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write rows and provenance here")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="query rows per request")
    parser.add_argument("--thorough", action="store_true", help="more tiles and shapes, splits, FlashAttention 3")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This sweep times CUDA kernels; torch sees no CUDA device here, so nothing was run.")
        return
    ceilings, rows = Ceilings.measure(), []
    for num_query in map(int, args.rows.split(",")):
        rows += list(sweep(num_query, ceilings, thorough=args.thorough))
        if args.json:
            save(args.json, rows)


if __name__ == "__main__":
    main()
