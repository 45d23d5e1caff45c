# SPDX-License-Identifier: Apache-2.0
"""Counts and times what one in-process engine on Model Runner V2 does; shared by the GPU benchmarks of this folder."""

import contextlib

DRAFT_RANGE = "dflash_draft_step"
"""Name of the profiler range around ``propose``."""


class Meter:
    """Wraps the runner's ``execute_model`` and the speculator's ``propose`` of one in-process engine."""

    def __init__(self, llm):
        import torch

        self.torch = torch
        self.llm = llm
        self.runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.speculator = self.runner.speculator
        self.steps = 0
        self.graph_steps = self.proposals = 0
        self.spans = []
        self.jit_compiles = []
        self._wrap(self.runner, "execute_model", self._count_step)
        if self.speculator is not None:
            self._wrap(self.speculator, "propose", self._time_draft)
            manager = getattr(self.speculator, "graphs", None) or getattr(self.speculator, "query_cudagraph_manager", None)
            if manager is not None:
                self._wrap(manager, "run_fullgraph", self._count_graph)
        self._watch_jit()

    @staticmethod
    def _wrap(owner, name, wrapper):
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def _count_step(self, original, *args, **kwargs):
        self.steps += 1
        return original(*args, **kwargs)

    def _count_graph(self, original, *args, **kwargs):
        self.graph_steps += 1
        return original(*args, **kwargs)

    def _time_draft(self, original, *args, **kwargs):
        if kwargs.get("num_speculative_tokens") == 0:  # no request can use drafts: context KV only
            return original(*args, **kwargs)
        self.proposals += 1
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.torch.profiler.record_function(DRAFT_RANGE):
            start.record()
            result = original(*args, **kwargs)
            end.record()
        self.spans.append((self.proposals, start, end))
        return result

    def _watch_jit(self):
        from triton import knobs

        before = knobs.runtime.jit_post_compile_hook

        def hook(*args, **kwargs):
            self.jit_compiles.append(str(getattr(kwargs.get("fn"), "name", "?")))
            return None if before is None else before(*args, **kwargs)

        with contextlib.suppress(AttributeError):
            knobs.runtime.jit_post_compile_hook = hook

    def accepted(self):
        """(steps with drafts, accepted drafts) so far."""
        values = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        prefix = "vllm:spec_decode_num_"
        return values.get(f"{prefix}drafts", 0), values.get(f"{prefix}accepted_tokens", 0)
