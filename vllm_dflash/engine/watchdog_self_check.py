# SPDX-License-Identifier: Apache-2.0
"""Self-check for a user who suspects the draft (option ``self_check``): the first fitting request is drafted three times over.

While one request decodes, its hidden states are kept. At some of its steps the draft step is then run again from the same
inputs, eagerly where it was a CUDA graph, and once more after the K/V of the whole context were computed again from the hidden
states, layer by layer instead of fused, and stored over what the cache held. Sound engines draft the same tokens each time.
One line says so, or says what differs. Ends by itself; it slows those steps down and synchronises with the device.

Nothing is decided here: verification follows as ever, and K/V stored again are the right ones.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from vllm.logger import init_logger

from vllm_dflash.engine.query_block import committed_rows
from vllm_dflash.options import read_options

logger = init_logger("vllm.plugins.dflash")

FIRST, EVERY, CHECKS = 4, 2, 3
"""Verifications of the request before the first check, between checks, and number of checks."""
MOST_ROWS = 2048
"""Longer requests are not traced: 84 MB of hidden states at 5 layers of 4096 in bfloat16."""
LEAST_EQUAL = {torch.float32: 1.0}
OTHERWISE = 0.75
"""Share of equal drafts that passes. Near ties fall either way where a GEMM over other shapes rounds to 16 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Committed rows of one request in one step.

    Attributes:
        request: its id; ``row``: its row in the batch, and in the drafts.
        aux: [n, U * H_target] captured hidden states, ascending layers.
        positions: int64 [n]. slots: int64 [G, n], by KV group of the draft.
        drafts_count: whether the drafts of this step are used, so not in mid-prefill.
    """

    request: str
    row: int
    aux: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    drafts_count: bool


class Steps(Protocol):
    """What a runner's draft step shows to the check."""

    model: Any
    windows: tuple[int | None, ...]
    dtype: torch.dtype

    def spans(self, call: Mapping[str, Any]) -> Iterator[Span]:
        """Requests of the step that was run with the arguments ``call``."""

    def store(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Store K/V of context states [n, H] in every layer's cache, layer by layer."""

    def again(self, call: Mapping[str, Any], *, eager: bool) -> torch.Tensor:
        """Run the draft step of ``call`` once more -> int64 [B, K]."""


class V1Steps:
    """Steps of the proposer."""

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        self._runner = proposer._runner
        self.model, self.dtype = proposer.model, proposer.dtype
        self.windows = tuple(layer.window for layer in proposer.draft.layers)

    def spans(self, call: Mapping[str, Any]) -> Iterator[Span]:
        """See :class:`Steps`."""
        common, aux = call["common_attn_metadata"], call["target_hidden_states"]
        starts = common.query_start_loc
        slots = common.slot_mapping[: aux.shape[0]]
        rows = committed_rows(starts, common.seq_lens, slots, call["num_rejected_tokens_gpu"], compact=False)
        prefilling = self._runner.discard_request_mask.np
        draws = self._proposer._enable_probabilistic_draft_probs and not call["sampling_metadata"].all_greedy
        for row, name in enumerate(self._runner.input_batch.req_ids):
            span = torch.arange(int(starts[row]), int(starts[row + 1]), device=aux.device)
            span = span[rows.slots[span] >= 0]
            yield Span(name, row, aux[span], rows.positions[span], rows.slots[span].unsqueeze(0), not (prefilling[row] or draws))

    def store(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """See :class:`Steps`."""
        self.model.precompute_and_store_context_kv(states, positions, slots[0])

    def again(self, call: Mapping[str, Any], *, eager: bool) -> torch.Tensor:  # noqa: ARG002  # part of the protocol
        """See :class:`Steps`; the proposer's graphs are the compiler's, and stay."""
        drafts: torch.Tensor = type(self._proposer).propose(self._proposer, **call)
        return drafts


class V2Steps:
    """Steps of the speculator."""

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self.model, self.dtype = speculator.model, speculator.dtype
        self.windows = tuple(layer.window for layer in speculator.draft.layers)

    def spans(self, call: Mapping[str, Any]) -> Iterator[Span]:
        """See :class:`Steps`."""
        batch, buffers = call["input_batch"], self._speculator.buffers
        query, starts = buffers.query, batch.query_start_loc.tolist()
        aux = buffers.context_rows(call["aux_hidden_states"] or [], 0, batch.num_tokens)
        sampled = call["num_sampled"].tolist()
        for row, name in enumerate(batch.req_ids):
            span = torch.arange(starts[row], starts[row + 1], device=aux.device)
            span = span[query.context_slots[0, span] >= 0]
            yield Span(name, row, aux[span], query.context_positions[span], query.context_slots[:, span], sampled[row] > 0)

    def store(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """See :class:`Steps`."""
        per_layer = [slots[row] for row in self._speculator.attention.layer_rows]
        self.model.precompute_and_store_context_kv(states, positions, per_layer)

    def again(self, call: Mapping[str, Any], *, eager: bool) -> torch.Tensor:
        """See :class:`Steps`; a profile run is one that uses no graph."""
        drafts: torch.Tensor = type(self._speculator).propose(self._speculator, **{**call, "is_profile": eager})
        return drafts


@dataclasses.dataclass(slots=True)
class _Trace:
    """The request that is followed, and what its checks found."""

    request: str
    rows: list[Span] = dataclasses.field(default_factory=list)
    known: int = 0
    prompt: int = 0
    verified: int = -1
    checks: int = 0
    compared: int = 0
    equal: int = 0
    equal_rebuilt: int = 0

    def follows(self, span: Span | None) -> bool:
        """Whether ``span`` begins where the trace ends: false after preemption, and when the request is gone."""
        return span is not None and span.positions.numel() > 0 and int(span.positions[0]) == self.known

    def keep(self, span: Span) -> None:
        """Add the rows of a step; the first that drafts is the end of the prompt."""
        copies = {name: getattr(span, name).clone() for name in ("aux", "positions", "slots")}
        self.rows.append(dataclasses.replace(span, **copies))
        self.known += span.aux.shape[0]
        self.verified += span.drafts_count
        if self.verified < 1:
            self.prompt = self.known


class SelfCheck:
    """Follows one request through the steps of a runner; ``done`` once the verdict is in the log."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._trace: _Trace | None = None
        self.done = False

    def after_step(self, call: Mapping[str, Any], drafts: torch.Tensor) -> torch.Tensor:
        """Look at the step with arguments ``call`` that drafted ``drafts`` [B, K]; returns the drafts to use."""
        spans = {span.request: span for span in self._steps.spans(call)}
        span = None if self._trace is None else spans.get(self._trace.request)
        if span is None or self._trace is None or not self._trace.follows(span):
            span = next((s for s in spans.values() if _begins(s)), None)
            self._trace = None if span is None else _Trace(span.request)
        if span is None or self._trace is None:
            return drafts
        trace = self._trace
        trace.keep(span)
        if trace.known > MOST_ROWS:
            self._trace = None
        elif span.drafts_count and trace.verified >= FIRST and trace.verified % EVERY == 0:
            return self._check(trace, call, span, drafts)
        return drafts

    def _check(self, trace: _Trace, call: Mapping[str, Any], span: Span, drafts: torch.Tensor) -> torch.Tensor:
        first = drafts[span.row].clone()
        aux = torch.cat([kept.aux for kept in trace.rows])
        states = self._steps.model.combine_hidden_states(aux)
        if problem := self._not_finite(aux, states):
            self._end(trace, problem)
            return drafts
        trace.equal += int((self._steps.again(call, eager=True)[span.row] == first).sum())
        # Blocks behind a layer's window may belong to another request by now.
        near = slice(-min((window for window in self._steps.windows if window), default=trace.known), None)
        positions = torch.cat([kept.positions for kept in trace.rows])
        slots = torch.cat([kept.slots for kept in trace.rows], dim=1)
        self._steps.store(states[near], positions[near], slots[:, near])
        drafts = self._steps.again(call, eager=False)
        trace.equal_rebuilt += int((drafts[span.row] == first).sum())
        trace.compared += first.numel()
        trace.checks += 1
        if trace.checks == CHECKS:
            self._end(trace, self._verdict(trace))
        return drafts

    def _not_finite(self, aux: torch.Tensor, states: torch.Tensor) -> str | None:
        layers = self._steps.model.captured_layers
        blocks = torch.isfinite(aux.view(aux.shape[0], len(layers), -1)).all(-1).all(0).tolist()
        bad = [layer for layer, finite in zip(layers, blocks, strict=True) if not finite]
        if bad:
            return (
                f"hidden states of target layers {bad} hold NaN or infinity; is dtype float16 and the target made for bfloat16?"
            )
        if not bool(torch.isfinite(states).all()):
            return f"the draft's fc overflows in {self._steps.dtype}; set dtype to bfloat16 or float32"
        return None

    def _verdict(self, trace: _Trace) -> str | None:
        least = LEAST_EQUAL.get(self._steps.dtype, OTHERWISE) * trace.compared
        if trace.equal < least:
            return (
                f"run twice on the same inputs, {trace.equal} of {trace.compared} drafts are equal. Where there are CUDA graphs: "
                "does enforce_eager help? Please report it"
            )
        if trace.equal_rebuilt < least:
            return (
                f"with the K/V of its context computed again, {trace.equal_rebuilt} of {trace.compared} drafts are equal: the "
                f"draft's KV cache held other values for some of {trace.known} tokens. Does enable_prefix_caching=False help? "
                "Please report it"
            )
        return None

    def _end(self, trace: _Trace, problem: str | None) -> None:
        self.done = True
        if problem:
            logger.warning("DFlash self-check FAILED: %s.", problem)
            return
        logger.info(
            "DFlash self-check OK: hidden states finite; %d of %d drafts equal when drafted again, %d when the K/V of %d tokens "
            "were computed again; acceptance length of this request %.2f over %d verifications.",
            trace.equal,
            trace.compared,
            trace.equal_rebuilt,
            trace.known,
            (trace.known - trace.prompt) / trace.verified,
            trace.verified,
        )


def _begins(span: Span) -> bool:
    """Whether a request begins in this step with nothing from a cache: all of its hidden states will be seen."""
    return span.positions.numel() > 0 and int(span.positions[0]) == 0 and span.aux.shape[0] < MOST_ROWS


def attach(drafter: Any, vllm_config: Any, steps: Callable[[Any], Steps]) -> Any:
    """Let ``drafter`` check itself where the option asks for it; returns ``drafter``."""
    if not read_options(vllm_config.additional_config).self_check:
        return drafter
    if vllm_config.parallel_config.data_parallel_size > 1:
        logger.warning("DFlash self-check: left out with data_parallel_size > 1, where ranks must run the same steps.")
        return drafter
    propose, signature = drafter.propose, inspect.signature(drafter.propose)
    check: SelfCheck | None = None

    def checked(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal check
        drafts: torch.Tensor = propose(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        if call.get("dummy_run") or call.get("num_speculative_tokens") == 0 or (check and check.done):
            return drafts
        check = check or SelfCheck(steps(drafter))
        with torch.inference_mode():
            drafts = check.after_step(call, drafts)
        if check.done and vars(drafter).get("propose") is checked:
            del drafter.propose
        return drafts

    drafter.propose = checked
    return drafter
