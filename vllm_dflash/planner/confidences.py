# SPDX-License-Identifier: Apache-2.0
"""Survival of drafts from the confidences of adaptive verification, which cuts drafts on the device.

Counting accepted drafts would mislead there: a request whose drafts were all accepted as far as they were verified looks like a
rejection. Confidences are calibrated online by vLLM's estimator against what was accepted, and there is one for every draft that
was made, verified or not. They come from the worker, in the same process; bounded, as nobody may read them. What steps cost goes
the other way, to whoever decides where to cut. One engine of a process is served, the last one.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_dflash.planner.acceptance import PRIOR, REQUEST_DECAY, AcceptanceStats, log_odds, rate
from vllm_dflash.planner.costs import StepCosts

Array = npt.NDArray[np.float64]

POOL = 64
"""Drafted blocks that their spread is estimated from, at least: the latest of the same few requests, or one step of many."""
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
    """Survival of the next drafts where confidences tell of every draft that was made, verified or not.

    A confidence counts as the part of an acceptance that it stands for, so levels follow requests, batches and the population as
    they do by counting. But drafts of one request differ from step to step, and only the best of a step are verified: what counts
    besides is how survivals *spread*. So latest blocks keep how far, in log-odds, they lay about what was expected of their
    request; these offsets are put about what is expected now. Means by position stay as expected.
    """

    def __init__(self, max_width: int) -> None:
        super().__init__(max_width)
        self._request_fade[1:] = REQUEST_DECAY  # positions behind a narrow pass, too: what they told is of another text by then
        self._offsets: deque[Array] = deque()  # [requests, K] of one step each

    def note(self, request_ids: Sequence[str], confidences: Array) -> None:
        """One step's, [requests, width]: each that of a draft to be accepted if all before it are."""
        width = confidences.shape[1]
        certain = np.clip(confidences, 0.0, 1.0).astype(np.float64)
        offsets = log_odds(certain) - log_odds(self._conditional(request_ids)[:, :width])
        beyond = np.repeat(offsets.mean(1, keepdims=True), self.max_width - width, axis=1)  # a block is easy throughout
        self._offsets.append(np.concatenate([offsets, beyond], axis=1))
        while sum(map(len, self._offsets)) - len(self._offsets[0]) >= POOL:
            self._offsets.popleft()
        news = np.zeros((1, len(request_ids), 2, self.max_width))
        news[0, :, 1, :width] = np.cumprod(certain, axis=1)
        news[0, :, 0, 0] = 1.0
        news[0, :, 0, 1:width] = news[0, :, 1, : width - 1]  # a draft behind a rejection would not be looked at
        self._learn(request_ids, np.full((1, len(request_ids)), width), news.reshape(1, len(request_ids), -1))

    def observe(self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing: which drafts were verified is known to the device only."""

    def survival(self, request_ids: Sequence[str]) -> Array:
        """[len(request_ids), K], see above; in order of what they promise, not of requests."""
        requests, expected = len(request_ids), self._conditional(request_ids)
        level: Array = np.cumprod(expected, axis=1, dtype=np.float64)
        if not self._offsets or not requests:
            return level
        offsets = np.concatenate(list(self._offsets))
        offsets = offsets - offsets.mean(0)  # expectations that lag behind a change of text are no spread
        each = -(-POOL // requests)  # blocks per request
        chosen = np.arange(requests * each) * len(offsets) // (requests * each)
        blocks = np.cumprod(rate(log_odds(expected).repeat(each, axis=0) + offsets[chosen]), axis=1)
        blocks = np.minimum.accumulate(np.minimum(blocks * (level.mean(0) / blocks.mean(0)), 1.0), axis=1)
        blocks = blocks[np.argsort(-blocks.sum(1), kind="stable")]
        parts: Array = blocks.reshape(requests, each, -1).mean(1)
        return parts
