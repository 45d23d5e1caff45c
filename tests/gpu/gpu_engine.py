# SPDX-License-Identifier: Apache-2.0
"""One in-process engine on the device, its prompts and its checks; shared by the tests of this folder.

``DFLASH_GPU_DRY_RUN=1`` runs what it can without a device (Triton's interpreter, float32, no graphs, a few short prompts): it
finds slips in the tests, and proves nothing about a GPU.
"""

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "engine")]  # a bare checkout runs without an install
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
DRY = os.environ.get("DFLASH_GPU_DRY_RUN") == "1"
if DRY:
    _spec = importlib.util.spec_from_file_location("interpreted", ROOT / "tests" / "engine" / "v2" / "conftest.py")
    interpreted = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(interpreted)  # before anything imports Triton

import torch  # noqa: E402  # the interpreter must be chosen before anything imports Triton

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
K = 7
# Whole blocks in the checkpoint's precision: what these tests compare must not follow load or a timing.
FIXED = {"planner": "off", "draft_weights": "checkpoint", "draft_head": "full"}


def prompts_for(count, length=24):
    """``count`` random prompts; fewer and shorter ones in a dry run."""
    generator = torch.Generator().manual_seed(count)
    count, length = (min(count, 3), min(length, 12)) if DRY else (count, length)
    return [torch.randint(10, 2000, (length + i % 9,), generator=generator).tolist() for i in range(count)]


def agreement(ours, other, least_common=0.5):
    """Share of equal draft tokens in steps that both took, most of them: a near-tie in bf16 ends one request's comparison."""
    common = ours.keys() & other.keys()
    assert len(common) > least_common * len(ours)
    pairs = [(a, b) for key in common for a, b in zip(ours[key], other[key], strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def watch_compiler(monkeypatch):
    """(those of ours, all others): names of the kernels that Triton compiles from now on."""
    import triton

    ours, others, runtime = [], [], triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def hook(*args, **kwargs):
        (ours if "dflash_kernels" in str(kwargs["fn"].module) else others).append(kwargs["fn"].name)
        return None if before is None else before(*args, **kwargs)

    monkeypatch.setattr(runtime, "jit_post_compile_hook", hook)
    return ours, others


class Engine:
    """One in-process engine on the device."""

    current = None

    @classmethod
    def of(cls, *args, **options):
        """The engine with these arguments: the current one, without its watch, or a new one."""
        if cls.current is None or cls.current.key != (args, options):
            cls.close()
            cls.current = cls(*args, **options)
            cls.current.key = (args, options)
        if cls.current.speculator is not None:
            vars(cls.current.speculator).pop("propose", None)
        return cls.current

    def __init__(self, target, draft=None, *, speculative=None, plugin=None, **options):
        """``plugin``: options of ours on top of ``FIXED``."""
        from vllm import LLM

        from vllm_dflash.plugin import register

        register()
        self.key = None
        if draft is not None:
            options["speculative_config"] = {
                "method": "dflash",
                "model": draft,
                "num_speculative_tokens": K,
                **(speculative or {}),
            }
        settings = {
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 80,
            "max_num_batched_tokens": 1024,
            "enable_prefix_caching": False,
            # Several processes share one GPU: a fixed cache, as vLLM's memory profiling fails where another one frees memory.
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 4 << 30,
            "additional_config": {"vllm_dflash": FIXED | (plugin or {})},
            **options,
        }
        if DRY:
            settings |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 4}
            settings.pop("compilation_config", None)
        self.llm = LLM(model=target, seed=0, disable_log_stats=False, **settings)

    @classmethod
    def close(cls):
        if cls.current is not None:
            cls.current.__dict__.pop("llm")
            cls.current = None
            gc.collect()
            if not DRY:
                torch.cuda.empty_cache()

    @property
    def runner(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def speculator(self):
        return self.runner.speculator

    def generate(self, prompts, max_tokens=48, **sampling):
        from vllm import SamplingParams

        max_tokens = min(max_tokens, 12) if DRY else max_tokens
        params = SamplingParams(
            **{"temperature": 0, "ignore_eos": True, "detokenize": False, **sampling, "max_tokens": max_tokens}
        )
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    def drafts(self, prompts, max_tokens=48):
        """(greedy answers, proposals)."""
        proposals = self.watch(prompts)
        return self.generate(prompts, max_tokens), proposals

    def counters(self):
        """(drafted, accepted) tokens so far."""
        values = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        prefix = "vllm:spec_decode_num_"
        return values.get(f"{prefix}draft_tokens", 0), values.get(f"{prefix}accepted_tokens", 0)

    def stays_in_graphs(self):
        """Asserts that draft steps ran, all of them replayed."""
        counters = self.speculator.counters
        assert (counters.eager if DRY else counters.graph) > 0
        assert DRY or counters.eager == 0

    def watch(self, prompts, replay=None):
        """Record proposals as {(prompt number, anchor position): drafts}; ``replay`` replaces them by known outputs.

        Reads the device in every step: not for timing.
        """
        vars(self.speculator).pop("propose", None)
        first = self.llm.request_counter.counter
        original = type(self.speculator).propose.__get__(self.speculator)
        proposals = {}

        def propose(input_batch, *args, **kwargs):
            drafts = original(input_batch, *args, **kwargs)
            if kwargs.get("dummy_run") or kwargs.get("num_speculative_tokens") == 0:
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

    def accepted_share(self, prompts, expected, run):
        """Accepted share of perfect drafts while ``run()`` asks for ``prompts`` again."""
        drafted, accepted = self.counters()
        self.watch(prompts, replay=expected)
        run()
        after = self.counters()
        return (after[1] - accepted) / (after[0] - drafted)
