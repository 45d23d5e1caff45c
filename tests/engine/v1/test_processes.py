# SPDX-License-Identifier: Apache-2.0
"""vLLM's default is an engine core in a process of its own: the plugin must work there, and only there."""

import os
import subprocess
import sys

SCRIPT = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    target, draft = sys.argv[1:]
    llm = LLM(
        target, speculative_config={"method": "dflash", "model": draft}, skip_tokenizer_init=True, enforce_eager=True,
        additional_config={"vllm_dflash": {"planner": "off"}},  # numbers of drafts are exact below
        dtype="float32", max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=16 << 20, disable_log_stats=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True, detokenize=False)
    output = llm.generate([{"prompt_token_ids": [1, 40, 50, 22]}], params, use_tqdm=False)
    values = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    print("TOKENS", *output[0].outputs[0].token_ids)
    print("ACCEPTED", values["vllm:spec_decode_num_accepted_tokens"])
    print("LOADED_HERE", "vllm_dflash.engine.proposer" in sys.modules)
"""


def test_engine_core_in_its_own_process(tmp_path):
    """Breaks if registration or a patch does not reach a spawned engine core, or does not survive pickling.

    K is left out of the config: its default is what the draft was trained for.
    """
    from tiny_models import write_markov_pair

    folders = write_markov_pair(tmp_path, half=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, tmp_path / "script.py", *folders],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = dict(line.split(" ", 1) for line in result.stdout.splitlines() if line.startswith(("TOKENS", "ACCEPTED", "LOADED")))
    assert lines.get("TOKENS") == " ".join(map(str, [*range(23, 31), *[10] * 33])), result.stderr[-2000:]
    assert (float(lines["ACCEPTED"]), lines["LOADED_HERE"]) == (35, "False")
