# SPDX-License-Identifier: Apache-2.0
"""vLLM's adaptive verification beside drafts of changing width, and what it tells the planner.

vLLM's manager picks, before each step, how many drafts the whole batch verifies (its *budget*, from confidences that reached the
host a step earlier and from tables of costs), and the device gives them to the drafts of highest survival. Six things change
here, all of them on the host and from earlier steps alone, so that nothing can bias what is accepted:

* its tables are of the width in use and of what rows really cost (``verification_prices.py``);
* positions that an earlier, narrower pass did not draft have no confidence yet: the budget takes the usual one of that position;
* of few requests one step's confidences are luck: the budget takes what several steps let expect;
* a budget that saves next to no time is that of all drafts;
* while nothing is drafted nothing is copied to the host, which would wait for the GPU in every step;
* confidences and the rows that were really verified go to the planner, where it runs in the same process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dflash.engine.verification_prices import VerificationPrices, surely_saved
from vllm_dflash.planner import confidences

WORTH_A_CUT = 0.06
"""Of a step's time, what a cut must save of the bare pass, whose times are steadier than those of steps that ran: a draft that is
cut is lost for sure. Of 8 requests of 8 rows the roofline explains 5.5 % of the pass at most. With a limit of 3 %, 40 of their 54
drafts were verified, for 6 % fewer tokens a step than with all, in no less time than lengths that are equal took. What the cut
saved of a step of its own kind was not told apart (8B, one H200: ``docs/results/never_slower_few.json``)."""
_COPIES = 2
"""Of confidences on the host: a step reads one while the other is on its way."""


class Trimming:
    """Stands before the methods of an ``AdaptiveVerificationManager`` that the runner calls.

    Args:
        manager: vLLM's; its methods are replaced on this one object.
        query_rows: rows per request of the draft pass of each width, ascending.
        drafted: whether the latest step drafted.
        graph_sizes: rows of the target's graphs, ascending; none where steps are as large as they are.
    """

    def __init__(
        self, manager: Any, query_rows: dict[int, int], drafted: Callable[[], bool], graph_sizes: Sequence[int] = ()
    ) -> None:
        self._manager, self._query_rows, self._has_drafted, self._graph_sizes = manager, query_rows, drafted, graph_sizes
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
        self._prices: VerificationPrices | None = None
        # Requests, and how many of the copies on the host say that none of them has drafts.
        self._told_of: frozenset[str] = frozenset()
        self._told = 0
        confidences.forget()

    def set_cost_curves(self, draft_curve: list[tuple[int, float]], verify_curve: list[tuple[int, float]]) -> None:
        """As vLLM's: milliseconds by requests and by rows."""
        self._set_curves(draft_curve, verify_curve)
        self._prices = None

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
        certain = list(self._manager._pending_resets)  # places whose request is new, or comes again: vLLM puts 1 down for it
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
        if certain:
            drafted &= ~np.isin(slots, certain)
        if drafted.all():
            self._record_news(names, seen[:, :width])
        elif drafted.any():
            self._record_news([name for name, here in zip(names, drafted.tolist(), strict=True) if here], seen[drafted, :width])

    def _says_nothing(self, names: Sequence[str]) -> bool:
        """Whether both copies on the host say that these requests have no drafts, and there are none to tell of."""
        drafted = self._has_drafted()
        if drafted or self._manager._pending_resets or not self._told_of.issuperset(names):
            self._told_of, self._told = frozenset(() if drafted else names), 0  # who sits a step out is not in its copy
        before = self._told
        self._told += not drafted
        return before >= _COPIES

    def _record_news(self, names: list[str], seen: Any) -> None:
        """Hand over what is known of a step: fp32 [len(names), its width]."""
        news = seen.astype(np.float64)
        self._usual.note(news)
        self._recent.note(names, news)
        confidences.record_confidences(names, news)

    def _price(self, width: int, requests: int) -> None:
        """Have the manager reckon with the draft pass that this width runs, and with what steps of so many requests take."""
        manager = self._manager
        if self._prices is None and manager.cost_tables is not None:
            draft, verify = manager.cost_tables
            self._prices = VerificationPrices(draft, verify, self._query_rows, self._graph_sizes)
        if self._prices is not None:
            manager.cost_tables = self._prices.of(width, requests)

    def _uncut(self, rows: int) -> int:
        """All rows that are scheduled where a cut to ``rows`` saves next to no time, else ``rows``."""
        manager = self._manager
        drafts, others, budget = manager._batch_budget
        all_drafts = min(sum(drafts.values()), manager._max_total_logits - len(others) * manager.num_bonus_tokens)
        left_out: int = all_drafts - budget
        if self._prices is None or left_out <= 0:
            return rows
        (draft, verify), bare, uncut = manager.cost_tables, self._prices.bare, rows + left_out
        saved = surely_saved(float(bare[rows]), float(bare[uncut]), rows, uncut)
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


def trim(manager: Any, speculator: Any, graph_sizes: Sequence[int] = ()) -> None:
    """Put :class:`Trimming` before ``manager``, once, for a speculator of ours."""
    if not isinstance(getattr(manager.get_num_tokens, "__self__", None), Trimming):
        rows = {width: shape.num_query_per_req for width, shape in speculator.buffers.shapes.items()}
        Trimming(manager, rows, lambda: bool(speculator.drafted), graph_sizes)
