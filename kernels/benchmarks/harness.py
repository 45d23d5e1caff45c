# SPDX-License-Identifier: Apache-2.0
"""Timing shared by all `bench_<op>.py`: cases in, rows of microseconds and achieved bandwidth out.

A case is timed as CUDA-graph replays (launch gaps shrink to what a captured draft step sees), several calls per graph, median.
Inputs stay warm in the L2 cache, as they are in a draft step, where the kernel before wrote them; so small cases may
exceed the share of the copy ceiling that device memory alone would allow. The ceiling is measured in the same process.
A case that a graph cannot capture is timed with events instead and says so.

From a bare checkout: `python kernels/benchmarks/run_all.py OUT.json` for all, or `bench_<op>.py` for one.
"""

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.testing

_CEILING_BYTES = 1 << 30
_HOST_CALLS = 200


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    Attributes:
        op: name of the op.
        case: its sizes, readable.
        arm: "kernel", "torch", or the name of another way to get the same result.
        run: the call; repeated, so it must be idempotent.
        num_bytes: device memory that the result needs to move: every input read once, every output written once.
        graph: whether a CUDA graph can capture the call.
    """

    op: str
    case: str
    arm: str
    run: Callable[[], object]
    num_bytes: int
    graph: bool = True


def copy_ceiling() -> float:
    """Bytes per second of a large device-to-device copy, read and write counted."""
    source = torch.empty(_CEILING_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * _CEILING_BYTES / (milliseconds * 1e-3)


def host_us(run: Callable[[], object]) -> float:
    """Microseconds of host time per eager call: what a launch costs the thread that makes it."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_HOST_CALLS):
        run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / _HOST_CALLS * 1e6


def measure(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Time every case and print one line per case.

    Returns:
        Rows {op, case, arm, us, host_us, bytes, gb_s, of_copy_ceiling, timing}.
    """
    ceiling = copy_ceiling()
    rows = []
    for case in cases:
        case.run()  # compile before anything is timed or captured
        bench = triton.testing.do_bench_cudagraph if case.graph else triton.testing.do_bench
        microseconds = bench(case.run, return_mode="median") * 1e3
        rate = case.num_bytes / (microseconds * 1e-6)
        row = {
            "op": case.op,
            "case": case.case,
            "arm": case.arm,
            "us": round(microseconds, 2),
            "host_us": round(host_us(case.run), 1),
            "bytes": case.num_bytes,
            "gb_s": round(rate / 1e9, 1),
            "of_copy_ceiling": round(rate / ceiling, 3),
            "timing": "graph" if case.graph else "events",
        }
        rows.append(row)
        print(
            f"{row['op']:16} {row['case']:40} {row['arm']:12} {row['us']:9.2f} us  host {row['host_us']:7.1f} us  "
            f"{row['gb_s']:8.1f} GB/s  {row['of_copy_ceiling']:6.1%} of copy"
        )
    print(f"copy ceiling {ceiling / 1e12:.2f} TB/s")
    return rows


def provenance() -> dict[str, Any]:
    """Versions, device, command, commit and date: what a published number needs."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(Path(arg).name if i == 0 else arg for i, arg in enumerate(sys.argv)),
        "commit": os.environ.get("DFLASH_COMMIT") or git.stdout.strip() or "unknown",  # set where there is no history
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
    }


def print_fastest(rows: list[dict[str, Any]]) -> None:
    """One line per case: its arms from the fastest on."""
    for case in dict.fromkeys((row["op"], row["case"]) for row in rows):
        arms = sorted((row["us"], row["arm"]) for row in rows if (row["op"], row["case"]) == case)
        print(f"{case[0]} {case[1]}: " + "  ".join(f"{arm} {us:.1f}" for us, arm in arms))


def main(build_cases: Callable[[], Iterable[Case]], sweep: Callable[[], Iterable[Case]] | None = None) -> None:
    """Command line of one benchmark: time its cases, write `--json PATH` if asked; `--sweep` compares launch parameters."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write rows and provenance here")
    if sweep:
        parser.add_argument("--sweep", action="store_true", help="time candidates of the launch parameters instead")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark times CUDA kernels; torch sees no CUDA device here, so nothing was run.")
        return
    sweeping = sweep if sweep and args.sweep else None
    rows = measure((sweeping or build_cases)())
    if sweeping:
        print_fastest(rows)
    if args.json:
        args.json.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")
