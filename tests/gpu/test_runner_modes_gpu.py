# SPDX-License-Identifier: Apache-2.0
"""Modes of the engine with graphs and async scheduling, an engine each: planned widths, adapters and grammars, adaptive
verification, probabilistic drafts, sleep and wake-up. Sleep comes last: it allows one engine per process that uses it.
"""

import itertools
import re
from pathlib import Path

import pytest
import served
from gpu_engine import DRY, agreement, needs_gpu, prompts_for, watch_compiler

TOKENS = 40
VOCAB = 2048
PROMPTS = prompts_for(9)


def force(engine, widths):
    """The planner's next widths, in order."""
    import numpy as np

    from vllm_dflash.engine.planning import planning_of
    from vllm_dflash.planner.plan import Plan

    planner = planning_of(engine.llm.llm_engine.engine_core.engine_core.scheduler).planner
    known = set(planner.widths)

    def plan(names, *_, **__):
        width = next(widths)
        assert width in known
        return Plan(width, np.full(len(names), width), 1.0)

    planner.plan = plan
    return planner.widths


def test_planned_widths_compile_nothing_and_keep_the_text(pair, engine_of, monkeypatch, record_property):
    """Breaks if the first step of another width compiles a kernel, leaves its graph, or loses a row of context."""
    engine = engine_of(*pair, plugin={"planner": "on"}, max_num_seqs=16)
    widths = force(engine, itertools.repeat(7))
    ours, others = watch_compiler(monkeypatch)
    expected, _ = engine.drafts(PROMPTS)
    steps = [7, *widths, *reversed(widths)]
    for count in (1, 3, len(PROMPTS)):
        force(engine, itertools.cycle(steps))
        found = engine.generate(PROMPTS[:count])
        same = sum(a == b for a, b in zip(found, expected, strict=False))
        assert same >= (count if DRY else 0.7 * count - 1)
    record_property("compiled by vLLM", others)
    assert ours == []
    engine.stays_in_graphs()


@needs_gpu  # vLLM's adapters on CPUs do not take several rows of logits per request
def test_adapters_and_grammars_with_async_scheduling(pair, engine_of, tmp_path):
    """Breaks if async scheduling is off with our drafts, an adapter stops drafting, or a grammar loses or lets pass drafts."""
    target = Path(pair[0])
    served.write_tokenizer(target, VOCAB)
    served.write_adapter(tmp_path / "adapter", target, tmp_path / "merged")
    engine = engine_of(*pair, max_num_seqs=16, **served.options())
    assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    tokens = TOKENS

    def adapted():
        return served.generate(
            engine, PROMPTS, tokens, adapter=[tmp_path / "adapter" if i % 2 else None for i, _ in enumerate(PROMPTS)]
        )

    answers = adapted()
    bare = engine.generate(PROMPTS, tokens)
    assert all(a != b for a, b in list(zip(answers, bare, strict=True))[1::2])
    assert engine.accepted_share(PROMPTS, answers, adapted) >= 0.9

    def constrained():
        return served.generate(engine, PROMPTS[:3], 30, grammars=served.GRAMMARS)

    engine.watch(PROMPTS[:3])
    answers = constrained()
    tokenizer = engine.llm.get_tokenizer()
    text = ["".join(tokenizer.convert_ids_to_tokens(answer[:-1])) for answer in answers]
    assert re.fullmatch(served.GRAMMARS[0]["regex"], text[0])
    assert text[1] in served.GRAMMARS[1]["choice"]
    # Short answers: a last step goes beyond their end.
    assert engine.accepted_share(PROMPTS[:3], answers, constrained) >= 0.5
    engine.stays_in_graphs()


@needs_gpu
def test_adaptive_verification(pair, engine_of):
    """Breaks if rows of drafts that were not checked count as context, the draft leaves its graphs, or vLLM's cut stays."""
    from vllm_dflash.engine.draft_budget import DraftBudget

    answers, plain = engine_of(*pair, max_num_seqs=16).drafts(PROMPTS, TOKENS)
    engine = engine_of(*pair, speculative={"enable_adaptive_verification": True}, max_num_seqs=16)
    # A kernel that does not compile is a warning at start-up.
    assert isinstance(engine.runner.adaptive_verification.reallocate_drafts.__self__, DraftBudget)
    found, proposals = engine.drafts(PROMPTS, TOKENS)
    assert sum(a == b for a, b in zip(found, answers, strict=True)) >= 0.7 * len(PROMPTS)
    assert agreement(proposals, plain) >= 0.98
    engine.stays_in_graphs()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_probabilistic_drafts(pair, engine_of, temperature):
    """Random draws and the logit cache inside the graph; breaks if sampling falls back to eager steps or changes greedy text."""
    engine = engine_of(*pair, speculative={"draft_sample_method": "probabilistic"}, max_num_seqs=16)
    outputs = engine.generate(PROMPTS, 32, temperature=temperature, seed=1)
    assert all(len(tokens) == (12 if DRY else 32) for tokens in outputs)
    again = engine.generate(PROMPTS, 32, temperature=temperature, seed=1)
    assert sum(a == b for a, b in zip(outputs, again, strict=True)) >= 0.7 * len(PROMPTS)  # one seed, one text
    engine.stays_in_graphs()


@pytest.fixture(scope="module")
def sleeper(pair, engine_of):
    """(engine, its answers and proposals before it first sleeps)."""
    engine = engine_of(*pair, enable_sleep_mode=True, max_num_seqs=16)
    return engine, engine.drafts(PROMPTS, TOKENS)


@needs_gpu
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
    again, after = engine.drafts(PROMPTS, TOKENS)
    assert sum(a == b for a, b in zip(again, answers, strict=True)) >= 0.7 * len(PROMPTS)
    assert agreement(after, before) >= 0.98
    assert engine.accepted_share(PROMPTS, again, lambda: engine.generate(PROMPTS, TOKENS)) >= 0.9
    engine.stays_in_graphs()
