# SPDX-License-Identifier: Apache-2.0
"""Fixed-address tensors of the draft step and the invariants of their padding.

Allocated when the speculator is built or when KV groups are known, never in a step. A captured graph for R requests reads
R * Q query rows, R * K sample rows and R * (K + 1) context rows; ``query_block`` writes all of these on every step, rows
without a request as padding: slot -1, sequence length 0, request state -1.
"""

import dataclasses

import torch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch

from dflash_kernels.query_block import DraftBlockTables, QueryBlockBuffers, QueryBlockSpec, TargetStep, query_block

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes that every buffer follows from."""

    max_requests: int
    """Requests of the largest draft step, graph padding included."""
    num_query_per_req: int
    num_speculative_tokens: int
    max_num_tokens: int
    """Rows of the largest target step."""
    aux_width: int
    """Target hidden size times captured layers."""
    mask_token_id: int
    sample_from_anchor: bool

    @property
    def context_rows_per_req(self) -> int:
        """Rows that one verification adds per request: anchor and K drafts."""
        return self.num_speculative_tokens + 1

    def graph_context_rows(self, num_requests: int) -> int:
        """Context rows that a draft step for ``num_requests`` requests stores itself; more (a prefill) go before it."""
        return min(num_requests * self.context_rows_per_req, self.max_num_tokens)

    def narrowed(self, num_speculative_tokens: int) -> "DraftShape":
        """The shape of a step that drafts fewer tokens: a shorter block, and context rows of as narrow a verification."""
        fewer = self.num_speculative_tokens - num_speculative_tokens
        return dataclasses.replace(
            self, num_query_per_req=self.num_query_per_req - fewer, num_speculative_tokens=num_speculative_tokens
        )


class DraftBuffers:
    """All persistent device memory of the draft step besides weights and KV cache.

    Attributes:
        query: integer inputs (see ``QueryBlockBuffers``).
        aux: [graph context rows, aux_width] draft dtype; aux hidden states of the rows that the graph combines. Rows beyond
            the batch hold anything, NaN included where the target itself fills it (``hold_every_row``): whatever reads them
            works row by row, and their slots are padding.
        draft_tokens: int64 [max_requests, K].
        shapes: shapes of steps by their K, ascending; the last is ``shape``.
        sample_steps: by K of a step, int32 [max_requests * K], column of each sample row; constant.
        inert_requests: int64 [max_requests], -1: a request mapping that turns every row into padding (dummy runs).
    """

    def __init__(self, shape: DraftShape, dtype: torch.dtype, device: torch.device, narrower: tuple[int, ...] = ()) -> None:
        self.shape = shape
        self.shapes = {width: shape.narrowed(width) for width in narrower} | {shape.num_speculative_tokens: shape}
        self.device = device
        self.query = self._allocate_query(num_groups=1)
        rows = shape.graph_context_rows(shape.max_requests)
        self.aux = torch.zeros(rows, shape.aux_width, dtype=dtype, device=device)
        num_drafts = shape.num_speculative_tokens
        self.draft_tokens = torch.zeros(shape.max_requests, num_drafts, dtype=torch.int64, device=device)
        self.sample_steps = {
            width: torch.arange(width, dtype=torch.int32, device=device).repeat(shape.max_requests) for width in self.shapes
        }
        self.inert_requests = torch.full((shape.max_requests,), -1, dtype=torch.int64, device=device)
        self._query_starts = torch.arange(shape.max_requests + 1, dtype=torch.int32, device=device)
        self._tables: DraftBlockTables | None = None  # these two: set by bind()
        self._specs: dict[int, QueryBlockSpec] = {}

    def _allocate_query(self, num_groups: int) -> QueryBlockBuffers:
        shape = self.shape
        return QueryBlockBuffers.allocate(
            shape.max_requests,
            shape.num_query_per_req,
            shape.num_speculative_tokens,
            shape.max_num_tokens,
            num_groups,
            self.device,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes held, without the draft-logit cache."""
        fields = [getattr(self.query, field.name) for field in dataclasses.fields(self.query)]
        return sum(tensor.nbytes for tensor in (*fields, self.aux, self.draft_tokens, *self.sample_steps.values()))

    def bind(self, block_tables: BlockTables, group_ids: list[int], max_model_len: int) -> None:
        """Follow new block tables; KV groups of the draft become rows of ``query.slots`` in the order of ``group_ids``."""
        if self.query.slots.shape[0] != len(group_ids):
            self.query = self._allocate_query(len(group_ids))
        self.query.reset()
        self._tables = DraftBlockTables.build(
            [block_tables.input_block_tables[gid] for gid in group_ids],
            [block_tables.block_sizes[gid] for gid in group_ids],
            group_ids,
        )
        self._specs = {
            width: QueryBlockSpec(
                shape.num_query_per_req,
                shape.num_speculative_tokens,
                shape.mask_token_id,
                max_model_len,
                sample_from_anchor=shape.sample_from_anchor,
                draft_mid_prefill=False,  # the scheduler drops such drafts, and each would read the whole prompt so far
            )
            for width, shape in self.shapes.items()
        }

    def fill(self, batch: InputBatch, step: TargetStep, num_reqs: int, num_reqs_padded: int, shape: DraftShape) -> None:
        """Write the query block and all slots of a step of ``shape``, for all draft KV groups in one launch."""
        assert self._tables is not None
        query_block(
            self.query,
            self._tables,
            self._specs[shape.num_speculative_tokens],
            step,
            num_reqs=num_reqs,
            num_reqs_padded=num_reqs_padded,
            num_context_rows=max(shape.graph_context_rows(num_reqs_padded), batch.num_tokens),
            max_query_len=int(batch.num_scheduled_tokens.max()),
        )

    def hold_every_row(self) -> torch.Tensor:
        """Make ``aux`` [max_num_tokens, aux_width], for a target that stores its states there itself (``aux_buffer.py``)."""
        self.aux = torch.zeros(self.shape.max_num_tokens, self.shape.aux_width, dtype=self.aux.dtype, device=self.device)
        return self.aux

    def context_rows(self, aux_hidden_states: list[torch.Tensor], begin: int, end: int) -> torch.Tensor:
        """Aux hidden states [end - begin, aux_width] of target rows ``begin:end``; ``aux`` holds them where the list is empty."""
        if not aux_hidden_states:
            return self.aux[begin:end]
        return torch.cat([states[begin:end].to(self.aux.dtype) for states in aux_hidden_states], dim=-1)

    def stage_aux(self, aux_hidden_states: list[torch.Tensor], num_rows: int) -> None:
        """Put the first ``num_rows`` rows of each captured layer ([rows, H_target], any float dtype) side by side.

        Nothing to do for an empty list: the target has put them there.
        """
        if aux_hidden_states:
            self.copy_aux(aux_hidden_states, self.aux[:num_rows])

    def copy_aux(self, aux_hidden_states: list[torch.Tensor], out: torch.Tensor) -> None:
        """The first rows of the step's aux states, as in :meth:`context_rows`, into ``out`` [rows, aux_width], draft dtype."""
        num_rows = out.shape[0]
        parts = [states[:num_rows] for states in aux_hidden_states or (self.aux,)]
        if all(part.dtype == out.dtype for part in parts):
            torch.cat(parts, dim=-1, out=out)
            return
        width = self.shape.aux_width // len(parts)
        for index, part in enumerate(parts):
            out[:, index * width : (index + 1) * width].copy_(part)

    def prepare_capture(self, num_reqs: int, shape: DraftShape) -> None:
        """Inputs of a capture run: ``num_reqs`` requests whose keys are their own rows, and no slot to write."""
        self.query.reset()
        starts = self.query.query_start_loc
        starts[: num_reqs + 1].copy_(self._query_starts[: num_reqs + 1] * shape.num_query_per_req)
        self.query.seq_lens[:num_reqs].fill_(shape.num_query_per_req)
