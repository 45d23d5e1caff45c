# SPDX-License-Identifier: Apache-2.0
"""Survival of drafts from the confidences of adaptive verification, which cuts drafts on the device.

Counting accepted drafts would mislead there: a request whose drafts were all accepted as far as they were verified looks like a
rejection. Confidences are calibrated online by vLLM's estimator against what was accepted, and there is one for every draft that
was made, verified or not. They come from the worker, in the same process; bounded, as nobody may read them. What steps cost goes
the other way, to whoever decides where to cut. One engine of a process is served, the last one.
"""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_dflash.planner.acceptance import AT_ONCE, PRIOR, REQUEST_DECAY, AcceptanceStats, log_odds, rate
from vllm_dflash.planner.costs import StepCosts

Array = npt.NDArray[np.float64]

POOL = 64
"""Drafted blocks that their spread is estimated from, at least: the latest of the same few requests, or one step of many."""
LATEST = 16
"""Steps that one request's blocks are taken from at most: text changes."""
RATE = 0.1
"""Of one step in the usual confidence of a position: 10 steps of memory."""
_CONFIDENCES: deque[tuple[Sequence[str], Array]] = deque(maxlen=16)
_ROWS: deque[int] = deque(maxlen=16)
_COSTS: list[StepCosts] = []  # one or none


def record_confidences(request_ids: Sequence[str], confidences: Array) -> None:
    """Of one step's drafts: [requests, width], each that of a draft to be accepted if all before it are."""
    _CONFIDENCES.append((request_ids, confidences))


def record_rows(rows: int) -> None:
    """The step that is about to run verifies ``rows`` rows, after the cut."""
    _ROWS.append(rows)


def take_confidences() -> list[tuple[Sequence[str], Array]]:
    """(requests, confidences) that came since the last call, oldest first."""
    taken = list(_CONFIDENCES)
    _CONFIDENCES.clear()
    return taken


def take_rows() -> list[int]:
    """The same of rows."""
    taken = list(_ROWS)
    _ROWS.clear()
    return taken


def forget() -> None:
    """Drop what no planner has taken, and what an earlier one has offered."""
    _CONFIDENCES.clear()
    _ROWS.clear()
    _COSTS.clear()


def offer_costs(costs: StepCosts) -> None:
    """Let :func:`bare_costs` and :func:`observed_costs` read what steps cost."""
    _COSTS[:] = [costs]


def bare_costs(rows: npt.NDArray[np.int64]) -> Array | None:
    """Seconds of passes of ``rows`` [n] on their own, [n]; None where none was timed."""
    verify = _COSTS[0].verify if _COSTS else None
    return verify.alone(rows) if verify is not None and verify.measured else None


def observed_costs(requests: int) -> list[tuple[float, float]]:
    """See :meth:`StepCosts.observed`; empty without a planner in this process."""
    return _COSTS[0].observed(requests) if _COSTS else []


class UsualConfidence:
    """Mean confidence by position, of drafts that are reached: where all before them were accepted."""

    def __init__(self, max_width: int) -> None:
        self.by_position: Array = np.full(max_width, PRIOR)

    def note(self, confidences: Array) -> None:
        """One step's, [requests, width]."""
        survival = np.cumprod(confidences, axis=1)
        reached = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1).sum(0)
        mean = self.by_position[: survival.shape[1]]
        mean += RATE * (survival.sum(0) / np.maximum(reached, 1e-9) - mean)


