# SPDX-License-Identifier: Apache-2.0
"""What an in-process engine does besides emitting tokens: time and graphs of its draft steps, kernels compiled while serving."""

import contextlib
import statistics
import time
from typing import Any

DRAFT_RANGE = "dflash_draft_step"
"""Name of the profiler's range around a draft step on a GPU."""


class Meter:
    """Wraps the runner and the drafter of one in-process engine; does nothing where the engine is in another process.

    Attributes:
        runner: vLLM's model runner; None where it is in another process.
        drafter: its proposer (V1) or speculator (V2); None without speculation.
        steps: calls of the runner so far.
        proposals: draft steps so far; steps that only store context do not count.
        graph_steps: those of them that replayed a CUDA graph.
        compiled: names of the Triton kernels that were compiled so far.
    """

    def __init__(self, engine: Any) -> None:
        """``engine``: an ``LLMEngine``, for example ``LLM.llm_engine``."""
        self._spans: list[Any] = []
        self.steps = self.proposals = self.graph_steps = 0
        self.compiled: list[str] = []
        self._seen = (0, 0, 0)
        self._drafting = False
        try:
            self.runner = engine.model_executor.driver_worker.worker.model_runner
        except AttributeError:
            self.runner = None
        self.drafter = getattr(self.runner, "drafter", None) or getattr(self.runner, "speculator", None)
        self._cuda = getattr(getattr(self.runner, "device", None), "type", None) == "cuda"
        if self.runner is not None:
            self._wrap(self.runner, "execute_model", self._count_step)
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
