# SPDX-License-Identifier: Apache-2.0
"""Timing shared by all `bench_<op>.py`: cases in, rows of microseconds and of achieved bandwidth and arithmetic out.

A case is timed as CUDA-graph replays (launch gaps shrink to what a captured draft step sees), several calls per graph, median.
Inputs stay warm in the L2 cache, as they are in a draft step, where the kernel before wrote them; so small cases may
exceed the share of the copy ceiling that device memory alone would allow. Both ceilings, a copy of 1 GiB and a bf16 product of
8,192 x 8,192 x 8,192, are measured in the same process. A case that a graph cannot capture is timed with events and says so.

From a bare checkout: `python kernels/benchmarks/run_all.py OUT.json` for all, or `bench_<op>.py` for one. Either takes
`--thorough`: every size, and longer measurements.
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
from typing import Any, NamedTuple

import torch
import triton
import triton.testing

_CEILING_BYTES = 1 << 30
_CEILING_SIDE = 8192
_HOST_CALLS = 100
_REPLAY_MS = {False: 4, True: 20}
"""Milliseconds of one replay, of which there are ten, by thoroughness."""


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
        flops: multiplications and additions that the result needs; 0 where the op is no product.
    """

    op: str
    case: str
    arm: str
    run: Callable[[], object]
    num_bytes: int
    graph: bool = True
    flops: int = 0


class Ceilings(NamedTuple):
    """What the device reaches on plain large work: bytes per second of a copy, FLOP per second of a bf16 product."""

    copy: float
    matmul: float

    @classmethod
    def measure(cls) -> "Ceilings":
        """Half a second."""
        return cls(copy_ceiling(), matmul_ceiling())


def matmul_ceiling() -> float:
    """FLOP per second of a large bf16 product."""
    a, b = torch.randn(2, _CEILING_SIDE, _CEILING_SIDE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    milliseconds = triton.testing.do_bench(lambda: torch.mm(a, b, out=out), return_mode="median")
    return 2 * _CEILING_SIDE**3 / (milliseconds * 1e-3)


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


def row_of(op: str, case: str, arm: str, us: float, num_bytes: int, flops: int, ceilings: Ceilings) -> dict[str, Any]:
    """{op, case, arm, us, bytes, gb_s, of_copy_ceiling}, and for products {flops, tflop_s, of_matmul_ceiling}."""
    rate = num_bytes / (us * 1e-6)
    row = {
        "op": op,
        "case": case,
        "arm": arm,
        "us": round(us, 2),
        "bytes": num_bytes,
        "gb_s": round(rate / 1e9, 1),
        "of_copy_ceiling": round(rate / ceilings.copy, 3),
    }
    if flops:
        rate = flops / (us * 1e-6)
        row |= {"flops": flops, "tflop_s": round(rate / 1e12, 2), "of_matmul_ceiling": round(rate / ceilings.matmul, 3)}
    return row


def print_row(row: dict[str, Any]) -> None:
    """One line."""
    product = f"  {row['tflop_s']:6.1f} TFLOP/s {row['of_matmul_ceiling']:6.1%} of matmul" if "flops" in row else ""
    print(
        f"{row['op']:16} {row['case']:40} {row['arm']:12} {row['us']:9.2f} us  {row['gb_s']:8.1f} GB/s "
        f"{row['of_copy_ceiling']:6.1%} of copy{product}",
        flush=True,
    )


def measure(cases: Iterable[Case], ceilings: Ceilings, *, thorough: bool = False) -> list[dict[str, Any]]:
    """Time every case and print one line per case.

    Returns:
        Rows as of `row_of`, with host_us and timing ("graph" or "events").
    """
    rows = []
    for case in cases:
        case.run()  # compile before anything is timed or captured
        torch.cuda.synchronize()  # the timer has a stream of its own, and would read inputs that are still being written
        bench = triton.testing.do_bench_cudagraph if case.graph else triton.testing.do_bench
        us = bench(case.run, rep=_REPLAY_MS[thorough] if case.graph else 20, return_mode="median") * 1e3
        row = row_of(case.op, case.case, case.arm, us, case.num_bytes, case.flops, ceilings)
        row |= {"host_us": round(host_us(case.run), 1), "timing": "graph" if case.graph else "events"}
        rows.append(row)
        print_row(row)
    return rows


def provenance() -> dict[str, Any]:
    """Versions, device, command, commit and date: what a published number needs."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(Path(arg).name if i == 0 or arg.startswith("/") else arg for i, arg in enumerate(sys.argv)),
        "commit": os.environ.get("DFLASH_COMMIT") or git.stdout.strip() or "unknown",  # set where there is no history
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
    }


def print_fastest(rows: list[dict[str, Any]]) -> None:
    """One line per case: its arms from the fastest on."""
    for case in dict.fromkeys((row["op"], row["case"]) for row in rows):
        arms = sorted((row["us"], row["arm"]) for row in rows if (row["op"], row["case"]) == case)
        print(f"{case[0]} {case[1]}: " + "  ".join(f"{arm} {us:.1f}" for us, arm in arms))


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the file whole, so that a run that is stopped leaves what it has finished."""
    staging = path.with_name(path.name + ".part")
    staging.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")
    staging.replace(path)


def main(build_cases: Callable[[bool], Iterable[Case]], sweep: Callable[[], Iterable[Case]] | None = None) -> None:
    """Command line of one benchmark: time its cases, write `--json PATH` if asked; `--sweep` compares launch parameters."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write rows and provenance here")
    parser.add_argument("--thorough", action="store_true", help="every size, longer measurements")
    if sweep:
        parser.add_argument("--sweep", action="store_true", help="time candidates of the launch parameters instead")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark times CUDA kernels; torch sees no CUDA device here, so nothing was run.")
        return
    ceilings = Ceilings.measure()
    print(f"ceilings: copy {ceilings.copy / 1e12:.2f} TB/s, bf16 product {ceilings.matmul / 1e12:.0f} TFLOP/s")
    if sweep and args.sweep:
        rows = measure(sweep(), ceilings, thorough=args.thorough)
        print_fastest(rows)
    else:
        rows = measure(build_cases(args.thorough), ceilings, thorough=args.thorough)
    if args.json:
        save(args.json, rows)
