# SPDX-License-Identifier: Apache-2.0
"""Draft widths where another cuts the verification: vLLM's adaptive verification admits the drafts of highest survival.

The planner then chooses how many drafts are *made*. A wider pass offers more positions to choose from, and a position that
promises little is not verified, so a width is worth what the best cut of it is worth::

    rate(w) = max over n of   (R + sum of the n highest a[r, j], j <= w) / (verify(R + n) + draft(R * rows(w)) + slope * context)

Who cuts does so by confidences of its own, which may promise too much, at a number of its own. So what drafting brought is held
against what was promised (:class:`KeptPromises`), and rates of drafting are as much lower, or higher.
"""

import time
from collections.abc import Sequence

import numpy as np

from vllm_dflash.planner.confidences import ConfidenceStats
from vllm_dflash.planner.costs import StepCosts, whole_numbers
from vllm_dflash.planner.kept_promises import KeptPromises
from vllm_dflash.planner.plan import Floats, Lengths, Plan
from vllm_dflash.planner.planner import Planner, RowsOf

DOUBT = 0.5
"""How far the confidences of a probe must lie above what was expected, times the root of their number: each strays by 0.25."""
ALIKE = 32
"""Batches that differ by one request in as many at most reach the same rate."""
_CUTS = 64
"""Numbers of verified drafts that are tried per width: the rate is flat around the best."""


def trimmed_rates(survivals: Sequence[Floats], widths: Lengths, costs: StepCosts, query_rows: Lengths, context: int) -> Floats:
    """Tokens per second of each of ``widths`` with the best cut of its drafts.

    ``survivals``: [R, width] of each; ``query_rows``: rows per request of each width's draft pass.
    """
    requests = len(survivals[0])
    rates = []
    grid, verify = costs.by_rows(requests, requests * (1 + int(widths[-1])), context)
    for survival, width, rows in zip(survivals, widths.tolist(), query_rows.tolist(), strict=True):
        if not width:
            rates.append(requests / costs.plain(requests, context))
            continue
        best = np.sort(survival, axis=None)[::-1]
        cuts = whole_numbers(0, best.size, _CUTS).astype(np.int64)
        tokens = requests + np.concatenate([[0.0], np.cumsum(best)])[cuts]
        seconds = np.interp(requests + cuts, grid, verify) + costs.drafting(requests * rows)
        rates.append(float((tokens / seconds).max()))
    return np.array(rates)


def corrected(bare: Floats, observed: Sequence[tuple[float, float]]) -> Floats:
    """A curve of bare passes plus what steps that ran took beyond it (or less), interpolated over rows; more rows cost no less.

    Args:
        bare: [rows + 1], milliseconds by rows.
        observed: (rows, seconds) of whole steps without their draft pass, ascending.
    """
    if not observed:
        return bare
    rows, seconds = np.array(observed).T
    beyond = 1e3 * seconds - np.interp(rows, np.arange(len(bare)), bare)
    table: Floats = np.maximum.accumulate(np.maximum(bare + np.interp(np.arange(len(bare)), rows, beyond), 1e-6))
    return table


class TrimmedPlanner(Planner):
    """Chooses draft widths only; survival comes from confidences (``acceptance``, see :class:`ConfidenceStats`)."""

    acceptance: ConfidenceStats

    def __init__(self, widths: Sequence[int], costs: StepCosts, rows_of: RowsOf) -> None:
        super().__init__(widths, costs, rows_of, per_request=False, clock=time.perf_counter)
        self.acceptance = ConfidenceStats(self.widths[-1], self._rows)
        self.kept = KeptPromises()
        self._shares = np.ones(len(self.widths))  # of what widths promise, that the rates in use reckon with
        self._kept_of: frozenset[str] = frozenset()
        self._steps: dict[tuple[int, int], int] = {}  # by power of two of the requests and width

    def plan(self, request_ids: Sequence[str], context: int, *, decoding: bool = True) -> Plan:
        """See :meth:`Planner.plan`; the lengths are those that are drafted."""
        plan = super().plan(request_ids, context, decoding=decoding)
        if self._fixed is None:  # a held width teaches nothing
            key = len(request_ids).bit_length(), plan.width
            self._steps[key] = self._steps.get(key, 0) + 1
        return plan

    def _tried(self, width: int, lengths: Lengths) -> float:
        """Steps at ``width``: how many rows of one are verified is decided later."""
        return self._steps.get((len(lengths).bit_length(), width), 0)

    def observe(
        self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int], width: int | None = None
    ) -> None:
        """Nothing, see :meth:`note`."""

    def note(self, request_ids: Sequence[str], confidences: Floats) -> None:
        """Confidences of one step's drafts, verified or not, see :meth:`ConfidenceStats.note`; a probe's as for counts."""
        if expected := self._expected_of_probe(request_ids, confidences.shape[1]):
            self._follow_up(float(np.cumprod(confidences, axis=1).sum()) > expected + DOUBT * confidences.size**0.5)
        self.acceptance.note(request_ids, confidences)

    def came(self, plan: Plan, seconds: float, tokens: int, requests: int) -> None:
        """``tokens`` of ``requests`` came in a step of ``seconds``, which was as ``plan`` wants them, like those before it."""
        planned = len(self._planned_for)
        if abs(requests - planned) * ALIKE > planned:
            return  # its rate is that of another batch
        if plan.width:
            believed = float(self._shares[self.widths.index(plan.width)])
            self.kept.note(requests, plan.width, plan.rate / believed, seconds, tokens)
        else:
            self.kept.rest(requests)

    def _replan(self, request_ids: list[str], context: int, *, decoding: bool) -> Plan:
        if self._kept_of.isdisjoint(request_ids):
            self.kept.others(len(request_ids))
        self._kept_of = frozenset(request_ids)
        return super()._replan(request_ids, context, decoding=decoding)

    def _rates(self, survivals: Sequence[Floats], context: int) -> Floats:
        self._shares = np.array([self.kept.share(len(survivals[0]), width) for width in self.widths])
        rates: Floats = self._shares * trimmed_rates(survivals, self._widths, self.costs, self._query_rows, context)
        return rates
