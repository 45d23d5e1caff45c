# SPDX-License-Identifier: Apache-2.0
"""The choice of the next step: draft width and verify lengths with the most expected tokens per second, zero included.

With survival ``a[r, j]`` (``acceptance.py``) and lengths ``n_r <= w`` the next cycle yields ``R + sum_r sum_{j <= n_r} a[r, j]``
tokens in ``verify(R + sum n_r) + draft(rows of w)`` seconds (``costs.py``). For one width the best lengths of each total are the
positions of highest survival, so one sort per width finds the optimum over all lengths.
"""

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from vllm_dflash.planner.acceptance import AcceptanceStats
from vllm_dflash.planner.costs import StepCosts
from vllm_dflash.planner.plan import Floats, Lengths, Plan, fitted_plan, uniform_rates
from vllm_dflash.planner.turns import PLAIN_STEPS, PROBE_SHARE, PlainTries, Turns

Clock = Callable[[], float]
RowsOf = Callable[[int], int]
"""Query rows per request that the draft runs for a width; more than width + 1 where graphs exist for some widths only."""

MARGIN = 0.02
"""A new width must promise this much more: below it noise would decide. On GPUs none at all need only promise more,
once such steps were timed: nothing is guessed about them then, and all requests get on alike. On CPUs the way back costs: context
that was kept back is computed."""
LARGE_GAIN, DWELL = 0.10, 8
"""What it must promise in the step after a change, and the steps over which that falls to ``MARGIN``: a jump of the load is
followed at once, and text that is not guessed shows after some 3 steps, though counts are slow to say by how much."""
WORTH = 0.10
"""What drafts for some of many requests must promise over none at all: the luckiest look better than they are. For R of them
``WORTH * (1 - 1 / R)``, as one alone is no luckier than others."""
HOPE = 1.5
"""Where lengths differ by request: standard deviations by which a batch is thought better than its drafts so far tell. Drafts
teach, plain steps do not: what is given up too late is soon seen, what is given up too soon is not. It is the deviation of the
mean of R requests: one request is tried for long, of many the mean is soon known."""
REPLAN = (6, 64)
"""Fewest and most steps that a plan serves while the batch stays nearly the same; a batch that has just come together is planned
for again after half as many steps as it has run."""
PLANNING_SHARE = 0.005
"""Part of the time that planning may take, in between: it delays the next step of a target that the host bounds."""
LATE = 2
"""More steps in a row than this that take much longer than before: something is wrong with the plan, whatever it promised."""
OTHER_BATCH = 8
"""A batch that has grown or shrunk by one part in as many is planned for anew, whatever the number of steps."""
PROBE_EVERY = (16, 1024)
"""Fewest and most steps between two probes."""
ENOUGH = 4
"""Probes of a neighbour, at this load, before the other one has its turn and both wait longer each time."""
FOLLOW_UPS = 2
"""Probes in a row that follow one that did better than expected: it may have, and still not pay."""
FEW = 8
"""One request in as many is drafted for where a batch without drafts is probed and lengths may differ."""


