# SPDX-License-Identifier: Apache-2.0
"""The device half of a draft step: combine context, write context KV, draft forward, pick drafts.

Everything here is recorded into CUDA graphs, so it allocates only what a graph pool may hold, reads fixed addresses, and takes
from the host nothing but sizes. The host half (what to run, what to stage) is in ``speculator.py``.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context

from vllm_dflash.engine.buffers import DraftBuffers, DraftShape
from vllm_dflash.engine.draft_backend import DraftAttention
from vllm_dflash.engine.fused_context import FusedContext

# Context rows of a prefill handled at once: bounds the concatenated copy (84 MB at hidden 4096, 5 layers) and fills the GPU.
_CONTEXT_CHUNK = 2048
Picker = Callable[[torch.Tensor, slice, int], torch.Tensor]
"""(hidden states [m, H] of sample rows, which sample rows, K of the step) -> int64 [m] drafts."""


class DraftPass:
    """Runs the draft model over the buffers of one step.

    Args:
        model: draft network (``DFlashDraftModel`` or its duck type).
        buffers: staged inputs and the output ``draft_tokens``.
        pick: turns hidden states into tokens.
        chunk: sample rows to pick at once, rounded up to whole requests.
        anchors_too: up to this many query rows, pick for all of them; the picker must not look at which rows they are.
    """

    def __init__(
        self, model: Any, buffers: DraftBuffers, vllm_config: VllmConfig, pick: Picker, chunk: int, anchors_too: int
    ) -> None:
        self.model = model
        self.buffers = buffers
        self.attention: DraftAttention | None = None  # set by the speculator's set_attn
        self.fused_context: FusedContext | None = None  # set when KV caches are bound
        self._vllm_config = vllm_config
        self._pick = pick
        self._chunk = chunk
        self._anchors_too = anchors_too

    def run(
        self,
        num_reqs: int,
        num_context_rows: int,
        metadata: dict[str, Any] | None,
        across_dp: torch.Tensor | None = None,
        *,
        refresh: bool = False,
        shape: DraftShape | None = None,
    ) -> None:
        """Steps 2 to 5 for ``num_reqs`` requests whose first ``num_context_rows`` context rows are staged.

        ``metadata`` None runs without attention and without stores (memory profiling). ``refresh`` recomputes in the graph
        what the metadata derives from lengths and block tables. ``shape``: how wide to draft; None for the widest.
        """
        self._store_rows(self.buffers.aux[:num_context_rows], 0, metadata is not None)
        if refresh:
            assert self.attention is not None
            assert metadata is not None
            self.attention.refresh(metadata, num_reqs)
        shape = shape or self.buffers.shape
        hidden_states = self._forward(num_reqs * shape.num_query_per_req, metadata, across_dp)
        self._pick_drafts(hidden_states, num_reqs, shape)

    def store_staged(self, num_context_rows: int) -> None:
        """Steps 2 and 3 alone, for staged rows: nothing is drafted, but the context stays in step with the target."""
        self._store_rows(self.buffers.aux[:num_context_rows], 0, store=True)

    def store_context(self, aux_hidden_states: list[torch.Tensor], start: int, end: int, *, store: bool = True) -> None:
        """Context KV of target rows ``start:end``, eagerly and in chunks; ``store`` False only computes it."""
        for begin in range(start, end, _CONTEXT_CHUNK):
            stop = min(begin + _CONTEXT_CHUNK, end)
            self._store_rows(self.buffers.context_rows(aux_hidden_states, begin, stop), begin, store)

    def store_waiting(self, aux: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Context KV of rows of earlier steps, eagerly.

        Args:
            aux: [n, aux_width].
            positions: int64 [n].
            slots: int64 [G, n], -1 for rows not to store.
        """
        self._write_context(self._combine_context(aux), positions, slots)

    def _store_rows(self, aux: torch.Tensor, start: int, store: bool) -> None:
        """Context KV of ``aux`` [n, aux_width], which belongs to target rows ``start:start + n`` of this step."""
        query, end = self.buffers.query, start + aux.shape[0]
        slots = query.context_slots[:, start:end] if store else None
        self._write_context(self._combine_context(aux), query.context_positions[start:end], slots)

    def _combine_context(self, aux: torch.Tensor) -> torch.Tensor:
        """[n, A * H_target] -> context states [n, H]."""
        states: torch.Tensor = self.model.combine_hidden_states(aux)
        return states

    def _write_context(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor | None) -> None:
        """K and V of context states [n, H] at ``positions`` into the caches of all layers; ``slots`` None only computes them."""
        if slots is not None and self.fused_context is not None:
            self.fused_context.write(states, positions, slots)
            return
        per_layer = None if slots is None or self.attention is None else self.attention.by_layer(slots)
        self.model.precompute_and_store_context_kv(states, positions, per_layer)

    def _forward(self, num_tokens: int, metadata: dict[str, Any] | None, across_dp: torch.Tensor | None) -> torch.Tensor:
        """The query block, ``num_tokens`` rows, through the draft's layers: [num_tokens, H]."""
        query = self.buffers.query
        slots = self.attention.query_slots(num_tokens) if metadata is not None and self.attention is not None else None
        with set_forward_context(
            metadata,
            self._vllm_config,
            num_tokens=num_tokens,
            num_tokens_across_dp=across_dp,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,  # a graph, if any, is recorded around this call
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
            slot_mapping=slots,
        ):
            hidden_states: torch.Tensor = self.model(
                input_ids=query.input_ids[:num_tokens], positions=query.positions[:num_tokens], inputs_embeds=None
            )
        return hidden_states

    def _pick_drafts(self, hidden_states: torch.Tensor, num_reqs: int, shape: DraftShape) -> None:
        """Tokens for the K predicting rows of each request, into ``draft_tokens``."""
        width = shape.num_speculative_tokens
        drafts = self.buffers.draft_tokens[:num_reqs, :width]
        if hidden_states.shape[0] <= self._anchors_too:
            # The head reads its weights once whatever the rows: taking the anchors along saves a gather.
            tokens = self._pick(hidden_states, slice(0, hidden_states.shape[0]), width).view(num_reqs, -1)
            drafts.copy_(tokens[:, -width:])
            return
        blocks = hidden_states.view(num_reqs, shape.num_query_per_req, -1)
        rows = blocks[:, -width:].reshape(drafts.numel(), -1)
        num_chunks = -(-rows.shape[0] // self._chunk)
        size = -(-num_reqs // num_chunks) * width  # whole requests
        for start in range(0, rows.shape[0], size):
            chunk = slice(start, min(start + size, rows.shape[0]))
            drafts[start // width : chunk.stop // width].copy_(self._pick(rows[chunk], chunk, width).view(-1, width))
