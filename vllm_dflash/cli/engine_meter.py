# SPDX-License-Identifier: Apache-2.0
"""What an in-process engine does besides emitting tokens: time and graphs of its draft steps, kernels compiled while serving."""

import contextlib
import statistics
import time
from typing import Any


class Meter:
    """Wraps ``propose`` of the drafter of one in-process engine; does nothing where the engine is in another process."""

    def __init__(self, engine: Any) -> None:
        self._spans: list[Any] = []
        self._graph_steps = self._proposals = self._compiled = 0
        self._seen = (0, 0, 0)
        self._drafting = False
        try:
            runner = engine.model_executor.driver_worker.worker.model_runner
        except AttributeError:
            runner = None
        self._drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        self._cuda = runner is not None and getattr(runner, "device", None) is not None and runner.device.type == "cuda"
        if self._drafter is not None:
            self._wrap(self._drafter, "propose", self._time_draft)
            manager = getattr(self._drafter, "graphs", None) or getattr(self._drafter, "query_cudagraph_manager", None)
            if manager is not None:
                self._wrap(manager, "run_fullgraph", self._count_graph)
        self._watch_compiler()

    def take(self) -> dict[str, Any]:
        """Figures since the last call: median milliseconds of a draft step, and counts."""
        graphs, proposals, compiled = (a - b for a, b in zip(self._counts(), self._seen, strict=True))
        self._seen = self._counts()
        spans, self._spans = self._spans, []
        if self._cuda and spans:
            import torch

            torch.cuda.synchronize()
            spans = [start.elapsed_time(end) for start, end in spans]
        figures: dict[str, Any] = {"draft_ms": statistics.median(spans) if spans else None}
        if self._cuda and self._drafter is not None:
            figures |= {"graph_steps": graphs, "eager_steps": proposals - graphs, "jit_compiles": compiled}
        return figures

    def _counts(self) -> tuple[int, int, int]:
        return self._graph_steps, self._proposals, self._compiled

    @staticmethod
    def _wrap(owner: Any, name: str, wrapper: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def _count_graph(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._graph_steps += self._drafting  # steps that only store context replay graphs too
        return original(*args, **kwargs)

    def _time_draft(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_speculative_tokens") == 0:  # context KV only
            return original(*args, **kwargs)
        self._proposals += 1
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
                self._compiled += 1
                return None if before is None else before(*args, **kwargs)

            knobs.runtime.jit_post_compile_hook = hook
