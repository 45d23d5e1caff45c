# SPDX-License-Identifier: Apache-2.0
"""With the plugin installed, vLLM without ``"method": "dflash"`` is vLLM: same classes, same tokens."""

import os
import subprocess
import sys

NGRAM = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(
    sys.argv[1],
    speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1},
    skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=192, kv_cache_memory_bytes=64 << 20,
)
params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": p} for p in json.loads(sys.argv[2])], params, use_tqdm=False)
drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
print("RESULT", json.dumps([type(drafter).__module__, [list(o.outputs[0].token_ids) for o in outputs]]))
"""


def test_draft_model_is_untouched(write_pair, engine_of, prompts):
    """Breaks if the takeover reaches another drafter: the target drafts for itself here, so its drafts are accepted."""
    target, _ = write_pair()
    plain = engine_of(target).generate(prompts, 16)
    engine = engine_of(target, speculative={"method": "draft_model", "model": str(target), "num_speculative_tokens": 3})
    assert type(engine.proposer).__module__ == "vllm.v1.spec_decode.draft_model"
    outputs, grown = engine.counted(lambda: engine.generate(prompts, 16))
    assert outputs == plain
    assert grown["num_accepted_tokens"] >= 0.9 * grown["num_draft_tokens"] > 0


def test_ngram_is_untouched(write_pair, engine_of, prompts):
    """Breaks as above. In a process of its own: vLLM cannot start a further engine in a process that has loaded numba."""
    import json

    target, _ = write_pair()
    plain = engine_of(target).generate(prompts, 16)
    command = [sys.executable, "-c", NGRAM, str(target), json.dumps(prompts)]
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}  # it compiles for a minute otherwise
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    line = next((line for line in result.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, result.stderr[-2000:]
    assert json.loads(line.removeprefix("RESULT ")) == ["vllm.v1.spec_decode.ngram_proposer", plain]
