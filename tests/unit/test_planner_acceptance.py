# SPDX-License-Identifier: Apache-2.0
"""What the planner believes of acceptance, from verified steps alone."""

import numpy as np
import pytest

from vllm_dflash.planner.acceptance import AcceptanceStats


def test_acceptance_is_shrunk_to_the_population_and_forgets():
    """Breaks if a request is judged by a single step, by another request's, or forever by its past."""
    stats = AcceptanceStats(3)
    for _ in range(200):
        stats.observe(["good"], [3], [3])
    assert stats.survival(["good"])[0, 2] > 0.95
    assert stats.survival(["new"])[0, 2] > 0.9
    stats.observe(["new"], [3], [0])
    assert 0.6 < stats.survival(["new"])[0, 0] < 0.9
    for _ in range(60):
        stats.observe(["good"], [3], [0])
    assert stats.survival(["good"])[0, 0] < 0.15
    stats.forget(["good", "new", "unknown"])
    assert stats.survival(["good"])[0, 0] == stats.survival(["other"])[0, 0]


def test_the_first_drafts_of_a_step_tell_what_more_of_them_would_bring():
    """Breaks if positions behind a narrow width keep the odds of the text before: copies would be drafted for three at a time
    long after seven would pay."""
    stats, random = AcceptanceStats(7), np.random.default_rng(0)
    for _ in range(150):  # chat, at full width
        stats.observe(["a", "b"], [7, 7], np.minimum(random.geometric(0.45, 2) - 1, 7).tolist())
    chat = stats.survival(["new"])[0]
    assert chat[6] < 0.1
    stats.forget(["a", "b"])
    copies = [f"c{i}" for i in range(16)]
    for _ in range(6):  # copies, three at a time
        stats.observe(copies, [3] * 16, np.minimum(random.geometric(0.12, 16) - 1, 3).tolist())
    assert stats.survival(copies)[:, 6].mean() > 0.25
    assert stats.survival(["new"])[0, 6] > 3 * chat[6]
    for _ in range(200):  # for long: what nobody tries must not stay behind what everybody does
        stats.observe(copies, [3] * 16, np.minimum(random.geometric(0.12, 16) - 1, 3).tolist())
    stats.forget(copies)
    assert stats.survival(["next"])[0, 6] == pytest.approx(0.88**7, abs=0.12)
