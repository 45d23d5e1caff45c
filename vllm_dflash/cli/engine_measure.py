# SPDX-License-Identifier: Apache-2.0
"""What `vllm-dflash bench` asks of an engine: timed batches, a held draft width, the best next tokens.

The engine may run in another process, as vLLM has it: what its worker does is asked through `WORKER_EXTENSION`.
"""

import time
from collections.abc import Sequence
from typing import Any

from vllm_dflash.cli.engine_answers import add_requests, draft_counters, drafts_since, encoded

WORKER_EXTENSION = "vllm_dflash.cli.engine_meter.WorkerFigures"
BEST = 5
"""Tokens in the answer to a question for the best next ones."""


def implementation_of(engine: Any) -> str | None:
    """Class that drafts; None without speculation, and where workers were given other methods than ours."""
    found: str | None = _ask(engine, "dflash_implementation")
    return found


def _ask(engine: Any, method: str) -> Any:
    if engine.vllm_config.parallel_config.worker_extension_cls != WORKER_EXTENSION:
        return None
    return engine.collective_rpc(method)[0]


class Bench:
    """Answers the questions of a benchmark on one engine; what is special to ours is left out for others."""

    def __init__(self, engine: Any, *, ours: bool) -> None:
        self._engine, self._ours, self._held = engine, ours, False

    def answer(self, request: dict[str, Any], prefix: str) -> dict[str, Any] | None:
        """Fields of the ``result`` event of one request, whose ``bench`` names the question; None where it asks for text."""
        match request.get("bench"):
            case "measure":
                return self._measure(request, prefix)
            case "widths":
                return self._possible(request["widths"])
            case "best":
                return {"best": self._best(request, prefix)}
        return None

    def _measure(self, request: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Run one batch with nothing between the engine's steps; the clock runs from the first request to the last step.

        ``at_least``: tokens that each answer needs; when the last one has them all requests end, so the batch is full till then.
        ``step_ends``: seconds at which each step with output ended; ``arrivals`` of an output: the steps that brought its tokens.
        """
        engine, wanted = self._engine, request.get("at_least")
        request = encoded(engine, request)
        self._hold(request.get("hold"))
        self._figures()  # of what came before
        before = draft_counters()
        seen: list[tuple[int, Any]] = []
        step_ends: list[float] = []
        begin = time.perf_counter()
        answers = add_requests(engine, request, prefix)  # an engine in another process begins with the first
        missing = dict.fromkeys(answers, wanted) if wanted else {}
        while engine.has_unfinished_requests() and (missing or not wanted):
            outputs = engine.step()
            if outputs:
                step_ends.append(time.perf_counter() - begin)
                seen += [(len(step_ends) - 1, output) for output in outputs]
                if missing:
                    _count_down(missing, outputs)
        if engine.has_unfinished_requests():
            engine.abort_request(list(answers))
        for step, output in seen:
            answers[output.request_id].count(step, output)
        result = {"outputs": [a.measured() for a in answers.values()], "seconds": step_ends[-1], "step_ends": step_ends}
        return result | {"at_least": wanted} | drafts_since(before) | self._figures()

    def _figures(self) -> dict[str, Any]:
        """What the worker did and the planner decided since the last call.

        A core in another process may be ahead of us: what it has sent by then, of requests that were ended, is taken and dropped.
        """
        found = (_ask(self._engine, "dflash_figures") or {}) | self._planner()
        waiting = getattr(self._engine.engine_core, "outputs_queue", None)
        while waiting is not None and not waiting.empty():
            self._engine.step()
        return found

    def _hold(self, width: int | None) -> None:
        """Make all steps draft ``width`` tokens; None lets the planner choose again.

        Raises:
            ValueError: there is no planner, or it has no such width.
        """
        if width is None and not self._held:
            return
        from vllm_dflash.engine.planner_access import hold_width

        hold_width(self._engine, width)
        self._held = width is not None

    def _possible(self, widths: Sequence[int]) -> dict[str, Any]:
        """Which widths can be held, and a sentence for each that cannot. A planner is made in the engine's first step."""
        self._best({"prompts": [[0]]}, "first")
        complaints = {width: self._complaint(width) for width in widths}
        self._hold(None)
        return {
            "possible": [width for width, complaint in complaints.items() if complaint is None],
            "complaints": [complaint for complaint in complaints.values() if complaint is not None],
        }

    def _complaint(self, width: int) -> str | None:
        try:
            self._hold(width)
        except ValueError as error:
            return str(error)
        return None

    def _planner(self) -> dict[str, Any]:
        """What the planner decided since the last call; empty without one that can be asked."""
        if not self._ours:
            return {}
        from vllm_dflash.engine.planner_access import report_of

        report = report_of(self._engine, reset=True)
        return {} if report is None else {"planner": report}

    def _best(self, request: dict[str, Any], prefix: str) -> list[list[tuple[int, float]]]:
        """(token id, log probability) of the most probable next tokens of each prompt, the best first."""
        sampling = {"temperature": 0, "max_tokens": 1, "logprobs": BEST}
        found: dict[str, list[tuple[int, float]]] = {
            name: [] for name in add_requests(self._engine, request | {"sampling": sampling}, prefix)
        }
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                for position in output.outputs[0].logprobs or []:
                    ranked = ((token, entry.logprob) for token, entry in position.items())
                    found[output.request_id] = sorted(ranked, key=lambda pair: -pair[1])
        return list(found.values())


def _count_down(missing: dict[str, int], outputs: Sequence[Any]) -> None:
    for output in outputs:
        name = output.request_id
        if name in missing:
            missing[name] -= len(output.outputs[0].token_ids)
            if missing[name] <= 0 or output.finished:
                del missing[name]
