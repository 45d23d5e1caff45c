# SPDX-License-Identifier: Apache-2.0
"""Confidences follow a change of text, with vLLM's own estimator and kernels."""

import pytest
import torch

K, REQUESTS = 3, 64


class Text:
    """Drafts whose chance of acceptance is ``sigmoid(feature + ease)``; ``play`` verifies all of them, step by step."""

    def __init__(self, estimator, seed=0):
        self.estimator, self.random = estimator, torch.Generator().manual_seed(seed)

    def play(self, ease, steps, requests=REQUESTS):
        """Mean confidence of first drafts in the last step; largest error of a step's mean by position in the last half."""
        estimator, errors = self.estimator, []
        states = torch.arange(requests)
        for step in range(steps):
            features = 3 + torch.randn(requests, K, generator=self.random)
            estimator.features[:requests] = features
            predicted = torch.sigmoid(estimator.slope * features + estimator.intercepts)
            estimator.predictions[:requests] = predicted
            chance = torch.sigmoid(features + ease)
            kept = (torch.rand(requests, K, generator=self.random) < chance).int().cumprod(1).sum(1).int()
            estimator.step(states, kept + 1, K - kept)
            if step >= steps // 2:
                errors.append(float((predicted - chance).mean(0).abs().max()))
        return float(predicted[:, 0].mean()), max(errors)


@pytest.fixture
def text():
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    from vllm_dflash.engine.calibration import SteadyFit

    estimator = OnlineAcceptanceEstimator(REQUESTS, K, torch.device("cpu"))
    SteadyFit(estimator)
    return Text(estimator)


def test_new_text_is_known_within_some_steps(text):
    """Breaks if a round throws coefficients past any probability (vLLM's own do here), or if rounds are long.

    Text that is never guessed drives predictions to zero, where a Newton step has no curvature to go by.
    """
    confidence, _ = text.play(-9.0, 200)
    assert confidence < 0.05
    text.play(-2.0, 32)
    confidence, error = text.play(-2.0, 16)
    assert confidence == pytest.approx(0.69, abs=0.1)
    assert error < 0.15


def test_few_observations_move_little(text):
    """Breaks if the rounds of a single request follow every accident of eight drafts."""
    text.play(-2.0, 160)
    before = text.estimator.intercepts.clone()
    text.play(-2.0, 8, requests=1)
    assert float((text.estimator.intercepts - before).abs().max()) < 0.5


def test_coefficients_keep_their_addresses(text):
    """Breaks if captured graphs go on reading the coefficients of the first round."""
    addresses = text.estimator.slope.data_ptr(), text.estimator.intercepts.data_ptr()
    text.play(-2.0, 20)
    assert (text.estimator.slope.data_ptr(), text.estimator.intercepts.data_ptr()) == addresses


def test_kernels_are_compiled_before_the_first_step(text):
    """Breaks if the first round that serves compiles, or the round that does it beforehand moves a coefficient."""
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    untouched = OnlineAcceptanceEstimator(REQUESTS, K, torch.device("cpu"))
    assert text.estimator._refits == 1
    torch.testing.assert_close(text.estimator.slope, untouched.slope)
    torch.testing.assert_close(text.estimator.intercepts, untouched.intercepts)


@pytest.mark.parametrize("lost", [0.0, float("nan")])
def test_coefficients_that_a_deep_sleep_took_come_back(text, lost):
    """Breaks if bounds are taken from what is lost: a slope of 0 would stay, and every draft promise the same."""
    for kept in (text.estimator.slope, text.estimator.intercepts, text.estimator.info, text.estimator.grad):
        kept.fill_(lost)
    text.play(-2.0, 64)
    confidence, error = text.play(-2.0, 16)
    assert confidence == pytest.approx(0.69, abs=0.1)
    assert error < 0.15


def test_every_size_of_batch_is_compiled_beforehand(monkeypatch):
    """Breaks if the first batch of more than 256 requests compiles while serving."""
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    from vllm_dflash.engine.calibration import SteadyFit

    seen, step = [], OnlineAcceptanceEstimator.step
    monkeypatch.setattr(OnlineAcceptanceEstimator, "step", lambda self, *args: seen.append(len(args[0])) or step(self, *args))
    for most, sizes in ((8, {1}), (256, {1}), (300, {1, 300}), (1024, {1, 512, 1024})):
        seen.clear()
        SteadyFit(OnlineAcceptanceEstimator(most, K, torch.device("cpu")))
        assert set(seen) == sizes
