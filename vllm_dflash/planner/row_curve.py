# SPDX-License-Identifier: Apache-2.0
"""Seconds by rows of one pass, learnt from observed times.

A curve starts from a *shape*: a prior (flat up to a knee, then linear: weights are read once per pass, arithmetic grows), or
times that were measured when the engine started. It is corrected where steps are observed. A correction fades quickly with the
distance in log2 rows, so a row count that was never run takes that of its nearest neighbour. Curves are made monotone, as more
rows are never cheaper, by pooling: a stall in a rare step must not lift everything above it.

Times err upwards (a kernel is compiled, a machine is shared), and a width that looks dear is not run again to learn better. So
no single observation decides: the first ones count as near to what was expected, later ones as near to their median.
"""

import bisect
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vllm_dflash.planner.context_slope import MEMORY

Array = npt.NDArray[np.float64]

REACH = 0.1
"""Octaves over which a correction fades to 1/e: half way to the next knot, so that a knot that was seen speaks for itself."""
RECENT = 9
"""Observations that a median is taken of, the lower of two in the middle: what looks good with few is tried, and soon known."""
CLIP = 1.5
"""An observation counts as at most this far off that median, or off what was expected where there are fewer than three."""
BELIEVED = 3
"""Observations of a knot from which on no single one decides."""


