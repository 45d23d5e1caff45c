# SPDX-License-Identifier: Apache-2.0
"""Survival of drafts by position, per request, from verified steps only.

For position j, ``c_j`` is the chance that draft j is accepted given that all before it were. Text that is easy to guess is so at
every position: a request's log-odds are the population's, moved by one number that all its tried positions tell
(:func:`_moved`), so that three drafts a step also tell what seven would bring. Its own decayed counts correct that, with
``SHRINK`` imagined tries against them; survival is the running product.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

REQUEST_DECAY = 0.94
"""Per verified step of the request: some 16 steps of memory, so that a change of topic shows within a second."""
POPULATION_DECAY = 0.99
"""Per step of the engine: 100 steps, the memory that a new request starts from."""
SHRINK = 3.0
"""Imagined tries at the expected rate: a request needs about as many of its own to be believed."""
SPREAD, COMMON = 0.8, 1.5
"""How far, in log-odds, requests lie about their batch, and batches about the population: chat and code are 0.8 apart."""
PRIOR, PRIOR_TRIES = 0.75, 2.0
"""Before anything is seen: optimistic, as a position that is never tried would never be corrected."""
AT_ONCE = 16
"""Steps that are counted together at most."""


class AcceptanceStats:
    """Decayed counts of tries and successes by request and position.

    Args:
        max_width: K, drafts per step at most.
        hope: standard deviations of the mean of a batch that its log-odds are taken above the most likely ones.
    """

    def __init__(self, max_width: int, hope: float = 0.0) -> None:
        self.max_width, self.hope = max_width, hope
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []
        self._counts: Array = np.zeros((0, 2 * max_width))  # tries, then hits
        self._all_counts: Array = np.concatenate([np.full(max_width, PRIOR_TRIES), np.full(max_width, PRIOR_TRIES * PRIOR)])
        # What a step changes depends on two small numbers only, how many positions were tried and how many of them accepted.
        below = np.tri(max_width + 1, max_width, -1)  # [n, j]: 1 where j < n
        self._request_fade = np.tile(1.0 - (1.0 - REQUEST_DECAY) * below, 2)
        self._population_fade = np.tile(1.0 - (1.0 - POPULATION_DECAY) * below, 2)
        tried, kept = np.divmod(np.arange((max_width + 1) ** 2), max_width + 1)
        self._news = np.concatenate([below[tried], below[kept]], axis=1)
        self._pending: list[tuple[Sequence[str], Sequence[int], Sequence[int]]] = []

    def observe(self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """One verified step: of ``drafted[i]`` drafts of a request the first ``accepted[i]`` were accepted; 0 drafted: no step.

        The sequences are kept until they are counted, several steps at once: numpy costs as much for one.
        """
        self._pending.append((request_ids, drafted, accepted))
        if len(self._pending) >= AT_ONCE:
            self._count()

    def _count(self) -> None:
        pending, self._pending = self._pending, []
        # The same list, or the same strings, from step to step: compared by identity.
        for names, steps in itertools.groupby(pending, key=lambda step: step[0]):
            _, drafted, accepted = zip(*steps, strict=True)
            self._add(names, np.array(drafted, dtype=np.int64), np.array(accepted, dtype=np.int64))

    def _add(self, names: Sequence[str], length: Rows, accepted: Rows) -> None:
        """Count T steps of the same R requests: ``length`` and ``accepted`` are [T, R]."""
        if not length.any():
            return
        kept = np.minimum(accepted, length)
        tried = np.minimum(kept + 1, length)  # the first rejection is a try; what lies behind was not looked at
        self._learn(names, tried, self._news.take(tried * (self.max_width + 1) + kept, axis=0))

    def _learn(self, names: Sequence[str], tried: Rows, news: Array) -> None:
        """Add ``news`` [T, R, 2 K], tries and hits of T steps that looked at the first ``tried`` [T, R] positions."""
        rows = np.fromiter(map(self._row, names), dtype=np.int64, count=len(names))
        self._counts[rows] = _faded(self._counts.take(rows, axis=0), self._request_fade.take(tried, axis=0), news)
        reached = tried.max(1)
        before = self._population()
        self._all_counts = _faded(self._all_counts, self._population_fade.take(reached, axis=0), news.sum(1))
        self._carry(before, int(reached.max()))

    def _population(self) -> Array:
        rates: Array = self._all_counts[self.max_width :] / self._all_counts[: self.max_width]
        return rates

    def _carry(self, before: Array, reached: int) -> None:
        """Move positions that nobody tries any more along with those before them: the text has changed for all of them."""
        if not 0 < reached < self.max_width:
            return
        moved = float((log_odds(self._population()[:reached]) - log_odds(before[:reached])).mean())
        behind = rate(log_odds(before[reached:]) + moved)
        self._all_counts[self.max_width + reached :] = behind * self._all_counts[reached : self.max_width]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Finished requests; unknown ones are ignored."""
        self._count()
        for name in request_ids:
            row = self._row_of.pop(name, None)
            if row is not None:
                self._free.append(row)

    def survival(self, request_ids: Sequence[str]) -> Array:
        """P(the first j + 1 drafts are all accepted) as [len(request_ids), K]; unknown requests get the population's."""
        return np.cumprod(self._conditional(request_ids), axis=1, dtype=np.float64)

    def _conditional(self, request_ids: Sequence[str]) -> Array:
        """The same of each draft by itself, given that all before it are accepted."""
        self._count()
        width = self.max_width
        population = self._population()
        rows = np.fromiter((self._row_of.get(name, -1) for name in request_ids), dtype=np.int64, count=len(request_ids))
        known = self._counts if len(self._counts) else np.zeros((1, 2 * width))
        counts = known.take(np.maximum(rows, 0), axis=0)
        counts[rows < 0] = 0.0
        tries, hits = counts[:, :width], counts[:, width:]
        odds = log_odds(population)
        common = _moved(odds, tries.sum(0, keepdims=True), hits.sum(0, keepdims=True), 0.0, COMMON)
        moved = _moved(odds, tries, hits, float(common[0]), SPREAD)
        if self.hope:
            moved += self.hope * _uncertain(odds + moved[:, None], tries, SPREAD) / len(rows) ** 0.5
        expected = rate(odds + moved[:, None])
        rates: Array = (hits + SHRINK * expected) / (tries + SHRINK)
        return rates

    def _row(self, name: str) -> int:
        row = self._row_of.get(name)
        if row is not None:
            return row
        if not self._free:
            first = self._counts.shape[0]
            more = max(16, first)
            self._free = list(range(first + more - 1, first - 1, -1))
            self._counts = np.vstack([self._counts, np.zeros((more, 2 * self.max_width))])
        row = self._free.pop()
        self._counts[row] = 0.0
        self._row_of[name] = row
        return row


