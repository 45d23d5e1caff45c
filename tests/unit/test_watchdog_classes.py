# SPDX-License-Identifier: Apache-2.0
"""What the watchdog makes of a scheduler's state, and what a user reads: without an engine, for any size of batch."""

from types import SimpleNamespace

import pytest

from vllm_dflash.acceptance import LONG_CONTEXT, VERY_LONG_CONTEXT, Class, Verdict
from vllm_dflash.engine import watchdog


def counted(running, calls=1, context=5):
    """What is handed to the statistics in ``calls`` verifications of a batch of ``running`` requests."""
    seen = []
    request = SimpleNamespace(num_preemptions=0, num_computed_tokens=context)
    scheduler = SimpleNamespace(running=[request] * running, requests={"one": request}, max_num_running_reqs=300)
    watch = watchdog.Watchdog(scheduler, SimpleNamespace(observe=lambda *call: seen.append(call) or ()))
    for _ in range(calls):
        watch.verified(7, 3, "one")
    return seen


@pytest.mark.parametrize(
    ("running", "of"),
    [(1, 0), (2, Class.FEW), (8, Class.FEW), (9, Class.SOME), (32, Class.SOME), (33, Class.MANY), (300, Class.MANY)],
)
def test_batches_belong_to_the_class_that_the_warning_names(running, of):
    """Breaks if a size goes to a class whose warning names other sizes, or if a full batch ends the watchdog."""
    assert set(counted(running, 13)) == {("one", 7, 3, of)}


@pytest.mark.parametrize(
    ("context", "of"),
    [
        (LONG_CONTEXT - 1, 0),
        (LONG_CONTEXT, Class.LONG),
        (VERY_LONG_CONTEXT - 1, Class.LONG),
        (VERY_LONG_CONTEXT, Class.LONG | Class.VERY_LONG),
    ],
)
def test_contexts_of_a_length_and_more(context, of):
    """Breaks if a context of exactly the length that a warning names is missed, or a very long one is not a long one too."""
    assert counted(1, context=context) == [("one", 7, 3, of)]


@pytest.mark.parametrize(("running", "every"), [(16, 1), (17, 3), (48, 3), (49, 7), (128, 7), (129, 13), (300, 13)])
def test_larger_batches_are_counted_by_sample(running, every):
    """Breaks if a step of a large batch costs more host time than one of a small batch, or if its requests are not counted."""
    assert len(counted(running, 3 * 7 * 13)) == 3 * 7 * 13 // every


@pytest.mark.parametrize(
    ("kind", "of", "parts"),
    [
        ("low", None, ["length is 1.15, near 1", "(below 2.50)", "another target"]),
        ("drop", None, ["length is 1.15, down from 2.50 before", "another kind of text"]),
        ("drop", Class.RESUMED, ["of preempted and resumed requests is 1.15, down from", "holes in the draft's context"]),
        ("behind", Class.CACHED, ["after prefix-cache hits is 1.15, against 2.50 of all other", "lack the draft's K/V"]),
        ("behind", Class.LONG, ["in contexts of 4,096 tokens and more", "trained on shorter contexts"]),
        ("behind", Class.VERY_LONG, ["in contexts of 32,768 tokens and more", "trained on shorter contexts"]),
        ("behind", Class.FEW, ["in batches of 2 to 8 is", "disturb each other's drafts"]),
        ("behind", Class.SOME, ["in batches of 9 to 32 is", "disturb each other's drafts"]),
        ("behind", Class.MANY, ["in batches of 33 and more is", "disturb each other's drafts"]),
    ],
)
def test_a_warning_names_the_class_the_figures_and_the_causes(kind, of, parts):
    """Breaks if a verdict is explained by another's words or causes, or if figures change places."""
    text = watchdog.warning(Verdict(kind, of, 1.15, 2.5, (0.09, 0.05, 0.01, 0.0, 0.5), 1234, 56))
    figures = ["over 1,234 verifications of 56 requests", "positions 1, 2, ...: 9%, 5%, 1%, 0%. The output is not affected"]
    for part in parts + figures:
        assert part in text
