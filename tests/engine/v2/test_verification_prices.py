# SPDX-License-Identifier: Apache-2.0
"""What a cut is worth: rows by the planner's own timing, in graphs of certain sizes, and only what is surely saved."""

from types import SimpleNamespace

import numpy as np
import pytest
from trimming_steps import EASY, HARD, K, budget, curves, priced_of, trimmer_of


@pytest.fixture
def priced(monkeypatch):
    return priced_of(trimmer_of(monkeypatch))


def test_a_cut_that_saves_next_to_nothing_is_not_made(priced):
    """Breaks if drafts are given up for a saving that is smaller than what prices are wrong by, or that only a bad time of larger
    steps promises: while weights are read rows cost next to nothing."""
    manager, places = priced._manager, {"a": 2, "b": 0}
    manager._stale_confidences[manager._stale_idx].np[[2, 0]] = [EASY, HARD]
    manager.cost_tables = curves(1.0, 0.3)
    assert budget(priced, places) == K  # 3 of 6 rows are 12 % of the step
    manager.cost_tables, priced._prices = curves(1.0, 0.05), None
    manager._max_total_logits = 2 + 2 * K
    assert budget(priced, places) == 2 * K
    assert manager._batch_budget[2] == 2 * K
    manager._max_total_logits = 2 + K + 1
    assert budget(priced, places) == K + 1  # more have no room
    manager._max_total_logits, steep = 2 + 2 * K, curves(1.0, 0.5)
    priced._prices._by_width = {K: steep}
    assert budget(priced, places) == 2 * K
    priced._prices._by_width, priced._prices.bare = {K: steep}, curves(1.0, 0.3)[1]
    assert budget(priced, places) == 2 * K  # 5 % of the step
    priced._prices.bare = curves(1.0, 0.4)[1]
    assert budget(priced, places) == K  # 8 %
    priced._prices._by_width[K] = steep[0] + 20.0, steep[1]  # of so dear a step the same saving is next to nothing
    assert budget(priced, places) == 2 * K


def test_what_the_roofline_explains_is_saved_whatever_strays():
    """Breaks if two sizes that differ by what any two do are a saving, or a large batch must save more than it pays for."""
    from vllm_dflash.engine.verification_prices import surely_saved

    assert surely_saved(5.0, 5.2, 44, 64) == pytest.approx(5.2 * 0.0289, rel=0.01)  # 1.0282 / 1.0588 by a knee of 184
    assert surely_saved(5.0, 5.2, 8, 16) < 0.02
    assert surely_saved(7.0, 8.4, 184, 256) == pytest.approx(1.4)
    assert surely_saved(5.0, 10.0, 8, 16) == pytest.approx(4.5)  # of other weights than the knee is of
    assert surely_saved(5.2, 5.2, 44, 64) == 0.0


def test_rows_are_priced_as_the_planner_timed_them(priced, monkeypatch):
    """Breaks if drafts are as dear as requests with contexts of their own, which vLLM times: they would be cut for nothing."""
    from vllm_dflash.planner import confidences as mailbox
    from vllm_dflash.planner.costs import StepCosts

    manager, places = priced._manager, {"a": 2, "b": 0}
    manager._stale_confidences[manager._stale_idx].np[[2, 0]] = [EASY, HARD]
    manager.cost_tables = dear = curves(1.0, 0.5)
    assert budget(priced, places) == K
    costs = StepCosts(184.0)
    monkeypatch.setattr(mailbox, "_COSTS", [costs])
    priced._prices = None
    manager.cost_tables = dear
    assert budget(priced, places) == K  # nothing was timed
    costs.verify.measure([(1, 5e-3), (64, 5.4e-3)])
    priced._prices._steps = 0
    assert budget(priced, places) == 2 * K
    assert priced._prices.bare[[1, 64 - 1]] == pytest.approx([5.0, 5.4], rel=0.01)
    costs.verify.measure([(1, 6e-3), (64, 9e-3)])
    priced._prices._steps = 0
    assert budget(priced, places) == 2 * K
    assert priced._prices.bare[1] == pytest.approx(5.0)  # timed once


