# SPDX-License-Identifier: Apache-2.0
"""DFlash speculator for vLLM's Model Runner V2: K drafts per request from one parallel pass after every verification.

One step, in :meth:`DFlashSpeculator.propose`:

1. build query block  ids, positions and slots of ``[anchor, mask x K]`` for all KV groups (one launch)
2. combine context    ``fc`` over the aux hidden states of the target step
3. write context KV   K and V of the committed rows, all draft layers
4. draft forward      the query block over context and itself
5. pick drafts        K tokens per request

Steps 2 to 5 are one function, :meth:`DraftPass.run`. It is captured for a grid of request counts (``graphs.py``) and replayed for
every step, prefills included: only context rows beyond R * (K + 1), which a prefill has, are stored eagerly before the replay.
Nothing here reads a tensor on the host.

Near ``max_model_len`` lengths are clamped while blocks keep their Q rows. Attention aligns rows to the end of the keys, so
rows of *causal* layers then see up to Q keys too few: block tables have no columns behind the end to read. Accepted, as it costs
only acceptance, and only of drafts for the last Q tokens of a context.

Derives from ``DraftModelSpeculator`` and not from vLLM's DFlash class, which changes most from version to version.
"""

import dataclasses
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.dp_utils import DPSyncState, dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.input_batch import InputBatch

from dflash_kernels.query_block import TargetStep
from vllm_dflash.engine.buffers import DraftShape
from vllm_dflash.engine.graphs import CONTEXT_ONLY
from vllm_dflash.engine.lifecycle import DraftLifecycle


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What the host knows of one draft step."""

    desc: BatchExecutionDescriptor
    shape: DraftShape
    num_reqs: int
    num_context_rows: int
    dummy: bool
    num_tokens_across_dp: torch.Tensor | None
    drafts: bool = True

    @property
    def num_reqs_padded(self) -> int:
        """Requests that the draft step runs, padding of a graph or of other data-parallel ranks included."""
        return int(self.desc.num_tokens // self.rows_per_req)

    @property
    def rows_per_req(self) -> int:
        """Rows that each request has in this step's graph."""
        return self.shape.num_query_per_req if self.drafts else CONTEXT_ONLY

    @property
    def in_graph(self) -> bool:
        return bool(self.desc.cg_mode == CUDAGraphMode.FULL)


