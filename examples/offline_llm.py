# SPDX-License-Identifier: Apache-2.0
"""DFlash through vLLM's Python API: nothing but the draft's name changes. Runs on a CPU with the demo pair.

python examples/offline_llm.py
"""

import os

# A CPU needs little memory and one process; a GPU needs none of these lines.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from vllm import LLM, SamplingParams

from vllm_dflash.demo_pair.prepare import prepare

PROMPTS = ["Name three rivers in Europe.", "Write a Python function that adds two numbers."]


def main() -> None:
    """Answer two prompts and say how many drafted tokens were accepted."""
    pair = prepare()  # downloads 93 MB once
    llm = LLM(
        model=str(pair.target),
        speculative_config={"method": "dflash", "model": str(pair.draft)},
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,
    )
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, llm.chat(messages, SamplingParams(temperature=0, max_tokens=48)), strict=True):
        print(f"> {prompt}\n{answer.outputs[0].text}\n")
    counters = {metric.name: metric for metric in llm.get_metrics()}
    drafts = counters["vllm:spec_decode_num_drafts"].value
    accepted = counters["vllm:spec_decode_num_accepted_tokens"].value
    print(f"{drafts} drafts, {accepted} tokens accepted: acceptance length {1 + accepted / drafts:.2f}")


if __name__ == "__main__":
    main()
