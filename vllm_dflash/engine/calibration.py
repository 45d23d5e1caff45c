# SPDX-License-Identifier: Apache-2.0
"""Calibration of confidences that follows the text: short rounds, and no round moves a coefficient far.

vLLM's estimator fits a slope and a bias by position with one Newton step for each 100 steps that serve. Where predictions have
gone to an end, as after text that is never guessed, curvature is next to nothing and the step next to unbounded: the first round
of other text throws the bias past any probability, and all drafts are verified, or none, until a later one throws it back.
"""

from typing import Any

import torch

REFIT_EVERY = 8
"""Steps of a round: vLLM damps by the observations in it, so that few of them move little, whatever the length."""
STRIDE = 3.0
"""Log-odds by which a bias moves in one round at most, and the factor of a slope."""
FARTHEST = 6.0
"""Bias beyond which nothing is gained: 0.2 % is never, and the way back is two rounds."""


class SteadyFit:
    """Stands before ``step`` of vLLM's ``OnlineAcceptanceEstimator``, whose kernels fit as ever.

    Args:
        estimator: vLLM's; its method is replaced on this one object. Coefficients keep their addresses, which graphs hold.
    """

    def __init__(self, estimator: Any) -> None:
        self._estimator, self._step = estimator, estimator.step
        estimator.REFIT_INTERVAL = REFIT_EVERY
        estimator.step = self.step
        self._slope, self._intercepts = estimator.slope.clone(), estimator.intercepts.clone()
        self._compile()

    def _compile(self) -> None:
        """One round over a request that verifies nothing: its kernels are compiled before the engine serves."""
        none, device = torch.zeros(1, dtype=torch.int32, device=self._slope.device), self._slope.device
        for _ in range(REFIT_EVERY):
            self.step(torch.zeros(1, dtype=torch.int64, device=device), none + 1, none)

    def step(self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """As vLLM's: idx_mapping int64 [B] request states, num_sampled and num_rejected int32 [B] of the verification."""
        estimator = self._estimator
        rounds = estimator._refits
        self._step(idx_mapping, num_sampled, num_rejected)
        if estimator._refits == rounds:
            return
        slope, intercepts = estimator.slope, estimator.intercepts
        torch.clamp(slope, self._slope / STRIDE, self._slope * STRIDE, out=slope)
        torch.clamp(intercepts, self._intercepts - STRIDE, self._intercepts + STRIDE, out=intercepts).clamp_(-FARTHEST, FARTHEST)
        self._slope.copy_(slope)
        self._intercepts.copy_(intercepts)
