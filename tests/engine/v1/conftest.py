# SPDX-License-Identifier: Apache-2.0
"""The real V1 engine on a CPU with our real plugin, tiny models in float32, and a recorder of what the proposer drafts."""

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # reference_check, tiny_models
if "vllm" not in sys.modules:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    )

import tiny_models  # noqa: E402  # the environment comes first


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") == "1":
        skip = pytest.mark.skip(reason="the Triton interpreter selects the V2 runner: run tests/engine/v1 in its own process")
        for item in items:
            item.add_marker(skip)


class Engine:
    """One ``LLM`` and the requests it ran."""

    def __init__(self, target, draft=None, *, speculative=None, **options):
        from vllm import LLM

        if draft is not None:
            speculative = {"method": "dflash", "model": str(draft)} | (speculative or {})
        defaults = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 192,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "block_size": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "seed": 0,
        }
        if draft is not None:  # these tests count on every draft; the planner has tests of its own
            chosen = options.get("additional_config", {}).get("vllm_dflash", {})
            options["additional_config"] = {"vllm_dflash": {"planner": "off"} | chosen}
        self.llm = LLM(
            str(target),
            enforce_eager=True,
            disable_log_stats=False,
            speculative_config=speculative,
            **defaults | options,
        )

    @property
    def runner(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def proposer(self):
        return self.runner.drafter

    def generate(self, prompts, max_tokens=24, **sampling):
        """Token ids of every prompt's answer; greedy unless ``sampling`` says otherwise."""
        from vllm import SamplingParams

        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False} | sampling
        )
        requests = [{"prompt_token_ids": list(p)} for p in prompts]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(requests, params, use_tqdm=False)]

    def counters(self):
        """Engine counters by short name; per-position counters left out."""
        return {
            m.name.removeprefix("vllm:").removeprefix("spec_decode_"): m.value
            for m in self.llm.get_metrics()
            if hasattr(m, "value")
        }

    def counted(self, run):
        """(result of ``run``, growth of every counter while it ran)."""
        before = self.counters()
        result = run()
        return result, {name: value - before.get(name, 0) for name, value in self.counters().items()}

    def record(self, monkeypatch, replace=None):
        """Record every proposal as (request number, known tokens, drafts); ``replace(number, known, K)`` may overrule them."""
        log, runner, real = [], self.runner, self.proposer.propose

        def propose(**call):
            drafts = real(**call)
            width = drafts.shape[1]
            rejected = call["num_rejected_tokens_gpu"]
            common = call["common_attn_metadata"]
            lengths = common.seq_lens if rejected is None else common.seq_lens - rejected
            skipped = runner.discard_request_mask.np
            for row, name in enumerate(runner.input_batch.req_ids):
                if skipped[row]:
                    continue
                number = int(name.split("-")[0])
                known = int(lengths[row]) + 1  # the new token included
                if replace is not None:
                    wanted = replace(number, known, width)
                    drafts[row, : len(wanted)] = drafts.new_tensor(wanted)
                log.append((number, known, drafts[row].tolist()))
            return drafts

        monkeypatch.setattr(self.proposer, "propose", propose)
        return log


@pytest.fixture(scope="module")
def engine_of():
    """``Engine(...)``, with the module's previous engine shut down first: there is one at a time."""
    alive = []

    def shut_down():
        alive.clear()
        gc.collect()

    def build(*args, **kwargs):
        shut_down()
        alive.append(Engine(*args, **kwargs))
        return alive[0]

    build.engine, build.shut_down = Engine, shut_down
    yield build
    shut_down()


@pytest.fixture(scope="session")
def write_pair(tmp_path_factory):
    """(Draft, Target) -> folders (target, draft); equal shapes are written once."""
    written = {}

    def write(draft=None, target=None):
        draft, target = draft or tiny_models.Draft(), target or tiny_models.Target()
        key = repr((draft, target))
        if key not in written:
            folder = tmp_path_factory.mktemp("pair")
            written[key] = (
                tiny_models.write_target(folder / "target", target),
                tiny_models.write_draft(folder / "draft", draft, target),
            )
        return written[key]

    return write


@pytest.fixture(scope="session")
def prompts():
    """Four prompts of different lengths; the last is longer than a scheduler step of 48 tokens."""
    import torch

    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, tiny_models.VOCAB, (n,), generator=generator).tolist() for n in (3, 17, 34, 101)]
