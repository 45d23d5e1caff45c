# SPDX-License-Identifier: Apache-2.0
"""What a step costs: ``verify(target rows) + draft(query rows) + slope * context tokens``, learnt from observed times."""

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vllm_dflash.planner.context_slope import ContextSlope
from vllm_dflash.planner.row_curve import BELIEVED, CLIP, Array, RowCurve, Typical, rising

KNEE_GPU, KNEE_CPU = 184.0, 8.0
"""Rows up to which a pass is bound by reading weights: of bf16 on an H200, and on CPUs."""
PRICED = 32
"""Numbers of rows that are looked up for a batch; those in between are interpolated."""
DRAFT_SHARE = 0.2
"""Draft pass over verification at equal rows, until a draft is timed: 5 layers and a head of some 36 layers."""


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
        self.plain_steps: Counter[int] = Counter()
        """Steps so far that neither verified nor drafted, by power of two of the requests."""
        self._by_batch: dict[int, dict[int, Typical]] = {}  # knots of requests, then of rows
        self._plain: dict[int, Typical] = {}  # by knot of requests
        self._in_vain: dict[int, Typical] = {}  # of steps since then that drafted, and verified next to nothing
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
                expected = float(self._of_batch(self.verify.knots[knot : knot + 1], requests)[0]) if known else None
                cells[knot] = Typical()
            else:
                expected = None
            cells[knot].observe(max(rest - self.verify.beyond_knot(verify_rows), 0.2 * rest), expected)
        if verify_rows == requests and not query_rows:
            self.plain_steps[requests.bit_length()] += 1
            self._observe_plain(self.verify.knot(requests), rest)
        elif requests and self.verify.knot(verify_rows) == self.verify.knot(requests):
            self._in_vain.setdefault(self.verify.knot(requests), Typical()).observe(rest, None)
        self.verify.observe(verify_rows, rest)

    def _observe_plain(self, knot: int, rest: float) -> None:
        """A step that neither verified nor drafted, for ``rest`` seconds; knot of its requests."""
        cell, later = self._plain.get(knot), self._in_vain.pop(knot, None)
        if cell is None or (later is not None and later.weight >= BELIEVED and later.mean < cell.mean):
            cell = self._plain[knot] = Typical()  # a price that no longer stood does not come back with the first step
        cell.observe(rest, None)  # no expectation: that is the point

    def seconds(self, verify_rows: npt.ArrayLike, query_rows: npt.ArrayLike, context: int, requests: int = 0) -> Array:
        """Predicted seconds; arrays of rows broadcast. ``requests``: as for :meth:`observe`, with rows ascending."""
        verify = self._of_batch(np.asarray(verify_rows), requests) if requests else self.verify(verify_rows)
        predicted: Array = verify + self.drafting(query_rows) + self._slope.value * context
        return predicted

    def plain(self, requests: int, context: int) -> float:
        """Predicted seconds of a step that neither verifies nor drafts.

        As observed, once such steps were seen: beside what the GPU does, drafting has a part on the host, which shows in steps
        that verify, or are followed by a draft, and in no pass that is timed on its own. Not more than later steps took
        that verified next to no rows beside, without their draft: a price from a bad time would stand for whole answers.
        """
        knot = self.verify.knot(requests)
        cell = self._plain.get(knot)
        if cell is None:
            return float(self.seconds(np.array([requests]), 0, context, requests)[0])
        later = self._in_vain.get(knot)
        seconds = min(cell.mean, later.mean) if later is not None and later.weight >= BELIEVED else cell.mean
        return seconds + self._slope.value * context

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
        rows = whole_numbers(requests, most_rows, PRICED)
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
        cells, share = self._cells(requests)
        if not cells:
            return self.verify(verify_rows)
        curve_of = self.verify.alone if self.verify.measured else self.verify
        known = sorted(cells)
        mean, weight = np.array([(cells[knot].mean, cells[knot].weight) for knot in known]).T
        knots = self.verify.knots_of(verify_rows)
        near = np.abs(np.array(known) - knots[:, None]).argmin(1)
        beyond = (mean - curve_of(self.verify.knots[known]))[near]
        found = np.maximum(curve_of(verify_rows) + (share or 1.0) * beyond, 0.2 * mean[near])
        own = (np.array(known)[near] == knots) & (share is None)
        return np.exp(rising(np.log(found), np.where(own, weight[near], 1e-3)))

    def _cells(self, requests: int) -> tuple[dict[int, Typical], float | None]:
        """What was observed of this batch size; where passes were timed alone, else of the nearest, and which part of it counts.

        What a step adds to its pass is the host's part for the most, which goes by requests.
        """
        knot = self.verify.knot(requests)
        if knot in self._by_batch or not (self.verify.measured and self._by_batch):
            return self._by_batch.get(knot, {}), None
        near = min(self._by_batch, key=lambda other: abs(other - knot))
        return self._by_batch[near], min(1.0, requests / float(self.verify.knots[near]))


def whole_numbers(first: int, last: int, parts: int) -> Array:
    """Ascending, from ``first`` to ``last`` in some ``parts`` equal steps; ``np.unique`` would load a module while serving."""
    numbers = np.linspace(first, last, parts + 1).round()
    return numbers[np.diff(numbers, prepend=first - 1) > 0]
