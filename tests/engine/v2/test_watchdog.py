# SPDX-License-Identifier: Apache-2.0
"""Watchdog and self-check on Model Runner V2: the same counts as vLLM's own, and a look at the draft's cache."""

import copy
import logging

import pytest


@pytest.fixture
def said():
    """What the self-check logs."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.plugins.dflash")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def checking(engine):
    """``engine`` with the self-check of the option ``self_check``."""
    from vllm_dflash.engine.watchdog_self_check import V2Steps, attach

    config = copy.copy(engine.speculator.vllm_config)
    config.additional_config = {"vllm_dflash": {"self_check": True}}
    attach(engine.speculator, config, V2Steps)
    return engine


def test_counts_and_a_clean_self_check(engine, prompts, baseline, said):
    """Breaks if the scheduler hands over other figures with this runner, or if a sound engine is called faulty."""
    vars(engine.llm.llm_engine.engine_core.engine_core.scheduler).pop("_dflash_watchdog", None)
    before = engine.counters()
    assert checking(engine).generate(prompts, 24) == baseline(prompts, 24)
    after = engine.counters()
    watch = vars(engine.llm.llm_engine.engine_core.engine_core.scheduler)["_dflash_watchdog"].watch
    cells = watch._cells.values()
    counted = sum(cell.verifications for cell in cells), sum(n * c for cell in cells for n, c in enumerate(cell.accepted))
    assert counted == tuple(after[name] - before[name] for name in ("num_drafts", "num_accepted_tokens"))
    line = next(text for text in said if "self-check" in text)
    assert line.startswith(
        "DFlash self-check OK: hidden states finite; 9 of 9 drafts equal when drafted again, 9 when the K/V of"
    )


def test_a_damaged_cache_is_named(engine, prompts, baseline, said, monkeypatch):
    """K/V of a prompt are not stored; breaks if the check compares the cache with itself."""
    write = engine.speculator.draft_pass._write_context

    def lossy(states, positions, slots):
        write(states, positions, slots if states.shape[0] <= 4 else None)

    monkeypatch.setattr(engine.speculator.draft_pass, "_write_context", lossy)
    assert checking(engine).generate(prompts[2:3], 16) == baseline(prompts[2:3], 16)
    assert "with the K/V of its context computed again" in next(text for text in said if "self-check FAILED" in text)
