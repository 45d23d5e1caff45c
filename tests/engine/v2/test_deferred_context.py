# SPDX-License-Identifier: Apache-2.0
"""Context of plain steps that waits on the device (Model Runner V2): drafts are those of an engine in which nothing waits.

Each run is done twice on one engine, the second time with every step's context stored in it. Few KV blocks, so that they change
hands while rows wait, and a prefix cache, through which others find them.
"""

import random
from types import SimpleNamespace

import pytest
import torch
import vllm

K, PAGE = 7, 32
TEXT = [(7 * i * i + 3 * i + 11) % 90 for i in range(70)]
PROMPTS = [
    TEXT[:40],
    [9, 8, 7],
    [*TEXT[:33], 1, 2, 3],
    TEXT[:65],
    [50, 41],
    [*TEXT[:32], 4],
    [5, *TEXT[:35]],
    [60, 2, 9],
    TEXT[:40],
]
LENGTHS = [30, 45, 20, 12, 50, 25, 14, 40, 28]


PLANNED = {"speculative": {"num_speculative_tokens": K}, "additional_config": {"vllm_dflash": {"planner": "on"}}}


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "a step ahead"])
def engine(request, target, make_draft, engine_of):
    if request.param:
        if vllm.__version__.startswith("0.32"):
            pytest.skip("dear under the interpreter; GPUs run newer vLLMs")
        request.getfixturevalue("allowed")
    engine = engine_of(
        target,
        make_draft(block=K + 1),
        **PLANNED,
        enable_prefix_caching=True,
        block_size=PAGE,
        async_scheduling=request.param,
        num_gpu_blocks_override=7,  # four requests need 8 or more, and one is vLLM's own: some are preempted
    )
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    assert type(scheduler).__name__ == ("AsyncScheduler" if request.param else "Scheduler")
    return engine


@pytest.fixture
def compare(engine, monkeypatch):
    """``action() -> result`` run with rows that wait and without: (result, drafts, what the counters say) of both runs."""
    from vllm_dflash.engine.graphs import StepCounters

    def run(action, prompts):
        engine.llm.reset_prefix_cache()
        engine.speculator.counters = StepCounters()
        drafts = engine.watch(prompts)
        return action(), drafts, engine.speculator.counters

    def both(action, prompts):
        waiting = run(action, prompts)
        assert waiting[2].deferred_rows > 0
        with monkeypatch.context() as patch:
            patch.setattr(engine.speculator, "deferred", None)
            at_once = run(action, prompts)
        assert at_once[2].deferred_rows == 0
        assert at_once[2].context_only == waiting[2].context_only
        return waiting, at_once

    yield both
    hold(engine, None)


def hold(engine, width):
    from vllm_dflash.engine.planner_access import hold_width

    hold_width(engine.llm.llm_engine, width)


def follow(engine, widths):
    """Have the planner choose the widths of an iterator."""
    import numpy as np

    from vllm_dflash.engine.planning import planning_of
    from vllm_dflash.planner.planner import Plan

    def plan(names, _context, **_):
        width = next(widths)
        return Plan(width, np.full(len(names), width), 1.0)

    planner = planning_of(engine.llm.llm_engine.engine_core.engine_core.scheduler).planner
    planner.plan = plan
    return planner


def serve_in_spells(engine, seed):
    """All prompts, in spells without drafts of any length, and a few steps with drafts between them."""
    chooser = random.Random(seed)

    def widths():
        while True:
            yield from [0] * chooser.choice([1, 2, 5, 9, 14])
            yield from [K] * chooser.choice([1, 1, 2])

    planner = follow(engine, widths())
    try:
        return engine.generate(PROMPTS, each=[{"max_tokens": length} for length in LENGTHS])
    finally:
        del planner.plan


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])  # 25 CPU seconds each, both ways
def test_drafts_are_those_of_steps_that_store_at_once(engine, compare, seed):
    """Plain spells of any length, while requests come, end, are preempted, share prefixes and take each other's blocks.

    Breaks if a waiting row is lost, is stored twice or late, or reaches a block that has changed hands.
    """

    before = preemptions(engine)
    waiting, at_once = compare(lambda: serve_in_spells(engine, seed), PROMPTS)
    assert waiting[0] == at_once[0]
    assert waiting[1] == at_once[1]
    assert len(waiting[1]) > 20
    assert waiting[2].deferred_rows > 2 * waiting[2].catch_ups > 10
    assert preemptions(engine) >= before + 2  # in both runs


