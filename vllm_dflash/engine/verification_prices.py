# SPDX-License-Identifier: Apache-2.0
"""What vLLM's adaptive verification reckons with: milliseconds of a draft pass by requests, and of a verification by rows.

vLLM times both when it starts, at full width and as if every row read a context of its own, of 8,192 tokens
(``VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN``). But the drafts of a request share its context, so they look dearer than they
are, and too many are cut. Here

* draft passes are those of the width in use, as their graphs were timed;
* verifications are bare passes as they were timed for the planner at start-up, and what steps of as many requests take beyond
  them while serving (head, sampling, contexts, the host's part).

Where either is not known, vLLM's own stands.
"""

import math

import numpy as np
import numpy.typing as npt
from vllm.distributed import get_tp_group

from vllm_dflash.planner import confidences
from vllm_dflash.planner.costs import KNEE_GPU
from vllm_dflash.planner.planner import OTHER_BATCH
from vllm_dflash.planner.trimmed import corrected

Array = npt.NDArray[np.float64]

STRAYS = 0.05
"""Of a bare pass, by which the times of two sizes differ for nothing; what the roofline explains counts whole."""
_DRAFT_TIMES: list[tuple[int, float]] = []
_REPRICE = 16
"""Steps between two looks at what was observed: 0.1 ms each time."""


def note_draft_times(times: list[tuple[int, float]]) -> None:
    """(query rows, seconds) of captured draft passes; ranks take those of the first, as they must agree on every budget."""
    group = get_tp_group()
    agreed = times if group.world_size == 1 else group.broadcast_object(times, src=0)
    _DRAFT_TIMES[:] = sorted(agreed)


def draft_prices(rows: int, otherwise: Array) -> Array:
    """Milliseconds of a draft pass of ``rows`` query rows per request, for 0 to ``len(otherwise) - 1`` requests.

    ``otherwise`` where none was timed.
    """
    if not _DRAFT_TIMES:
        return otherwise
    at, seconds = np.array(_DRAFT_TIMES).T
    prices: Array = 1e3 * np.interp(rows * np.arange(len(otherwise)), at, np.maximum.accumulate(seconds))
    return prices


def surely_saved(bare: float, uncut: float, rows: int, uncut_rows: int) -> float:
    """What a pass of ``rows`` that was timed at ``bare`` saves of one of ``uncut_rows`` at ``uncut``, in their unit."""
    explained = uncut * (1.0 - math.hypot(1.0, rows / KNEE_GPU) / math.hypot(1.0, uncut_rows / KNEE_GPU))
    return max(min(uncut - bare, explained), uncut - bare - STRAYS * uncut)


class VerificationPrices:
    """Tables by draft width, for the batch at hand.

    Args:
        draft: vLLM's table [requests + 1], at full width.
        verify: vLLM's table [rows + 1].
        query_rows: rows per request of the draft pass of each width, ascending.
    """

    def __init__(self, draft: Array, verify: Array, query_rows: dict[int, int]) -> None:
        self._draft, self._query_rows = draft, query_rows
        self.bare, self._is_ours = verify, False
        """[rows + 1] of passes alone."""
        self._verify = verify
        self._by_width: dict[int, tuple[Array, Array]] = {}
        self._steps = self._requests = 0

    def of(self, width: int, requests: int) -> tuple[Array, Array]:
        """Draft passes [requests + 1] of ``width`` and verifications [rows + 1] for the next step, of so many ``requests``."""
        if self._steps % _REPRICE == 0 or abs(requests - self._requests) * OTHER_BATCH > self._requests:
            self._look(requests)
        self._steps += 1
        if width not in self._by_width:
            rows = next(rows for wide, rows in self._query_rows.items() if wide >= width)
            self._by_width[width] = draft_prices(rows, self._draft), self._verify
        return self._by_width[width]

    def _look(self, requests: int) -> None:
        """Take what the planner has observed since, and once what it has timed."""
        if not self._is_ours and (timed := confidences.bare_costs(len(self.bare))) is not None:
            self.bare, self._is_ours = 1e3 * timed, True
        self._verify, self._by_width = corrected(self.bare, confidences.observed_costs(requests)), {}
        self._steps, self._requests = 0, requests
