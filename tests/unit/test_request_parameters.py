# SPDX-License-Identifier: Apache-2.0
"""``min_p`` and ``logit_bias`` on rows of drafts: each request's own rows, with numbers of drafts that differ, some without."""

import numpy as np
import torch

from vllm_dflash.engine.request_parameters import add_bias, mask_unlikely

COUNTS = np.array([2, 0, 1, 3])


def test_bias_reaches_the_rows_of_its_request_only():
    """Breaks if rows are counted from the wrong request, or if a request without drafts in this step ends the engine."""
    logits = torch.zeros(6, 5)
    add_bias(logits, {0: {1: 2.0}, 1: {0: 9.0}, 3: {4: -1.5, 2: 3.0}}, COUNTS)
    expected = torch.zeros(6, 5)
    expected[:2, 1] = 2.0
    expected[3:, 4], expected[3:, 2] = -1.5, 3.0
    assert torch.equal(logits, expected)


def test_min_p_is_a_share_of_the_likeliest_at_the_requests_temperature():
    """Breaks if min_p or temperature is another request's, if the share is of 1, or if a tie with the bound is masked.

    Two nats below the likeliest at temperature 1 are a share of 0.135, at temperature 4 one of 0.61.
    """
    logits = torch.tensor([[4.0, 2.0, 0.0, -9.0]]).repeat(6, 1)
    mask_unlikely(logits, np.array([0.3, 1.0, 0.0, 0.3], dtype=np.float32), torch.tensor([1.0, 1.0, 1.0, 4.0]), COUNTS)
    kept = torch.isfinite(logits).tolist()
    assert kept == [[True, False, False, False]] * 2 + [[True] * 4] + [[True, True, True, False]] * 3
    assert logits[3, 0] == 4.0  # temperature comes later, once
    tied = torch.tensor([[1.0, 1.0, 0.0]])
    mask_unlikely(tied, np.array([1.0], dtype=np.float32), torch.tensor([0.0]), np.array([1]))
    assert torch.isfinite(tied).tolist() == [[True, True, False]]
