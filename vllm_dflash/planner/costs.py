# SPDX-License-Identifier: Apache-2.0
"""What a step costs: ``verify(target rows) + draft(query rows) + slope * context tokens``, learnt from observed times.

Each curve starts from a *shape*: a prior (flat up to a knee, then linear: weights are read once per pass, arithmetic grows), or
times that were measured when the engine started. It is corrected where steps are observed. A correction fades quickly with the
distance in log2 rows, so a row count that was never run takes that of its nearest neighbour. Curves are made monotone, as more
rows are never cheaper, by pooling: a stall in a rare step must not lift everything above it.

Times err upwards (a kernel is compiled, a machine is shared), and a width that looks dear is not run again to learn better. So
no single observation decides: the first ones count as near to what was expected, later ones as near to their median.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vllm_dflash.planner.context_slope import MEMORY, ContextSlope

Array = npt.NDArray[np.float64]

REACH = 0.1
"""Octaves over which a correction fades to 1/e: half way to the next knot, so that a knot that was seen speaks for itself."""
RECENT = 9
"""Observations that a median is taken of, the lower of two in the middle: what looks good with few is tried, and soon known."""
CLIP = 1.5
"""An observation counts as at most this far off that median, or off what was expected where there are fewer than three."""
PRICED = 32
"""Numbers of rows that are looked up for a batch; those in between are interpolated."""
BELIEVED = 3
"""Observations of a knot from which on no single one decides."""
DRAFT_SHARE = 0.2
"""Draft pass over verification at equal rows, until a draft is timed: 5 layers and a head of some 36 layers."""
_MAX_ROWS = 1 << 17


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
        self._values = np.exp(_rising(np.log(self._shape * ratio), weight + 1e-3))
        self._listed, self._fresh = self._values.tolist(), True
        return self._listed


def _rising(values: Array, weights: Array) -> Array:
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


class StepCosts:
    """Seconds of one cycle: verification of what was drafted, and the next draft.

    Times are also kept by batch size: the host's part of a step grows with its requests whatever their rows, so that 64 rows of 8
    requests and 64 of 64 are different steps. What a batch of this size has not run yet is taken from the curve, as the
    difference to what it has.

    Args:
        knee: rows up to which a pass costs what one row costs: about 184 for bf16 weights on an H200, 8 on a CPU.
    """

    def __init__(self, knee: float) -> None:
        self.verify = RowCurve(knee)
        self.draft = RowCurve(knee)
        self.pace = 0.0
        """Seconds of late steps, whatever they did; 0 before the first."""
        self.late = 0
        """Steps in a row, up to the last, that took much longer than those before them."""
        self._by_batch: dict[int, dict[int, Typical]] = {}  # knots of requests, then of rows
        self._plain: dict[int, Typical] = {}  # by knot of requests
        self._context = 0  # of the last step
        self._slope = ContextSlope()
        self._draft_known = False

    def measure_drafts(self, times: Iterable[tuple[int, float]]) -> None:
        """Start from (query rows, seconds) of draft passes timed when the engine started; nothing happens without any."""
        self.draft.measure(times)
        self._draft_known = self._draft_known or self.draft.measured

    def observe_draft(self, query_rows: int, seconds: float) -> None:
        """A draft pass over ``query_rows`` rows, timed on its own."""
        self.draft.observe(query_rows, seconds)
        self._draft_known = True

    def observe(self, verify_rows: int, query_rows: int, context: int, seconds: float, requests: int = 0) -> None:
        """A whole step: ``verify_rows`` target rows, ``query_rows`` draft rows, ``context`` tokens of all requests together.

        ``requests``: of the step, or 0 where times are not kept by batch size.
        """
        self._context = context
        self.late = self.late + 1 if self.pace and seconds > CLIP * self.pace else 0
        self.pace += (min(seconds, 2.0 * self.pace or seconds) - self.pace) * (0.1 if self.pace else 1.0)
        rest = max(seconds - self.draft.lately(query_rows), 0.2 * seconds) if self._draft_known else seconds
        self._slope.observe(verify_rows, context, rest)
        rest = max(rest - self._slope.value * context, 0.2 * rest)
        if not self._draft_known and query_rows:
            knee = self.verify.knee
            rest /= 1.0 + DRAFT_SHARE * math.hypot(1.0, query_rows / knee) / math.hypot(1.0, verify_rows / knee)
        if requests:
            knot = self.verify.knot(verify_rows)
            cells = self._by_batch.setdefault(self.verify.knot(requests), {})
            if knot not in cells:
                known = self.verify.known
                expected = float(self._of_batch(np.array([verify_rows]), requests)[0]) if known else None
                cells[knot] = Typical()
            else:
                expected = None
            cells[knot].observe(rest, expected)
        if verify_rows == requests and not query_rows:
            self._plain.setdefault(self.verify.knot(requests), Typical()).observe(rest, None)  # no expectation: that is the point
        self.verify.observe(verify_rows, rest)

    def seconds(self, verify_rows: npt.ArrayLike, query_rows: npt.ArrayLike, context: int, requests: int = 0) -> Array:
        """Predicted seconds; arrays of rows broadcast. ``requests``: as for :meth:`observe`, with rows ascending."""
        verify = self._of_batch(np.asarray(verify_rows), requests) if requests else self.verify(verify_rows)
        predicted: Array = verify + self.drafting(query_rows) + self._slope.value * context
        return predicted

    def plain(self, requests: int, context: int) -> float:
        """Predicted seconds of a step that neither verifies nor drafts.

        As observed, once such steps were seen: beside what the GPU does, drafting has a part on the host, which shows in steps
        that verify, or are followed by a draft, and in no pass that is timed on its own.
        """
        cell = self._plain.get(self.verify.knot(requests))
        if cell is None:
            return float(self.seconds(np.array([requests]), 0, context, requests)[0])
        return cell.mean + self._slope.value * context

    def plain_seen(self, requests: int) -> float:
        """How many steps are remembered that neither verified nor drafted."""
        cell = self._plain.get(self.verify.knot(requests))
        return cell.weight if cell else 0.0

    def least(self, requests: int) -> float:
        """Seconds that such a step takes at least: its pass alone. Infinite where no pass was timed."""
        return float(self.verify.alone(requests)) if self.verify.measured else math.inf

    def observed(self, requests: int) -> list[tuple[float, float]]:
        """(rows, seconds) that steps of this batch size took lately, without their draft pass; rows and seconds ascending.

        Of any batch size where none of this one was seen often enough.
        """
        cells = self._by_batch.get(self.verify.knot(requests), {})
        knots = sorted(knot for knot, cell in cells.items() if cell.weight >= BELIEVED) or self.verify.believed()
        rows = self.verify.knots[knots]
        seconds = self._of_batch(rows, requests) + self._slope.value * self._context
        return list(zip(rows.tolist(), seconds.tolist(), strict=True))

    def by_rows(self, requests: int, most_rows: int, context: int) -> tuple[Array, Array]:
        """(rows, seconds) of steps without a draft pass, from ``requests`` rows to ``most_rows``, to interpolate in."""
        rows = np.unique(np.round(np.linspace(requests, most_rows, PRICED + 1)))
        return rows, self.seconds(rows, 0, context, requests)

    def drafting(self, query_rows: npt.ArrayLike) -> Array:
        """Predicted seconds of draft passes, 0 for none."""
        # Seconds and a prior without a unit do not add up.
        both = self._draft_known and self.verify.known
        return self.draft(query_rows) if both else DRAFT_SHARE * self.verify(query_rows)

    def seen(self, verify_rows: int, requests: int = 0) -> float:
        """How many steps like this one are remembered."""
        knot = self.verify.knot(verify_rows)
        if not requests:
            return self.verify.seen(knot)
        cell = self._by_batch.get(self.verify.knot(requests), {}).get(knot)
        return cell.weight if cell else 0.0

    def _of_batch(self, verify_rows: Array, requests: int) -> Array:
        """Verification of ascending ``verify_rows`` for one batch size.

        What it has not run is taken from what it has, by the difference of passes on their own where those were timed: the curve
        of all batches would lay the host's part of large ones upon the rows that only they have.
        """
        curve = self.verify.alone(verify_rows) if self.verify.measured else self.verify(verify_rows)
        cells, share = self._cells(requests)
        if not cells:
            return self.verify(verify_rows)
        found, weights = curve.copy(), np.full(len(curve), 1e-3)
        knots = np.array(sorted(cells))
        for at, rows in enumerate(verify_rows.tolist()):
            knot = self.verify.knot(rows)
            near = int(knots[np.abs(knots - knot).argmin()])
            cell = cells[near]
            if near == knot and share is None:
                found[at], weights[at] = cell.mean, cell.weight
            else:
                there = self.verify.knots[near : near + 1]
                base = self.verify.alone(there) if self.verify.measured else self.verify(there)
                found[at] = max(curve[at] + (share or 1.0) * (cell.mean - base[0]), 0.2 * cell.mean)
        return np.exp(_rising(np.log(found), weights))

    def _cells(self, requests: int) -> tuple[dict[int, Typical], float | None]:
        """What was observed of this batch size; where passes were timed alone, else of the nearest, and which part of it counts.

        What a step adds to its pass is the host's part for the most, which goes by requests.
        """
        knot = self.verify.knot(requests)
        if knot in self._by_batch or not (self.verify.measured and self._by_batch):
            return self._by_batch.get(knot, {}), None
        near = min(self._by_batch, key=lambda other: abs(other - knot))
        return self._by_batch[near], min(1.0, requests / float(self.verify.knots[near]))