class Planner:
    """Plans step by step, holding a width until another is clearly better.

    Args:
        widths: draft widths to choose from, ascending, 0 and the largest included.
        costs: what steps cost.
        rows_of: query rows per request of a width.
        per_request: lengths may differ between requests. Full CUDA graphs of the target want them equal.
        clock: seconds; times the planner itself.
    """

    def __init__(
        self, widths: Sequence[int], costs: StepCosts, rows_of: RowsOf, *, per_request: bool, clock: Clock = time.perf_counter
    ) -> None:
        self.widths = tuple(widths)
        self.costs = costs
        self._rows = {width: rows_of(width) for width in self.widths if width}
        self.acceptance = AcceptanceStats(self.widths[-1], HOPE if per_request else 0.0, self._rows)
        self.per_request = per_request
        self._widths = np.array(self.widths)
        self._query_rows = np.array([self._rows.get(width, 0) for width in self.widths])
        self._clock = clock
        self._held: int | None = None
        self._fixed: int | None = None
        self._current: Plan | None = None
        self._planned_for: list[str] = []
        self._served, self._serves, self._age = 0, REPLAN[0], 0
        self._decoding = False  # what the last plan was told
        self._pays = 2e-4  # seconds of planning once
        self._since_change = 0
        self._wait, self._backoff = PROBE_EVERY[0], 1
        self._upwards, self._turn = True, 0
        self._now = self._plain_left = 0
        self._plain: defaultdict[int, PlainTries] = defaultdict(PlainTries)  # by power of two of the requests
        self._news = Turns(*PROBE_EVERY, 2)
        self._met: set[str] = set()  # the requests of the last plan, of equal widths the last that decoded
        self._probed: dict[str, float] = {}
        self._probed_width = self._followed = 0

    def plan(self, request_ids: Sequence[str], context: int, *, decoding: bool = True) -> Plan:
        """The plan for the requests that the next step verifies.

        Args:
            request_ids: in the order of their arrival.
            context: their tokens so far, together.
            decoding: the step before was of these requests, and had no prompt in it.
        """
        if self._fixed is not None:
            return Plan(self._fixed, np.full(len(request_ids), self._fixed), 0.0)
        self._now += 1
        self._since_change += 1
        self._wait -= 1
        self._served += 1
        if self._plain_left:
            self._plain_left -= 1
            return Plan(0, np.zeros(len(request_ids), dtype=np.int64), 0.0, probe=True)
        plan = self._current
        self._age += 1
        # Nothing more is known of requests that are not drafted for: their plan stays until the next probe, or others come. One
        # of a batch in its prompt is soon made again: once it decodes it may be tried.
        plain = plan is not None and not plan.width and (self._decoding or self.per_request)
        serves = REPLAN[1] if plain else self._serves
        due = self._served >= min(serves, max(self._age // 2, REPLAN[0] // 2))
        other = self._is_other(request_ids)
        if other:
            self._followed = 0
        if plan is None or other or due or self._wait <= 0 or self.costs.late > LATE:
            self._age = 0 if other else self._age
            self.costs.late, self._decoding = 0, decoding
            began = self._clock()
            plan = self._replan(list(request_ids), context, decoding=decoding)
            self._pays = min(0.8 * self._pays + 0.2 * (self._clock() - began), 2.0 * self._pays)
            share = PLANNING_SHARE * self.costs.pace
            self._serves = min(max(math.ceil(self._pays / share) if share else 0, REPLAN[0]), REPLAN[1])
        elif len(plan.lengths) != len(request_ids):
            plan = self._current = dataclasses.replace(plan, lengths=np.full(len(request_ids), plan.width))
        return plan

    def _is_other(self, request_ids: Sequence[str]) -> bool:
        if self.per_request:
            return self._planned_for != request_ids
        before = self._planned_for
        # Requests are in the order of their arrival: once the first has left, others of its age are leaving.
        other_first = bool(before and request_ids and before[0] != request_ids[0])
        return other_first or abs(len(request_ids) - len(before)) * OTHER_BATCH > len(before)

    def hold(self, width: int | None) -> None:
        """Plan ``width`` for every request of every step, without probes, until told otherwise; None chooses again.

        Raises:
            ValueError: ``width`` is none of ``widths``.
        """
        if width is not None and width not in self.widths:
            known = ", ".join(map(str, self.widths))
            raise ValueError(f"draft width to hold: found {width!r}; expected one of {known}, or None to let the planner choose.")
        self._fixed, self._current = width, None
        self._plain_left, self._probed, self._followed = 0, {}, 0

    def _replan(self, request_ids: list[str], context: int, *, decoding: bool) -> Plan:
        survivals = self.acceptance.survivals(request_ids, self.widths)
        plans = self._fitted(survivals, context) if self.per_request else []
        rates = np.array([plan.rate for plan in plans]) if plans else self._rates(survivals, context)
        held = self._choose(rates, len(request_ids))
        if self.per_request and rates[held] <= rates[0]:
            held = self._held = 0  # the width that was held drafts for nobody
        if self.per_request or decoding:  # equal widths reach requests in mid-prompt too, whose drafts are not made
            if held == 0 and self._met.isdisjoint(request_ids):
                self._welcome()
            self._met = set(request_ids)
        self._current = None
        if request_ids and (self._wait <= 0 or self._is_plain_due(len(request_ids), float(rates[held]))):
            return self._probe(rates, held, survivals, request_ids, context)
        alike = self.widths[held]
        plan = plans[held] if plans else Plan(alike, np.full(len(request_ids), alike), float(rates[held]))
        self._current, self._planned_for, self._served = plan, request_ids, 0
        return plan

    def _welcome(self) -> None:
        """Probe a batch that has come while nothing is drafted: what those before it were like says little of its text.

        Where one request in eight is tried, always; else at growing intervals while it is in vain, as answers may be short.
        """
        if self.per_request:
            self._wait, self._backoff = 0, 1
        elif self._news.due(self._now):
            self._wait = 0
            self._news.take(self._now)

    def observe(
        self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int], width: int | None = None
    ) -> None:
        """One verified step, see :meth:`AcceptanceStats.observe`. A probe that did better than expected is followed up."""
        width = max(drafted, default=0) if width is None else width
        if expected := self._expected_of_probe(request_ids, width):
            self._follow_up(sum(accepted) > expected + 2.0 * (expected + 1.0) ** 0.5)
        self.acceptance.observe(request_ids, drafted, accepted, width)

    def _expected_of_probe(self, request_ids: Sequence[str], width: int) -> float:
        """Drafts expected to be accepted where a step of ``width`` is the probe of these requests, else 0.

        What became of steps comes late: those before the probe are told after it was planned.
        """
        if not self._probed or width != self._probed_width:
            return 0.0
        return sum(self._probed.get(name, 0.0) for name in request_ids)

    def _follow_up(self, better: bool) -> None:
        self._followed = self._followed + 1 if better and self._followed < FOLLOW_UPS else 0
        if self._followed:
            self._wait, self._backoff = 0, 1
        self._probed = {}

    def _rates(self, survivals: Sequence[Floats], context: int) -> Floats:
        return uniform_rates(survivals, self._widths, self.costs, self._query_rows, context)

    def _fitted(self, survivals: Sequence[Floats], context: int) -> list[Plan]:
        """For each width lengths up to it, by request, none at all unless that is well worth it."""
        requests = len(survivals[0])
        worth = WORTH * (1.0 - 1.0 / max(requests, 1))
        priced = self.costs.by_rows(requests, requests * (1 + self.widths[-1]), context)
        return [
            fitted_plan(survival, width, self.costs, rows, context, worth=worth, priced=priced)
            for survival, width, rows in zip(survivals, self.widths, self._query_rows.tolist(), strict=True)
        ]

    def _choose(self, rates: Floats, requests: int) -> int:
        """Index of the width to stay with or to change to."""
        best = int(np.argmax(rates))
        if self._held is None:
            self._held = best
        gain = rates[best] / rates[self._held] - 1.0
        to_none = self.widths[best] == 0 and not self.per_request and self.costs.plain_steps[requests.bit_length()]
        margin = 0.0 if to_none else MARGIN
        needed = margin + (LARGE_GAIN - margin) * max(0.0, 1.0 - self._since_change / DWELL)
        if best != self._held and gain > needed:
            self._held, self._since_change = best, 0
            self._wait, self._backoff = PROBE_EVERY[0], 1
            self._news = Turns(*PROBE_EVERY, 2)
        return self._held

    def _probe(self, rates: Floats, held: int, survivals: Sequence[Floats], request_ids: Sequence[str], context: int) -> Plan:
        """One step at the next wider or narrower width, or with drafts for some where there are none; then a wait by its cost."""
        share, out_of_turn = PROBE_SHARE, False
        if self.per_request and held == 0:
            at, lengths, rate = self._some(survivals, context)
            share *= max(self._at_stake(len(request_ids), context), 0.1)
        else:
            upwards = held == 0 or (self._upwards and held + 1 < len(self.widths))
            at = min(held + 1, len(self.widths) - 1) if upwards else held - 1
            out_of_turn = held > 0 and self._may_plain_pay(len(request_ids), float(rates[held]))
            if out_of_turn:
                at = 0
                bits = len(request_ids).bit_length()
                self._plain[bits].note(self._now, float(rates[0] / rates[held]), self.costs.plain_steps[bits])
            if at == 0 and not self.per_request:
                self._plain_left = PLAIN_STEPS - 1
            lengths, rate = np.full(len(request_ids), self.widths[at]), float(rates[at])
        width = self.widths[at]
        wait = (1 + self._plain_left) * max(0.0, 1.0 - rate / rates[held]) / share
        if out_of_turn and not self.per_request:
            wait = max(self._wait, 0)  # neighbours have their own turn
        elif self._tried(width, lengths) >= ENOUGH:
            wait *= self._backoff
            self._backoff = min(2 * self._backoff, 8)
            self._upwards = not self._upwards
        self._wait = int(np.clip(wait, *PROBE_EVERY))
        if at > held:
            drafting = lengths > 0
            hope = float(survivals[at][drafting].sum(1).mean())  # of each alike: survival may come in another order
            self._probed = {name: hope for name, drafts in zip(request_ids, drafting.tolist(), strict=True) if drafts}
            self._probed_width = width
        return Plan(width, lengths, rate, probe=True)

    def _some(self, survivals: Sequence[Floats], context: int) -> tuple[int, Lengths, float]:
        """A few requests in turn, at the width that is the best for them: its number, lengths of all, tokens per second."""
        requests = len(survivals[0])
        some = (np.arange(max(1, requests // FEW)) + self._turn) % requests
        self._turn += len(some)
        tokens = requests + np.array([survival[some].sum() for survival in survivals[1:]])
        rows, drafted = requests + len(some) * self._widths[1:], len(some) * self._query_rows[1:]
        rates = tokens / self.costs.seconds(rows, drafted, context, requests)
        at = 1 + int(np.argmax(rates))
        lengths = np.zeros(requests, dtype=np.int64)
        lengths[some] = self.widths[at]
        return at, lengths, float(rates[at - 1])

    def _at_stake(self, requests: int, context: int) -> float:
        """What drafts at full width that are all accepted would gain over none, as a share of its rate."""
        most = self.widths[-1]
        rows, drafted = np.array([requests, requests * (1 + most)]), np.array([0, requests * self._query_rows[-1]])
        plain, full = self.costs.seconds(rows, drafted, context, requests).tolist()
        return float((1 + most) * plain / full - 1.0)

    def _may_plain_pay(self, requests: int, rate: float) -> bool:
        """Whether steps without drafts are worth a try out of turn.

        Where lengths differ: until a few were seen. Else where their pass alone would do better than ``rate``, at intervals.
        """
        if self.per_request:
            return self.costs.seen(requests, requests) < ENOUGH
        bits = requests.bit_length()
        return self._plain[bits].due(self._now, self.costs.plain_steps[bits]) and requests > rate * self.costs.least(requests)

    def _is_plain_due(self, requests: int, rate: float) -> bool:
        """Whether steps without drafts are tried before it is time for a probe: once a batch has settled.

        They lose next to nothing where their pass alone would do better, and a batch that drafts in vain loses at every step.
        """
        return bool(self._held) and not self.per_request and self._age >= REPLAN[0] and self._may_plain_pay(requests, rate)

    def _tried(self, width: int, lengths: Lengths) -> float:  # noqa: ARG002  # where drafts are cut later, rows say nothing
        """How many steps like this one are remembered."""
        return self.costs.seen(len(lengths) + int(lengths.sum()), len(lengths))
