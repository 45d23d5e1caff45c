# SPDX-License-Identifier: Apache-2.0
"""The choice of the next step: draft width and verify lengths with the most expected tokens per second, zero included.

With survival ``a[r, j]`` (``acceptance.py``) and lengths ``n_r <= w`` the next cycle yields ``R + sum_r sum_{j <= n_r} a[r, j]``
tokens in ``verify(R + sum n_r) + draft(rows of w)`` seconds (``costs.py``). For one width the best lengths of each total are the
positions of highest survival, so one sort per width finds the optimum over all lengths.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_dflash.planner.acceptance import AcceptanceStats
from vllm_dflash.planner.costs import StepCosts

Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]
RowsOf = Callable[[int], int]
"""Query rows per request that the draft runs for a width; more than width + 1 where graphs exist for some widths only."""

MARGIN = 0.02
"""A new width must promise this much more: below it noise would decide."""
LARGE_GAIN, DWELL = 0.10, 8
"""Smaller gains wait this many steps after a change; larger ones (the load jumped) do not."""
REPLAN = 6
"""Steps that a plan serves while the batch stays the same: planning takes 0.3 ms of the scheduler, a small model's step 2."""
PROBE_SHARE = 0.01
"""Part of the time that may go to trying a neighbouring width: what is not tried is not known."""
PROBE_EVERY = (16, 1024)
"""Fewest and most steps between two probes."""
_SHARES = 4
"""Numbers of drafting requests that are tried, as parts of the batch."""
_LADDER = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
# Where each width has its own graphs of the target: at K = 15, 214 graphs instead of 373.
_GRAPH_LADDER = (1, 3, 7, 15, 31, 63)
"""Each width costs the target some 50 full graphs. By the roofline of an H200, leaving out 2 costs 5 % at 64 requests, and
leaving out 11 costs 13 % at 16."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Drafts of the next step.

    Attributes:
        width: drafts per request to make, 0 for none.
        lengths: int64 [R], how many of them to verify, by request.
        rate: expected tokens per second.
        probe: chosen to learn and not to gain.
    """

    width: int
    lengths: Lengths
    rate: float
    probe: bool = False


