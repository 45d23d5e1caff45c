# SPDX-License-Identifier: Apache-2.0
"""Survival of drafts from the confidences of adaptive verification, which cuts drafts on the device.

Counting accepted drafts would mislead there: a request whose drafts were all accepted as far as they were verified looks like a
rejection. Confidences are calibrated online by vLLM's estimator against what was accepted, and there is one for every draft that
was made, verified or not. They come from the worker, in the same process; bounded, as nobody may read them. What steps cost goes
the other way, to whoever decides where to cut. One engine of a process is served, the last one.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_dflash.planner.acceptance import PRIOR, AcceptanceStats
from vllm_dflash.planner.costs import StepCosts

Array = npt.NDArray[np.float64]

POOL = 64
"""Drafted blocks that an estimate is made of, at least: the latest of the same few requests, or one step of many."""
RATE = 0.1
"""Of one step in the usual confidence of a position: 10 steps of memory."""
_CONFIDENCES: deque[Array] = deque(maxlen=16)
_ROWS: deque[int] = deque(maxlen=16)
_COSTS: list[StepCosts] = []  # one or none


def record_confidences(confidences: Array) -> None:
    """Of one step's drafts: [requests, width], each that of a draft to be accepted if all before it are."""
    _CONFIDENCES.append(confidences)


def record_rows(rows: int) -> None:
    """The step that is about to run verifies ``rows`` rows, after the cut."""
    _ROWS.append(rows)


def take_confidences() -> list[Array]:
    """What came since the last call, oldest first."""
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
    """Let :func:`observed_costs` read what steps cost while serving."""
    _COSTS[:] = [costs]


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


class ConfidenceStats(AcceptanceStats):
    """Survival of the next drafts, by what the latest ones promised.

    What counts is how survivals spread over the batch, since the best positions of all requests are verified; whose they are does
    not. So an estimate is the latest blocks, sorted by what they promise, in as many equal parts as there are requests.
    """

    def __init__(self, max_width: int) -> None:
        super().__init__(max_width)
        self._usual = UsualConfidence(max_width)
        self._pool: deque[Array] = deque()

    def note(self, confidences: Array) -> None:
        """One step's, [requests, width]; positions beyond its width are expected to do as usual."""
        self._usual.note(confidences)
        requests, width = confidences.shape
        usual = np.tile(self._usual.by_position[width:], (requests, 1))
        self._pool.append(np.cumprod(np.concatenate([confidences, usual], axis=1), axis=1, dtype=np.float64))
        while sum(map(len, self._pool)) - len(self._pool[0]) >= POOL:
            self._pool.popleft()

    def observe(self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing: which drafts were verified is known to the device only."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nothing is kept by request."""

    def survival(self, request_ids: Sequence[str]) -> Array:
        """[len(request_ids), K], see above; in order of what they promise, not of requests."""
        requests = len(request_ids)
        if not self._pool:
            return np.tile(np.cumprod(self._usual.by_position), (requests, 1))
        blocks = np.concatenate(list(self._pool))
        blocks = blocks[np.argsort(-blocks.sum(1), kind="stable")]
        # Means of equal parts, which need not be whole blocks: differences of the running sum, interpolated.
        running = np.concatenate([np.zeros((1, blocks.shape[1])), np.cumsum(blocks, axis=0)])
        borders = np.arange(requests + 1) * (len(blocks) / max(requests, 1))
        below = np.minimum(borders.astype(np.int64), len(blocks) - 1)
        sums = running[below] + (borders - below)[:, None] * blocks[below]
        parts: Array = np.diff(sums, axis=0) * (requests / len(blocks))
        return parts
