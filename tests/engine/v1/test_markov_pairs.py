# SPDX-License-Identifier: Apache-2.0
"""Pairs with exactly known acceptance: numbers of drafts and accepted tokens, not only equal output."""

import pytest
from tiny_models import write_markov_pair


@pytest.mark.parametrize(("half", "rounds", "accepted"), [(False, 12, 35), (True, 24, 17)])
def test_known_acceptance(half, rounds, accepted, tmp_path, engine_of):
    """Breaks if verified positions are shifted against drafted ones, or if counters miss a step."""
    engine = engine_of(*write_markov_pair(tmp_path, half=half), speculative={"num_speculative_tokens": 7})
    answers, grown = engine.counted(lambda: engine.generate([[1, 40, 50, 22]], 41))
    start = [23, 24, 25, 26, 27, 28, 29, 30]
    assert answers[0] == start + ([10, 11] * 17 if half else [10] * 33)[: 41 - len(start)]
    assert (grown["num_drafts"], grown["num_accepted_tokens"]) == (rounds, accepted)
