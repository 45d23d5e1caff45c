# SPDX-License-Identifier: Apache-2.0
"""The demo pair on one GPU: real acceptance, at request counts where the built-in leaves its graphs.

    python tests/gpu/bench_demo_pair.py --arm all --out demo_pair.json --target T --draft D --prompts FOLDER_OR_FILE
    python tests/gpu/bench_demo_pair.py --arm ours --soak 15000 ...          # steps at temperature 0.7, mixed lengths

Prompts are JSON lines ``{"turns": [...]}``; the first turn is used through the chat template. All requests of a batch are
submitted at once, 128 new tokens each, greedy, bf16, K = 7. Each arm runs in a process of its own, over one engine; a cell is
the median over repetitions of output tokens per second over the whole time, prefill included. A 135M target is bound by
launches and the host: draw no conclusion about large models.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench_speculator import ARMS, ROOT, provenance, save, say
from meter import Meter

K, OUTPUT = 7, 128


def read_prompts(path):
    """First turns of every ``.jsonl`` in a folder, or of one file, interleaved so that any prefix is a mixture."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    sets = [[json.loads(line)["turns"][0] for line in file.read_text().splitlines() if line] for file in files]
    return [prompt for row in zip(*sets, strict=False) for prompt in row]


def start_engine(arm, options):
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_DFLASH="0" if arm == "builtin" else "1")
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # a bare checkout runs without an install
    from vllm import LLM

    from vllm_dflash.plugin import register

    register()
    speculative = {"method": "dflash", "model": str(options.draft), "num_speculative_tokens": K}
    return LLM(
        model=str(options.target),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.5,
        disable_log_stats=False,
        enable_prefix_caching=False,
        seed=0,
        speculative_config=None if arm == "none" else speculative,
    )


def run_batch(meter, prompts, **sampling):
    """Generate for all ``prompts`` at once; output tokens per second and acceptance length."""
    from vllm import SamplingParams

    params = SamplingParams(**({"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True} | sampling))
    drafts, accepted = meter.accepted()
    begin = time.perf_counter()
    outputs = meter.llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    after = meter.accepted()
    row = {"tok_s_wall": sum(len(o.outputs[0].token_ids) for o in outputs) / seconds}
    if after[0] > drafts:
        row["acceptance_length"] = 1 + (after[1] - accepted) / (after[0] - drafts)
    return row


def run_arm(arm, options):
    llm = start_engine(arm, options)
    tokenizer = llm.get_tokenizer()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in read_prompts(options.prompts)
    ]
    meter = Meter(llm)
    if options.soak:
        return [soak(meter, texts, options.soak) | {"arm": arm, "k": K}]
    run_batch(meter, texts[:8], max_tokens=32)  # first requests, caches
    rows = []
    for concurrency in options.concurrency:
        compiled, graphs, proposals = len(meter.jit_compiles), meter.graph_steps, meter.proposals
        batches = [texts[i * concurrency : (i + 1) * concurrency] for i in range(options.repeats)]
        runs = [run_batch(meter, batch) for batch in batches if len(batch) == concurrency]
        row = {"arm": arm, "concurrency": concurrency, "k": 0 if arm == "none" else K, "repeats": len(runs)}
        for key in runs[0]:
            values = [run[key] for run in runs]
            row |= {key: statistics.median(values), f"{key}_spread": (max(values) - min(values)) / statistics.median(values)}
        row["graph_steps"] = meter.graph_steps - graphs
        row["eager_steps"] = meter.proposals - proposals - row["graph_steps"]
        row["jit_compiles"] = meter.jit_compiles[compiled:]
        rows.append(row)
        say(json.dumps(row))
    return rows


def soak(meter, texts, steps):
    """Serve at temperature 0.7 with mixed lengths until ``steps`` engine steps; acceptance of each tenth of them."""
    from vllm import SamplingParams

    engine = meter.llm.llm_engine
    choose = random.Random(0)
    tenths, number = [], 0
    drafts, accepted = meter.accepted()
    first = meter.steps
    while meter.steps - first < steps or engine.has_unfinished_requests():
        while meter.steps - first < steps and engine.get_num_unfinished_requests() < 96:
            params = SamplingParams(temperature=0.7, max_tokens=choose.randint(1, 400), ignore_eos=True, seed=number)
            engine.add_request(str(number), choose.choice(texts), params)
            number += 1
        engine.step()
        if (meter.steps - first) // (steps // 10) > len(tenths) and len(tenths) < 10:
            after = meter.accepted()
            tenths.append(1 + (after[1] - accepted) / (after[0] - drafts))
            drafts, accepted = after
    row = {"soak_steps": meter.steps - first, "requests": number, "acceptance_length_by_tenth": tenths, "concurrency": 96}
    say(json.dumps(row))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=(*ARMS, "all"), default="all")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; arms merge into it")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--soak", type=int, default=0, help="engine steps to serve instead of the cells")
    options = parser.parse_args()
    if options.arm != "all":
        model = f"SmolLM2-135M-Instruct and its DFlash draft, bf16, K = {K}, {OUTPUT} new tokens, greedy"
        save(options.out, run_arm(options.arm, options), provenance(model))
        return
    for arm in ARMS:  # a process each: engines leave memory behind, and the plugin decides at start-up
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--arm", arm], check=True)


if __name__ == "__main__":
    main()
