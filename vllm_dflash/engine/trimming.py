# SPDX-License-Identifier: Apache-2.0
"""vLLM's adaptive verification beside drafts of changing width, and what it tells the planner.

vLLM's manager picks, before each step, how many drafts the whole batch verifies (its *budget*, from confidences that reached the
host a step earlier and from cost curves taken at start-up), and the device gives them to the drafts of highest survival. Seven
things change here, all of them on the host and from earlier steps alone, so that nothing can bias what is accepted:

* its draft curve was taken at full width: it is scaled to the width in use;
* its verification curve is that of bare passes: what steps of a row count take beyond them while serving (head, sampling, the
  host's part) is added, as the planner observes it;
* positions that an earlier, narrower pass did not draft have no confidence yet: the budget takes the usual one of that position;
* of few requests one step's confidences are luck: the budget takes what several steps let expect;
* a budget that saves next to no time is that of all drafts;
* while nothing is drafted nothing is copied to the host, which would wait for the GPU in every step;
* confidences and the rows that were really verified go to the planner, where it runs in the same process.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed import get_tp_group

from vllm_dflash.planner import confidences
from vllm_dflash.planner.costs import KNEE_GPU
from vllm_dflash.planner.planner import OTHER_BATCH
from vllm_dflash.planner.trimmed import corrected

Array = npt.NDArray[np.float64]

WORTH_A_CUT = 0.03
"""Of a step's time, what a cut must save of the bare pass, whose times are steadier than those of steps that ran: a draft that is
cut is lost for sure."""
STRAYS = 0.05
"""Of a bare pass, by which the times of two sizes differ for nothing; what the roofline explains counts whole."""
_DRAFT_TIMES: list[tuple[int, float]] = []
_COPIES = 2
"""Of confidences on the host: a step reads one while the other is on its way."""
_REPRICE = 16
"""Steps between two looks at what was observed: 0.1 ms each time."""


def note_draft_times(times: list[tuple[int, float]]) -> None:
    """(query rows, seconds) of captured draft passes; ranks take those of the first, as they must agree on every budget."""
    group = get_tp_group()
    agreed = times if group.world_size == 1 else group.broadcast_object(times, src=0)
    _DRAFT_TIMES[:] = sorted(agreed)


def share_of_full_width(rows: int, full_rows: int, max_requests: int) -> Array:
    """Cost of a pass of ``rows`` query rows per request over one of ``full_rows``, for 0 to ``max_requests`` requests.

    1 throughout where nothing was timed.
    """
    if not _DRAFT_TIMES:
        return np.ones(max_requests + 1)
    at, seconds = np.array(_DRAFT_TIMES).T
    requests = np.arange(max_requests + 1)
    narrow, full = (np.interp(requests * each, at, np.maximum.accumulate(seconds)) for each in (rows, full_rows))
    share: Array = narrow / full
    return share


def surely_saved(bare: float, uncut: float, rows: int, uncut_rows: int) -> float:
    """What a pass of ``rows`` that was timed at ``bare`` saves of one of ``uncut_rows`` at ``uncut``, in their unit."""
    explained = uncut * (1.0 - math.hypot(1.0, rows / KNEE_GPU) / math.hypot(1.0, uncut_rows / KNEE_GPU))
    return max(min(uncut - bare, explained), uncut - bare - STRAYS * uncut)


class Trimming:
    """Stands before the methods of an ``AdaptiveVerificationManager`` that the runner calls.

    Args:
        manager: vLLM's; its methods are replaced on this one object.
        query_rows: rows per request of the draft pass of each width, ascending.
        drafted: whether the latest step drafted.
    """

    def __init__(self, manager: Any, query_rows: dict[int, int], drafted: Callable[[], bool] = lambda: True) -> None:
        self._manager, self._query_rows, self._has_drafted = manager, query_rows, drafted
        self._count, self._record, self._set_curves = (
            manager.get_num_tokens,
            manager.record_confidences,
            manager.set_cost_curves,
        )
        manager.get_num_tokens, manager.record_confidences = self.get_num_tokens, self.record_confidences
        manager.set_cost_curves = self.set_cost_curves
        self._usual = confidences.UsualConfidence(manager.num_speculative_steps)
        self._recent = confidences.RecentBlocks()
        self._drafted_for: tuple[list[str], npt.NDArray[Any]] = [], np.empty(0, dtype=np.int64)
        self._full: Any = None  # vLLM's cost tables, of full width
        self._by_width: dict[int, Any] = {}
        self._verify: Any = None  # vLLM's, corrected
        self._steps = self._requests = 0
        self._told: tuple[Sequence[str], int] = (
            (),
            0,
        )  # requests whose copies on the host say that they have no drafts, how many do
        confidences.forget()

    def set_cost_curves(self, draft_curve: list[tuple[int, float]], verify_curve: list[tuple[int, float]]) -> None:
        """As vLLM's: milliseconds by requests and by rows."""
        self._set_curves(draft_curve, verify_curve)
        self._full, self._steps = None, 0

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """As vLLM's: rows of the next step with as many drafts as pay, given all that are scheduled."""
        width = max(map(len, draft_tokens.values()), default=0)
        if width:
            self._price(width, len(num_tokens_per_req))
            self._complete(list(num_tokens_per_req), width)
            if len(num_tokens_per_req) < confidences.POOL:
                self._expect([name for name in num_tokens_per_req if len(draft_tokens.get(name, ())) == width], width)
        rows: int = self._count(num_tokens_per_req, draft_tokens)
        if width:
            rows = self._uncut(rows)
        confidences.record_rows(rows)
        return rows

    def record_confidences(self, confidence_probs: Any, input_batch: Any) -> None:
        """As vLLM's, called once per step after the draft pass; the copy of the step before has arrived by then."""
        if self._says_nothing(input_batch.req_ids):
            self._recent.idle()
            return
        self._record(confidence_probs, input_batch)
        (names, slots), count = self._drafted_for, input_batch.num_reqs
        decoding = np.flatnonzero(~input_batch.is_prefilling_np[:count])  # others may have no drafts yet
        now = [input_batch.req_ids[at] for at in decoding.tolist()]
        # The same list while the batch is: whoever counts several steps tells batches by it.
        self._drafted_for = names if now == names else now, input_batch.idx_mapping_np[:count][decoding]
        if not names:
            return
        manager = self._manager
        seen = manager._stale_confidences[manager._stale_idx].np[slots]
        width = int(((seen > 0).mean(0) > 0.5).sum())  # all requests of a step draft alike
        if not width:
            self._recent.idle()
            return
        at_home = manager.req_states.req_id_to_index
        drafted = (seen[:, :width] > 0).all(1) & [at_home.get(name) == slot for name, slot in zip(names, slots, strict=True)]
        if drafted.all():
            self._record_news(names, seen[:, :width])
        elif drafted.any():
            self._record_news([name for name, here in zip(names, drafted.tolist(), strict=True) if here], seen[drafted, :width])

    def _says_nothing(self, names: Sequence[str]) -> bool:
        """Whether both copies on the host say that these requests have no drafts, and there are none to tell of."""
        before, told = self._told
        if self._has_drafted() or names != before:
            told = 0
        self._told = names, told + (not self._has_drafted())
        return told >= _COPIES

    def _record_news(self, names: list[str], seen: Any) -> None:
        """Hand over what is known of a step: fp32 [len(names), its width]."""
        news = seen.astype(np.float64)
        self._usual.note(news)
        self._recent.note(names, news)
        confidences.record_confidences(names, news)

    def _price(self, width: int, requests: int) -> None:
        """Have the manager reckon with the draft pass that this width runs, and with what steps of so many requests take."""
        manager = self._manager
        if manager.cost_tables is None:
            return
        if self._full is None:
            self._full = manager.cost_tables
        if self._steps % _REPRICE == 0 or abs(requests - self._requests) * OTHER_BATCH > self._requests:
            self._verify, self._by_width = corrected(self._full[1], confidences.observed_costs(requests)), {}
            self._steps, self._requests = 0, requests
        self._steps += 1
        if width not in self._by_width:
            rows = next(rows for wide, rows in self._query_rows.items() if wide >= width)
            draft = self._full[0]
            share = share_of_full_width(rows, list(self._query_rows.values())[-1], len(draft) - 1)
            self._by_width[width] = draft * share, self._verify
        manager.cost_tables = self._by_width[width]

    def _uncut(self, rows: int) -> int:
        """All rows that are scheduled where a cut to ``rows`` saves next to no time, else ``rows``."""
        manager = self._manager
        drafts, others, budget = manager._batch_budget
        all_drafts = min(sum(drafts.values()), manager._max_total_logits - len(others) * manager.num_bonus_tokens)
        left_out: int = all_drafts - budget
        if self._full is None or left_out <= 0:
            return rows
        (draft, verify), uncut = manager.cost_tables, rows + left_out
        saved = surely_saved(float(self._full[1][rows]), float(self._full[1][uncut]), rows, uncut)
        if saved > WORTH_A_CUT * (draft[len(others)] + verify[uncut]):
            return rows
        manager._batch_budget = drafts, others, all_drafts
        return uncut

    def _complete(self, names: list[str], width: int) -> None:
        """Usual confidences where the host's copy is of a narrower pass than the drafts at hand."""
        manager = self._manager
        slots = [manager.req_states.req_id_to_index[name] for name in names]
        stale = manager._stale_confidences[manager._stale_idx].np
        known = stale[slots]
        missing = known[:, :width] == 0
        if missing.any():
            known[:, :width] = np.where(missing, self._usual.by_position[:width], known[:, :width])
            stale[slots] = known

    def _expect(self, names: list[str], width: int) -> None:
        """For few requests, what several steps let expect, in place of the one that the host's copy is of."""
        names = self._recent.known(names)
        expected = self._recent.expected(len(names), width)
        if expected is not None:
            manager = self._manager
            slots = [manager.req_states.req_id_to_index[name] for name in names]
            manager._stale_confidences[manager._stale_idx].np[slots, :width] = expected


def trim(manager: Any, speculator: Any) -> None:
    """Put :class:`Trimming` before ``manager``, once, for a speculator of ours."""
    if not isinstance(getattr(manager.get_num_tokens, "__self__", None), Trimming):
        rows = {width: shape.num_query_per_req for width, shape in speculator.buffers.shapes.items()}
        Trimming(manager, rows, lambda: bool(speculator.drafted))
