# SPDX-License-Identifier: Apache-2.0
"""Many requests, drafts that promise more than they bring, a host whose speed moves: simulated as an 8B model on an H200."""

import numpy as np
import pytest

from vllm_dflash.planner.costs import StepCosts
from vllm_dflash.planner.trimmed import TrimmedPlanner

BARE = {1: 4.6, 32: 5.0, 64: 5.3, 128: 5.9, 256: 7.3, 512: 11.9, 1024: 22.3, 2048: 44.0}
"""Milliseconds of the target's pass by rows."""
DRAFT = {1: 0.9, 256: 1.2, 512: 1.85, 1024: 3.2, 2048: 6.7}
"""The same of the draft's, by query rows."""
QUERY_ROWS = {0: 0, 1: 2, 3: 4, 7: 8}
CONTEXT = 0.2
"""Of storing the draft's context where nothing is drafted."""
LAG = 2
"""Steps until the planner is told of one, as the scheduler is ahead."""


def between(table, rows):
    return np.interp(rows, list(table), list(table.values()))


class Machine:
    """Times of steps; the host slows down for 20 to 120 steps now and then, which shows where it is slower than the GPU."""

    def __init__(self, requests, slow, random):
        self.beyond, self._slow, self._random = 1.2 + 0.003 * requests, slow, random
        self._host, self._left = 8.6 * requests / 256, 0

    def gpu(self, rows, query_rows):
        return between(BARE, rows) + self.beyond + (between(DRAFT, query_rows) if query_rows else 0.0)

    def step(self, rows, query_rows, *, plugin=True):
        """Milliseconds."""
        if not self._left:
            self._left = int(self._random.integers(20, 120))
            self._now = self._host * (1.28 if self._random.random() < self._slow else 1.0)
        self._left -= 1
        gpu = self.gpu(rows, query_rows) + (CONTEXT if plugin and not query_rows else 0.0)
        return max(gpu, self._now) * (1.0 + 0.01 * self._random.standard_normal())


def budget(machine, expected, survival, requests, width):
    """Which drafts are verified: as many as pay by what is ``expected`` of them, and of those that came the best."""
    ranked = np.sort(expected, axis=None)[::-1]
    tokens = requests + np.concatenate([[0.0], np.cumsum(ranked)])
    count = int(np.argmax(tokens / machine.gpu(requests + np.arange(ranked.size + 1), requests * QUERY_ROWS[width])))
    kept = np.zeros(survival.size, dtype=bool)
    kept[np.argsort(-survival, axis=None)[:count]] = True
    return kept.reshape(survival.shape)


def serve(requests, level, truth, slow, seed, answers=4):
    """Tokens per second over those without speculation on the same machine; ``truth``: of a chance that is told, what is so."""
    random = np.random.default_rng(seed)
    machine, costs = Machine(requests, slow, random), StepCosts(184.0)
    costs.measure_drafts((rows, milliseconds / 1e3) for rows, milliseconds in DRAFT.items())
    costs.verify.measure((rows, milliseconds / 1e3) for rows, milliseconds in BARE.items())
    planner, tokens, spent = TrimmedPlanner(tuple(QUERY_ROWS), costs, QUERY_ROWS.get), 0.0, 0.0
    for answer in range(answers):
        names = [f"{answer}-{number}" for number in range(requests)]
        skill, have = random.normal(level, 0.8, (requests, 1)), np.zeros(requests)
        made, before, told = None, None, []
        while have.min() < 160:
            plan = planner.plan(names, 0)
            accepted, rows = np.zeros(requests), requests
            if made is not None:
                survival = np.cumprod(made, axis=1)
                expected = before if before is not None and before.shape == survival.shape else survival
                kept = budget(machine, expected, survival, requests, made.shape[1])
                accepted = np.cumprod((random.random(made.shape) < truth * made) & kept, axis=1).sum(1)
                before, rows = survival, requests + int(kept.sum())
            milliseconds = machine.step(rows, requests * QUERY_ROWS[plan.width])
            told.append((rows, plan, milliseconds / 1e3, int(requests + accepted.sum())))
            if len(told) > 2 * LAG:
                rows, of, seconds, came = told[-1 - LAG]
                costs.observe(rows, requests * QUERY_ROWS[of.width], 0, seconds, requests)
                if not of.probe and all(one.width == plan.width for _, one, *_ in told[-2 * LAG - 1 :]):
                    planner.came(of, seconds, came, requests)
            made = None
            if plan.width:
                odds = skill + random.normal(0, 1.5, (requests, 1)) + random.normal(0, 1.5, (requests, plan.width))
                made = 1.0 / (1.0 + np.exp(-odds))
                planner.note(names, made)
            have += 1 + accepted
            spent += milliseconds
        tokens += have.sum()
        planner.acceptance.forget(names)
    without = np.mean([machine.step(requests, 0, plugin=False) for _ in range(20_000)])
    return tokens / spent / (requests / without)


@pytest.mark.parametrize(("requests", "level", "truth"), [(256, 1.5, 0.8), (256, 1.2, 0.85), (128, -1.0, 0.5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_promises_that_are_not_kept_cost_a_large_batch_next_to_nothing(requests, level, truth, seed):
    """Breaks if confidences that are too high hold a batch to drafts: 0.88, 0.91, 0.85 of no speculation. Storing the draft's
    context is 2 % and more of what is allowed."""
    assert serve(requests, level, truth, 0.0, seed) > 0.96


@pytest.mark.parametrize(("requests", "level", "least"), [(128, 1.0, 1.3), (256, 1.5, 1.04), (256, 0.5, 0.97)])
@pytest.mark.parametrize("slow", [0.0, 0.25])
def test_promises_that_are_kept_are_believed(requests, level, least, slow):
    """Breaks if what is held against promises, or a host that slows down, keeps a batch from drafting that gains by it."""
    assert serve(requests, level, 1.0, slow, 0) > least
