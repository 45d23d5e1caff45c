# SPDX-License-Identifier: Apache-2.0
"""Which of the times between two calls of the scheduler are those of a step without drafts."""

from collections import deque
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("ahead", "steps", "told"),
    [
        (1, "dppp", [(64, 0)]),
        (1, "pppd", []),  # the host has prepared a step that drafts, which takes it longer than the GPU the plain one
        (1, "dppd", []),
        (1, "dddp", [(256, 256)]),
        (1, "dddd", [(256, 256)]),
        (0, "dp", [(64, 0)]),  # a scheduler that is not ahead has prepared the plain step itself
        (0, "pd", [(256, 256)]),
    ],
)
def test_a_step_without_drafts_is_timed_where_the_next_is_another(ahead, steps, told):
    """Breaks if what the host does for a step that drafts stands for the price of those without: of three that are tried one in
    two looks as dear as drafting, and a batch that drafts in vain goes on."""
    from vllm_dflash.engine.planning import StepPlanning, _Step

    found, heard = object.__new__(StepPlanning), []
    costs = SimpleNamespace(observe=lambda rows, query_rows, *_: heard.append((rows, query_rows)))
    found.planner, found._unlearnt, found._ahead = SimpleNamespace(costs=costs), 0, ahead
    kinds = {"d": _Step(64, 256, 256, 0, True, 3), "p": _Step(64, 64, 0, 0, True, 0)}
    found._steps = deque((kinds[kind] for kind in steps), maxlen=2 + 2 * ahead)
    found._learn(0.01)
    assert heard == told
