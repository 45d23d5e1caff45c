# SPDX-License-Identifier: Apache-2.0
"""What a step costs: ``verify(target rows) + draft(query rows) + slope * context tokens``, learnt from observed times.

Each curve starts from a prior *shape* (flat up to a knee, then linear: weights are read once per pass, arithmetic grows) and is
corrected where steps are observed. A correction fades quickly with the distance in log2 rows, so a row count that was never run
takes that of its nearest neighbour. Curves are made monotone, as more rows are never cheaper, by pooling: a stall in a rare step
must not lift everything above it.
"""

import bisect
import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MEMORY = 24.0
"""Observations that a knot remembers: a shared machine drifts, and so does the context."""
REACH = 0.1
"""Octaves over which a correction fades to 1/e: half way to the next knot, so that a knot that was seen speaks for itself."""
CLIP = 2.0
"""One observation moves a knot as if it were at most this far off: a stall is not a trend."""
DRAFT_SHARE = 0.2
"""Draft pass over verification at equal rows, until a draft is timed: 5 layers and a head of some 36 layers."""
_MAX_ROWS = 1 << 17


class RowCurve:
    """Seconds by rows of one pass.

    Args:
        knee: rows up to which the pass is bound by reading weights.
    """

    def __init__(self, knee: float) -> None:
        self.knee = knee
        few = np.arange(1, 9, dtype=np.float64)
        self.knots: Array = np.concatenate([few, 8 * 2 ** (np.arange(1, 57) / 4)])
        self._mean: Array = np.ones_like(self.knots)  # observed over prior
        self._weight: Array = np.zeros_like(self.knots)
        distance = np.abs(np.log2(self.knots)[:, None] - np.log2(self.knots)[None, :])
        self._kernel: Array = np.exp(-distance / REACH)
        self._borders = np.sqrt(self.knots[1:] * self.knots[:-1]).tolist()
        self._values: Array | None = None

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return bool(self._weight.any())

    def shape(self, rows: Array) -> Array:
        """Prior by rows, 1 for few."""
        bent: Array = np.sqrt(1.0 + (np.asarray(rows) / self.knee) ** 2)
        return bent

    def observe(self, rows: int, seconds: float) -> None:
        """A pass over ``rows`` took ``seconds``."""
        if rows < 1 or seconds <= 0:
            return
        knot = bisect.bisect(self._borders, rows)
        ratio = seconds / math.hypot(1.0, rows / self.knee)
        weight, mean = float(self._weight[knot]), float(self._mean[knot])
        if weight >= 2:
            ratio = min(max(ratio, mean / CLIP), mean * CLIP)
        self._weight[knot] = min(weight + 1, MEMORY)
        self._mean[knot] = mean + (ratio - mean) / self._weight[knot]
        self._values = None

    def __call__(self, rows: npt.ArrayLike) -> Array:
        """Seconds for each entry of ``rows``; 0 rows cost nothing. Only ratios mean anything before the first observation."""
        if self._values is None:
            pull = self._kernel * self._weight
            total = pull.sum(1)
            logarithms = np.log(self.shape(self.knots)) + ((pull @ np.log(self._mean)) / total if self.known else 0.0)
            # What was never run has next to no say in what was. Logarithms, as times err upwards.
            self._values = np.exp(_rising(logarithms, self._weight + 1e-3))
        asked = np.asarray(rows, dtype=np.float64)
        found: Array = np.where(asked > 0, np.interp(np.clip(asked, 1, _MAX_ROWS), self.knots, self._values), 0.0)
        return found


def _rising(values: Array, weights: Array) -> Array:
    """The non-decreasing sequence closest to ``values``, by weighted squares: neighbours that fall are pooled."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, entries
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, much, many = pools.pop()
            mean = (before * much + mean * total) / (much + total)
            total, count = much + total, many + count
        pools.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


class StepCosts:
    """Seconds of one cycle: verification of what was drafted, and the next draft.

    Args:
        knee: rows up to which a pass costs what one row costs: about 184 for bf16 weights on an H200, 8 on a CPU.
    """

    def __init__(self, knee: float) -> None:
        self.verify = RowCurve(knee)
        self.draft = RowCurve(knee)
        self._slope = _ContextSlope()

    def observe_draft(self, query_rows: int, seconds: float) -> None:
        """A draft pass over ``query_rows`` rows, timed on its own."""
        self.draft.observe(query_rows, seconds)

    def observe(self, verify_rows: int, query_rows: int, context: int, seconds: float) -> None:
        """A whole step: ``verify_rows`` target rows, ``query_rows`` draft rows, ``context`` tokens of all requests together."""
        rest = max(seconds - float(self.draft(query_rows)), 0.2 * seconds) if self.draft.known else seconds
        self._slope.observe(verify_rows, context, rest)
        rest = max(rest - self._slope.value * context, 0.2 * rest)
        if not self.draft.known and query_rows:
            knee = self.verify.knee
            rest /= 1.0 + DRAFT_SHARE * math.hypot(1.0, query_rows / knee) / math.hypot(1.0, verify_rows / knee)
        self.verify.observe(verify_rows, rest)

    def seconds(self, verify_rows: npt.ArrayLike, query_rows: npt.ArrayLike, context: int) -> Array:
        """Predicted seconds; arrays of rows broadcast."""
        predicted: Array = self.verify(verify_rows) + self._draft(query_rows) + self._slope.value * context
        return predicted

    def _draft(self, query_rows: npt.ArrayLike) -> Array:
        # Seconds and a prior without a unit do not add up.
        both = self.draft.known and self.verify.known
        return self.draft(query_rows) if both else DRAFT_SHARE * self.verify(query_rows)


class _ContextSlope:
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
