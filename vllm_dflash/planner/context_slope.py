# SPDX-License-Identifier: Apache-2.0
"""What a token of context adds to a step, learnt from how steps of the same row count vary."""

import math

MEMORY = 24.0
"""Observations that a mean remembers, here and of a knot: a shared machine drifts, and contexts grow."""


class ContextSlope:
    """Seconds per context token, from how steps of the same row count vary with their context.

    Believed only as far as it stands out of the noise, and never negative.
    """

    FADE = 0.998
    """500 steps: contexts grow slowly, and the slope is a constant of model and machine."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        self._moments = (0.0, 0.0, 0.0, 0.0)  # weight, context^2, context * seconds, seconds^2, about the means
        self.value = 0.0

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """One step's seconds without its draft pass."""
        key = round(4 * math.log2(max(rows, 1)))
        old = self._means.get(key)
        if old is None:
            self._means[key] = (float(context), seconds)
            return
        mean_context, mean_seconds = old
        moved = context - mean_context
        changed = min(max(seconds - mean_seconds, -0.5 * mean_seconds), 0.5 * mean_seconds)
        rate = 2.0 / MEMORY
        self._means[key] = (mean_context + rate * moved, mean_seconds + rate * changed)
        news = (1.0, moved * moved, moved * changed, changed * changed)
        weight, spread, together, noise = (self.FADE * old + new for old, new in zip(self._moments, news, strict=True))
        self._moments = (weight, spread, together, noise)
        if weight < 16 or spread <= 0 or together <= 0:
            self.value = 0.0
            return
        slope = together / spread
        residual = max(noise - slope * together, 1e-30) / weight
        signal = slope * slope * spread / residual
        self.value = slope * max(0.0, 1.0 - 9.0 / signal)
