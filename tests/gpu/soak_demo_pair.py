# SPDX-License-Identifier: Apache-2.0
"""The demo pair on one GPU for thousands of steps at temperature 0.7, mixed lengths, 96 requests at a time.

    python tests/gpu/soak_demo_pair.py --steps 15000 --out soak.json --target T --draft D --prompts FILE_OR_FOLDER

Writes the acceptance length of each tenth of the steps: it has to stay level. Speed of this pair: ``vllm-dflash bench``.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

from bench_speculator import ROOT, provenance, say
from meter import Meter

K = 7


def start_engine(options):
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_DFLASH="1")
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # a bare checkout runs without an install
    from vllm import LLM

    from vllm_dflash.plugin import register

    register()
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
        speculative_config={"method": "dflash", "model": str(options.draft), "num_speculative_tokens": K},
    )


def soak(meter, texts, steps):
    """Serve until ``steps`` engine steps are done; acceptance of each tenth of them."""
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
    return {
        "soak_steps": meter.steps - first,
        "requests": number,
        "acceptance_length_by_tenth": tenths,
        "concurrency": 96,
        "k": K,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--steps", type=int, default=15_000)
    options = parser.parse_args()
    llm = start_engine(options)
    from vllm_dflash.bench.prompts import prompt_set

    template = llm.get_tokenizer().apply_chat_template
    chats = ([{"role": "user", "content": text}] for text in prompt_set(options.prompts))
    texts = [template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    row = soak(Meter(llm), texts, options.steps)
    say(json.dumps(row))
    origin = provenance(f"SmolLM2-135M-Instruct and its DFlash draft, bf16, K = {K}, temperature 0.7")
    options.out.write_text(json.dumps({"provenance": origin, "rows": [row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
