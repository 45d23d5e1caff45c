# SPDX-License-Identifier: Apache-2.0
"""Tests that need one CUDA device; engines run in this process, over tiny random models in bf16."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "engine")]  # a bare checkout runs without an install
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


K = 7


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Folders of a random target and draft whose shapes FlashAttention takes."""
    import tiny_models
    from tiny_models import Draft, Target

    target = Target(layers=4, hidden=256, heads=8, kv_heads=2, head_dim=64, mlp=512, vocab=2048)
    draft = Draft(layers=3, heads=8, kv_heads=2, head_dim=64, mlp=512, block=K + 1, layer_ids=(0, 1, 3))
    folder = tmp_path_factory.mktemp("pair")
    return (
        str(tiny_models.write_target(folder / "target", target)),
        str(tiny_models.write_draft(folder / "draft", draft, target)),
    )


class Engine:
    """One in-process engine on the device."""

    current = None

    def __init__(self, target, draft=None, *, speculative=None, **options):
        from vllm import LLM

        from vllm_dflash.plugin import register

        Engine.close()
        register()
        if draft is not None:
            options["speculative_config"] = {
                "method": "dflash",
                "model": draft,
                "num_speculative_tokens": K,
                **(speculative or {}),
            }
        settings = {
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 80,
            "max_num_batched_tokens": 1024,
            "enable_prefix_caching": False,
            # Several processes share one GPU: a fixed cache, as vLLM's memory profiling fails where another one frees memory.
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 4 << 30,
            # Whole blocks in the checkpoint's precision: what these tests compare must not follow load or a timing.
            "additional_config": {"vllm_dflash": {"planner": "off", "draft_weights": "checkpoint", "draft_head": "full"}},
            **options,
        }
        self.llm = LLM(model=target, dtype="bfloat16", seed=0, disable_log_stats=False, **settings)
        Engine.current = self

    @staticmethod
    def close():
        if Engine.current is not None:
            Engine.current.__dict__.pop("llm")
            Engine.current = None
            gc.collect()
            torch.cuda.empty_cache()

    @property
    def speculator(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.speculator

    def generate(self, prompts, max_tokens=48, **sampling):
        from vllm import SamplingParams

        params = SamplingParams(
            **{"temperature": 0, "ignore_eos": True, "detokenize": False, **sampling, "max_tokens": max_tokens}
        )
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    def counters(self):
        """(drafted, accepted) tokens so far."""
        values = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        prefix = "vllm:spec_decode_num_"
        return values.get(f"{prefix}draft_tokens", 0), values.get(f"{prefix}accepted_tokens", 0)

    def watch(self, prompts, replay=None):
        """Record proposals as {(prompt number, anchor position): drafts}; ``replay`` replaces them by known outputs.

        Reads the device in every step: not for timing.
        """
        first = self.llm.request_counter.counter
        original = type(self.speculator).propose.__get__(self.speculator)
        proposals = {}

        def propose(input_batch, *args, **kwargs):
            drafts = original(input_batch, *args, **kwargs)
            if kwargs.get("dummy_run"):
                return drafts
            num_sampled, num_rejected = args[4].tolist(), args[5].tolist()
            starts, positions = input_batch.query_start_loc.tolist(), input_batch.positions.tolist()
            rows = drafts.tolist()
            for i, name in enumerate(input_batch.req_ids):
                number = int(name.split("-")[0]) - first
                anchor = positions[starts[i + 1] - 1 - num_rejected[i]] + 1
                if num_sampled[i] == 0:
                    continue
                proposals[number, anchor] = rows[i]
                if replay is not None:
                    known = replay[number][anchor + 1 - len(prompts[number]) :][:K]
                    rows[i] = known + [0] * (K - len(known))
            if replay is not None:
                drafts.copy_(torch.tensor(rows, device=drafts.device))
            return drafts

        self.speculator.propose = propose
        return proposals


@pytest.fixture(scope="session")
def engine_of():
    yield Engine
    Engine.close()
