# SPDX-License-Identifier: Apache-2.0
"""What drafting brought, over what was promised: counted for the steps and the batch that it is of, believed for a while."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_dflash.planner.kept_promises import BOUNDS, KeptPromises
from vllm_dflash.planner.plan import Plan


def told(kept, steps, share, *, requests=256, width=3, rate=25_000.0, seconds=0.02):
    """``steps`` steps that brought ``share`` of what was promised."""
    for _ in range(steps):
        kept.note(requests, width, rate, seconds, share * rate * seconds)
    return kept


def test_a_share_is_what_came_over_what_was_promised():
    """Breaks if the first step counts for nothing, luck of one request for much, a fault that lasts for nothing, or no fault is
    too large to be believed."""
    assert KeptPromises().share(256, 3) == 1.0
    kept = told(KeptPromises(), 1, 1.0)
    assert kept.share(256, 3) == pytest.approx(1.0)
    assert told(kept, 100, 0.85).share(256, 3) == pytest.approx(0.85, abs=0.01)
    assert kept.share(256, 0) == 1.0
    alone = told(KeptPromises(), 8, 0.5, requests=1, rate=400.0, seconds=0.005)
    assert alone.share(1, 3) > 0.85
    assert told(alone, 92, 0.5, requests=1, rate=400.0, seconds=0.005).share(1, 3) < 0.7
    assert (told(KeptPromises(), 100, 0.1).share(256, 3), told(KeptPromises(), 100, 9.0).share(256, 3)) == BOUNDS


def test_a_stall_is_no_broken_promise():
    """Breaks if a step that took ten times as long, as another process had the machine, ends drafting."""
    kept = told(KeptPromises(), 40, 1.0)
    kept.note(256, 3, 25_000.0, 0.2, 500.0)
    assert kept.share(256, 3) > 0.97


def test_each_width_and_batch_size_keeps_promises_of_its_own():
    """Breaks if a width that keeps its promise pays for a wider one that does not, one that was never tried is trusted, or what
    256 requests were like decides for 8."""
    kept = told(KeptPromises(), 100, 0.75, width=7)
    assert kept.share(256, 3) == pytest.approx(0.75, abs=0.02)
    assert kept.share(8, 3) == kept.share(8, 7) == 1.0
    told(kept, 60, 1.0)
    assert kept.share(256, 3) == pytest.approx(1.0, abs=0.02)
    assert kept.share(256, 7) < 0.85


@pytest.mark.parametrize("requests", [64, 256])
def test_what_was_found_is_forgotten(requests):
    """Breaks if a bad time ends a width for thousands of steps, whether others are used meanwhile or none, or for no time."""
    for pause in (lambda kept: kept.rest(requests), lambda kept: told(kept, 1, 1.0, requests=requests, width=1)):
        kept = told(KeptPromises(), 100, 0.8, requests=requests, rate=100.0 * requests)
        shares = []
        for _ in range(3):
            for _ in range(512):
                pause(kept)
            shares.append(kept.share(requests, 3))
        assert 0.85 < shares[0] < 0.95
        assert shares[2] > 0.97


def test_other_batch_sizes_leave_what_was_found():
    """Breaks if steps of 8 requests make what 256 lost by drafting forgotten: the next large batch would lose as much again."""
    kept = told(KeptPromises(), 100, 0.8)
    before = kept.share(256, 3)
    told(kept, 600, 1.0, requests=8)
    for _ in range(600):
        kept.rest(8)
    assert kept.share(256, 3) == before


@pytest.mark.parametrize(("requests", "least", "most"), [(1, 0.75, 0.95), (8, 0.5, 0.75), (256, 0.4, 0.5)])
def test_what_few_requests_were_like_says_little_of_the_next(requests, least, most):
    """Breaks if one hard answer keeps the next from drafting for hundreds of steps, or if what hundreds of requests told of the
    confidences is forgotten with them."""
    kept = told(KeptPromises(), 160, 0.45, requests=requests, rate=400.0 * requests, seconds=0.005)
    assert kept.share(requests, 3) < 0.6
    kept.others(requests)
    assert least < kept.share(requests, 3) < most
    if requests == 1:
        assert told(kept, 40, 1.0, requests=1, rate=400.0, seconds=0.005).share(1, 3) > 0.88


def test_others_are_others_once_they_have_come():
    """Breaks if a batch whose requests are replaced one by one forgets what it has lost, or one of new requests does not."""
    from vllm_dflash.planner.costs import StepCosts
    from vllm_dflash.planner.trimmed import TrimmedPlanner

    planner, calls = TrimmedPlanner((0, 3), StepCosts(184.0), lambda width: width + 1), []
    planner.kept.others = calls.append
    for first in range(0, 64, 2):
        planner.plan([str(number) for number in range(first, first + 8)], 0)
    assert calls == [8]  # the first of all
    planner.plan(["x", "y"], 0)
    assert calls == [8, 2]


def planning(ahead, heard):
    """A ``StepPlanning`` with a plan of 3 drafts for 8 requests in force; what its planner is told goes to ``heard``."""
    from vllm_dflash.engine.planning import StepPlanning

    found = object.__new__(StepPlanning)
    found._trimmed = SimpleNamespace(came=lambda _plan, *rest: heard.append(rest))
    found._plan, found._unlearnt, found._came, found._ahead = Plan(3, np.full(8, 3), 1000.0), 0, 20, ahead
    found._steps = deque(maxlen=2 + 2 * ahead)
    return found


def steps(*requests, width=3, decode_only=True):
    from vllm_dflash.engine.planning import _Step

    return [_Step(count, count * 4, count * 4, 0, decode_only, width) for count in requests]


@pytest.mark.parametrize(
    ("ahead", "flight", "expected"),
    [
        (0, steps(64, 65), [(0.02, 20, 65)]),
        (1, steps(64, 64, 64, 65), [(0.02, 20, 64)]),  # its tokens are those of the step before the last
        (1, steps(256, 256, 256, 32), []),  # a batch that has ended: the tokens are of all, the last step is of few
        (1, steps(64, 64), []),
        (1, [*steps(64, 64, 64), *steps(64, width=1)], []),
        (1, [*steps(64, decode_only=False), *steps(64, 64, 64)], []),
    ],
)
def test_tokens_are_told_of_steps_alike(ahead, flight, expected):
    """Breaks if tokens of a large batch are set against the promise to a small one, of a prompt's step or of another width's."""
    heard = []
    found = planning(ahead, heard)
    found._steps.extend(flight)
    found._settle(0.02)
    assert heard == expected


def test_a_probe_and_a_held_width_are_no_promise():
    """Breaks if one step at another width counts as what the plan brought."""
    heard = []
    for change in ({"_plan": Plan(3, np.full(8, 3), 1000.0, probe=True)}, {"_unlearnt": 1}, {"_plan": None}, {"_trimmed": None}):
        found = planning(0, heard)
        vars(found).update(change)
        found._steps.extend(steps(64, 64))
        found._settle(0.02)
    assert heard == []


def test_a_planner_rests_where_it_drafts_nothing():
    """Breaks if what was found while drafting never fades without: the batch would not draft again. Or if a larger or smaller
    batch than the plan's counts."""
    from vllm_dflash.planner.costs import StepCosts
    from vllm_dflash.planner.trimmed import TrimmedPlanner

    planner = TrimmedPlanner((0, 3), StepCosts(184.0), lambda width: width + 1)
    names = [str(number) for number in range(64)]
    planner.plan(names, 0)
    for _ in range(60):
        planner.came(Plan(3, np.full(64, 3), 6400.0), 0.02, 100, 64)
    before = planner.kept.share(64, 3)
    assert before < 0.9
    for other in (40, 61, 67, 90):  # other batches than the plan's
        planner.came(Plan(3, np.full(64, 3), 6400.0), 0.02, 0, other)
        assert planner.kept.share(64, 3) == before
    for _ in range(600):
        planner.came(Plan(0, np.zeros(64), 6400.0), 0.02, 64, 64)
    assert planner.kept.share(64, 3) > before + 0.05
