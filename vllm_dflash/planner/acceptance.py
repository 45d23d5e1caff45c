# SPDX-License-Identifier: Apache-2.0
"""Survival of drafts by position, per request, from verified steps only.

For position j, ``c_j`` is the chance that draft j is accepted given that all before it were. A request's own ``c_j`` is its
decayed count of successes, shrunk to the population by ``SHRINK`` imagined tries; survival is the running product.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

REQUEST_DECAY = 0.94
"""Per verified step of the request: some 16 steps of memory, so that a change of topic shows within a second."""
POPULATION_DECAY = 0.99
"""Per step of the engine: 100 steps, the memory that a new request starts from."""
SHRINK = 4.0
"""Imagined tries at the population's rate: a request needs about as many of its own to be believed."""
PRIOR, PRIOR_TRIES = 0.75, 2.0
"""Before anything is seen: optimistic, as a position that is never tried would never be corrected."""


class AcceptanceStats:
    """Decayed counts of tries and successes by request and position.

    Args:
        max_width: K, drafts per step at most.
    """

    def __init__(self, max_width: int) -> None:
        self.max_width = max_width
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []
        self._tries: Array = np.zeros((0, max_width))
        self._hits: Array = np.zeros((0, max_width))
        self._all_tries: Array = np.full(max_width, PRIOR_TRIES)
        self._all_hits: Array = np.full(max_width, PRIOR_TRIES * PRIOR)

    def observe(self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """One verified step: of ``drafted[i]`` drafts of a request the first ``accepted[i]`` were accepted."""
        if not request_ids:
            return
        rows = np.array([self._row(name) for name in request_ids])
        length, kept = np.array(drafted)[:, None], np.array(accepted)[:, None]
        position = np.arange(self.max_width)[None, :]
        hit = (position < kept).astype(np.float64)
        tried = (position <= kept) & (position < length)  # the first rejection is a try; what lies behind was not looked at
        decay = np.where(tried, REQUEST_DECAY, 1.0)
        self._tries[rows] = self._tries[rows] * decay + tried
        self._hits[rows] = self._hits[rows] * decay + hit
        seen = tried.any(0)
        fading = np.where(seen, POPULATION_DECAY, 1.0)
        self._all_tries *= fading
        self._all_tries += tried.sum(0)
        self._all_hits *= fading
        self._all_hits += hit.sum(0)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Finished requests; unknown ones are ignored."""
        for name in request_ids:
            row = self._row_of.pop(name, None)
            if row is not None:
                self._free.append(row)

    def survival(self, request_ids: Sequence[str]) -> Array:
        """P(the first j + 1 drafts are all accepted) as [len(request_ids), K]; unknown requests get the population's."""
        population = self._all_hits / self._all_tries
        rows = [self._row_of.get(name, -1) for name in request_ids]
        own = np.array(rows, dtype=np.int64)
        known = own >= 0
        tries = np.zeros((len(rows), self.max_width))
        hits = np.zeros_like(tries)
        tries[known], hits[known] = self._tries[own[known]], self._hits[own[known]]
        conditional = (hits + SHRINK * population) / (tries + SHRINK)
        return np.cumprod(conditional, axis=1, dtype=np.float64)

    def _row(self, name: str) -> int:
        row = self._row_of.get(name)
        if row is not None:
            return row
        if not self._free:
            first = self._tries.shape[0]
            more = max(16, first)
            self._free = list(range(first + more - 1, first - 1, -1))
            extra = np.zeros((more, self.max_width))
            self._tries, self._hits = np.vstack([self._tries, extra]), np.vstack([self._hits, extra])
        row = self._free.pop()
        self._tries[row] = self._hits[row] = 0.0
        self._row_of[name] = row
        return row
