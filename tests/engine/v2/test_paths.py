# SPDX-License-Identifier: Apache-2.0
"""Prompts that reach the draft in pieces: chunked prefill, prefix cache, preemption.

The measure is always the same: perfect drafts must be accepted to the last, and the random draft's proposals must equal those
of the same prompt served alone in one piece, so its context KV is the same however it came about.
"""

import pytest

K = 3


@pytest.fixture(scope="module")
def expected(long_prompts, baseline):
    return baseline(long_prompts, 13)


@pytest.fixture(scope="module")
def alone(target, draft, long_prompts, expected, engine_of):
    """Proposals by prompt, each served alone in one prefill."""
    engine = engine_of(target, draft, max_num_batched_tokens=128)
    proposals = {}
    for number, prompt in enumerate(long_prompts):
        found = engine.watch([prompt])
        assert engine.generate([prompt], 13) == [expected[number]]
        proposals |= {(number, anchor): drafts for (_, anchor), drafts in found.items()}
    return proposals


def usable(proposals, prompts):
    """Proposals without those behind the last token: vLLM 0.33 skips them only when no request of the batch needs drafts."""
    return {(i, anchor): drafts for (i, anchor), drafts in proposals.items() if anchor < len(prompts[i]) + 12}


def check(engine, prompts, expected, alone):
    """Outputs and proposals as for each prompt alone; then the same with perfect drafts."""
    proposals = engine.watch(prompts)
    assert engine.generate(prompts, 13) == expected
    assert usable(proposals, prompts) == usable(alone, prompts)
    engine.watch(prompts, replay=expected)
    drafted, accepted, outputs = engine.acceptance_of(lambda: engine.generate(prompts, 13))
    assert outputs == expected
    return drafted, accepted


def test_chunked_prefill(target, draft, long_prompts, expected, alone, engine_of):
    """Chunks of 24: decodes and prompt pieces share batches; breaks if a chunk's context KV is lost or shifted."""
    engine = engine_of(target, draft, max_num_batched_tokens=24)
    drafted, accepted = check(engine, long_prompts, expected, alone)
    assert drafted == accepted == len(long_prompts) * 3 * K
    assert engine.speculator.counters.eager_context_rows > 0  # a chunk has more rows than a verification


def test_prefix_cache(target, draft, long_prompts, expected, alone, engine_of):
    """The second round takes its prompt from the cache; breaks if the draft's KV is not cached with the target's."""
    engine = engine_of(target, draft, enable_prefix_caching=True, block_size=32)
    engine.generate(long_prompts, 13)
    drafted, accepted = check(engine, long_prompts, expected, alone)
    assert drafted == accepted == len(long_prompts) * 3 * K
    hits = {m.name: m.value for m in engine.llm.get_metrics() if hasattr(m, "value")}
    assert hits["vllm:prefix_cache_hits"] > 0


def test_preemption(target, draft, long_prompts, baseline, alone, engine_of):
    """A cache that holds the prompts but not the outputs; breaks if a resumed request drafts over holes."""
    expected = baseline(long_prompts, 30)
    engine = engine_of(target, draft, block_size=32, num_gpu_blocks_override=8)
    proposals = engine.watch(long_prompts)
    assert engine.generate(long_prompts, 30) == expected
    assert {key: proposals[key] for key in alone} == alone
    metrics = {m.name: m.value for m in engine.llm.get_metrics() if hasattr(m, "value")}
    assert metrics["vllm:num_preemptions"] > 0
