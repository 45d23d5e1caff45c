# SPDX-License-Identifier: Apache-2.0
"""The planner beside vLLM's scheduler: it sets the draft width of every step through vLLM's own dynamic speculation.

vLLM reads ``Scheduler.dynamic_sd_lookup`` (from ``num_speculative_tokens_per_batch_size``) in every ``schedule()``, sends the
width to the worker, where ``propose`` gets it, and has full graphs of the target for every width of the table. So the table is
filled in when the engine is configured (:func:`configure`), and the look-up is rewritten before each step.

Steps are timed on the host, from one ``schedule()`` to the next: in steady state the time of one step, whichever part of it the
host overlaps. Which step depends on the scheduler: an asynchronous one is a step ahead of the outputs, and two ahead of the draft
pass that ends before them.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dflash import hooks
from vllm_dflash.engine.pair import resolve_draft
from vllm_dflash.options import read_options
from vllm_dflash.planner import measured
from vllm_dflash.planner.costs import StepCosts
from vllm_dflash.planner.planner import Planner, draft_widths, schedule_of, widths_up_to

logger = init_logger("vllm.plugins.dflash")

KNEE_GPU, KNEE_CPU = 184.0, 8.0
# "auto" plans for targets from this size on. Measured on an H200: 8e9 parameters gain up to 2.8 times from narrower blocks under
# load; 0.1e9, whose steps the host bounds, lose up to half below 128 requests (docs/benchmarks.md).
_LARGE_TARGET = 2e9
_PLANNING = "_vllm_dflash_planning"


class PlannedWidth(int):
    """A draft width that also carries the requests that are not drafted for, as far as the worker."""

    idle: frozenset[str] = frozenset()


def why_fixed(vllm_config: Any) -> str | None:
    """Why K stays as configured; None where the planner may choose."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    model, option = vllm_config.model_config, read_options(vllm_config.additional_config).planner
    reasons = {
        'option "planner" is off': option == "off",
        'option "planner" is auto, and this machine is a CPU': option == "auto" and current_platform.is_cpu(),
        'option "planner" is auto, and the target is small': option == "auto" and _num_parameters(vllm_config) < _LARGE_TARGET,
        "num_speculative_tokens_per_batch_size is set": not _table_is_ours(vllm_config),
        "adaptive verification is on": bool(speculative.enable_adaptive_verification),
        "data-parallel ranks must draft alike": parallel.data_parallel_size > 1,
        "pipeline stages expect all drafts": parallel.pipeline_parallel_size > 1,
        "the target keeps recurrent state": bool(getattr(model, "is_hybrid", False)),
        "vLLM differs where steps end": hooks.STEP_DONE.problem() is not None,
        "model runner V1 would lose its full graphs": not (current_platform.is_cpu() or vllm_config.use_v2_model_runner),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _num_parameters(vllm_config: Any) -> float:
    """Of a dense target, by the usual 12 h^2 of a layer: the rule above needs the order only."""
    model = vllm_config.model_config
    return float(12 * model.get_total_num_hidden_layers() * model.get_hidden_size() ** 2)


def configure(vllm_config: Any) -> None:
    """Name the planner's widths to vLLM; runs when the engine's configuration is built, before graph sizes are chosen."""
    if why_fixed(vllm_config) is None:
        vllm_config.speculative_config.num_speculative_tokens_per_batch_size = _table(vllm_config)


def _table(vllm_config: Any) -> list[tuple[int, int, int]]:
    return schedule_of(vllm_config.speculative_config.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs)


def _table_is_ours(vllm_config: Any) -> bool:
    table = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    return table is None or [tuple(row) for row in table] == _table(vllm_config)


def _rows_of(graphed: Sequence[int], anchors: int) -> Callable[[int], int]:
    """Query rows per request of a width: those of the narrowest draft pass that holds it, and ``anchors`` that draft nothing."""
    return lambda wanted: next(width for width in graphed if width >= wanted) + anchors


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What a scheduled step does, as far as it costs time."""

    verify_rows: int
    query_rows: int
    context: int
    decode_only: bool


class StepPlanning:
    """One scheduler's planner, its bookkeeping of steps in flight, and what is reported of it."""

    def __init__(self, scheduler: Any) -> None:
        config = scheduler.vllm_config
        width = config.speculative_config.num_speculative_tokens
        on_cpu = current_platform.is_cpu()
        self._graphs = config.compilation_config.cudagraph_mode.name != "NONE"
        widths = widths_up_to(width, config.scheduler_config.max_num_seqs if self._graphs else None)
        # Graphs of the draft exist for some widths only (see graphs.py); without graphs the block is as long as it has to be.
        graphed = draft_widths(width) if config.use_v2_model_runner else range(1, width + 1)
        if not config.use_v2_model_runner:
            measured.take_drafts()  # V1 times every pass: those before are of an earlier engine of this process
        rows_of = _rows_of(graphed, anchors=0 if resolve_draft(config).sample_from_anchor else 1)
        self._rows_of = rows_of
        self.planner = Planner(
            widths, StepCosts(KNEE_CPU if on_cpu else KNEE_GPU), rows_of, per_request=on_cpu and not self._graphs
        )
        self._ahead = int(bool(config.scheduler_config.async_scheduling))
        self._size = config.scheduler_config.max_num_seqs + 1
        self._lengths: dict[str, int] = {}
        self._steps: deque[_Step] = deque(maxlen=2 + 2 * self._ahead)
        self._last: float | None = None
        self._said = -1

    def before(self, scheduler: Any) -> None:
        """Learn from the time since the last call, cut drafts to their planned lengths, and plan the next drafts."""
        now = time.perf_counter()
        running = scheduler.running
        if self._last is not None and running:
            self._learn(now - self._last)
        elif not running:
            self._steps.clear()
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
        names = [request.request_id for request in batch]
        plan = self.planner.plan(names, sum(request.num_computed_tokens for request in batch))
        self._lengths = dict(zip(names, plan.lengths.tolist(), strict=True)) if self.planner.per_request else {}
        width = PlannedWidth(plan.width)
        width.idle = frozenset(name for name, length in self._lengths.items() if not length)
        scheduler.dynamic_sd_lookup = [width] * self._size
        if plan.width != self._said:
            self._said = plan.width
            logger.debug(
                "DFlash planner: %d requests draft %d tokens%s, %.0f tokens/s expected; steps by width so far %s",
                len(names),
                plan.width,
                " to probe" if plan.probe else "",
                plan.rate,
                dict(sorted(self.planner.histogram.items())),
            )

    def after(self, output: Any) -> None:
        """Note what was scheduled."""
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            self._last = None  # asynchronous schedulers come up empty now and then: this time belongs to no step
            return
        requests = len(scheduled)
        rows = output.total_num_scheduled_tokens
        drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        width = 0 if getattr(output, "skip_drafts", False) else int(output.num_spec_tokens_to_schedule)
        drafting = requests - sum(1 for name in scheduled if self._lengths.get(name) == 0)
        query_rows = drafting * self._rows_of(width) if width else 0
        context = sum(output.scheduled_cached_reqs.num_computed_tokens)
        self._steps.append(_Step(rows, query_rows, context, rows == requests + drafts))

    def finished(self, output: Any, runner_output: Any) -> None:
        """Count accepted drafts of a finished step (vLLM's ``SchedulerOutput`` and ``ModelRunnerOutput``)."""
        sampled = getattr(runner_output, "sampled_token_ids", None)
        if sampled:
            self.planner.observe(*_acceptance(output, runner_output.req_id_to_index, sampled))
        if output.finished_req_ids:
            self.planner.acceptance.forget(output.finished_req_ids)

    def report(self) -> dict[str, Any]:
        """Steps by chosen width, and probes among them."""
        return {"widths": dict(sorted(self.planner.histogram.items())), "probes": self.planner.probes}

    def _learn(self, seconds: float) -> None:
        for rows, taken in measured.take_drafts():
            self.planner.costs.observe_draft(rows, taken)
        steps = self._steps
        if len(steps) < (steps.maxlen or 0) or not all(step.decode_only for step in steps):
            return  # a prefill is among the steps that this time may belong to, or the engine was idle
        done = steps[-1 - self._ahead]
        drafted = steps[-1 - 2 * self._ahead]
        self.planner.costs.observe(done.verify_rows, drafted.query_rows, done.context, seconds)


def _acceptance(output: Any, row_of: Mapping[str, int], sampled: list[list[int]]) -> tuple[list[str], list[int], list[int]]:
    """Requests whose drafts were verified, how many of them were, and how many were accepted."""
    invalid: Mapping[str, int] = getattr(output, "num_invalid_spec_tokens", None) or {}  # of a grammar
    names, lengths, accepted = [], [], []
    for name, drafts in output.scheduled_spec_decode_tokens.items():
        new = sampled[row_of[name]] if name in row_of else []
        length = len(drafts) - invalid.get(name, 0)
        if length > 0 and new:
            names.append(name)
            lengths.append(length)
            accepted.append(min(len(new) - 1, length))
    return names, lengths, accepted


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
        logger.info_once(f"DFlash planner: drafts of {', '.join(map(str, planning.planner.widths))} tokens, chosen step by step")
    return planning


def report_of(engine: Any) -> dict[str, Any] | None:
    """:meth:`StepPlanning.report` of an ``LLMEngine`` in this process; None without a planner, or where it runs in another."""
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    planning: StepPlanning | None = getattr(getattr(core, "scheduler", None), _PLANNING, None)
    return None if planning is None else planning.report()
