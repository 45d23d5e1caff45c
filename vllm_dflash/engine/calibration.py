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
FLATTEST, USUAL = 0.05, 0.5
"""Slope from which a factor still leads back, and the one to begin with: coefficients lie in memory that a deep sleep drops."""
_ONE_WARP = 256
"""Requests that vLLM's kernel counts with one warp; more of them, in powers of two, are programs of their own."""


class SteadyFit:
    """Stands before ``step`` of vLLM's ``OnlineAcceptanceEstimator``, whose kernels fit as ever.

    Args:
        estimator: vLLM's; its method is replaced on this one object. Coefficients keep their addresses, which graphs hold.
    """

    def __init__(self, estimator: Any) -> None:
        self._estimator, self._step = estimator, estimator.step
        estimator.REFIT_INTERVAL = REFIT_EVERY
        estimator.step = self.step
        self._compile()

    def step(self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """As vLLM's: idx_mapping int64 [B] request states, num_sampled and num_rejected int32 [B] of the verification."""
        estimator = self._estimator
        if estimator._steps_since_refit + 1 < REFIT_EVERY:
            self._step(idx_mapping, num_sampled, num_rejected)
            return
        slope, intercepts = estimator.slope.clone(), estimator.intercepts.clone()
        self._step(idx_mapping, num_sampled, num_rejected)
        torch.clamp(estimator.slope, slope / STRIDE, slope * STRIDE, out=estimator.slope)
        estimator.slope.nan_to_num_(nan=USUAL).clamp_(min=FLATTEST)
        torch.clamp(estimator.intercepts, intercepts - STRIDE, intercepts + STRIDE, out=estimator.intercepts)
        estimator.intercepts.nan_to_num_(nan=0.0).clamp_(-FARTHEST, FARTHEST)

    def _compile(self) -> None:
        """One round over requests that verify nothing: its kernels are compiled before the engine serves, for every batch."""
        most, device = self._estimator.features.shape[0], self._estimator.slope.device
        sizes = [1]
        while max(sizes[-1], _ONE_WARP) < most:
            sizes.append(min(2 * max(sizes[-1], _ONE_WARP), most))
        for number in range(max(REFIT_EVERY, len(sizes))):
            requests = sizes[min(number, len(sizes) - 1)]
            none = torch.zeros(requests, dtype=torch.int32, device=device)
            self.step(torch.zeros(requests, dtype=torch.int64, device=device), none + 1, none)
