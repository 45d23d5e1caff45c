# SPDX-License-Identifier: Apache-2.0
"""The real V2 engine on a CPU: real runner, real Triton kernels through the interpreter, our real plugin, tiny models in fp32.

Run this folder in a process of its own: the interpreter is chosen when Triton is first imported.
"""

import dataclasses
import gc
import os
import sys
import types
from pathlib import Path

import pytest

if "vllm" not in sys.modules and "triton" not in sys.modules:
    os.environ.update(
        TRITON_INTERPRET="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    )
    import triton.backends

    # vLLM's CPU build accepts Triton only with a backend called "cpu"; under the interpreter nothing is compiled.
    if "cpu" not in triton.backends.backends:
        driver = type("InterpreterDriver", (), {"is_active": staticmethod(lambda: True)})
        triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]  # tiny_models
import tiny_models  # noqa: E402  # the interpreter must be chosen before anything imports Triton
from tiny_models import Draft, Target  # noqa: E402

K = 3
TARGET = Target()
DRAFT = Draft(block=K + 1)


def _complete_interpreter():
    """Two gaps that vLLM's sampling kernels meet: masks that became integers, and ``libdevice.log1p``, which is a stub.

    And a third of the time: a call from one device function to another patches ``triton.language`` as the launch has done.
    """
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def create_masked_load(self, pointers, mask, *others):
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *others)

    def create_masked_store(self, pointers, value, mask, *policy):
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *policy)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store

    def call(self, *args, **kwargs):
        if any(map(tl.core.is_builtin, (tl.load, tl.core.load))):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    libdevice.log1p = lambda x: tl.log(x + 1.0)


def pytest_collection_modifyitems(items):
    from vllm.triton_utils import HAS_TRITON

    _complete_interpreter()

    if not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1":
        reason = "needs Triton's interpreter from the start of the process: run `pytest tests/engine/v2` on its own"
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return str(tiny_models.write_target(tmp_path_factory.mktemp("target"), TARGET))


@pytest.fixture(scope="session")
def make_draft(tmp_path_factory):
    """A draft checkpoint; options as of ``tiny_models.Draft``."""

    def make(**options):
        folder = tmp_path_factory.mktemp("draft")
        return str(tiny_models.write_draft(folder, dataclasses.replace(DRAFT, **options), TARGET))

    return make


@pytest.fixture(scope="session")
def draft(make_draft):
    return make_draft()


class Engine:
    """One engine; closes the one before it (vLLM keeps one set of process groups per process)."""

    current = None

    @classmethod
    def of(cls, *args, **options):
        """The engine with these arguments: the current one, without its watch, or a new one."""
        if cls.current is None or cls.current.key != (args, options):
            engine = cls(*args, **options)
            engine.key = (args, options)
        if cls.current.speculator is not None:
            vars(cls.current.speculator).pop("propose", None)
        return cls.current

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
            # These tests count on every draft; the planner has tests of its own.
            chosen = options.get("additional_config", {}).get("vllm_dflash", {})
            options["additional_config"] = {"vllm_dflash": {"planner": "off"} | chosen}
        settings = {
            "skip_tokenizer_init": True,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
            **options,
        }
        self.llm = LLM(
            model=target,
            dtype="float32",
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
            **settings,
        )
        self.key = None
        Engine.current = self

    @staticmethod
    def close():
        if Engine.current is not None:
            Engine.current.__dict__.pop("llm")
            Engine.current = None
            gc.collect()

    @property
    def runner(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def speculator(self):
        return self.runner.speculator

    def generate(self, prompts, max_tokens=24, *, each=None, **sampling):
        """Output tokens by prompt; sampling options for all, or by prompt in ``each``."""
        from vllm import SamplingParams

        common = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": max_tokens}
        params = [SamplingParams(**common | options) for options in each or [sampling] * len(prompts)]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    def watch(self, prompts, replay=None):
        """Record every proposal as {(prompt number, position of the anchor): drafts}; optionally replace it.

        ``replay``: known outputs by prompt number; the drafts become the K tokens that the target will choose. Any slip in
        anchors, positions or slots then costs acceptance.
        """
        first = self.llm.request_counter.counter
        original = type(self.speculator).propose.__get__(self.speculator)
        proposals = {}

        def propose(input_batch, *args, **kwargs):
            drafts = original(input_batch, *args, **kwargs)
            if kwargs.get("dummy_run") or kwargs.get("num_speculative_tokens") == 0:
                return drafts
            num_sampled, num_rejected = args[4], args[5]
            for i, name in enumerate(input_batch.req_ids):
                number = int(name.split("-")[0]) - first
                last = int(input_batch.query_start_loc[i + 1]) - 1 - int(num_rejected[i])
                anchor = int(input_batch.positions[last]) + 1
                if int(num_sampled[i]) == 0:
                    continue
                proposals[number, anchor] = drafts[i].tolist()
                if replay is not None:
                    known = replay[number][anchor + 1 - len(prompts[number]) :][:K]
                    drafts[i] = torch.tensor(known + [0] * (K - len(known)))
            return drafts

        self.speculator.propose = propose
        return proposals

    def counters(self):
        wanted = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
        for metric in self.llm.get_metrics():
            short = metric.name.removeprefix("vllm:spec_decode_")
            if short in wanted:
                wanted[short] += metric.value
        return wanted

    def acceptance_of(self, action):
        """(drafted, accepted) tokens while ``action()`` runs, and its result."""
        before = self.counters()
        result = action()
        after = self.counters()
        return (*(after[n] - before[n] for n in ("num_draft_tokens", "num_accepted_tokens")), result)


@pytest.fixture(scope="session")
def engine_of():
    yield Engine.of
    Engine.close()


@pytest.fixture
def engine(target, draft, baseline, engine_of):  # the baseline's engine has to come first
    """The engine that most tests need; it lives on where one such test follows another."""
    return engine_of(target, draft)


PROMPTS = [[3, 17, 44, 8, 21], [60, 2, 9], [7, 7, 30, 31, 5, 80, 12, 64, 33, 29, 1], [50, 41]]
LONG = [(7 * i * i + 3 * i + 11) % 90 for i in range(70)]
LONG_PROMPTS = [LONG, [9, 8, 7], [*LONG[:41], 1, 2, 3]]
LAST_PROMPT = LONG[:50] + LONG[:48]  # 30 tokens below max_model_len


@pytest.fixture(scope="session")
def prompts():
    return PROMPTS


@pytest.fixture(scope="session")
def long_prompts():
    return LONG_PROMPTS


@pytest.fixture(scope="session")
def last_prompt():
    return LAST_PROMPT


@pytest.fixture(scope="session")
def baseline(target):
    """Tokens without speculation, by prompt: up to 30."""
    known = [*PROMPTS, *LONG_PROMPTS, LAST_PROMPT]
    found = Engine(target).generate(known, 30)
    memory = dict(zip(map(tuple, known), found, strict=True))
    return lambda prompts, max_tokens=24: [memory[tuple(p)][:max_tokens] for p in prompts]


@pytest.fixture(scope="module")
def allowed():
    """Asynchronous scheduling is not turned off for CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        yield
