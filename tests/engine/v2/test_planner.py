# SPDX-License-Identifier: Apache-2.0
"""Widths that change from step to step on Model Runner V2: the text stays, the context stays in step, narrow blocks are whole."""

import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch

K = 7
PLANNED = {"vllm_dflash": {"planner": "on"}}


@pytest.fixture
def planned(target, make_draft, baseline, engine_of):  # the baseline's engine has to come first
    """An engine whose planner may choose, and its planner."""
    from vllm_dflash.engine.planning import planning_of

    engine = engine_of(target, _draft(make_draft), speculative={"num_speculative_tokens": K}, additional_config=PLANNED)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    planning = planning_of(scheduler)
    vars(planning.planner).pop("plan", None)
    planning.hold(None)
    return engine, planning.planner


_DRAFTS = []


def _draft(make_draft):
    if not _DRAFTS:
        _DRAFTS.append(make_draft(block=K + 1))
    return _DRAFTS[0]


def force(planner, widths):
    """Plans with the widths of an iterator, in order."""
    import numpy as np

    from vllm_dflash.planner.plan import Plan

    def plan(names, _context, **_):
        width = next(widths)
        return Plan(width, np.full(len(names), width), 1.0)

    planner.plan = plan


def any_width(seed):
    chooser = random.Random(seed)
    return iter(lambda: chooser.choice([0, 1, 2, 3, 5, 7]), None)


def test_a_held_width_teaches_nothing(planned, prompts):
    """Breaks if the fixed widths of a benchmark show the planner what to choose, also by what ends after the last of them."""
    from vllm_dflash.engine.planner_access import hold_width

    engine, planner = planned

    def known():
        return planner.acceptance.survival(["anyone"]).tolist(), planner.costs.seconds([2, 4, 16], [4, 8, 16], 100).tolist()

    engine.generate(prompts[:2], 12)
    before = known()
    for width in (7, 1):
        hold_width(engine.llm.llm_engine, width)
        engine.generate(prompts[:2], 12)
    hold_width(engine.llm.llm_engine, None)
    assert known() == before
    force(planner, iter(lambda: 7, None))  # otherwise it may choose to draft nothing
    engine.generate(prompts[:2], 12)
    assert known() != before


def test_text_is_the_targets_whatever_the_widths(planned, prompts, long_prompts, baseline):
    """Breaks if a step of another width leaves a hole in a cache, or a draft is verified that was not made in it."""
    engine, planner = planned
    force(planner, any_width(1))
    assert engine.generate(prompts, 14) == baseline(prompts, 14)
    assert engine.generate(long_prompts, 14) == baseline(long_prompts, 14)


def test_drafts_of_any_width_read_a_whole_context(planned, prompts, baseline):
    """Steps of random widths, none among them, then full ones: their drafts are those of an engine that never changed.

    Breaks if steps without drafts, or narrow ones, do not store the context.
    """
    engine, planner = planned
    force(planner, iter(lambda: K, None))
    steady = engine.watch(prompts)
    engine.generate(prompts, 18)
    early = set()
    mixed = engine.watch(prompts)

    def widths():
        yield from [1, 0, 0, 3, 2, 0, K, 1, 5]
        early.update(mixed)
        while True:
            yield K

    force(planner, widths())
    assert engine.generate(prompts, 18) == baseline(prompts, 18)
    later = [key for key in mixed if key not in early and key in steady]
    assert len(later) >= 20
    assert {key: mixed[key] for key in later} == {key: steady[key] for key in later}


