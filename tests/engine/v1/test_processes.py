# SPDX-License-Identifier: Apache-2.0
"""vLLM's default is an engine core in a process of its own: the plugin must work there, and be reached there."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

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


PLANNED = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm_dflash.engine.planner_access import hold_width, report_of

def complaint_of(width):
    try:
        hold_width(llm.llm_engine, width)
    except ValueError as error:
        return str(error)

def widths(tokens=30):
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [1, 40, 50, 22]}], params, use_tqdm=False)
    return report_of(llm.llm_engine, reset=True)["widths"]

if __name__ == "__main__":
    target, draft = sys.argv[1:]
    llm = LLM(
        target, speculative_config={"method": "dflash", "model": draft}, skip_tokenizer_init=True, enforce_eager=True,
        dtype="float32", max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=16 << 20, disable_log_stats=False,
        # vLLM's executor of one worker on GPUs; on CPUs it takes another, in which the worker has a process of its own
        distributed_executor_backend=UniProcExecutor,
        worker_extension_cls="vllm_dflash.cli.engine_meter.WorkerFigures",
    )
    found = {"early": [report_of(llm.llm_engine), complaint_of(3)]}
    found["first"] = widths(1)
    llm.collective_rpc("dflash_figures")
    found["none"] = complaint_of(3) or widths()
    found["drafted"] = llm.collective_rpc("dflash_figures")[0]
    found["refused"] = complaint_of(4)
    found["nothing"] = complaint_of(0) or widths()
    found["free"] = complaint_of(None)
    found["drafter"] = llm.collective_rpc("dflash_implementation")
    found["here"] = "vllm_dflash.engine.proposer" in sys.modules
    print("FOUND", json.dumps(found))
"""


def test_the_planner_of_another_process_is_asked_and_told(tmp_path):
    """Breaks if a benchmark of engines as users start them does not say what was decided, or cannot hold a width.

    A mutant that answers from this process (or a configuration that is a copy) finds no planner: ``first`` would be an error.
    """
    from tiny_models import write_markov_pair

    folders = write_markov_pair(tmp_path, half=False)
    (tmp_path / "script.py").write_text(PLANNED)
    result = subprocess.run(
        [sys.executable, tmp_path / "script.py", *folders],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, result.stderr[-2000:]
    found = json.loads(lines[0].removeprefix("FOUND "))
    assert found["early"][0] is None
    assert "found no planner beside the engine's worker" in found["early"][1]
    assert sum(found["first"].values()) == 1
    assert set(found["none"]) == {"3"}
    assert found["drafted"]["draft_ms"] > 0
    assert "hold: found 4; expected one of 0, 1, 2, 3, 5, 7" in found["refused"]
    assert set(found["nothing"]) == {"0"}
    assert found["free"] is None
    assert found["drafter"] == ["vllm_dflash.engine.proposer.DFlashProposer"]
    assert not found["here"]


def test_an_executor_class_is_known_by_what_it_is():
    """Breaks if any class passes for an executor of one process, or vLLM's own does not."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    from vllm_dflash.engine.workers import share_process

    kinds = (UniProcExecutor, ExecutorWithExternalLauncher, MultiprocExecutor)
    configs = [SimpleNamespace(world_size=1, distributed_executor_backend=kind) for kind in kinds]
    assert [share_process(config) for config in configs] == [True, True, False]
