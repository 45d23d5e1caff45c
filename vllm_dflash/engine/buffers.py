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


class DraftBuffers:
    """All persistent device memory of the draft step besides weights and KV cache.

    Attributes:
        query: integer inputs (see ``QueryBlockBuffers``).
        aux: [graph context rows, aux_width] draft dtype; aux hidden states of the rows that the graph combines. Rows beyond
            the batch hold older values: they are finite, and their slots are padding.
        draft_tokens: int64 [max_requests, K].
        sample_steps: int32 [max_requests * K], column k of each sample row; constant.
        inert_requests: int64 [max_requests], -1: a request mapping that turns every row into padding (dummy runs).
    """

    def __init__(self, shape: DraftShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.query = self._allocate_query(num_groups=1)
        rows = shape.graph_context_rows(shape.max_requests)
        self.aux = torch.zeros(rows, shape.aux_width, dtype=dtype, device=device)
        num_drafts = shape.num_speculative_tokens
        self.draft_tokens = torch.zeros(shape.max_requests, num_drafts, dtype=torch.int64, device=device)
        self.sample_steps = torch.arange(num_drafts, dtype=torch.int32, device=device).repeat(shape.max_requests)
        self.inert_requests = torch.full((shape.max_requests,), -1, dtype=torch.int64, device=device)
        self._query_starts = torch.arange(shape.max_requests + 1, dtype=torch.int32, device=device) * shape.num_query_per_req
        self._tables: DraftBlockTables | None = None  # these two: set by bind()
        self._spec: QueryBlockSpec | None = None

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
        return sum(tensor.nbytes for tensor in (*fields, self.aux, self.draft_tokens, self.sample_steps))

    def bind(self, block_tables: BlockTables, group_ids: list[int], max_model_len: int) -> None:
        """Follow new block tables; KV groups of the draft become rows of ``query.slots`` in the order of ``group_ids``."""
        shape = self.shape
        if self.query.slots.shape[0] != len(group_ids):
            self.query = self._allocate_query(len(group_ids))
        self.query.reset()
        self._tables = DraftBlockTables.build(
            [block_tables.input_block_tables[gid] for gid in group_ids],
            [block_tables.block_sizes[gid] for gid in group_ids],
            group_ids,
        )
        self._spec = QueryBlockSpec(
            shape.num_query_per_req,
            shape.num_speculative_tokens,
            shape.mask_token_id,
            max_model_len,
            sample_from_anchor=shape.sample_from_anchor,
            draft_mid_prefill=False,  # the scheduler drops such drafts, and each would read the whole prompt so far
        )

    def fill(self, batch: InputBatch, step: TargetStep, num_reqs: int, num_reqs_padded: int) -> None:
        """Write the query block and all slots of this step, for all draft KV groups in one launch."""
        assert self._tables is not None
        assert self._spec is not None
        query_block(
            self.query,
            self._tables,
            self._spec,
            step,
            num_reqs=num_reqs,
            num_reqs_padded=num_reqs_padded,
            num_context_rows=max(self.shape.graph_context_rows(num_reqs_padded), batch.num_tokens),
            max_query_len=int(batch.num_scheduled_tokens.max()),
        )

    def stage_aux(self, aux_hidden_states: list[torch.Tensor], num_rows: int) -> None:
        """Put the first ``num_rows`` rows of each captured layer ([rows, H_target], any float dtype) side by side."""
        parts = [states[:num_rows] for states in aux_hidden_states]
        if all(part.dtype == self.aux.dtype for part in parts):
            torch.cat(parts, dim=-1, out=self.aux[:num_rows])
            return
        width = self.shape.aux_width // len(parts)
        for index, part in enumerate(parts):
            self.aux[:num_rows, index * width : (index + 1) * width].copy_(part)

    def prepare_capture(self, num_reqs: int) -> None:
        """Inputs of a capture run: ``num_reqs`` requests whose keys are their own rows, and no slot to write."""
        self.query.reset()
        starts = self.query.query_start_loc
        starts[: num_reqs + 1].copy_(self._query_starts[: num_reqs + 1])
        self.query.seq_lens[:num_reqs].fill_(self.shape.num_query_per_req)
