# SPDX-License-Identifier: Apache-2.0
"""Measure the demo pair on this CPU, three arms taking turns: python examples/measure_cpu.py [OUT.json [--quick]]."""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from vllm_dflash.cli.demo import ORDER, chosen_prompts, interleaved
from vllm_dflash.cli.demo_report import versions
from vllm_dflash.cli.engine_run import Engine, engine_spec
from vllm_dflash.cli.models import checked_pair, prepared_demo_pair
from vllm_dflash.cli.probes import hardware

OUT = Path("docs/results/cpu_speed.json")
GRID = (("float32", "bfloat16"), (1, 3, 5, 7), (1, 8), 8, 48)  # dtypes, K, batches, prompts, tokens per answer
OPTIONS = {"ours": {"additional_config": {"vllm_dflash": {"planner": "off"}}}}  # K stays: it is what is compared
QUICK = (("float32",), (7,), (1, 2), 2, 12)


def measure(dtype: str, k: int, batches: tuple[int, ...], texts: list[str], max_tokens: int, pair: tuple) -> list[dict]:
    """Rows of one dtype and K: every batch goes to each arm in turn, and which arm is first rotates."""
    done = {(arm, batch): [] for batch in batches for arm in ORDER}
    with ExitStack() as stack:
        checked = checked_pair(*pair, k)
        specs = [engine_spec(arm, checked, dtype, enable_prefix_caching=False, **OPTIONS.get(arm, {})) for arm in ORDER]
        engines = {spec.arm: stack.enter_context(Engine(spec)) for spec in specs}
        for engine in engines.values():
            engine.ready()
            engine.generate(texts[:1], temperature=0, max_tokens=8)
        for batch in batches:
            for arm, result, _ in interleaved(engines, texts, max_tokens, batch):
                done[arm, batch].append(result)
    return [{"arm": arm, "dtype": dtype, "k": k, "batch": batch} | figures(results) for (arm, batch), results in done.items()]


def figures(results: list[dict]) -> dict:
    """Tokens per second of engine time, and acceptance length (None without drafts)."""
    tokens = sum(sum(output["steps"]) for result in results for output in result["outputs"])
    drafts, accepted, seconds = (sum(result[key] for result in results) for key in ("drafts", "accepted", "seconds"))
    return {"tok_s": round(tokens / seconds, 2), "acceptance_length": round(1 + accepted / drafts, 4) if drafts else None}


def main(out: Path, quick: bool) -> None:
    """Run the grid and write rows with their provenance."""
    dtypes, ks, batches, prompts, max_tokens = QUICK if quick else GRID
    pair, texts = prepared_demo_pair(Console(stderr=True)), chosen_prompts(prompts)
    rows = [row for dtype in dtypes for k in ks for row in measure(dtype, k, batches, texts, max_tokens, pair)]
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True).strip()
    provenance = {"versions": versions(), "hardware": hardware(), "command": " ".join(sys.argv), "commit": commit}
    provenance |= {"date": time.strftime("%Y-%m-%d"), "prompts": prompts, "max_tokens": max_tokens}
    out.write_text(json.dumps({"provenance": provenance, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else OUT, quick="--quick" in sys.argv)
