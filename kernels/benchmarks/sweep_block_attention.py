# SPDX-License-Identifier: Apache-2.0
"""Compare launch parameters of `block_attention` on Qwen3-8B's draft shape, with FlashAttention 3 beside them where vLLM has it.

First every tile (keys, stages, warps) with the default splits, then splits and scratch for the three best tiles. Prints one line
per case: FlashAttention, the default, and the fastest candidates as keys/stages/warps/programs per SM/least keys/scratch bytes;
then the candidates that are best over all cases. Takes some 5 minutes, most of it compiling.

usage: sweep_block_attention.py [--json PATH]
"""

import argparse
import functools
import itertools
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from bench_block_attention import HEAD_DIM, NUM_QUERY, kernel_case, make_inputs
from dflash_kernels.block_attention import Tuning
from harness import provenance

CAPACITY = 40960
SHAPES = ((8, 1024), (1, 1024), (4, 1024), (16, 1024), (32, 1024), (8, 4096), (1, 4096))
TILES = [
    Tuning(keys=keys, stages=stages, warps=warps, min_keys=max(64, keys))
    for keys, stages, warps in itertools.product((32, 64, 128), (2, 3, 4, 5), (4, 8))
    if keys * stages <= 320  # more does not fit into shared memory
]
SPLITS = list(itertools.product((1, 2, 3, 4), (1, 2, 4), (True, False)))  # programs per SM, tiles per split, short scratch


def name_of(tuning: Tuning) -> str:
    """The parameters that vary here, in a few characters; None is what these shapes get for it."""
    scratch = 2 if tuning.short_scratch else 4
    return f"{tuning.keys}/{tuning.stages or 5}/{tuning.warps or 4}/{tuning.programs_per_sm}/{tuning.min_keys}/{scratch}"


def microseconds(run: Any) -> float:
    """Median of graph replays."""
    run()
    return float(triton.testing.do_bench_cudagraph(run, return_mode="median")) * 1e3


def flash_attention(inputs: Any) -> float | None:
    """Time of vLLM's FlashAttention 3 on the same pages; None where it is not to be had."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
    except ImportError:
        return None
    q, keys, values, table, lens = inputs.args
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=q.device) * NUM_QUERY
    options = {"cu_seqlens_q": starts, "max_seqlen_q": NUM_QUERY, "seqused_k": lens, "max_seqlen_k": CAPACITY}
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


def time_all(inputs: Any, tunings: Iterable[Tuning], done: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Rows {arm, us} of every candidate that fits this GPU and is not done; a wrong result stops the sweep."""
    expected = kernel_case(inputs, None, CAPACITY).run()
    rows = []
    candidates = {name_of(tuning): tuning for tuning in tunings}
    for name in candidates.keys() - set(done):
        tuning = candidates[name]
        run = kernel_case(inputs, None, CAPACITY, tuning=tuning).run
        try:
            found = run()
        except OutOfResources:
            continue
        assert (found - expected).abs().max() < 0.02, f"{name} differs from the default"
        rows.append({"arm": name, "us": round(microseconds(run), 2), **tuning._asdict()})
    return rows


def best_over(results: dict[str, list[dict[str, Any]]], count: int) -> list[str]:
    """Names of the `count` arms with the least geometric mean over the cases in which all arms that are compared ran."""
    times: dict[str, list[float]] = {}
    for rows in results.values():
        for row in rows:
            times.setdefault(row["arm"], []).append(row["us"])
    complete = {arm: us for arm, us in times.items() if len(us) == len(results)}
    return sorted(complete, key=lambda arm: sum(map(math.log, complete[arm])))[:count]


def with_splits(tile: Tuning) -> list[Tuning]:
    """All splits for one tile."""
    return [
        tile._replace(programs_per_sm=per_sm, min_keys=max(64, tile.keys) * tiles, short_scratch=short)
        for per_sm, tiles, short in SPLITS
    ]


def sweep() -> list[dict[str, Any]]:
    """Time, print, and return rows {case, arm, us, parameters}."""
    cases = {f"reqs={reqs} keys={keys}": make_inputs(reqs, keys, None, torch.bfloat16, CAPACITY) for reqs, keys in SHAPES}
    default = Tuning()
    tiles = {case: time_all(inputs, [default, *TILES]) for case, inputs in cases.items()}
    chosen = [tuning for tuning in TILES if name_of(tuning) in best_over(tiles, 3)]
    found = []
    for case, inputs in cases.items():
        done = [row["arm"] for row in tiles[case]]
        tiles[case] += time_all(inputs, [tuning for tile in chosen for tuning in with_splits(tile)], done)
        flash = flash_attention(inputs)
        times = {row["arm"]: row["us"] for row in tiles[case]}
        line = "  ".join(f"{arm} {times[arm]:.1f}" for arm in sorted(times, key=lambda arm: times[arm])[:5])
        ours = times[name_of(default)]
        print(f"{case:20} FA3 {'-' if flash is None else f'{flash:.1f}'}  default {ours:.1f}  | {line}", flush=True)
        found += [{"op": "block_attention", "case": case, **row} for row in tiles[case]]
        if flash is not None:
            found.append({"op": "block_attention", "case": case, "arm": "FlashAttention 3", "us": round(flash, 2)})
    print("best over all cases: " + "  ".join(best_over(tiles, 5)))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write rows and provenance here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This sweep times CUDA kernels; torch sees no CUDA device here, so nothing was run.")
        return
    rows = sweep()
    if args.json:
        args.json.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
