# SPDX-License-Identifier: Apache-2.0
"""What it gains that the draft's context of steps without drafts waits, for up to 32 requests: time of a step, both ways.

    python tests/gpu/time_deferred_context.py --out deferred_context.json [--widen 8b] [--concurrency 1,8,32] [--repeats 4]

One engine, told to draft nothing. Its context waits, as it does by default, or is stored in each step; the two take turns, and
who begins alternates. Exits 1 where an arm did not do what it says, or no step was in the steady state. The default length has
160 steps in it, whole multiples of those that wait together: a shorter one may leave out a pass that stores them. On a CPU:
``--widen none --dtype float32 --concurrency 2 --max-tokens 40 --repeats 1``.
"""

import argparse
import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # a bare checkout runs without an install
WAITS, AT_ONCE = "waits", "at once"
ARMS = (WAITS, AT_ONCE)
PROMPT_TOKENS = 48
ENGINE = {
    # A fixed cache: several processes may share the GPU, and vLLM's memory profiling fails where another one frees memory.
    "kv_cache_memory_bytes": 5_500_000_000,
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "gpu_memory_utilization": 0.12,
}


def start_engine(options):
    """(engine, K) of our plugin on the pair that was asked for."""
    from rich.console import Console

    from vllm_dflash.bench.wide_pair import prepared_wide_pair
    from vllm_dflash.cli.engine_child import _build_engine
    from vllm_dflash.cli.engine_run import engine_spec
    from vllm_dflash.cli.models import checked_pair, prepared_demo_pair

    console = Console(stderr=True)
    names = prepared_demo_pair(console) if options.widen == "none" else prepared_wide_pair(options.widen, console)
    pair = checked_pair(*names)
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_DFLASH="1")  # before vLLM is imported
    from vllm_dflash.plugin import register

    register()
    # No cached prefixes: rows that wait when all requests have ended are forgotten. Small targets plan only when asked to.
    settings = {"enable_prefix_caching": False, "additional_config": {"vllm_dflash": {"planner": "on"}}}
    spec = engine_spec("ours", pair, options.dtype, **settings, **options.engine_args)
    return _build_engine(dataclasses.asdict(spec)), pair.k


class Arms:
    """The two ways of one engine."""

    def __init__(self, engine):
        from vllm_dflash.cli.engine_measure import Bench

        self.engine, self.bench, self.number = engine, Bench(engine, ours=True), 0
        self.speculator = getattr(engine.model_executor.driver_worker.worker.model_runner, "speculator", None)
        self.deferred = getattr(self.speculator, "deferred", None)
        if self.deferred is None:
            raise SystemExit("no context waits in this engine; expected Model Runner V2, a planner, one KV group")

    def play(self, arm, prompts, max_tokens):
        """The ``result`` event of one batch, and how many rows waited and were stored late in it."""
        assert not self.engine.has_unfinished_requests()
        self.deferred.drop()  # of requests that have ended
        self.speculator.deferred = self.deferred if arm == WAITS else None
        before = dataclasses.asdict(self.speculator.counters)
        sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        question = {"bench": "measure", "at_least": None, "hold": 0, "prompts": prompts, "sampling": sampling}
        self.number += 1
        result = self.bench.answer(question, str(self.number))
        after = dataclasses.asdict(self.speculator.counters)
        return result | {key: after[key] - before[key] for key in ("deferred_rows", "catch_ups", "context_only")}


def measure(arms, concurrency, options):
    """Rows of one load, one for each arm."""
    from vllm_dflash.bench.prompts import groups, random_prompts

    vocabulary = arms.engine.model_config.get_vocab_size()
    everything = random_prompts(vocabulary, PROMPT_TOKENS, concurrency * options.repeats)
    results = {arm: [] for arm in ARMS}
    batches = groups(everything, concurrency, options.repeats)
    for arm in ARMS:  # warm up
        arms.play(arm, batches[0], options.max_tokens)
    for number, batch in enumerate(batches):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            results[arm].append(arms.play(arm, batch, options.max_tokens))
    return [row_of(arm, concurrency, results[arm]) for arm in ARMS]


