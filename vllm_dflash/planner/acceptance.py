# SPDX-License-Identifier: Apache-2.0
"""Survival of drafts by position, per request, from verified steps only.

For position j, ``c_j`` is the chance that draft j is accepted given that all before it were. Text that is easy to guess is so at
every position: a request's log-odds are the population's, moved by one number that all its tried positions tell
(:func:`_moved`), so that three drafts a step also tell what seven would bring. Its own decayed counts correct that, with
``SHRINK`` imagined tries against them; survival is the running product.

A narrower block guesses worse at every position (``narrow_blocks.py``). So all counts are as of blocks of full length, and the
survival of a narrower one is less.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_dflash.planner.narrow_blocks import NarrowBlocks

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
        rows: of the block that each width runs in; without them all blocks are of full length.
    """

    def __init__(self, max_width: int, hope: float = 0.0, rows: Mapping[int, int] | None = None) -> None:
        self.max_width, self.hope = max_width, hope
        self.blocks = NarrowBlocks(rows or {max_width: max_width + 1}, REQUEST_DECAY)
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
        self._pending: list[tuple[Sequence[str], Sequence[int], Sequence[int], int]] = []
        # Answer to the last question, while nothing new is known: plans without drafts are made again as prices change.
        self._told: tuple[tuple[Sequence[str], Sequence[int]], list[Array]] | None = None

    def observe(
        self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int], width: int | None = None
    ) -> None:
        """One verified step: of ``drafted[i]`` drafts of a request the first ``accepted[i]`` were accepted; 0 drafted: no step.

        ``width``: drafts of the pass that made them, where fewer are verified. The sequences are kept until they are counted,
        several steps at once: numpy costs as much for one.
        """
        self._pending.append((request_ids, drafted, accepted, max(drafted, default=0) if width is None else width))
        if len(self._pending) >= AT_ONCE:
            self._count()

    def _count(self) -> None:
        pending, self._pending = self._pending, []
        # The same list, or the same strings, from step to step: compared by identity.
        for (names, width), steps in itertools.groupby(pending, key=lambda step: (step[0], step[3])):
            _, drafted, accepted, _ = zip(*steps, strict=True)
            length = np.array(drafted, dtype=np.int64)
            if length.any():
                self._add(names, width, length, np.array(accepted, dtype=np.int64))

    def _add(self, names: Sequence[str], width: int, length: Rows, accepted: Rows) -> None:
        """Count T steps of the same R requests in blocks of ``width``: ``length`` and ``accepted`` are [T, R]."""
        kept = np.minimum(accepted, length)
        tried = np.minimum(kept + 1, length)  # the first rejection is a try; what lies behind was not looked at
        self._learn(names, width, tried, self._news.take(tried * (self.max_width + 1) + kept, axis=0))

    def _learn(self, names: Sequence[str], width: int, tried: Rows, news: Array) -> None:
        """Add ``news`` [T, R, 2 K], tries and hits of T steps that looked at the first ``tried`` [T, R] positions.

        They are of blocks of ``width``; the first is compared with what was expected, where that comes from other blocks.
        """
        self._told = None
        if self.blocks.tells(width):
            self._compare(names, width, news[int(np.argmax(tried.any(axis=1)))])
        self.blocks.note(width, float((tried > 0).mean(1).sum()))
        news = self._of_full_width(width, news)
        rows = np.fromiter(map(self._row, names), dtype=np.int64, count=len(names))
        self._counts[rows] = _faded(self._counts.take(rows, axis=0), self._request_fade.take(tried, axis=0), news)
        reached = tried.max(1)
        before = self._population()
        self._all_counts = _faded(self._all_counts, self._population_fade.take(reached, axis=0), news.sum(1))
        self._carry(before, int(reached.max()))

    def _compare(self, names: Sequence[str], width: int, news: Array) -> None:
        """Tell how much better or worse than expected the drafts of a block of ``width`` did: ``news`` [R, 2 K] of one step."""
        tries, hits = news[:, :width], news[:, self.max_width : self.max_width + width]
        odds = log_odds(self._conditional(names)[:, :width]) - self.blocks.lost(width)
        rates = rate(odds)
        told = float((tries * rates * (1 - rates)).sum())
        counts, _ = self._counts_of(names)
        known = float((counts[:, :width] * rates * (1 - rates))[tries[:, 0] > 0].sum())
        if told > 0:
            surprise = float((hits - tries * rates).sum()) / told
            self.blocks.compare(width, float(np.clip(surprise, -1.5, 1.5)), 1.0 / told + 1.0 / (known + COMMON**-2))

    def _of_full_width(self, width: int, news: Array) -> Array:
        """Tries and hits [..., 2 K] of a block of ``width``, as of a full one."""
        if width == self.max_width:
            return news
        hit, miss = self.blocks.widened(width)
        tries, hits = news[..., : self.max_width], news[..., self.max_width :]
        return np.concatenate([miss * tries + (hit - miss) * hits, hit * hits], axis=-1)

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
        self._told = None
        for name in request_ids:
            row = self._row_of.pop(name, None)
            if row is not None:
                self._free.append(row)

    def survival(self, request_ids: Sequence[str]) -> Array:
        """See :meth:`survivals`, of a block of full width: [len(request_ids), K]."""
        return self.survivals(request_ids, [self.max_width])[0]

    def survivals(self, request_ids: Sequence[str], widths: Sequence[int]) -> list[Array]:
        """For each of ``widths``: P(the first j + 1 of its drafts are all accepted) as [len(request_ids), width].

        Unknown requests get the population's.
        """
        self._count()
        if self._told is None or self._told[0] != (request_ids, tuple(widths)):
            self._told = (list(request_ids), tuple(widths)), self._survivals(request_ids, widths)
        return self._told[1]

    def _survivals(self, request_ids: Sequence[str], widths: Sequence[int]) -> list[Array]:
        rates = self._conditional(request_ids, self.hope)
        return [np.cumprod(self._narrowed(rates, width), axis=1, dtype=np.float64) for width in widths]

    def _narrowed(self, rates: Array, width: int) -> Array:
        """Of ``rates`` [R, K] of a full block, each given that those before it are accepted: [R, width] of a narrower one."""
        lost = self.blocks.lost(width) if width else 0.0
        return rate(log_odds(rates[:, :width]) - lost) if lost else rates[:, :width]

    def _counts_of(self, request_ids: Sequence[str]) -> tuple[Array, Rows]:
        """[R, 2 K], 0 for requests that nothing is known of, and their rows, -1 for those."""
        rows = np.fromiter((self._row_of.get(name, -1) for name in request_ids), dtype=np.int64, count=len(request_ids))
        known = self._counts if len(self._counts) else np.zeros((1, 2 * self.max_width))
        counts = known.take(np.maximum(rows, 0), axis=0)
        counts[rows < 0] = 0.0
        return counts, rows

    def _conditional(self, request_ids: Sequence[str], hope: float = 0.0) -> Array:
        """The chance [R, K] of each draft of a full block by itself, given that all before it are accepted."""
        width = self.max_width
        counts, rows = self._counts_of(request_ids)
        tries, hits = counts[:, :width], counts[:, width:]
        odds = log_odds(self._population())
        common = _moved(odds, tries.sum(0, keepdims=True), hits.sum(0, keepdims=True), 0.0, COMMON)
        moved = _moved(odds, tries, hits, float(common[0]), SPREAD)
        if hope:
            moved += hope * _uncertain(odds + moved[:, None], tries, SPREAD) / len(rows) ** 0.5
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
