# SPDX-License-Identifier: Apache-2.0
"""Run every `bench_*.py` beside this file and gather their rows in one JSON file, which grows after each of them.

usage: run_all.py OUT.json [--thorough] [--only op,op]    some 80 s on an H200, thorough some 4 minutes

One child process runs them all: imports and the device's ceilings are paid once. Where it ends early (a fault on the device ends
a process), the benchmark at work gets a row with the exit code and a new child does the rest.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from harness import Ceilings, measure, save

HERE = Path(__file__).parent
NAMES = tuple(path.stem.removeprefix("bench_") for path in sorted(HERE.glob("bench_*.py")))


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Rows of the file, none where there is no file yet."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return found


def work(out: Path, names: list[str], thorough: bool) -> None:
    """In the child: run benchmarks in turn, saving after each."""
    ceilings = Ceilings.measure()
    print(f"ceilings: copy {ceilings.copy / 1e12:.2f} TB/s, bf16 product {ceilings.matmul / 1e12:.0f} TFLOP/s", flush=True)
    device = {"op": "device", "case": "ceilings", "copy_tb_s": ceilings.copy / 1e12, "matmul_tflop_s": ceilings.matmul / 1e12}
    rows = [row for row in rows_in(out) if row["op"] != "device"] + [device]
    for name in names:
        module = importlib.import_module(f"bench_{name}")
        if hasattr(module, "benchmark"):
            rows += module.benchmark(ceilings, thorough=thorough)
        else:
            rows += measure(module.cases(thorough), ceilings, thorough=thorough)
        save(out, rows)
        torch.cuda.empty_cache()


def run(out: Path, names: list[str], thorough: bool) -> list[str]:
    """Run `names` in children until each has rows in `out`; returns those that failed."""
    save(out, [row for row in rows_in(out) if row["op"] not in names])
    failed: list[str] = []
    while names:
        options = ["--only", ",".join(names), *(["--thorough"] if thorough else [])]
        code = subprocess.run([sys.executable, __file__, str(out), "--child", *options], check=False).returncode
        rows = rows_in(out)
        names = [name for name in names if all(row["op"] != name for row in rows)]
        if names:
            failed.append(names.pop(0))
            save(out, [*rows, {"op": failed[-1], "error": f"exit code {code}"}])
    return failed


def main() -> int:
    """Exit code 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--thorough", action="store_true", help="every size, longer measurements")
    parser.add_argument("--only", default=",".join(NAMES), help=f"some of {','.join(NAMES)}")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(NAMES):
        parser.error(f"--only: found {', '.join(sorted(unknown))}; expected some of {', '.join(NAMES)}")
    if not torch.cuda.is_available():
        print("The benchmarks time CUDA kernels; torch sees no CUDA device here, so nothing was run.")
        return 0
    if args.child:
        work(args.out, names, args.thorough)
        return 0
    failed = run(args.out, names, args.thorough)
    print(f"{len(rows_in(args.out)) - len(failed)} rows written" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