def widths_up_to(max_width: int, limit: int | None = None) -> tuple[int, ...]:
    """Widths to choose from, ascending: 0, a ladder, and ``max_width``.

    ``limit``: widths have graphs of their own, so the ladder is coarse; at most this many, the middle goes first.
    """
    ladder = _LADDER if limit is None else _GRAPH_LADDER
    widths = [0, *(w for w in ladder if w < max_width), max_width]
    while limit is not None and len(widths) > max(limit, 1):
        del widths[len(widths) // 2 if len(widths) > 2 else 0]
    return tuple(widths)


def uniform_rates(survival: Floats, widths: Lengths, costs: StepCosts, query_rows: Lengths, context: int) -> Floats:
    """Tokens per second where every request drafts and verifies the same number of tokens, for each of ``widths``.

    ``survival`` [R, >= largest width]; ``query_rows``: rows per request of each width's draft pass.
    """
    requests = survival.shape[0]
    tokens = requests + np.concatenate([[0.0], np.cumsum(survival.sum(0))])[widths]
    rates: Floats = tokens / costs.seconds(requests * (1 + widths), requests * query_rows, context)
    return rates


def fitted_plan(survival: Floats, width: int, costs: StepCosts, query_rows: int, context: int) -> Plan:
    """Lengths up to ``width`` by request, ``survival`` [R, >= width]; requests of length 0 are not drafted for.

    Positions are admitted in the order of their survival, among the most promising requests only, for several numbers of them:
    each request that drafts pays for its ``query_rows``.
    """
    requests = survival.shape[0]
    ranked = np.argsort(-survival[:, :width].sum(1), kind="stable")
    best = Plan(0, np.zeros(requests, dtype=np.int64), requests / float(costs.seconds(requests, 0, context)))
    for count in sorted({max(1, round(requests * part / _SHARES)) for part in range(1, _SHARES + 1)}):
        some = ranked[:count]
        flat = survival[some, :width].ravel()
        order = np.argsort(-flat, kind="stable")  # stable: an earlier position comes before an equal later one
        tokens = requests + np.cumsum(flat[order])
        drafting = np.cumsum(order % width == 0)
        rates = tokens / costs.seconds(requests + np.arange(1, flat.size + 1), drafting * query_rows, context)
        at = int(np.argmax(rates))
        if rates[at] > best.rate:
            lengths = np.zeros(requests, dtype=np.int64)
            lengths[some] = np.bincount(order[: at + 1] // width, minlength=count)
            best = Plan(width, lengths, float(rates[at]))
    return best


class Planner:
    """Plans step by step, holding a width until another is clearly better.

    Args:
        widths: draft widths to choose from, ascending, 0 and the largest included.
        costs: what steps cost.
        rows_of: query rows per request of a width.
        per_request: lengths may differ between requests. Full CUDA graphs of the target want them equal.
    """

    def __init__(self, widths: Sequence[int], costs: StepCosts, rows_of: RowsOf, *, per_request: bool) -> None:
        self.widths = tuple(widths)
        self.costs = costs
        self.acceptance = AcceptanceStats(self.widths[-1])
        self.per_request = per_request
        self.histogram: Counter[int] = Counter()
        """Steps by chosen width."""
        self.probes = 0
        self._widths = np.array(self.widths)
        self._query_rows = np.array([rows_of(width) if width else 0 for width in self.widths])
        self._held: int | None = None
        self._current: Plan | None = None
        self._planned_for: list[str] = []
        self._served = 0
        self._since_change = 0
        self._wait, self._backoff = PROBE_EVERY[0], 1
        self._upwards = True
        self._probed: dict[str, float] = {}

    def plan(self, request_ids: Sequence[str], context: int) -> Plan:
        """The plan for the requests that the next step verifies; ``context``: their tokens so far, together."""
        self._since_change += 1
        self._wait -= 1
        self._served += 1
        plan = self._current
        if plan is None or self._served >= REPLAN or self._wait <= 0 or list(request_ids) != self._planned_for:
            plan = self._replan(list(request_ids), context)
        self.histogram[plan.width] += 1
        self.probes += plan.probe
        return plan

    def _replan(self, request_ids: list[str], context: int) -> Plan:
        survival = self.acceptance.survival(request_ids)
        rates = self._rates(survival, context)
        held = self._hold(rates)
        self._current = None
        if self._wait <= 0 and request_ids:
            return self._probe(rates, held, survival, request_ids)
        if self.per_request and self.widths[held]:
            plan = fitted_plan(survival, self.widths[held], self.costs, int(self._query_rows[held]), context)
        else:
            plan = Plan(self.widths[held], np.full(len(request_ids), self.widths[held]), float(rates[held]))
        self._current, self._planned_for, self._served = plan, request_ids, 0
        return plan

    def observe(self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """One verified step, see :meth:`AcceptanceStats.observe`. A probe that did better than expected is followed up."""
        if self._probed and any(name in self._probed for name in request_ids):
            expected = sum(self._probed.get(name, 0.0) for name in request_ids)
            if sum(accepted) > expected + 2.0 * (expected + 1.0) ** 0.5:
                self._wait, self._backoff = 0, 1
            self._probed = {}
        self.acceptance.observe(request_ids, drafted, accepted)

    def _rates(self, survival: Floats, context: int) -> Floats:
        if not self.per_request:
            return uniform_rates(survival, self._widths, self.costs, self._query_rows, context)
        plans = [
            fitted_plan(survival, width, self.costs, int(rows), context) if width else None
            for width, rows in zip(self.widths, self._query_rows, strict=True)
        ]
        none = survival.shape[0] / float(self.costs.seconds(survival.shape[0], 0, context))
        return np.array([none if plan is None else plan.rate for plan in plans])

    def _hold(self, rates: Floats) -> int:
        """Index of the width to stay with or to change to."""
        best = int(np.argmax(rates))
        if self._held is None:
            self._held = best
        gain = rates[best] / rates[self._held] - 1.0
        if best != self._held and (gain > LARGE_GAIN or (gain > MARGIN and self._since_change > DWELL)):
            self._held, self._since_change = best, 0
            self._wait, self._backoff = PROBE_EVERY[0], 1
        return self._held

    def _probe(self, rates: Floats, held: int, survival: Floats, request_ids: Sequence[str]) -> Plan:
        """One step at the next wider or narrower width, all requests alike; then as long a wait as its cost asks for."""
        upwards = held == 0 or (self._upwards and held + 1 < len(self.widths))
        at = min(held + 1, len(self.widths) - 1) if upwards else held - 1
        self._upwards = not self._upwards
        loss = max(0.0, 1.0 - rates[at] / rates[held])
        self._wait = int(np.clip(loss / PROBE_SHARE * self._backoff, *PROBE_EVERY))
        self._backoff = min(2 * self._backoff, 8)
        width = self.widths[at]
        if at > held:
            self._probed = dict(zip(request_ids, survival[:, :width].sum(1).tolist(), strict=True))
        return Plan(width, np.full(len(request_ids), width), float(rates[at]), probe=True)


def draft_widths(max_width: int) -> tuple[int, ...]:
    """Widths with a draft pass of their own, ascending, ``max_width`` last: 4, 8, 16 ... rows with the anchor.

    Rows in multiples of what a tensor core takes; a width in between runs the next one and drops what it does not need.
    """
    return (*(rows - 1 for rows in (4, 8, 16, 32, 64) if rows - 1 < max_width), max_width)


def schedule_of(max_width: int, max_requests: int) -> list[tuple[int, int, int]]:
    """A table of vLLM's form (first batch size, last, width) that names every width the planner may choose.

    vLLM captures full graphs of the target for the widths in it. Without a planner it would be obeyed as it stands, so it gives
    each batch size the widest that stays near the knee of an H200.
    """
    widths = widths_up_to(max_width, max_requests)
    table, first = [], 1
    for place, width in enumerate(reversed(widths)):
        rest = len(widths) - 1 - place
        last = max_requests - rest if rest == 0 else min(max(first, 2 * 184 // (width + 1)), max_requests - rest)
        table.append((first, last, width))
        first = last + 1
    return table