def test_a_cached_prefix_brings_the_rows_that_wait(engine, compare, monkeypatch):
    """A request ends while rows of its last blocks wait; the next one finds these in the cache and drafts at once.

    Breaks if what waits is dropped with its request, or stored behind the drafts that read it.
    """
    from vllm_dflash.engine import deferred_context

    monkeypatch.setattr(deferred_context, "MOST_STEPS", 2 * PAGE)  # 0.32 recomputes the last cached block

    def serve():
        hold(engine, 0)
        (answer,) = engine.generate([TEXT[:40]], 61)
        left = len(engine.speculator.deferred or ())
        text = TEXT[:40] + answer
        hold(engine, K)
        before = hits(engine)
        return engine.generate([text], 12), left, hits(engine) - before

    waiting, at_once = compare(serve, [TEXT[:40], range(101)])
    assert waiting[0][1] == 60  # from position 40 on
    assert waiting[0][2] >= 2 * PAGE
    assert waiting[0][0] == at_once[0][0]
    assert waiting[1] == at_once[1]
    assert waiting[1]


def test_a_full_memory_is_emptied(engine, compare):
    """Breaks if rows beyond what the memory holds are lost, or nothing is stored before somebody drafts."""
    from vllm_dflash.engine.deferred_context import MOST_STEPS

    spell = 2 * MOST_STEPS + 5

    def serve():
        widths = iter([0] * spell + [K] * 40)
        planner = follow(engine, widths)
        try:
            return engine.generate([[50, 41]], spell + 20)
        finally:
            del planner.plan

    waiting, at_once = compare(serve, [[50, 41]])
    assert waiting[:2] == at_once[:2]
    assert waiting[1]
    assert waiting[2].catch_ups == 3  # twice full, then before the first drafts


def test_nothing_waits_through_another_kv_cache(engine):
    """Breaks if rows of a KV cache that was replaced are stored in the next one, which may have fewer slots."""
    hold(engine, 0)
    engine.generate([[50, 41]], 9)
    assert len(engine.speculator.deferred) > 0
    assert f"up to {engine.speculator.deferred.max_rows} rows waits" in str(engine.speculator.capability)
    engine.runner.initialize_kv_cache(engine.runner.kv_cache_config)
    assert len(engine.speculator.deferred) == 0
    hold(engine, None)


def test_blocks_that_other_layers_may_get_are_written_at_once(target, make_draft, engine_of):
    """A windowed layer makes a second KV group, and a block may go from one to the other.

    Breaks if rows wait there: stored behind the target's next pass they would be in the place of its K/V, which changes the text.
    """
    windowed = ("layer_types", ["sliding_attention", "full_attention"]), ("use_sliding_window", True), ("sliding_window", 64)
    engine = engine_of(target, make_draft(block=K + 1, config=windowed), **PLANNED, block_size=PAGE)
    assert len(engine.runner.kv_cache_config.kv_cache_groups) > 1
    hold(engine, 0)
    engine.generate([[50, 41]], 4)
    counters = engine.speculator.counters
    assert (counters.context_only > 0, counters.deferred_rows) == (True, 0)
    assert "waits" not in str(engine.speculator.capability)


def hits(engine):
    return metric(engine, "prefix_cache_hits")


def preemptions(engine):
    return metric(engine, "num_preemptions")


def metric(engine, name):
    return next(m.value for m in engine.llm.get_metrics() if m.name == f"vllm:{name}")


def batch(*names, **fields):
    plain = {"num_reqs": len(names), "num_tokens": len(names), "num_draft_tokens": 0, "has_prefill": False}
    return SimpleNamespace(req_ids=list(names), **plain | fields)


@pytest.fixture
def memory():
    from vllm_dflash.engine.deferred_context import DeferredContext

    return DeferredContext(34, 3, torch.float32, torch.device("cpu"))