class DFlashSpeculator(DraftLifecycle):
    """Drafts with a plain DFlash checkpoint; see :class:`DraftLifecycle` for construction."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],  # noqa: ARG002  # the target's; the draft has its own
        slot_mappings: dict[str, torch.Tensor],  # noqa: ARG002
        last_hidden_states: torch.Tensor,  # noqa: ARG002
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: DPSyncState | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,  # noqa: ARG002  # drafts are text-only
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Drafts for the next verification, int64 [num_reqs, K]; arguments as in ``BaseSpeculator.propose``.

        ``num_speculative_tokens`` 0 stores the context KV only; fewer than K run the narrowest step that drafts as many, and
        the runner masks the rest.
        """
        aux = self._check_aux(aux_hidden_states)
        if dummy_run and skip_attn_for_dummy_run:
            return self._profile_without_attention(input_batch, aux)
        self.drafted = self.drafted and dummy_run
        if not self._caches_bound:
            self._bind_caches()
        self.model.refresh_head(None if dummy_run else input_batch.input_ids[: input_batch.num_tokens])
        closed = not dummy_run and self.dp_size == 1 and self.gate.closes_all(input_batch, input_batch.num_reqs)
        waits = not dummy_run and self._may_wait(input_batch, plain=num_speculative_tokens == 0 and not closed)
        if closed:
            return self._without_drafts(input_batch.num_reqs)
        sampled = (num_sampled, num_rejected, last_sampled, next_prefill_tokens)
        if waits:
            return self._defer_context(input_batch, aux, sampled)
        if num_speculative_tokens == 0 and self._context_alone:
            return self._keep_context(input_batch, aux, dummy_run, sampled)
        shape = self._shape_for(num_speculative_tokens or self.num_speculative_steps)
        step = self._plan(input_batch, dp_sync_state, dummy_run, is_profile, shape)
        self._build_query_block(step, input_batch, *sampled)
        if num_speculative_tokens == 0:
            self.draft_pass.store_context(aux, 0, step.num_context_rows)
            self.counters.context_only += not dummy_run
            return self._without_drafts(input_batch.num_reqs)
        self._stage_sampling(step, input_batch, temperature, seeds)
        self._stage_context(step, aux)
        self._prepare_eplb_forward(step.num_reqs * shape.num_query_per_req)
        self._run(step, input_batch)
        self.drafted = self.drafted or not dummy_run
        return self.draft_tokens[: input_batch.num_reqs]

    def observe_verification(self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """As in ``DraftModelSpeculator``; nothing is launched where the step before drafted nothing that could be verified.

        Drafts of a request that sits out a step are then not graded, which costs the estimator their few samples.
        """
        if self.drafted:
            super().observe_verification(idx_mapping, num_sampled, num_rejected)

    def _without_drafts(self, num_reqs: int) -> torch.Tensor:
        """What a step that drafts nothing returns: tokens that nobody reads, and no confidence in them."""
        if self._confidence is not None:
            self._confidence.none_drafted(num_reqs)
        return self.draft_tokens[:num_reqs]

    def _shape_for(self, num_speculative_tokens: int) -> DraftShape:
        """The narrowest shape that drafts as many tokens."""
        return next(shape for width, shape in self.buffers.shapes.items() if width >= num_speculative_tokens)

    @property
    def _context_alone(self) -> bool:
        """Whether steps without drafts have a graph of their own (data-parallel ranks run the same as each other)."""
        if self.graphs is None or self.num_query_per_req == CONTEXT_ONLY or self.dp_size > 1:
            return False
        return CONTEXT_ONLY in self.graphs.grids

    def _may_wait(self, input_batch: InputBatch, *, plain: bool) -> bool:
        """Whether the context of this step may wait, ``plain`` if nothing is drafted; what must not wait longer is stored."""
        if self.deferred is None:
            return False
        suits = plain and self.deferred.suits(input_batch)
        if len(self.deferred) and not (suits and self.deferred.continues(input_batch)):
            self.draft_pass.store_waiting(*self.deferred.take())
            self.counters.catch_ups += 1
        return suits

    def _defer_context(self, input_batch: InputBatch, aux: list[torch.Tensor], sampled: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """A step that drafts nothing and adds one row per request: copied, with its slots, to wait."""
        assert self.deferred is not None
        num_reqs = input_batch.num_reqs
        desc = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=num_reqs, num_reqs=num_reqs)
        shape = next(iter(self.buffers.shapes.values()))
        step = _Step(desc, shape, num_reqs, num_reqs, dummy=False, num_tokens_across_dp=None, drafts=False)
        self._build_query_block(step, input_batch, *sampled)
        query = self.buffers.query
        rows = self.deferred.add(input_batch.req_ids, query.context_positions[:num_reqs], query.context_slots[:, :num_reqs])
        self.buffers.copy_aux(aux, rows)
        self.counters.context_only += 1
        self.counters.deferred_rows += num_reqs
        return self._without_drafts(num_reqs)

    def _keep_context(
        self, input_batch: InputBatch, aux: list[torch.Tensor], dummy: bool, sampled: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """A step that drafts nothing: slots, then the context KV of all rows, in a graph where they are one per request."""
        assert self.graphs is not None
        num_reqs, num_rows = input_batch.num_reqs, input_batch.num_tokens
        desc = self.graphs.dispatch(num_reqs, num_reqs, CONTEXT_ONLY, 0)
        step = _Step(desc, next(iter(self.buffers.shapes.values())), num_reqs, num_rows, dummy, None, drafts=False)
        self._build_query_block(step, input_batch, *sampled)
        staged = min(num_rows, step.num_reqs_padded) if step.in_graph else 0
        self.buffers.stage_aux(aux, staged)
        self.draft_pass.store_context(aux, staged, num_rows)
        if step.in_graph:
            self.graphs.run_fullgraph(desc)
        self.counters.context_only += not dummy
        return self._without_drafts(num_reqs)

    def _check_aux(self, aux_hidden_states: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """The target's list; empty where the target has stored the states in ``buffers.aux`` itself."""
        if self._stored_in_place and not aux_hidden_states:
            return []
        width = sum(states.shape[-1] for states in aux_hidden_states or ())
        if not aux_hidden_states or width != self.buffers.shape.aux_width:
            raise ValueError(
                f"aux hidden states: the target delivered {len(aux_hidden_states or ())} layers, {width} values per row; the "
                f"DFlash draft needs target_layer_ids {self.draft.target_layer_ids}, {self.buffers.shape.aux_width} values. "
                "Check the draft's config.json against the target."
            )
        return aux_hidden_states

    def _profile_without_attention(self, input_batch: InputBatch, aux: list[torch.Tensor]) -> torch.Tensor:
        """Peak-memory run before a KV cache exists: all the work of a largest step, nothing stored."""
        num_reqs = input_batch.num_reqs
        self.draft_pass.store_context(aux, 0, input_batch.num_tokens, store=False)
        self._prepare_eplb_forward(num_reqs * self.num_query_per_req)
        self.draft_pass.run(num_reqs, self.buffers.shape.graph_context_rows(num_reqs), None)
        return self.draft_tokens[:num_reqs]

    def _plan(self, input_batch: InputBatch, sync: DPSyncState | None, dummy: bool, is_profile: bool, shape: DraftShape) -> _Step:
        """Pick the graph, in agreement with the other data-parallel ranks; host work only."""
        num_reqs = input_batch.num_reqs
        if dummy and sync is not None:
            num_reqs = min(num_reqs, sync.num_reqs)
        num_tokens = num_reqs * shape.num_query_per_req
        if sync is not None:
            sync, num_tokens = self._build_uniform_batch_dp_sync(sync, num_reqs, shape.num_query_per_req)
        desc, sync = dispatch_cg_and_sync_dp(
            self.graphs,
            num_reqs,
            num_tokens,
            uniform_token_count=shape.num_query_per_req,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=is_profile,
            dp_sync_state=sync,
        )
        across_dp = None if sync is None else sync.num_tokens_across_dp
        return _Step(desc, shape, num_reqs, input_batch.num_tokens, dummy, across_dp)

    def _build_query_block(
        self,
        step: _Step,
        input_batch: InputBatch,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
    ) -> None:
        """Ids, positions, slots and sample rows of this step for all KV groups; arguments as in :meth:`propose`."""
        if self.pcp_manager is not None and not step.dummy:
            # Prefill context parallelism leaves rank-local block tables; the draft runs over whole requests.
            self.block_tables.gather_block_tables(input_batch.idx_mapping, num_reqs_padded=step.num_reqs)
        # The block tables of a dummy run are placeholders, so nothing may be stored through them.
        mapping = self.buffers.inert_requests[: step.num_reqs] if step.dummy else input_batch.idx_mapping
        if not step.dummy:
            num_sampled = self.gate.sampled(input_batch, step.num_reqs, num_sampled, num_rejected)
        target_step = TargetStep(
            input_batch.query_start_loc,
            input_batch.positions,
            mapping,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            num_blocks=self.block_tables.num_blocks.gpu,  # its address changes with every step
        )
        self.buffers.fill(input_batch, target_step, step.num_reqs, step.num_reqs_padded, step.shape)
        if not step.dummy:
            self.gate.drop_context(input_batch, step.num_reqs, self.buffers.query, step.num_context_rows)

    def _stage_sampling(self, step: _Step, input_batch: InputBatch, temperature: torch.Tensor, seeds: torch.Tensor) -> None:
        """Copy sampling state ([max_num_reqs] by request state) to the graph's addresses; argmax needs none."""
        if not self._needs_logits and self._confidence is None:
            return
        if self.draft_logits is not None and not step.dummy:
            # The cache may hold fewer rows than there are request states; a state beyond them would be written out of bounds.
            highest = int(input_batch.idx_mapping_np.max())
            assert highest < self.draft_logits.shape[0], f"request state {highest} has no row in the draft-logit cache"
        self.temperature.copy_(temperature)
        self.seeds.copy_(seeds)

    def _stage_context(self, step: _Step, aux: list[torch.Tensor]) -> None:
        """Stage the rows that the draft step stores itself; a prefill's rows behind them are stored here."""
        staged = min(step.num_context_rows, step.shape.graph_context_rows(step.num_reqs_padded))
        self.buffers.stage_aux(aux, staged)
        self.draft_pass.store_context(aux, staged, step.num_context_rows)
        if not step.dummy:
            self.counters.eager_context_rows += step.num_context_rows - staged

    def _run(self, step: _Step, input_batch: InputBatch) -> None:
        """Steps 2 to 5: replayed, or launched one by one where graphs are off."""
        assert self.attention is not None
        num_reqs, num_query = step.num_reqs_padded, step.shape.num_query_per_req
        metadata = None
        if not (step.in_graph and self.attention.refreshes_in_graph):
            bound = torch.zeros(num_reqs, dtype=torch.int32)
            bound[: step.num_reqs] = input_batch.seq_lens_cpu_upper_bound[: step.num_reqs] + num_query
            bound.clamp_(max=self.max_model_len)
            metadata = self.attention.build(num_reqs, int(bound.max()), bound, capture=False, num_query=num_query)
        if step.in_graph:
            assert self.graphs is not None
            self.graphs.run_fullgraph(step.desc)
            self.counters.graph += not step.dummy
            return
        rows = min(step.num_context_rows, step.shape.graph_context_rows(num_reqs))
        self.draft_pass.run(num_reqs, rows, metadata, step.num_tokens_across_dp, shape=step.shape)
        self.counters.eager += not step.dummy
