# SPDX-License-Identifier: Apache-2.0
"""Confidences of drafts for vLLM's adaptive verification, without whole logits and for drafts of every width.

vLLM's estimator (``acceptance_estimator.OnlineAcceptanceEstimator``) predicts acceptance from one feature of the draft's
distribution q at a position: the log-odds of its most likely token, ``log(q / (1 - q))``. The fused heads deliver the odds
against that token, ``(1 - q) / q``, with the token itself. Its own kernel then turns them into feature, prediction and
confidence, so that what is fitted and what is admitted stays vLLM's.

The feature depends on the distribution alone and never on a drawn token: cutting drafts by it leaves the output's law as it is.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import _MAX_LOG_ODDS, OnlineAcceptanceEstimator, _predict_kernel


class DraftConfidence:
    """Writes features, predictions and confidences of a draft pass; recorded into CUDA graphs.

    Positions that a narrower pass does not draft get confidence 0 exactly, which no prediction can be: they are never admitted,
    and whoever reads confidences later sees how many drafts there were.

    Args:
        estimator: vLLM's, which owns coefficients, features and predictions by request state.
        confidence: fp32 [requests, K] by batch row, what vLLM's ``record_confidences`` reads.
        steps: by width of a pass, int32 [requests * width], position of each sample row.
        max_rows: most sample rows of a pass.
    """

    def __init__(
        self,
        estimator: OnlineAcceptanceEstimator,
        confidence: torch.Tensor,
        steps: Mapping[int, torch.Tensor],
        max_rows: int,
    ) -> None:
        confidence.zero_()
        self._confidence = confidence
        self._steps = steps
        # The winner's own logit, against which the odds are taken.
        self._zeros = torch.zeros(max_rows, dtype=torch.float32, device=confidence.device)
        self._of_width: dict[int, Any] = {}
        for width in steps:
            # Its kernels find the request of a row by the number of drafts per request; all tensors are shared.
            self._of_width[width] = copy.copy(estimator)
            self._of_width[width].num_speculative_steps = width

    def of_odds(self, against: torch.Tensor, states: torch.Tensor, first: int, width: int) -> None:
        """Of a pass whose head gave the odds.

        Args:
            against: fp32 [m], odds against each row's winner, at its request's temperature.
            states: int64 [m], request state of each row; rows of -1 (padding) change nothing.
            first: batch row of the first request.
            width: drafts per request; m is a multiple.
        """
        estimator = self._of_width[width]
        confidence = self._cut(first, against.shape[0] // width, width)
        total = against + 1.0  # of exp(logit - winner's) over all tokens
        _predict_kernel[(against.shape[0],)](
            estimator.features,
            estimator.features.stride(0),
            estimator.predictions,
            estimator.predictions.stride(0),
            confidence,
            confidence.stride(0),
            estimator.slope,
            estimator.intercepts,
            self._zeros,
            1,
            total,
            1,
            states,
            states.stride(0),
            self._steps[width],
            against.shape[0],
            1,
            per_token_step=True,
            NUM_SPECULATIVE_STEPS=width,
            MAX_LOG_ODDS=_MAX_LOG_ODDS,
            PADDED_VOCAB_NUM_BLOCKS=1,
        )

    def of_logits(
        self, logits: torch.Tensor, states: torch.Tensor, steps: torch.Tensor, temperature: torch.Tensor, first: int, width: int
    ) -> None:
        """Of a pass with whole logits [m, V]; ``steps`` int32 [m] positions, ``temperature`` fp32 by request state."""
        confidence = self._cut(first, logits.shape[0] // width, width)
        self._of_width[width].predict(logits, states, steps, confidence, temperature)

    def none_drafted(self, num_reqs: int) -> None:
        """A step that drafts nothing, for the first ``num_reqs`` requests of the batch."""
        self._confidence[:num_reqs].zero_()

    def _cut(self, first: int, num_reqs: int, width: int) -> torch.Tensor:
        """Confidences from batch row ``first`` on, those of positions that are not drafted set to 0."""
        confidence = self._confidence[first:]
        if width < confidence.shape[1]:
            confidence[:num_reqs, width:].zero_()
        return confidence