def row_of(arm, concurrency, results):
    """Medians over repetitions; what is counted is of all of them together."""
    from vllm_dflash.bench.figures import cell_row

    found = cell_row(results, None)
    row = {"arm": arm, "concurrency": concurrency}
    row |= {key: found.get(key) for key in ("repeats", "step_ms", "step_ms_spread", "steady_steps", "at_a_time")}
    row |= {key: sum(result[key] for result in results) for key in ("deferred_rows", "catch_ups", "context_only", "drafts")}
    return row | {key: found[key] for key in ("jit_compiles",) if key in found}


def complaints(rows):
    """What is wrong, a sentence each."""
    for row in rows:
        name = f"{row['concurrency']} requests, {row['arm']}"
        if row["step_ms"] is None:
            yield f"{name}: no steady state; raise --max-tokens"
        if row["at_a_time"] < 0.95 * row["concurrency"]:
            yield f"{name}: {row['at_a_time']:.1f} at a time; raise max_num_seqs or the KV cache"
        if row["drafts"] or not row["context_only"]:
            yield f"{name}: {row['drafts']} steps had drafts, {row['context_only']} had none"
        if (row["deferred_rows"] > 0) != (row["arm"] == WAITS):
            yield f"{name}: {row['deferred_rows']} rows waited"
        if row["arm"] == WAITS and not row["catch_ups"]:
            yield f"{name}: nothing that waited was stored; raise --max-tokens"
        if row.get("jit_compiles"):
            yield f"{name}: {row['jit_compiles']} kernels were compiled meanwhile"


def table(rows):
    """Lines of text, one for each load."""
    heads = ["requests", "at once ms", "spread", "waits ms", "spread", "at once / waits", "rows waited", "times stored"]
    yield "  ".join(heads)
    cells = {}
    for row in rows:
        cells.setdefault(row["concurrency"], {})[row["arm"]] = row
    for concurrency, cell in cells.items():
        slow, fast = cell[AT_ONCE], cell[WAITS]
        known = slow["step_ms"] and fast["step_ms"]
        steps = [f"{row['step_ms']:.4f} {row['step_ms_spread']:.1%}".split() if row["step_ms"] else "--" for row in (slow, fast)]
        texts = [str(concurrency), *steps[0], *steps[1], f"{slow['step_ms'] / fast['step_ms']:.4f}" if known else "-"]
        texts += [" / ".join(f"{row[key]}" for row in (slow, fast)) for key in ("deferred_rows", "catch_ups")]
        yield "  ".join(text.rjust(len(head)) for head, text in zip(heads, texts, strict=True))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=165)
    parser.add_argument("--engine-args", default="{}", help=f"JSON, on top of {json.dumps(ENGINE)}")
    parser.add_argument("--widen", default="8b", help="a preset of vllm-dflash bench; none: the demo pair as it is")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    options.engine_args = ENGINE | json.loads(options.engine_args)
    options.concurrency = [int(part) for part in options.concurrency.split(",")]
    return options


def main():
    options = parse()
    from vllm_dflash.bench.record import provenance, save, without_folders

    engine, k = start_engine(options)
    command = shlex.join(["python", "tests/gpu/time_deferred_context.py", *map(without_folders, sys.argv[1:])])
    model = "the demo pair" if options.widen == "none" else f"the demo pair widened to {options.widen}"
    facts = {"model": model, "k": k, "dtype": options.dtype, "max_tokens": options.max_tokens, "prompt_tokens": PROMPT_TOKENS}
    origin = provenance(command=command, **facts)
    arms, rows = Arms(engine), []
    for concurrency in options.concurrency:
        rows += measure(arms, concurrency, options)
        save(options.out, rows, origin)
    wrong = list(complaints(rows))
    sys.stdout.write("\n".join([*wrong, *table(rows)]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