def test_a_plan_is_told_what_came_of_its_own_steps(planned, prompts, monkeypatch):
    """Breaks if tokens of a prompt, of a plan before or of a held width are taken for what this plan brought."""
    from vllm_dflash.engine.planning import planning_of

    engine, planner = planned
    planning, told = planning_of(engine.llm.llm_engine.engine_core.engine_core.scheduler), []
    came = lambda plan, seconds, tokens, requests: told.append((plan.width, tokens, requests, seconds > 0))  # noqa: E731
    monkeypatch.setattr(planning, "_trimmed", SimpleNamespace(came=came, note=lambda *_: None))
    force(planner, itertools.chain([7] * 9, itertools.repeat(0)))
    engine.generate(prompts[:2], 40)
    widths = [width for width, *_ in told]
    assert widths == sorted(widths, reverse=True)
    assert 4 <= widths.count(7) <= 9 - 2
    assert all(requests == 2 and positive for _, _, requests, positive in told)
    assert {tokens for width, tokens, *_ in told if not width} == {2}
    assert sum(tokens for width, tokens, *_ in told if width) >= 2 * widths.count(7)
    told.clear()
    planning.hold(7)
    engine.generate(prompts[:2], 12)
    assert told == []


def test_a_narrow_step_runs_a_narrow_block(planned, prompts):
    """A step of width 1 is a block of 2 rows, not a wide one that is cut, and one of width 0 is none.

    Breaks if the width reaches the runner but not the draft pass.
    """
    from vllm_dflash.engine.planner_access import hold_width, report_of

    engine, _ = planned
    shapes = engine.speculator.buffers.shapes
    assert list(shapes) == [1, 3, 7]
    assert [shape.num_query_per_req for shape in shapes.values()] == [2, 4, 8]
    seen = []
    original = type(engine.speculator.draft_pass).run.__get__(engine.speculator.draft_pass)

    def run(num_reqs, *args, shape=None, **kwargs):
        seen.append(shape.num_query_per_req)
        return original(num_reqs, *args, shape=shape, **kwargs)

    engine.speculator.draft_pass.run = run
    try:
        for width, rows in ((1, 2), (2, 4), (3, 4), (5, 8), (7, 8)):
            seen.clear()
            hold_width(engine.llm.llm_engine, width)
            report_of(engine.llm.llm_engine, reset=True)
            engine.generate(prompts[:2], 6)
            assert set(seen) == {rows}
            report = report_of(engine.llm.llm_engine)
            assert list(report["widths"]) == [width]
            assert len(report["timeline"]) == 1
            assert report["seconds"] > 0
            assert report["verified"] >= width
        seen.clear()
        hold_width(engine.llm.llm_engine, 0)
        engine.generate(prompts[:2], 6)
        assert not seen
    finally:
        del engine.speculator.draft_pass.run


def test_replays_of_every_width_propose_what_eager_steps_do(planned, prompts, baseline, monkeypatch):
    """Every step runs padded to four requests, as a replay would, steps without drafts too, over what earlier steps left.

    Breaks if a narrow graph reads rows that its step did not write, or one of a width is replayed for another.
    """
    from vllm.platforms import current_platform

    from vllm_dflash.engine.graphs import CONTEXT_ONLY, DraftGraphManager

    engine, planner = planned
    speculator = engine.speculator
    force(planner, any_width(5))
    eager = engine.watch(prompts)
    assert engine.generate(prompts, 12) == baseline(prompts, 12)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda *_: None)
    manager = DraftGraphManager(speculator.vllm_config, torch.device("cpu"), K + 1, (4,), (CONTEXT_ONLY, 2, 4))
    manager._graphs_captured = True
    replayed = []

    def replay(desc):
        replayed.append(desc.uniform_token_count)
        if desc.uniform_token_count == CONTEXT_ONLY:
            speculator.draft_pass.store_staged(desc.num_reqs)
            return
        shape = next(s for s in speculator.buffers.shapes.values() if s.num_query_per_req == desc.uniform_token_count)
        bound = torch.full((desc.num_reqs,), speculator.max_model_len, dtype=torch.int32)
        metadata = speculator.attention.build(
            desc.num_reqs, speculator.max_model_len, bound, capture=False, num_query=shape.num_query_per_req
        )
        speculator.draft_pass.run(desc.num_reqs, shape.graph_context_rows(desc.num_reqs), metadata, shape=shape)

    manager.run_fullgraph = replay
    speculator.graphs, before = manager, speculator.graphs
    try:
        force(planner, any_width(5))
        padded = engine.watch(prompts)
        assert engine.generate(prompts, 12) == baseline(prompts, 12)
        assert padded == eager
        assert {CONTEXT_ONLY, 2, 4, 8} == set(replayed)
    finally:
        speculator.graphs = before