class RecentBlocks:
    """How good the best drafts of a next step will be, the second best, and so on, from the latest steps of the same requests.

    How many drafts are verified is decided before they are known to the host, which sees those of an earlier step. Of many
    requests these are as good as the next; of few they are luck, and an easy block is cut for a hard one before it. So the n-th
    best of several steps are averaged, of as many as have ``POOL`` blocks together.
    """

    def __init__(self) -> None:
        self._now = 0
        self._steps: dict[int, deque[tuple[int, Array]]] = {}  # by width: when, and survivals of the step, descending
        self._names: Sequence[str] = ()
        self._known: frozenset[str] = frozenset()

    def note(self, names: Sequence[str], confidences: Array) -> None:
        """One step's, [requests, width]; what is known of requests that have all left is forgotten."""
        self._now += 1
        if names is not self._names:
            if self._known.isdisjoint(names):
                self._steps.clear()
            self._names, self._known = names, frozenset(names)
        if len(names) < POOL:  # the latest step of more is as good
            ranked = np.sort(np.cumprod(confidences, axis=1), axis=None)[::-1]
            self._steps.setdefault(confidences.shape[1], deque(maxlen=LATEST)).append((self._now, ranked))

    def idle(self) -> None:
        """A step without drafts: text goes on."""
        self._now += 1

    def known(self, names: Sequence[str]) -> list[str]:
        """Those that a step was noted of; of others nothing is expected."""
        return [name for name in names if name in self._known]

    def expected(self, requests: int, width: int) -> Array | None:
        """[requests, width]: confidences whose survivals are those to expect; None where the latest step is as good.

        Which request has which says nothing.
        """
        if not 0 < requests < POOL:
            return None
        fresh = [one for at, one in reversed(self._steps.get(width, ())) if self._now - at < 2 * LATEST]
        latest = fresh[: -(-POOL // requests)]
        if len(latest) < 2:
            return None
        places = (np.arange(requests * width) + 0.5) / (requests * width)
        for number, one in enumerate(latest):
            if len(one) != len(places):  # of more requests, or fewer
                latest[number] = np.interp(places, (np.arange(len(one)) + 0.5) / len(one), one)
        survival = np.mean(latest, axis=0).reshape(requests, width)  # each row falls, as survivals of one request do
        before = np.concatenate([np.ones((requests, 1)), survival[:, :-1]], axis=1)
        found: Array = np.minimum(survival / np.maximum(before, 1e-12), 1.0)
        return found


class ConfidenceStats(AcceptanceStats):
    """Survival of the next drafts where confidences tell of every draft that was made, verified or not.

    A confidence counts as the part of an acceptance that it stands for, so levels follow requests, batches and the population as
    they do by counting. But drafts of one request differ from step to step, and only the best of a step are verified: what counts
    besides is how survivals *spread*. So latest blocks keep how far, in log-odds, they lay about what was expected of their
    request; these offsets are put about what is expected now. Means by position stay as expected.
    """

    def __init__(self, max_width: int, rows: Mapping[int, int] | None = None) -> None:
        super().__init__(max_width, rows=rows)
        self._request_fade[1:] = REQUEST_DECAY  # positions behind a narrow pass, too: what they told is of another text by then
        self._offsets: deque[Array] = deque()  # [requests, K] of one step each
        self._noted: list[tuple[Sequence[str], Array]] = []

    def note(self, request_ids: Sequence[str], confidences: Array) -> None:
        """One step's, [requests, width]: each that of a draft to be accepted if all before it are.

        Kept until they are counted, several steps at once: numpy costs as much for one.
        """
        if not confidences.shape[1]:
            return  # nothing was drafted
        self._noted.append((request_ids, np.clip(confidences, 0.0, 1.0).astype(np.float64)))
        if len(self._noted) >= AT_ONCE:
            self._count()

    def _count(self) -> None:
        noted, self._noted = self._noted, []
        for (names, width), steps in itertools.groupby(noted, key=lambda step: (step[0], step[1].shape[1])):
            self._add_confidences(names, width, np.stack([confidences for _, confidences in steps]))

    def _add_confidences(self, names: Sequence[str], width: int, certain: Array) -> None:
        """Count T steps of the same R requests, [T, R, width]."""
        news = np.zeros((*certain.shape[:2], 2, self.max_width))
        news[:, :, 1, :width] = np.cumprod(certain, axis=2)
        news[:, :, 0, 0] = 1.0
        news[:, :, 0, 1:width] = news[:, :, 1, : width - 1]  # behind a rejection nobody would look
        self._learn(names, width, np.full(certain.shape[:2], width), news.reshape(*certain.shape[:2], -1))
        # About what is expected with these counted: what tells a request from others is in its level, and no spread besides.
        odds = log_odds(self._narrowed(self._conditional(names), width))
        for step in certain:
            offsets = np.empty((len(names), self.max_width))
            offsets[:, :width] = log_odds(step) - odds
            offsets[:, width:] = offsets[:, :width].mean(1, keepdims=True)  # a block is easy throughout
            self._offsets.append(offsets)
        while sum(map(len, self._offsets)) - len(self._offsets[0]) >= POOL:
            self._offsets.popleft()

    def observe(
        self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int], width: int | None = None
    ) -> None:
        """Nothing: which drafts were verified is known to the device only."""

    def _survivals(self, request_ids: Sequence[str], widths: Sequence[int]) -> list[Array]:
        """[len(request_ids), width] of each, see above; in order of what they promise, not of requests."""
        odds = log_odds(self._conditional(request_ids))
        offsets = np.concatenate(list(self._offsets)) if self._offsets and request_ids else None
        return [self._spread(odds[:, :width] - (self.blocks.lost(width) if width else 0.0), offsets) for width in widths]

    @staticmethod
    def _spread(odds: Array, offsets: Array | None) -> Array:
        """Survival [R, width] of blocks whose drafts have log-odds ``odds`` [R, width] on average, and lie about them."""
        requests, width = odds.shape
        level: Array = np.cumprod(rate(odds), axis=1, dtype=np.float64)
        if offsets is None or not width:
            return level
        offsets = offsets[:, :width]
        offsets = offsets - offsets.mean(0)  # expectations that lag behind a change of text are no spread
        each = -(-POOL // requests)  # blocks per request
        chosen = np.arange(requests * each) * len(offsets) // (requests * each)
        blocks = np.cumprod(rate(odds.repeat(each, axis=0) + offsets[chosen]), axis=1)
        blocks = np.minimum.accumulate(np.minimum(blocks * (level.mean(0) / np.maximum(blocks.mean(0), 1e-300)), 1.0), axis=1)
        blocks = blocks[np.argsort(-blocks.sum(1), kind="stable")]
        parts: Array = blocks.reshape(requests, each, -1).mean(1)
        return parts
