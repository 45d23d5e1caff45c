# SPDX-License-Identifier: Apache-2.0
"""The companion of vLLM's acceptance estimator: the same numbers from odds as from whole logits, whatever the width."""

import pytest
import torch
from confidence_odds import odds_of

K = 3


def estimators(num_states=6):
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    made = tuple(OnlineAcceptanceEstimator(num_states, K, torch.device("cpu")) for _ in range(2))
    for estimator in made:
        estimator.intercepts.copy_(torch.tensor([-0.2, 0.1, -0.4]))
        estimator.features.fill_(9.0)
        estimator.predictions.fill_(9.0)
    return made


@pytest.mark.parametrize("width", [1, 2, K])
def test_odds_and_logits_give_the_same_confidences(width):
    """Features, predictions and confidences of vLLM's own path, for every width, from the second chunk of a batch on.

    Breaks if a narrow pass is read as one of K drafts, padding rows write over a live request, or a position that was not drafted
    keeps the confidence of another step.
    """
    from vllm_dflash.engine.confidence import DraftConfidence

    states = torch.tensor([4, -1, 0]).repeat_interleave(width)
    logits = torch.randn(3 * width, 50, generator=torch.Generator().manual_seed(width)) * 4
    logits[-1, 7] = 90.0  # certain: clamped
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5, 1.0])
    steps = {w: torch.arange(w, dtype=torch.int32).repeat(4) for w in (1, 2, K)}
    ours, vllms = estimators()
    confidence = torch.full((4, K), 0.7)
    companion = DraftConfidence(ours, confidence, steps, 4 * K)
    confidence.fill_(0.7)
    companion.of_odds(odds_of(logits, (states, temperature)), states, 1, width)
    expected = torch.full((3, K), 0.7)
    vllms.num_speculative_steps = width
    vllms.predict(logits, states, steps[width][: 3 * width], expected, temperature)
    torch.testing.assert_close(ours.features, vllms.features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.predictions, vllms.predictions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(confidence[[1, 3], :width], expected[[0, 2], :width], rtol=1e-4, atol=1e-5)
    assert (confidence[1:, width:] == 0).all()
    assert (confidence[0] == 0.7).all()
    assert (ours.features[[1, 2, 3, 5]] == 9.0).all()
    again = torch.full((4, K), 0.7)
    DraftConfidence(vllms, again, steps, 4 * K).of_logits(logits, states, steps[width], temperature, 1, width)
    torch.testing.assert_close(again[[1, 3]], confidence[[1, 3]], rtol=1e-4, atol=1e-5)