def test_verification_is_timed_where_a_planner_reads_it(planned, monkeypatch):
    """The real runner's dummy steps, on a host clock in place of CUDA events. Breaks if other rows are timed than recorded, or an
    engine without narrow draft graphs pays for it."""
    from vllm.platforms import current_platform

    from vllm_dflash.engine.graphs import CONTEXT_ONLY, DraftGraphManager
    from vllm_dflash.engine.verify_timing import time_verification
    from vllm_dflash.planner import measured

    class Event:
        def __init__(self, **_):
            self.at = 0.0

        def record(self):
            self.at = time.perf_counter()

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    engine, _ = planned
    runner, speculator = engine.runner, engine.speculator
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda *_: None)
    measured.forget()
    time_verification(runner, (1, 2))
    assert not measured.take_verifications()
    manager = DraftGraphManager(speculator.vllm_config, torch.device("cpu"), K + 1, (4,), (CONTEXT_ONLY, 4))
    monkeypatch.setattr(speculator, "graphs", manager)
    ran = []
    head = runner.model.compute_logits
    monkeypatch.setattr(runner.model, "compute_logits", lambda states: ran.append(states.shape[0]) or head(states))
    time_verification(runner, (1, 2))
    times = measured.take_verifications()
    assert [rows for rows, _ in times] == [1] * 3 + [2] * 3 + [8] * 3 + [16] * 3
    assert ran == [1] * 4 + [2] * 4 + [8] * 4 + [16] * 4
    assert all(0 < seconds < 60 for _, seconds in times)


def test_the_planner_is_off_where_it_is_told_to_be(engine):
    """Breaks if the option does not reach vLLM's configuration: K then stays what it is."""
    from vllm_dflash.engine.planned_widths import why_fixed
    from vllm_dflash.engine.planner_access import hold_width, report_of
    from vllm_dflash.engine.planning import planning_of

    with pytest.raises(ValueError, match="found an engine without a planner"):
        hold_width(engine.llm.llm_engine, 0)
    assert report_of(engine.llm.llm_engine) is None
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    assert planning_of(scheduler) is None
    assert why_fixed(scheduler.vllm_config) == 'option "planner" is off'
    assert scheduler.dynamic_sd_lookup is None


@pytest.mark.parametrize(
    ("option", "on_cpu", "layers", "hidden", "part"),
    [
        ("auto", False, 36, 4096, None),
        ("auto", False, 30, 576, "small"),
        ("auto", True, 30, 576, None),
        ("on", False, 30, 576, None),
        ("on", True, 30, 576, None),
        ("off", False, 36, 4096, "off"),
    ],
)
def test_when_k_follows_the_load(option, on_cpu, layers, hidden, part, monkeypatch):
    """Breaks if auto plans for a target that the host bounds, or not for one that the GPU bounds."""
    from vllm_dflash.engine import planned_widths

    monkeypatch.setattr(planned_widths, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    config = SimpleNamespace(
        additional_config={"vllm_dflash": {"planner": option}},
        use_v2_model_runner=True,
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers, get_hidden_size=lambda: hidden),
        speculative_config=SimpleNamespace(num_speculative_tokens_per_batch_size=None, enable_adaptive_verification=False),
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1, world_size=1),
    )
    reason = planned_widths.why_fixed(config)
    assert reason is None if part is None else part in reason


def test_a_fault_of_the_planner_does_not_end_the_engine():
    """Breaks if an exception in planning reaches the engine's loop, or the last planned width stays for good."""
    from vllm_dflash.plugin import _guarded

    def fails(_):
        raise ZeroDivisionError

    scheduler = SimpleNamespace(num_spec_tokens=7, dynamic_sd_lookup=[2, 2, 2], _vllm_dflash_planning=object())
    _guarded(scheduler, fails, None)
    assert scheduler._vllm_dflash_planning is None
    assert scheduler.dynamic_sd_lookup == [7, 7, 7]
