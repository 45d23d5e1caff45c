# SPDX-License-Identifier: Apache-2.0
"""The planner beside vLLM's scheduler: it sets the draft width of every step through vLLM's own dynamic speculation.

vLLM reads ``Scheduler.dynamic_sd_lookup`` (from ``num_speculative_tokens_per_batch_size``) in every ``schedule()``, sends the
width to the worker, where ``propose`` gets it, and has full graphs of the target for every width of the table. So the table is
filled in when the engine is configured (``planned_widths.py``), and the look-up is rewritten before each step.

Steps are timed on the host, from one ``schedule()`` to the next: in steady state the time of one step, whichever part of it the
host overlaps. Which step depends on the scheduler: an asynchronous one is a step ahead of the outputs, and two ahead of the draft
pass that ends before them.
"""

import dataclasses
import itertools
import math
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dflash.engine.pair import resolve_draft
from vllm_dflash.engine.planned_widths import trims, why_fixed
from vllm_dflash.engine.step_outcome import acceptance_of
from vllm_dflash.planner import confidences, measured
from vllm_dflash.planner.costs import KNEE_CPU, KNEE_GPU, StepCosts
from vllm_dflash.planner.plan import Plan
from vllm_dflash.planner.planner import OTHER_BATCH, Planner
from vllm_dflash.planner.record import Record
from vllm_dflash.planner.trimmed import ALIKE, TrimmedPlanner
from vllm_dflash.planner.widths import draft_widths, query_rows_of, widths_up_to

logger = init_logger("vllm.plugins.dflash")

_PLANNING = "_vllm_dflash_planning"
_MADE_BY = "_vllm_dflash_made_by"
"""On a ``SchedulerOutput``: width of the pass that made the drafts it verifies, of which lengths and grammars cut some."""


_ALIVE: "weakref.WeakSet[StepPlanning]" = weakref.WeakSet()
"""The planners of this process, for those who know an engine by its configuration alone (``engine/planner_access.py``)."""


