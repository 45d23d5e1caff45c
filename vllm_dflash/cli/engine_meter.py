# SPDX-License-Identifier: Apache-2.0
"""What an engine's worker does besides emitting tokens: time and graphs of its draft steps, kernels compiled while serving.

:class:`WorkerFigures` brings that, and what the planner decided, from the worker's process to ours.
"""

import contextlib
import statistics
import time
from typing import Any

from vllm_dflash.engine.planner_access import PlannerAccess

_METER = "_vllm_dflash_meter"
DRAFT_RANGE = "dflash_draft_step"
"""Name of the profiler's range around a draft step on a GPU."""


def drafter_of(runner: Any) -> Any:
    """Proposer (V1) or speculator (V2) of a model runner; None without speculation."""
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


class Meter:
    """Wraps a runner and its drafter.

    Attributes:
        runner: vLLM's model runner.
        drafter: its proposer (V1) or speculator (V2); None without speculation.
        steps: calls of the runner so far.
        proposals: draft steps so far; steps that only store context do not count.
        graph_steps: those of them that replayed a CUDA graph.
        compiled: names of the Triton kernels that were compiled so far.
    """

    def __init__(self, runner: Any) -> None:
        self._spans: list[Any] = []
        self.steps = self.proposals = self.graph_steps = 0
        self.compiled: list[str] = []
        self._seen = (0, 0, 0)
        self._drafting = False
        self.runner, self.drafter = runner, drafter_of(runner)
        self._cuda = runner.device.type == "cuda"
        self._wrap(runner, "execute_model", self._count_step)
        if self.drafter is not None:
            self._wrap(self.drafter, "propose", self._time_draft)
            manager = getattr(self.drafter, "graphs", None) or getattr(self.drafter, "query_cudagraph_manager", None)
            if manager is not None:
                self._wrap(manager, "run_fullgraph", self._count_graph)
        self._watch_compiler()

    def take(self) -> dict[str, Any]:
        """Figures since the last call: median milliseconds of a draft step, and counts."""
        graphs, proposals, compiled = (a - b for a, b in zip(self._counts(), self._seen, strict=True))
        self._seen = self._counts()
        spans = self.take_spans()
        figures: dict[str, Any] = {"draft_ms": statistics.median(spans) if spans else None}
        if self._cuda and self.drafter is not None:
            figures |= {"graph_steps": graphs, "eager_steps": proposals - graphs, "jit_compiles": compiled}
        return figures

    def take_spans(self) -> list[float]:
        """Milliseconds of each draft step since the last call: GPU time between entry and exit, or the host's on a CPU."""
        spans, self._spans = self._spans, []
        if self._cuda and spans:
            import torch

            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in spans]
        return spans

    def _counts(self) -> tuple[int, int, int]:
        return self.graph_steps, self.proposals, len(self.compiled)

    @staticmethod
    def _wrap(owner: Any, name: str, wrapper: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def _count_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return original(*args, **kwargs)

    def _count_graph(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.graph_steps += self._drafting  # steps that only store context replay graphs too
        return original(*args, **kwargs)

    def _time_draft(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_speculative_tokens") == 0:  # context KV only
            return original(*args, **kwargs)
        self.proposals += 1
        self._drafting = True
        try:
            return self._timed(original, *args, **kwargs)
        finally:
            self._drafting = False

    def _timed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._cuda:
            begin = time.perf_counter()
            drafts = original(*args, **kwargs)
            self._spans.append(1e3 * (time.perf_counter() - begin))
            return drafts
        import torch

        event: Any = torch.cuda.Event  # untyped
        start, end = event(enable_timing=True), event(enable_timing=True)
        with torch.profiler.record_function(DRAFT_RANGE):
            start.record()
            drafts = original(*args, **kwargs)
            end.record()
        self._spans.append((start, end))
        return drafts

    def _watch_compiler(self) -> None:
        with contextlib.suppress(ImportError, AttributeError):
            from triton import knobs

            before = knobs.runtime.jit_post_compile_hook

            def hook(*args: Any, **kwargs: Any) -> Any:
                self.compiled.append(str(getattr(kwargs.get("fn"), "name", "?")))
                return None if before is None else before(*args, **kwargs)

            knobs.runtime.jit_post_compile_hook = hook


class WorkerFigures(PlannerAccess):
    """Methods for the workers of a benchmark's engines (``ParallelConfig.worker_extension_cls``)."""

    model_runner: Any

    def dflash_implementation(self) -> str | None:
        """The class that drafts; None without speculation."""
        drafter = drafter_of(self.model_runner)
        return None if drafter is None else f"{type(drafter).__module__}.{type(drafter).__qualname__}"

    def dflash_figures(self) -> dict[str, Any]:
        """:meth:`Meter.take` since the last call; the first call begins to measure. What was launched has ended then."""
        meter: Meter | None = getattr(self.model_runner, _METER, None)
        if meter is None:
            meter = Meter(self.model_runner)
            setattr(self.model_runner, _METER, meter)
        return meter.take()
