# SPDX-License-Identifier: Apache-2.0
"""Ask a running engine's planner what it chose, and tell it a width, wherever the engine runs.

The planner lives beside the scheduler. vLLM puts that into a process of its own (``VLLM_ENABLE_V1_MULTIPROCESSING``), in which an
engine of one worker has its worker too. There vLLM's own ``collective_rpc`` leads, for workers that have the methods of
:class:`PlannerAccess`:

    LLM(..., worker_extension_cls="vllm_dflash.engine.planner_access.PlannerAccess")
"""

import inspect
import pkgutil
from typing import Any

from vllm_dflash.engine.workers import share_process
from vllm_dflash.plugin import claims

_HOW = (
    'Set additional_config={"vllm_dflash": {"planner": "on"}}, and worker_extension_cls='
    '"vllm_dflash.engine.planner_access.PlannerAccess" where the engine core runs in another process with its one worker, or '
    "VLLM_ENABLE_V1_MULTIPROCESSING=0 with several workers and on CPUs. Where K is fixed all the same, the log says why."
)


class PlannerAccess:
    """Methods for vLLM's workers (``ParallelConfig.worker_extension_cls``); they answer where the scheduler is beside them."""

    vllm_config: Any

    def dflash_planner_report(self, reset: bool = False) -> dict[str, Any] | None:
        """:func:`report_of` of this process's engine."""
        from vllm_dflash.engine.planning import planning_for

        planning = planning_for(self.vllm_config)
        return None if planning is None else planning.report(reset=reset)

    def dflash_hold_width(self, width: int | None) -> str | None:
        """:func:`hold_width` of this process's engine; what is wrong in words, as exceptions do not pass processes whole."""
        from vllm_dflash.engine.planning import planning_for

        planning = planning_for(self.vllm_config)
        if planning is None:
            return f"hold_width: found no planner beside the engine's worker; expected one whose draft width may change. {_HOW}"
        try:
            planning.hold(width)
        except ValueError as error:
            return str(error)
        return None


def report_of(engine: Any, *, reset: bool = False) -> dict[str, Any] | None:
    """What the planner of an ``LLMEngine`` decided, see :meth:`StepPlanning.report`.

    None without a planner, before an engine in another process has served its first step, and where it cannot be reached.
    """
    planning = _planning_in(engine)
    if planning is not None:
        report: dict[str, Any] | None = planning.report(reset=reset)
    else:
        report = _ask_worker(engine, "dflash_planner_report", reset)
    return report


def hold_width(engine: Any, width: int | None) -> None:
    """Make all steps of an ``LLMEngine`` draft ``width`` tokens; None lets the planner choose again.

    See :meth:`StepPlanning.hold`. An engine in another process must have served a step before.

    Raises:
        ValueError: the engine has no planner, it cannot be reached, or ``width`` is none of its widths.
    """
    planning = _planning_in(engine)
    if planning is not None:
        planning.hold(width)
        return
    complaint = f"hold_width: found an engine without a planner in reach; expected one whose draft width may change. {_HOW}"
    if _is_reachable(engine):
        complaint = _ask_worker(engine, "dflash_hold_width", width)
    if complaint is not None:
        raise ValueError(complaint)


def _planning_in(engine: Any) -> Any:
    """The planner of an engine that runs in this process."""
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    if scheduler is None or not claims(scheduler.vllm_config):
        return None
    from vllm_dflash.engine.planning import planning_of

    return planning_of(scheduler)


def _is_reachable(engine: Any) -> bool:
    """Whether the engine's one worker has our methods; an ``AsyncLLM`` would have to be awaited."""
    parallel = engine.vllm_config.parallel_config
    extension = parallel.worker_extension_cls
    if not share_process(parallel) or not extension or inspect.iscoroutinefunction(engine.collective_rpc):
        return False
    try:
        return issubclass(pkgutil.resolve_name(extension), PlannerAccess)
    except (ImportError, AttributeError):  # importable for workers only
        return False


def _ask_worker(engine: Any, method: str, *args: Any) -> Any:
    """The answer of the one worker; None where it has no such method."""
    return engine.collective_rpc(method, args=args)[0] if _is_reachable(engine) else None