class PlannedWidth(int):
    """A draft width that also carries the requests that are not drafted for, as far as the worker."""

    idle: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What a scheduled step does, as far as it costs time."""

    requests: int
    verify_rows: int
    query_rows: int
    context: int
    decode_only: bool
    width: int


class StepPlanning:
    """One scheduler's planner, its bookkeeping of steps in flight, and what is reported of it."""

    def __init__(self, scheduler: Any) -> None:
        self.config = config = scheduler.vllm_config
        width = config.speculative_config.num_speculative_tokens
        on_cpu = current_platform.is_cpu()
        self._graphs = config.compilation_config.cudagraph_mode.name != "NONE"
        widths = widths_up_to(width, config.scheduler_config.max_num_seqs if self._graphs else None)
        anchors = 0 if resolve_draft(config).sample_from_anchor else 1
        # Graphs of the draft exist for some widths only (see graphs.py); without graphs the block is as long as it has to be.
        graphed = draft_widths(width, anchors) if config.use_v2_model_runner else range(1, width + 1)
        rows_of = query_rows_of(graphed, anchors)
        costs = StepCosts(KNEE_CPU if on_cpu else KNEE_GPU)
        drafts = measured.take_drafts()
        if config.use_v2_model_runner:  # V1 times every pass: those before are of an earlier engine of this process
            costs.measure_drafts(drafts)
        costs.verify.measure(measured.take_verifications())
        self._rows_of = rows_of
        self._trimmed: TrimmedPlanner | None = None
        if trims(config):
            # One family of graphs serves verifications of every width, and a draft pass that is cut afterwards gains nothing.
            self._trimmed = TrimmedPlanner((0, *graphed), costs, rows_of)
            confidences.offer_costs(costs)
        self.planner = self._trimmed or Planner(widths, costs, rows_of, per_request=on_cpu and not self._graphs)
        self._ahead = int(bool(config.scheduler_config.async_scheduling))
        self._size = config.scheduler_config.max_num_seqs + 1
        self.record = Record()
        self._plan: Plan | None = None
        self._batch: list[Any] = []
        self._names: list[str] = []
        self._lengths: dict[str, int] = {}
        self._steps: deque[_Step] = deque(maxlen=2 + 2 * self._ahead)
        self._last: float | None = None
        self._drafts = self._width = 0  # of the last step, as scheduled: drafts that it verifies, and makes of each request
        self._came = 0  # tokens of the steps that have ended since the last call
        self._unlearnt = 0.0  # outputs to come of steps whose width was held

    def hold(self, width: int | None) -> None:
        """Draft ``width`` tokens in every step from the next on, for every request; None lets the planner choose again.

        Nothing is learnt meanwhile: what is chosen afterwards is what would have been chosen without.

        Raises:
            ValueError: ``width`` is none of the planner's.
        """
        self.planner.hold(width)
        self._steps.clear()  # those in flight are of the width before
        self._unlearnt = 1 + self._ahead if width is None else math.inf

    def before(self, scheduler: Any) -> None:
        """Learn from the time since the last call, cut drafts to their planned lengths, and plan the next drafts."""
        now = time.perf_counter()
        self._before(scheduler, now)
        self.record.seconds += time.perf_counter() - now

    def _before(self, scheduler: Any, now: float) -> None:
        running = scheduler.running
        if self._trimmed is not None:
            self._follow(self._trimmed, scheduler.requests)
        caught_up = measured.take_catch_up()
        if self._last is not None and running:
            self._settle(now - self._last - caught_up)
            self._learn(now - self._last - caught_up)
            self.record.promise(self._plan.rate if self._plan else 0.0, now - self._last)
        elif not running:
            self._steps.clear()
        self._came = 0  # of a time that belongs to no step, too
        self._last = now
        if self.planner.per_request:
            for request in running:
                wanted = self._lengths.get(request.request_id)
                if wanted is not None and len(request.spec_token_ids) > wanted:
                    request.spec_token_ids = request.spec_token_ids[:wanted]
        # Drafts of a prefill are verified too, and before the first one nothing runs yet.
        batch = running or list(itertools.islice(scheduler.waiting, self._size - 1))
        if not batch:
            return
        if batch != self._batch:  # the same requests from step to step: compared by identity
            self._batch, self._names = list(batch), [request.request_id for request in batch]
        names = self._names
        latest = self._steps[-1] if self._steps else None
        decoding = bool(running) and latest is not None and latest.decode_only
        plan = self.planner.plan(names, latest.context if latest else 0, decoding=decoding)
        if plan is not self._plan:
            self._plan = plan
            self._lengths = dict(zip(names, plan.lengths.tolist(), strict=True)) if self.planner.per_request else {}
            width = PlannedWidth(plan.width)
            width.idle = frozenset(name for name, length in self._lengths.items() if not length)
            scheduler.dynamic_sd_lookup = [width] * self._size
        if self.record.note(len(names), plan.width, probe=plan.probe):
            logger.debug(
                "DFlash planner: %d requests draft %d tokens%s, %.0f tokens/s expected; steps by width so far %s",
                len(names),
                plan.width,
                " to probe" if plan.probe else "",
                plan.rate,
                dict(sorted(self.record.widths.items())),
            )

    def _follow(self, planner: TrimmedPlanner, requests: Mapping[str, Any]) -> None:
        """Take the confidences of late drafts, and how many rows the last step really verified."""
        for request_ids, news in confidences.take_confidences():
            alive = [at for at, name in enumerate(request_ids) if name in requests]  # others were forgotten when they ended
            if alive and not self._unlearnt:
                planner.note([request_ids[at] for at in alive], news[alive])
        self._note_cut()

    def _note_cut(self) -> None:
        """Take how many rows the last step really verified: of its drafts others were cut."""
        rows = confidences.take_rows()
        if rows and self._steps:
            self.record.verified += rows[-1] - self._steps[-1].verify_rows + self._drafts
            self._steps[-1] = dataclasses.replace(self._steps[-1], verify_rows=rows[-1])

    def after(self, output: Any) -> None:
        """Note what was scheduled."""
        began = time.perf_counter()
        self._after(output)
        self.record.seconds += time.perf_counter() - began

    def _after(self, output: Any) -> None:
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            self._last = None  # asynchronous schedulers come up empty now and then: this time belongs to no step
            return
        requests = len(scheduled)
        rows = output.total_num_scheduled_tokens
        drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        width = 0 if getattr(output, "skip_drafts", False) else int(output.num_spec_tokens_to_schedule)
        drafting = requests - (sum(1 for name in scheduled if self._lengths.get(name) == 0) if self._lengths else 0)
        query_rows = drafting * self._rows_of(width) if width else 0
        context = sum(output.scheduled_cached_reqs.num_computed_tokens)
        self._drafts = drafts
        setattr(output, _MADE_BY, self._width)
        self._width = width
        if self._trimmed is None:
            self.record.verified += drafts
        self._steps.append(_Step(requests, rows, query_rows, context, rows == requests + drafts, width))

    def finished(self, output: Any, runner_output: Any) -> None:
        """Count accepted drafts of a finished step (vLLM's ``SchedulerOutput`` and ``ModelRunnerOutput``)."""
        began = time.perf_counter()
        sampled = getattr(runner_output, "sampled_token_ids", None)
        if self._trimmed is not None:
            self._came += sum(map(len, sampled or ()))
        if self._unlearnt:
            self._unlearnt -= 1
        elif sampled and output.scheduled_spec_decode_tokens and self._trimmed is None:  # counts of cut drafts say nothing
            verified = acceptance_of(output, runner_output.req_ids, sampled)
            self.planner.observe(*verified, getattr(output, _MADE_BY, 0) or None)
        if output.finished_req_ids:
            self.planner.acceptance.forget(output.finished_req_ids)
        self.record.seconds += time.perf_counter() - began

    def report(self, *, reset: bool = False) -> dict[str, Any]:
        """What was decided, see :meth:`Record.report`; ``reset`` makes the next report begin here.

        With adaptive verification also ``kept``, see :class:`KeptPromises`: by width, the part of its promises to reckon with
        for the last batch.
        """
        if self._trimmed is None:
            return self.record.report(reset=reset)
        self._note_cut()
        shares = {width: self._trimmed.kept.share(len(self._names), width) for width in self._trimmed.widths if width}
        return self.record.report(reset=reset) | {"kept": shares}

    def _settle(self, seconds: float) -> None:
        """Hold the tokens of a step against what its plan promised, where the steps in flight are of that plan too."""
        plan, steps = self._plan, self._steps
        if self._trimmed is None or self._unlearnt or plan is None or plan.probe or len(steps) < (steps.maxlen or 0):
            return
        requests = [step.requests for step in steps]
        alike = (max(requests) - min(requests)) * ALIKE <= max(requests)
        if alike and all(step.decode_only and step.width == plan.width for step in steps):
            self._trimmed.came(plan, seconds, self._came, requests[-1 - self._ahead])

    def _learn(self, seconds: float) -> None:
        drafts = measured.take_drafts()
        if self._unlearnt:
            return
        for rows, taken in drafts:
            self.planner.costs.observe_draft(rows, taken)
        steps = self._steps
        if len(steps) < (steps.maxlen or 0) or not all(step.decode_only for step in steps):
            return  # a prefill is among the steps that this time may belong to, or the engine was idle
        requests = [step.requests for step in steps]
        if (max(requests) - min(requests)) * OTHER_BATCH > max(requests):
            return  # steps of other sizes overlap
        done, drafted, newest = steps[-1 - self._ahead], steps[-1 - 2 * self._ahead], steps[-1]
        plain = done.verify_rows == done.requests and not drafted.query_rows
        if plain and (newest.query_rows or newest.verify_rows > newest.requests):
            return  # the host has prepared a step that drafts meanwhile, which takes it longer than the GPU had to do
        self.planner.costs.observe(done.verify_rows, drafted.query_rows, done.context, seconds, done.requests)


def planning_of(scheduler: Any) -> StepPlanning | None:
    """The planner of a scheduler whose draft is ours; None where K is fixed. Made at the first call."""
    planning: StepPlanning | None
    if hasattr(scheduler, _PLANNING):
        planning = getattr(scheduler, _PLANNING)
        return planning
    reason = why_fixed(scheduler.vllm_config)
    if reason is None and getattr(scheduler, "dynamic_sd_lookup", None) is None:
        reason = "vLLM has switched dynamic speculation off"
    planning = StepPlanning(scheduler) if reason is None else None
    if planning is not None and len(planning.planner.widths) == 1:
        planning, reason = None, "there is one width only"
    setattr(scheduler, _PLANNING, planning)
    if reason is not None:
        logger.info_once(f"DFlash planner: K is fixed; {reason}")
    else:
        assert planning is not None
        _ALIVE.add(planning)
        logger.info_once(f"DFlash planner: drafts of {', '.join(map(str, planning.planner.widths))} tokens, chosen step by step")
    return planning


def planning_for(vllm_config: Any) -> StepPlanning | None:
    """The planner of the engine with this very configuration, if it is in this process and has served a step."""
    return next((planning for planning in _ALIVE if planning.config is vllm_config), None)