def add(memory, names, first):
    rows = torch.arange(first, first + len(names))
    memory.add(names, rows, rows.unsqueeze(0) + 100).copy_(rows.unsqueeze(1).expand(-1, 3))


def test_rows_come_back_as_they_were_added(memory):
    """Breaks if a row's states, position and slot part, or rows come twice."""
    add(memory, ["a", "b"], 0)
    add(memory, ["a", "b"], 2)
    assert len(memory) == 4
    aux, positions, slots = memory.take()
    assert aux.tolist() == [[row] * 3 for row in range(4)]
    assert positions.tolist() == [0, 1, 2, 3]
    assert slots.tolist() == [[100, 101, 102, 103]]
    assert len(memory) == 0
    add(memory, ["c"], 9)
    assert [part.flatten().tolist() for part in memory.take()] == [[9, 9, 9], [9], [109]]


def test_rows_wait_for_their_own_requests_only(memory):
    """Breaks if rows wait on while a block may change hands: another request, fewer, or the same ones in other places."""
    add(memory, ["a", "b"], 0)
    assert memory.continues(batch("a", "b"))
    for names in (["a"], ["b", "a"], ["a", "c"], ["a", "b", "c"]):
        assert not memory.continues(batch(*names))
    for first in range(2, 34, 2):
        assert memory.continues(batch("a", "b"))
        add(memory, ["a", "b"], first)
    assert not memory.continues(batch("a", "b"))  # full
    memory.drop()
    assert memory.continues(batch("c"))


@pytest.mark.parametrize(
    ("fields", "suits"),
    [({}, True), ({"num_tokens": 3}, False), ({"num_draft_tokens": 1}, False), ({"has_prefill": True}, False)],
)
def test_only_plain_decode_steps_wait(memory, fields, suits):
    """Breaks if rows of a prompt wait, whose request may be a resumed one with other blocks, or rows that were rejected do."""
    assert memory.suits(batch("a", "b", **fields)) == suits


def test_a_batch_that_fills_the_memory_at_once_does_not_wait(memory):
    """Breaks if a large batch pays for copies and gains nothing."""
    assert not memory.suits(batch("a", "b", "c"))


@pytest.mark.parametrize(
    ("max_requests", "row_bytes", "rows"), [(1, 40_960, 32), (4, 40_960, 128), (256, 40_960, 512), (256, 131_072, 256)]
)
def test_memory_is_bounded_in_steps_rows_and_bytes(max_requests, row_bytes, rows):
    """Breaks if an engine for many requests, or a wide target, takes hundreds of MiB."""
    from vllm_dflash.engine.deferred_context import capacity

    assert capacity(max_requests, row_bytes) == rows


@pytest.mark.parametrize(
    ("parallel", "changes", "window", "reason"),
    [
        ({}, {}, 2048, None),
        ({}, {}, None, None),
        ({"data_parallel_size": 2}, {}, None, "data-parallel"),
        ({"pipeline_parallel_size": 2}, {}, None, "pipeline"),
        ({"decode_context_parallel_size": 2}, {}, None, "share requests"),
        ({"prefill_context_parallel_size": 2}, {}, None, "share requests"),
        ({}, {"kv_transfer_config": object()}, None, "connector"),
        ({}, {"dynamic": False}, None, "every step drafts"),
        ({}, {}, 16, "window"),
    ],
)
def test_where_nothing_may_wait(parallel, changes, window, reason):
    """Breaks if rows wait where a block is read, saved or given away before they are stored."""
    from vllm_dflash.engine.deferred_context import why_at_once

    sizes = dict.fromkeys(("data", "pipeline", "decode_context", "prefill_context"), 1)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{f"{name}_parallel_size": size for name, size in sizes.items()} | parallel),
        speculative_config=SimpleNamespace(uses_dynamic_speculative_decoding=lambda: changes.get("dynamic", True)),
        kv_transfer_config=changes.get("kv_transfer_config"),
    )
    draft = SimpleNamespace(layers=[SimpleNamespace(window=window, frees=True)])
    found = why_at_once(config, draft)
    assert found is None if reason is None else reason in found