def test_rows_that_a_graph_pads_anyway_are_free(priced, monkeypatch):
    """Breaks if a cut ends between two graph sizes: the rows up to the next are computed whatever they hold."""
    from vllm_dflash.engine.verification_prices import padded
    from vllm_dflash.planner import confidences as mailbox
    from vllm_dflash.planner.costs import StepCosts

    assert padded(64, [8, 16, 32])[[1, 8, 9, 17, 32, 33, 40, 63]].tolist() == [8, 8, 16, 32, 32, 33, 40, 63]
    assert padded(4, ()).tolist() == [0, 1, 2, 3]
    costs = StepCosts(184.0)
    costs.verify.measure([(8, 5e-3), (16, 8e-3), (32, 12e-3)])
    monkeypatch.setattr(mailbox, "_COSTS", [costs])
    manager, places = priced._manager, {"a": 2, "b": 0, "c": 5}
    manager.cost_tables, priced._graph_sizes = curves(1.0, 0.5), [8, 16, 24, 32]
    manager._stale_confidences[manager._stale_idx].np[[2, 0, 5]] = [EASY, EASY, [0.05, 0.05, 0.05]]
    assert budget(priced, places) == 8 - len(places)  # 9 drafts and 3 anchors would be padded to 16 rows
    assert priced._prices.bare[[1, 8, 9, 16]] == pytest.approx([5.0, 5.0, 8.0, 8.0], rel=0.01)


def test_more_requests_than_were_timed_cost_more(monkeypatch):
    """Breaks if the draft pass of a very large batch costs what the largest did that was timed: too much would be cut."""
    from vllm_dflash.engine import verification_prices

    monkeypatch.setattr(verification_prices, "_DRAFTS", [])
    monkeypatch.setattr(verification_prices, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    verification_prices.note_draft_times([(rows, 1e-6 * rows) for rows in (8, 512, 2048)])
    prices = verification_prices.draft_prices(8, np.zeros(1025))
    assert prices[[64, 256]] == pytest.approx([0.512, 2.048], rel=0.05)
    assert prices[[512, 1024]] == pytest.approx([4.096, 8.192], rel=0.05)


def test_prices_follow_what_steps_take(priced, monkeypatch):
    """Breaks if a steady batch is cut by the prices of its first step, another batch or other curves wait for new ones, or a
    narrow pass is paid for as a wide one."""
    from vllm_dflash.engine import verification_prices
    from vllm_dflash.planner import confidences as mailbox

    manager, seconds = priced._manager, {1: 0.1, 2: 0.2}
    monkeypatch.setattr(mailbox, "_COSTS", [])
    monkeypatch.setattr(mailbox, "observed_costs", lambda requests: [(4, seconds[requests])])
    monkeypatch.setattr(verification_prices, "_DRAFTS", [])
    monkeypatch.setattr(verification_prices, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    verification_prices.note_draft_times([(rows, 1e-3 * rows) for rows in (2, 4, 8)])
    priced._set_curves = lambda *tables: setattr(manager, "cost_tables", tables)
    for places in ({"a": 2}, {"a": 2, "b": 0}):
        budget(priced, places)
        assert manager.cost_tables[1][4] == pytest.approx(1e3 * seconds[len(places)])
    seconds[2] = 0.4
    for _ in range(verification_prices._REPRICE):
        budget(priced, places)
    assert manager.cost_tables[1][4] == pytest.approx(400.0)
    drafting = []
    for drafts in (1, K):
        budget(priced, places, drafts)
        drafting.append(manager.cost_tables[0][2])
    assert drafting == [4.0, 8.0]
    verification_prices.note_draft_times([])
    manager.set_cost_curves(*curves(3.0, 0.0))
    seconds[2] = 0.3
    budget(priced, places)
    assert manager.cost_tables[0][2] == pytest.approx(3.0)
    assert manager.cost_tables[1][4] == pytest.approx(300.0)
