# SPDX-License-Identifier: Apache-2.0
"""What vLLM's adaptive verification reckons with: milliseconds of a draft pass by requests, and of a verification by rows.

vLLM times both when it starts, at full width and as if every row read a context of its own, of 8,192 tokens
(``VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN``). But the drafts of a request share its context, so they look dearer than they
are, and too many are cut. Here

* draft passes are those of the width in use, as their graphs were timed;
* verifications are passes with their head as they were timed for the planner at start-up, of as many rows as the graph that holds
  them, and what steps of as many requests take beyond them while serving (sampling, contexts, the host's part).

Where either is not known, vLLM's own stands.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from vllm.distributed import get_tp_group

from vllm_dflash.planner import confidences
from vllm_dflash.planner.costs import KNEE_GPU
from vllm_dflash.planner.planner import OTHER_BATCH
from vllm_dflash.planner.row_curve import RowCurve
from vllm_dflash.planner.trimmed import corrected

Array = npt.NDArray[np.float64]

STRAYS = 0.05
"""Of a bare pass, by which the times of two sizes differ for nothing; what the roofline explains counts whole."""
_DRAFTS: list[RowCurve] = []
"""Seconds of draft passes by query rows, of this process's last engine; one or none."""
_REPRICE = 16
"""Steps between two looks at what was observed: 0.1 ms each time."""


def note_draft_times(times: list[tuple[int, float]]) -> None:
    """(query rows, seconds) of captured draft passes; ranks take those of the first, as they must agree on every budget."""
    group = get_tp_group()
    agreed = times if group.world_size == 1 else group.broadcast_object(times, src=0)
    curve = RowCurve(KNEE_GPU)
    curve.measure(agreed)
    _DRAFTS[:] = [curve] if curve.measured else []


def draft_prices(rows: int, otherwise: Array) -> Array:
    """Milliseconds of a draft pass of ``rows`` query rows per request, for 0 to ``len(otherwise) - 1`` requests.

    Beyond what was timed as arithmetic grows; ``otherwise`` where nothing was.
    """
    return 1e3 * _DRAFTS[0].alone(rows * np.arange(len(otherwise))) if _DRAFTS else otherwise


def surely_saved(cut: float, uncut: float, cut_rows: int, uncut_rows: int) -> float:
    """What a pass of ``cut_rows`` that was timed at ``cut`` saves of one of ``uncut_rows`` at ``uncut``, in their unit.

    The roofline is that of 16-bit weights on Hopper, where lengths by request are the default; on other GPUs it bounds what is
    saved for sure by less than what two sizes stray by, and a saving beyond that counts whatever it says.
    """
    explained = uncut * (1.0 - math.hypot(1.0, cut_rows / KNEE_GPU) / math.hypot(1.0, uncut_rows / KNEE_GPU))
    return max(min(uncut - cut, explained), uncut - cut - STRAYS * uncut)


def padded(num_rows: int, graph_sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """[num_rows]: rows that 0 to ``num_rows - 1`` run as; ``graph_sizes`` ascending, beyond the largest nothing is padded."""
    rows, sizes = np.arange(num_rows), np.array(graph_sizes, dtype=np.int64)
    at = np.searchsorted(sizes, rows)
    return np.where(at < len(sizes), np.append(sizes, 0)[at], rows)


class VerificationPrices:
    """Tables by draft width, for the batch at hand.

    Args:
        draft: vLLM's table [requests + 1], at full width.
        verify: vLLM's table [rows + 1].
        query_rows: rows per request of the draft pass of each width, ascending.
        graph_sizes: rows of the target's graphs, ascending.
    """

    def __init__(self, draft: Array, verify: Array, query_rows: dict[int, int], graph_sizes: Sequence[int] = ()) -> None:
        self._draft, self._query_rows, self._graph_sizes = draft, query_rows, graph_sizes
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
        if not self._is_ours and (timed := confidences.bare_costs(padded(len(self.bare), self._graph_sizes))) is not None:
            self.bare, self._is_ours = 1e3 * timed, True
        self._verify, self._by_width = corrected(self.bare, confidences.observed_costs(requests)), {}
        self._steps, self._requests = 0, requests
