# SPDX-License-Identifier: Apache-2.0
"""How often plans are made: planning takes time of a host that may be behind."""

import numpy as np
import pytest

from vllm_dflash.planner.costs import StepCosts
from vllm_dflash.planner.planner import Planner
from vllm_dflash.planner.trimmed import TrimmedPlanner

ROWS = {0: 0, 1: 2, 3: 4, 7: 8}


def bare(rows):
    """Milliseconds of a pass, about those of an 8B model on an H200."""
    return 4.6 + 0.012 * rows


@pytest.mark.parametrize("kind", ["equal", "trimmed"])
def test_a_plan_without_drafts_is_not_made_again_and_again(kind):
    """Breaks if a batch that drafts nothing is planned for as often as one that does, which delays the steps of a host that is
    behind; or if one that decodes in every second step, with a prompt in the others, is planned for in every step."""
    names, hard, costs = [str(number) for number in range(128)], np.full((128, 7), 0.01), StepCosts(184.0)
    costs.measure_drafts((rows, (0.7 + 0.003 * rows) / 1e3) for rows in (8, 256, 2048))
    costs.verify.measure((rows, bare(rows) / 1e3) for rows in (1, 128, 1024))
    planner = TrimmedPlanner((0, 1, 3, 7), costs, ROWS.get)
    if kind == "equal":
        planner = Planner((0, 1, 3, 7), costs, ROWS.get, per_request=False)
    planner._clock = lambda: 0.0  # however long planning takes here, plans are made again soon
    while planner.plan(names, 0).width or planner._age < 200:
        width = planner._current.width if planner._current else 1
        planner.costs.observe(128 * (1 + width), 128 * (1 + width) if width else 0, 0, bare(128 * (1 + width)) / 1e3, 128)
        if width and kind == "trimmed":
            planner.note(names, hard[:, :width])
        elif width:
            planner.observe(names, [width] * 128, [0] * 128)
    planner._wait, plans, replan = 500, [], planner._replan

    def replanned(*args, **kwargs):
        plans.append(replan(*args, **kwargs))
        return plans[-1]

    planner._replan = replanned
    for _ in range(128):
        planner.plan(names, 0)
    assert len(plans) <= 3
    plans.clear()
    for number in range(64):
        planner.plan(names, 0, decoding=bool(number % 2))
    assert len(plans) <= 16