def _faded(counts: Array, fade: Array, news: Array) -> Array:
    """``counts`` [...] after T steps that each first multiply by ``fade`` [T, ...], then add ``news`` [T, ...]."""
    for factor, more in zip(fade, news, strict=True):
        counts = counts * factor + more
    return counts


def log_odds(rates: Array) -> Array:
    """Of probabilities, 0.001 to 0.999."""
    inside: Array = np.clip(rates, 1e-3, 1 - 1e-3)
    return np.log(inside / (1 - inside))


def rate(odds: Array) -> Array:
    """Probabilities of log-odds."""
    rates: Array = 1.0 / (1.0 + np.exp(-odds))
    return rates


def _moved(odds: Array, tries: Array, hits: Array, mean: float, spread: float) -> Array:
    """[R]: by how much the log-odds of all positions [K] are best moved for each row of counts [R, K].

    The most likely value under a normal prior, by Newton's method from its mean: three bounded steps are within 0.05.
    """
    moved = np.full(len(tries), mean)
    for _ in range(3):
        rates = rate(odds + moved[:, None])
        slope = (hits - tries * rates).sum(1) - (moved - mean) / spread**2
        curvature = (tries * rates * (1 - rates)).sum(1) + 1 / spread**2
        moved = moved + np.clip(slope / curvature, -1.5, 1.5)
    return moved


def _uncertain(odds: Array, tries: Array, spread: float) -> Array:
    """[R]: standard deviation of what :func:`_moved` finds, by the curvature where it ended; ``odds`` [R, K] of that place."""
    rates = rate(odds)
    deviation: Array = ((tries * rates * (1 - rates)).sum(1) + 1 / spread**2) ** -0.5
    return deviation
