# SPDX-License-Identifier: Apache-2.0
"""Modes of the engine that need a GPU: sleep and wake-up, adapters, grammars, adaptive verification; all with graphs and async.

Three engine starts. Sleep mode allows one engine per process that uses it.
"""

import re
from pathlib import Path

import pytest
import served
import torch

K, TOKENS = 7, 40
VOCAB = 2048


def prompts_for(count):
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(10, 2000, (24 + i % 9,), generator=generator).tolist() for i in range(count)]


PROMPTS = prompts_for(9)


def drafts_of(engine):
    """(answers, proposals)."""
    proposals = engine.watch(PROMPTS)
    return engine.generate(PROMPTS, TOKENS), proposals


def agreement(ours, other):
    """Share of equal draft tokens in steps that both took, most of them: a near-tie in bf16 ends one request's comparison."""
    common = ours.keys() & other.keys()
    assert len(common) > 0.5 * len(ours)
    pairs = [(a, b) for key in common for a, b in zip(ours[key], other[key], strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def accepted_share(engine, prompts, expected, run):
    """Accepted share of perfect drafts."""
    drafted, accepted = engine.counters()
    engine.watch(prompts, replay=expected)
    run()
    after = engine.counters()
    return (after[1] - accepted) / (after[0] - drafted)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(sleeper, level):
    """Breaks if a fixed-address buffer, a captured graph, a table of addresses or a weight of the draft does not survive.

    Level 2 drops weights: vLLM reloads the target's, and the draft's are kept in host memory.
    """
    engine, (answers, before) = sleeper
    llm = engine.llm
    llm.sleep(level=level)
    llm.wake_up(tags=["weights"])
    if level == 2:
        llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    again, after = drafts_of(engine)
    assert sum(a == b for a, b in zip(again, answers, strict=True)) >= 0.7 * len(PROMPTS)
    assert agreement(after, before) >= 0.98
    assert accepted_share(engine, PROMPTS, again, lambda: engine.generate(PROMPTS, TOKENS)) >= 0.9
    assert engine.speculator.counters.eager == 0


@pytest.fixture(scope="module")
def sleeper(pair, engine_of):
    """(engine, its answers and proposals before it first sleeps)."""
    engine = engine_of(*pair, enable_sleep_mode=True)
    return engine, drafts_of(engine)


def test_adapters_and_grammars_with_async_scheduling(pair, engine_of, tmp_path):
    """Breaks if async scheduling is off with our drafts, an adapter stops drafting, or a grammar loses or lets pass drafts."""
    target = Path(pair[0])
    served.write_tokenizer(target, VOCAB)
    served.write_adapter(tmp_path / "adapter", target, tmp_path / "merged")
    engine = engine_of(*pair, **served.options())
    assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling

    def adapted():
        return served.generate(engine, PROMPTS, TOKENS, adapter=[tmp_path / "adapter" if i % 2 else None for i in range(9)])

    engine.watch(PROMPTS)
    answers = adapted()
    bare = engine.generate(PROMPTS, TOKENS)
    assert all(a != b for a, b in list(zip(answers, bare, strict=True))[1::2])
    assert accepted_share(engine, PROMPTS, answers, adapted) >= 0.9

    def constrained():
        return served.generate(engine, PROMPTS[:3], 30, grammars=served.GRAMMARS)

    engine.watch(PROMPTS[:3])
    answers = constrained()
    tokenizer = engine.llm.get_tokenizer()
    text = ["".join(tokenizer.convert_ids_to_tokens(answer[:-1])) for answer in answers]
    assert re.fullmatch(served.GRAMMARS[0]["regex"], text[0])
    assert text[1] in served.GRAMMARS[1]["choice"]
    assert accepted_share(engine, PROMPTS[:3], answers, constrained) >= 0.5  # short answers: a last step goes beyond the end
    assert engine.speculator.counters.eager == 0


def test_adaptive_verification(pair, engine_of):
    """Breaks if rows of drafts that were not checked count as context, or the draft leaves its graphs."""
    plain = drafts_of(engine_of(*pair))
    engine = engine_of(*pair, speculative={"enable_adaptive_verification": True})
    answers, proposals = drafts_of(engine)
    assert sum(a == b for a, b in zip(answers, plain[0], strict=True)) >= 0.7 * len(PROMPTS)
    assert agreement(proposals, plain[1]) >= 0.98
    assert engine.speculator.counters.eager == 0
