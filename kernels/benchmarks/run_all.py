# SPDX-License-Identifier: Apache-2.0
"""Run every `bench_*.py` beside this file, each in its own process, and merge their rows into one JSON file.

usage: run_all.py OUT.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from harness import provenance


def run_benchmark(script: Path) -> list[dict[str, object]]:
    """Rows of one benchmark; a failed one gives a single row with its exit code, so the others still count."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(script), "--json", str(out)]
        code = subprocess.run(command, check=False).returncode
        if code or not out.exists():
            return [{"op": script.stem.removeprefix("bench_"), "error": f"exit code {code}"}]
        rows: list[dict[str, object]] = json.loads(out.read_text())["rows"]
        return rows


def main() -> int:
    """Exit code 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("The benchmarks time CUDA kernels; torch sees no CUDA device here, so nothing was run.")
        return 0
    rows = [row for script in sorted(Path(__file__).parent.glob("bench_*.py")) for row in run_benchmark(script)]
    args.out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")
    failed = [row["op"] for row in rows if "error" in row]
    print(f"{len(rows) - len(failed)} rows written" + (f"; failed: {', '.join(map(str, failed))}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
