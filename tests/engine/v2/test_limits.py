# SPDX-License-Identifier: Apache-2.0
"""Engines whose limits disagree: more requests allowed than tokens, fewer active than either."""

import dataclasses

import pytest
from vllm import SamplingParams
from vllm.config import SchedulerConfig
from vllm.v1.worker.gpu.warmup import warmup_kernels

K = 3
TOKENS = 64
CAPPED = any(field.name == "max_num_active_seqs" for field in dataclasses.fields(SchedulerConfig))


@pytest.fixture(scope="module")
def anchor_draft(make_draft):
    """Its anchor row drafts too: K rows per request, where the scheduler counts K + 1."""
    return make_draft(block=K, config=(("sample_from_anchor", True),))


FREE = pytest.param({}, id="free", marks=[pytest.mark.slow] if CAPPED else [])


@pytest.mark.parametrize("name", ["draft", "anchor_draft"])
@pytest.mark.parametrize("options", [FREE, *([pytest.param({"max_num_active_seqs": 5}, id="capped")] if CAPPED else [])])
def test_every_batch_the_runner_makes_fits(name, options, target, prompts, baseline, engine_of, request, monkeypatch):
    """The largest profile run and the kernel warm-up of start-up on GPUs, then serving more requests than fit at once.

    Breaks if buffers or the cache of draft logits hold only the requests that the scheduler would run.
    """
    draft = request.getfixturevalue(name)
    engine = engine_of(
        target,
        draft,
        speculative={"draft_sample_method": "probabilistic"},
        max_num_seqs=40,
        max_num_batched_tokens=TOKENS,
        **options,
    )
    shape = engine.speculator.buffers.shape
    assert shape.num_query_per_req == (K if name == "anchor_draft" else K + 1)
    for arguments in ({"skip_attn": True, "is_profile": True}, {}, {"uniform_decode": True}):
        engine.runner._dummy_run(TOKENS, **arguments)
    # The interpreter cannot run vLLM's top-k kernel, which the warm-up's own sampling parameters ask for.
    monkeypatch.setattr(SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0.9))
    warmup_kernels(engine.runner, engine.runner.execute_model, engine.runner.sample_tokens)
    largest = TOKENS // shape.num_query_per_req
    assert shape.max_requests >= largest
    many = prompts * 5
    assert engine.generate(many, 8) == baseline(prompts, 8) * 5
