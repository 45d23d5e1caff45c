# SPDX-License-Identifier: Apache-2.0
"""The demo pair for thousands of steps at temperature 0.7, mixed lengths, requests that come and go: acceptance stays level.

    python tests/gpu/soak_demo_pair.py --out soak.json [--target T --draft D] [--steps 15000] [--requests 32] [--time-limit 420]

Some 5 ms a step on an H200, after the start of the engine. Steps are counted where they bring tokens. Writes every 500 steps
what it has; exits 1 where a tenth of the steps differs from all of them by more than chance allows, draft steps ran outside their
graphs on a GPU, or the time was not enough. On a CPU: ``--steps 60 --requests 4 --dtype float32``. Speed: ``vllm-dflash bench``.
"""

import argparse
import os
import random
import shlex
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # a bare checkout runs without an install
K, LONGEST, SAVE_EVERY = 7, 400, 500
BLOCKS = 200
"""Parts of the run whose acceptance is recorded: their scatter is what chance does to a tenth, which has 20 of them."""
SIGMAS = 4.0
"""A right run passes ten such comparisons with 99.9 %."""


def start_engine(options):
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_DFLASH="1")
    from vllm import LLM

    from vllm_dflash.cli.machine import cpu_engine_args
    from vllm_dflash.plugin import register

    register()
    settings = {
        "max_model_len": 1024,
        "max_num_seqs": options.requests,
        "max_num_batched_tokens": 4096,
        # A fixed cache: several processes may share the GPU, and vLLM's memory profiling fails where another one frees memory.
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.2,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    speculative = {"method": "dflash", "model": str(options.draft), "num_speculative_tokens": K}
    settings = cpu_engine_args({}, settings)
    return LLM(model=str(options.target), dtype=options.dtype, speculative_config=speculative, **settings)


def prompts_of(llm, name):
    """Token ids of the chats of a prompt set."""
    from vllm_dflash.bench.prompts import prompt_set

    template = llm.get_tokenizer().apply_chat_template
    chats = ([{"role": "user", "content": text}] for text in prompt_set(name))
    return [template(chat, tokenize=True, add_generation_prompt=True, return_dict=False) for chat in chats]


class Soak:
    """Serves until ``steps`` steps are done, or the time is over."""

    def __init__(self, llm, prompts, options):
        from vllm_dflash.cli.engine_meter import Meter

        self.llm, self.prompts, self.options = llm, prompts, options
        self.meter = Meter(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
        self.choose = random.Random(0)
        self.steps = self.requests = 0
        self.blocks = []  # (drafts, accepted)
        self.meter.take()
        self.figures = {}

    def accepted(self):
        """(steps with drafts, accepted drafts) so far."""
        values = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        prefix = "vllm:spec_decode_num_"
        return values.get(f"{prefix}drafts", 0), values.get(f"{prefix}accepted_tokens", 0)

    def run(self, save):
        """``save(row)`` is called every now and then."""
        options, engine = self.options, self.llm.llm_engine
        # All requests are young at first, and young answers are accepted otherwise than old ones.
        settle = min(LONGEST, options.steps // 10)
        each = max(1, (options.steps - settle) // BLOCKS)
        begin, before = time.monotonic(), None
        while self.steps < options.steps and time.monotonic() - begin < options.time_limit:
            while engine.get_num_unfinished_requests() < options.requests:
                self.add(engine)
            if not engine.step():
                continue
            self.steps += 1
            if self.steps >= settle and (self.steps - settle) % each == 0:
                after = self.accepted()
                if before is not None:
                    self.blocks.append((after[0] - before[0], after[1] - before[1]))
                before = after
            if self.steps % SAVE_EVERY == 0:
                save(self.row(time.monotonic() - begin))
        seconds = time.monotonic() - begin
        self.figures = self.meter.take()
        engine.abort_request([str(i) for i in range(self.requests)])
        row = self.row(seconds)
        save(row)
        return row

    def add(self, engine):
        from vllm import SamplingParams

        tokens = self.choose.randint(1, LONGEST)
        params = SamplingParams(temperature=0.7, max_tokens=tokens, ignore_eos=True, seed=self.requests, detokenize=False)
        engine.add_request(str(self.requests), {"prompt_token_ids": self.choose.choice(self.prompts)}, params)
        self.requests += 1

    def row(self, seconds):
        counts = ("graph_steps", "eager_steps", "jit_compiles")
        return {
            "steps": self.steps,
            "steps_wanted": self.options.steps,
            "seconds": round(seconds, 1),
            "requests": self.requests,
            "concurrency": self.options.requests,
            "k": K,
            **{key: self.figures[key] for key in counts if key in self.figures},
            **level(self.blocks),
        }


def level(blocks):
    """Acceptance lengths {acceptance_length, .._by_tenth, standard_error of a tenth, worst_sigmas} from (drafts, accepted)."""
    lengths = [1 + accepted / drafts for drafts, accepted in blocks if drafts]
    if len(lengths) < 20:
        return {"acceptance_length_by_tenth": []}
    size = len(lengths) // 10
    parts = [lengths[i * size : (i + 1) * size] for i in range(10)]
    tenths, mean = [statistics.fmean(part) for part in parts], statistics.fmean(lengths)
    # Scatter inside the tenths, so that a drift does not excuse itself. Neighbouring blocks share requests: hence twice.
    error = 2 * (statistics.fmean(statistics.variance(part) for part in parts) / size) ** 0.5
    return {
        "acceptance_length": mean,
        "acceptance_length_by_tenth": tenths,
        "standard_error": error,
        "worst_sigmas": max(abs(tenth - mean) for tenth in tenths) / error if error else 0.0,
    }


def complaints(row):
    """What is wrong, a sentence each."""
    if row["steps"] < row["steps_wanted"]:
        yield f"{row['steps']} of {row['steps_wanted']} steps in the given time"
    if row.get("worst_sigmas", 0.0) > SIGMAS:
        yield f"acceptance is not level: a tenth is {row['worst_sigmas']:.1f} standard errors off"
    if not row["acceptance_length_by_tenth"]:
        yield "too few steps to judge acceptance"
    if row.get("eager_steps", 0) > 0:
        yield f"{row['eager_steps']} draft steps outside their graphs"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="folder; the demo pair where neither is given")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", default="all")
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--requests", type=int, default=32, help="at a time")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--time-limit", type=float, default=420.0, help="seconds, without the start of the engine")
    options = parser.parse_args()
    from vllm_dflash.bench.record import provenance, save

    if options.target is None:
        from vllm_dflash.demo_pair.prepare import prepare

        pair = prepare()
        options.target, options.draft = pair.target, pair.draft
    llm = start_engine(options)
    command = shlex.join(["python", "tests/gpu/soak_demo_pair.py", "--steps", str(options.steps)])
    origin = provenance(model=f"the demo pair, K = {K}, temperature 0.7", dtype=options.dtype, command=command)
    row = Soak(llm, prompts_of(llm, options.prompts), options).run(lambda found: save(options.out, [found], origin))
    wrong = list(complaints(row))
    sys.stdout.write("\n".join([str(row), *wrong]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