class Typical:
    """A running mean that no single stall decides."""

    __slots__ = ("_expected", "_recent", "mean", "weight")

    def __init__(self) -> None:
        self.mean, self.weight = 1.0, 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._expected: float | None = None

    def observe(self, value: float, expected: float | None) -> None:
        """One more value; ``expected`` counts where it is the first: what the next two are compared with."""
        recent = self._recent
        if not recent:
            self._expected = expected
        recent.append(value)
        count, expected = len(recent), self._expected
        middle = sorted(recent)[(count - 1) // 2]  # the lower one of two
        if count < 3 and expected is not None:
            self.mean = min(max(middle, expected / CLIP**3), expected * CLIP)  # no stall makes a step faster
            self.weight = float(count)
        elif count < RECENT or not middle / CLIP < self.mean < middle * CLIP:
            self.mean, self.weight = middle, float(count)
        else:
            self.weight = min(self.weight + 1, MEMORY)
            self.mean += (min(max(value, middle / CLIP), middle * CLIP) - self.mean) / self.weight


class RowCurve:
    """Seconds by rows of one pass.

    Args:
        knee: rows up to which the pass is bound by reading weights.
    """

    def __init__(self, knee: float) -> None:
        self.knee = knee
        few = np.arange(1, 9, dtype=np.float64)
        self.knots: Array = np.concatenate([few, 8 * 2 ** (np.arange(1, 57) / 4)])
        self._at: list[float] = self.knots.tolist()
        self._borders = np.sqrt(self.knots[1:] * self.knots[:-1]).tolist()
        distance = np.abs(np.log2(self.knots)[:, None] - np.log2(self.knots)[None, :])
        self._kernel: Array = np.exp(-distance / REACH)
        self._reshape(np.sqrt(1.0 + (self.knots / knee) ** 2))
        self.measured = False

    def _reshape(self, shape: Array) -> None:
        self._shape = shape
        self._shapes: list[float] = shape.tolist()
        self._seen = [Typical() for _ in self._shapes]  # observed over shape
        self._known = False
        self._values: Array = shape
        self._listed: list[float] = self._shapes
        self._fresh = True

    def measure(self, times: Iterable[tuple[int, float]]) -> None:
        """Start from (rows, seconds) of passes run on their own; forgets what was observed. Nothing happens without any."""
        best: dict[int, float] = {}
        for rows, seconds in times:
            if rows >= 1 and seconds > 0:
                best[rows] = min(seconds, best.get(rows, seconds))
        if not best:
            return
        rows_of = sorted(best)
        seconds_of = np.maximum.accumulate([best[rows] for rows in rows_of])
        beyond = np.maximum(1.0, self.knots / max(rows_of[-1], self.knee))  # as arithmetic grows
        self._reshape(np.interp(self.knots, rows_of, seconds_of) * beyond)
        self.measured = True

    @property
    def known(self) -> bool:
        """Whether values are seconds, and not only ratios."""
        return self.measured or self._known

    def observe(self, rows: int, seconds: float) -> None:
        """A pass over ``rows`` took ``seconds``."""
        if rows < 1 or seconds <= 0:
            return
        knot = self.knot(rows)
        seen = self._seen[knot]
        expected = self._refreshed()[knot] / self._shapes[knot] if self.known and not seen.weight else None
        seen.observe(seconds / self._between(self._shapes, rows), expected)
        self._known, self._fresh = True, False

    def knot(self, rows: int) -> int:
        """Number of the knot that ``rows`` belong to."""
        return bisect.bisect(self._borders, rows)

    def knots_of(self, rows: Array) -> npt.NDArray[np.int64]:
        """The same for each of ``rows``."""
        return np.searchsorted(self._borders, rows, side="right")

    def beyond_knot(self, rows: int) -> float:
        """Seconds that ``rows`` cost more than the knot they belong to (or less); 0 while nothing is known.

        What is kept by knots must not make a stair of the curve: whoever looks for the best cut would find the end of a step,
        rows that cost nothing.
        """
        if not self.known:
            return 0.0
        values = self._shapes if self.measured else self._listed
        return self._between(values, rows) - values[self.knot(rows)]

    def seen(self, knot: int) -> float:
        """Observations of a knot that are remembered."""
        return self._seen[knot].weight

    def believed(self) -> list[int]:
        """Numbers of the knots that were observed often enough, ascending."""
        return [knot for knot, seen in enumerate(self._seen) if seen.weight >= BELIEVED]

    def __call__(self, rows: npt.ArrayLike) -> Array:
        """Seconds for each entry of ``rows``; 0 rows cost nothing. Only ratios mean anything while nothing is ``known``."""
        self._refreshed()
        asked = np.asarray(rows, dtype=np.float64)
        found: Array = np.interp(asked, self.knots, self._values) * (asked > 0)
        return found

    def alone(self, rows: npt.ArrayLike) -> Array:
        """The same of a pass on its own: the shape that corrections start from."""
        found: Array = np.interp(np.asarray(rows, dtype=np.float64), self.knots, self._shape)
        return found

    def lately(self, rows: int) -> float:
        """The same for one number of rows, as of the last call for several: what is learnt at every step is cheap to look up."""
        return self._between(self._listed, rows) if rows > 0 else 0.0

    def _between(self, values: list[float], rows: int) -> float:
        above = bisect.bisect(self._at, rows)
        if above == 0 or above == len(values):
            return values[max(above - 1, 0)]
        left, right = self._at[above - 1], self._at[above]
        return values[above - 1] + (values[above] - values[above - 1]) * (rows - left) / (right - left)

    def _refreshed(self) -> list[float]:
        if self._fresh:
            return self._listed
        mean = np.array([seen.mean for seen in self._seen])
        weight = np.array([seen.weight for seen in self._seen])
        pull = self._kernel * weight
        ratio = np.exp((pull @ np.log(mean)) / pull.sum(1))
        if self.measured:
            # Beyond the pass alone a step has sampling, real contexts and, where the host is behind, waiting: parts of any row
            # count. As factors they would grow with the rows.
            beyond = (pull @ np.maximum(self._shape * (mean - 1.0), 0.0)) / pull.sum(1)
            unseen = self._shape * np.minimum(ratio, 1.0) + beyond
            ratio = np.where(weight > 0, ratio, unseen / self._shape)
        # What was never run has next to no say in what was. Logarithms, as times err upwards.
        self._values = np.exp(rising(np.log(self._shape * ratio), weight + 1e-3))
        self._listed, self._fresh = self._values.tolist(), True
        return self._listed


def rising(values: Array, weights: Array) -> Array:
    """The non-decreasing sequence closest to ``values``, by weighted squares: neighbours that fall are pooled."""
    if bool((values[1:] >= values[:-1]).all()):
        return values
    pools: list[tuple[float, float, int]] = []  # mean, weight, entries
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, much, many = pools.pop()
            mean = (before * much + mean * total) / (much + total)
            total, count = much + total, many + count
        pools.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])
