# SPDX-License-Identifier: Apache-2.0
"""The speculator before and between steps: construction, loading, binding to a KV cache, graphs, the start-up line.

The runner's order: construct (no target yet), ``load_model``, a profile run without KV cache, then ``set_attn`` and
``init_cudagraph_manager``, possibly twice (graph memory profiling replaces the KV cache and drops the graphs), ``capture``.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig, replace
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.utils import AttentionGroup

from dflash_kernels.draft_head import FUSED_MAX_ROWS, Temperatures
from vllm_dflash.checkpoint import DraftConfig
from vllm_dflash.engine import compat
from vllm_dflash.engine.announce import announce
from vllm_dflash.engine.aux_buffer import store_in_place, why_not_in_place
from vllm_dflash.engine.block_backend import share_workspace
from vllm_dflash.engine.buffers import DraftBuffers, DraftShape
from vllm_dflash.engine.calibration import SteadyFit
from vllm_dflash.engine.capability import Capability, graph_verdict, of_speculator
from vllm_dflash.engine.capture import announce_layers
from vllm_dflash.engine.confidence import DraftConfidence
from vllm_dflash.engine.context_gate import ContextGate
from vllm_dflash.engine.deferred_context import deferred_context, shares_blocks
from vllm_dflash.engine.draft_backend import DraftAttention, release_target_groups, separate_by_causality
from vllm_dflash.engine.draft_pass import DraftPass
from vllm_dflash.engine.draft_quantization import reserve_workspace
from vllm_dflash.engine.fused_context import FusedContext, fuse_context
from vllm_dflash.engine.fused_head import FusedHead, fuse_head
from vllm_dflash.engine.graphs import CONTEXT_ONLY, DraftGraphManager, StepCounters, request_grid
from vllm_dflash.engine.loading import draft_layer_config, load_draft
from vllm_dflash.engine.pair import drafted_context, resolve_draft
from vllm_dflash.engine.private_head import PrivateHead
from vllm_dflash.engine.verification_prices import note_draft_times
from vllm_dflash.engine.weight_update import keep_through_deep_sleep
from vllm_dflash.planner import measured
from vllm_dflash.planner.widths import draft_widths

logger = init_logger("vllm.plugins.dflash")

# Sample rows picked at once where whole logits are materialised: bounds them (311 MB at 151,936 tokens in bf16). The head is
# bound by compute from about 184 rows on, so reading its weights once per chunk costs nothing.
_SAMPLE_CHUNK = 1024
PROBABILISTIC = "probabilistic"


class DraftLifecycle(DraftModelSpeculator):
    """A DFlash draft, ready to step. Abstract: ``propose`` is in ``speculator.py``.

    Args:
        vllm_config: the engine's configuration; draft and target are checked against each other here.
        device: where all buffers live.
        req_states: the runner's request states. Given, the probabilistic logit cache is sized by the requests that one step
            can have instead of ``max_num_seqs``.

    Raises:
        CheckpointError: the draft cannot be read, or does not fit the target or ``num_speculative_tokens``.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any = None) -> None:
        self.draft = resolve_draft(vllm_config)
        announce_layers(vllm_config.speculative_config, self.draft)
        keep_through_deep_sleep(vllm_config.model_config)
        self._target_config = vllm_config
        reserve_workspace(vllm_config, device)
        vllm_config = _without_context_parallel(vllm_config)
        super().__init__(_without_logit_cache(vllm_config), device)
        self.vllm_config = vllm_config
        self.speculative_config = vllm_config.speculative_config
        num_drafts = self.num_speculative_steps
        self.num_query_per_req = num_drafts if self.draft.sample_from_anchor else num_drafts + 1
        shape = DraftShape(
            max_requests=compat.max_step_requests(vllm_config, self.num_query_per_req),
            num_query_per_req=self.num_query_per_req,
            num_speculative_tokens=num_drafts,
            max_num_tokens=self.max_num_tokens,
            aux_width=self.draft.target_hidden_size * len(set(self.draft.target_layer_ids)),
            mask_token_id=self.draft.mask_token_id,
            sample_from_anchor=self.draft.sample_from_anchor,
        )
        self.buffers = DraftBuffers(shape, self.dtype, device, narrower=_narrower(vllm_config, self.draft))
        self.draft_tokens = self.buffers.draft_tokens
        if self.speculative_config.draft_sample_method == PROBABILISTIC:
            self.draft_logits = self._allocate_draft_logits(req_states)
        self.gate = ContextGate(drafted_context(vllm_config, self.draft), num_drafts)
        self.deferred = deferred_context(vllm_config, self.draft, shape.max_requests, shape.aux_width, self.dtype, device)
        self.attn_groups: list[list[AttentionGroup]] = []
        self.attention: DraftAttention | None = None
        self.graphs: DraftGraphManager | None = None
        self.counters = StepCounters()
        self.drafted = False
        """Whether the latest step of requests drafted."""
        self._start_line = ""
        measured.forget()  # of an earlier engine of this process
        self.capability: Capability | None = None

    def _allocate_draft_logits(self, req_states: Any) -> torch.Tensor:
        """Pre-temperature logits of the last proposal, [request states, K, V], read by the next verification.

        V is the target's vocabulary whatever the draft's, and every column is kept: vLLM's rejection sampler
        (``rejection_sampler_utils._compute_local_logits_stats_kernel``) reads one dense row per draft, column v for target token
        v, for the proposal's normaliser and for the residual that it resamples from. Pairs of token and logit, which a reduced
        draft vocabulary or a truncated proposal would allow, have no reader there. So only rows are saved.
        """
        rows = compat.compact_request_states(self.vllm_config, req_states, self.buffers.shape.max_requests)
        dtype, fill = self.draft_logits_spec(self.vllm_config)
        shape = (rows, self.num_speculative_steps, self.vllm_config.model_config.get_vocab_size())
        return torch.full(shape, fill, dtype=dtype, device=self.device)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:  # noqa: ARG002  # base signature
        """The draft network, with embedding and head shared with the target where the checkpoint has none."""
        return load_draft(target_model, self.vllm_config, self.draft)

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft network behind the loaded target."""
        super().load_model(target_model)
        self._take_aux_in_place(target_model)
        self.supports_mm_inputs = False  # the query block is token ids only
        num_rows = self.draft_tokens.numel()
        self._confidence: DraftConfidence | None = None
        if self.acceptance_estimator is not None:
            SteadyFit(self.acceptance_estimator)
            self._confidence = DraftConfidence(
                self.acceptance_estimator, self.draft_token_confidence_probs, self.buffers.sample_steps, num_rows
            )
        self._fused_head: FusedHead | PrivateHead | str = "logits are needed"
        self._top_tokens = None
        # A random draw needs whole logits, and so do confidences where no fused head gives the odds; only argmax can do without.
        self._needs_logits = self.draft_logits is not None
        if not self._needs_logits:
            odds = self._confidence is not None
            self._fused_head = fuse_head(self.model, max(num_rows, FUSED_MAX_ROWS), self.vllm_config, odds=odds)
            self._top_tokens = self.model.get_top_tokens if isinstance(self._fused_head, str) else self._fused_head
            self._needs_logits = odds and isinstance(self._fused_head, str)
        if self._needs_logits:
            self._top_tokens = None
            self.model.drop_private_head("whole logits are needed")
        # The fused head bounds its logits itself; samplers that watermark look at whole requests.
        whole = not isinstance(self._fused_head, str) or self.draft_watermarker is not None
        chunk = num_rows if whole else _SAMPLE_CHUNK
        anchors_too = 0 if self._needs_logits or self._confidence is not None else FUSED_MAX_ROWS
        self.draft_pass = DraftPass(self.model, self.buffers, self.vllm_config, self._pick, chunk, anchors_too)

    def _take_aux_in_place(self, target_model: nn.Module) -> None:
        """Let the target store its aux hidden states in our buffer, where it can."""
        reason = why_not_in_place(target_model, self._target_config, self.draft)
        if reason is None:
            store_in_place(target_model, self._target_config, self.buffers.hold_every_row())
        self._stored_in_place = reason is None
        self._aux_fact = "aux hidden states stored in place" if reason is None else f"aux hidden states copied ({reason})"

    @property
    def attn_vllm_config(self) -> VllmConfig:
        """Configuration for the draft's metadata builders: its own causality and KV-cache dtype, not the target's."""
        return draft_layer_config(self.vllm_config, self.draft)

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: list[list[AttentionGroup]],
    ) -> None:
        """Bind to a KV cache. Called for memory profiling and again for serving, with other block tables."""
        super().set_attn(model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups)
        names = self.model.get_draft_kv_cache_layer_names()
        causal = dict(zip(names, self.model.get_draft_attn_causal(), strict=True))
        self.attn_groups = separate_by_causality(self.attn_groups, causal, self.attn_vllm_config, self.device)
        group_ids = [gid for gid, groups in enumerate(self.attn_groups) if groups]
        self.buffers.bind(block_tables, group_ids, self.max_model_len)
        self.attention = DraftAttention(self.attn_groups, names, causal, self.buffers, block_tables, self.vllm_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        self._attention_bytes = share_workspace(
            [layers[name] for name in names],
            self.buffers.shape.max_requests,
            self.num_query_per_req,
            self.max_model_len,
            self.device,
            tuple(shape.num_query_per_req for shape in self.buffers.shapes.values())[:-1],
        )
        self.draft_pass.attention = self.attention
        self._caches_bound = False
        self.draft_pass.fused_context = None
        if self.deferred is not None:
            self.deferred.drop()
            self.deferred = None if shares_blocks(kv_cache_config) else self.deferred
        if not kv_cache_config.needs_kv_cache_zeroing:  # the zeroer of new blocks walks the runner's groups
            release_target_groups(target_attn_groups, self.draft_attn_layer_names)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Choose the request counts to capture. Any graph mode of the target will do; only NONE means eager."""
        support = self.attn_cg_support.min_cg_support
        wanted = cudagraph_mode != CUDAGraphMode.NONE
        self._graph_verdict = graph_verdict(wanted, support, self.attn_cg_support.min_cg_attn_backend)
        if wanted and self._graph_verdict is not None:
            logger.warning(
                f"DFlash draft: {self._graph_verdict}. Set "
                '"attention_backend": "FLASH_ATTN" or "TRITON_ATTN" in the speculative config.'
            )
        shape = self.buffers.shape
        limit = min(shape.max_requests, max(1, shape.max_num_tokens // shape.num_query_per_req))
        grid = request_grid(limit) if self._graph_verdict is None else ()
        rows = {shape.num_query_per_req for shape in self.buffers.shapes.values()} - {self.num_query_per_req}
        # Steps that draft nothing have a graph too where the width may change: one row per request, its context.
        narrower = {CONTEXT_ONLY, *rows} if rows else rows
        self.graphs = DraftGraphManager(self.vllm_config, self.device, self.num_query_per_req, grid, narrower)
        self._announce()

    def capture(self) -> None:
        """Capture the draft step for the whole grid; block tables are dummies and every slot is padding."""
        assert self.graphs is not None
        if not self._caches_bound:
            self._bind_caches()
        self.graphs.capture_steps(self._prepare_capture)
        timed = self.graphs.time_drafts()
        for rows, seconds in timed:
            measured.record_draft(rows, seconds)
        if self._confidence is not None:
            note_draft_times(timed)
        self.buffers.query.reset()
        self.counters = StepCounters()  # vLLM's kernel warm-up runs steps before there are graphs

    def _bind_caches(self) -> None:
        """Once per KV cache, which the runner allocates after ``set_attn``: describe it to the fused context writer."""
        assert self.attention is not None
        self._caches_bound = True
        fused = fuse_context(self.model, self.attention.layer_rows)
        if isinstance(fused, FusedContext):
            self.draft_pass.fused_context = fused
        assert self.capability is not None
        self.capability = dataclasses.replace(self.capability, fused_context=fused if isinstance(fused, str) else None)
        logger.info_once(f"DFlash draft: {self.capability.fusions}")

    def _prepare_capture(self, num_reqs: int, num_query: int) -> Any:
        """Inputs outside the graph for ``num_reqs`` requests of ``num_query`` rows; returns the step to record."""
        assert self.attention is not None
        self.block_tables.get_dummy_block_tables(num_reqs)
        draft_pass = self.draft_pass
        shape = next((s for s in self.buffers.shapes.values() if s.num_query_per_req == num_query), None)
        if shape is None:
            assert num_query == CONTEXT_ONLY
            self.buffers.prepare_capture(num_reqs, self.buffers.shape)
            return lambda: draft_pass.store_staged(num_reqs)
        self.buffers.prepare_capture(num_reqs, shape)
        bound = torch.full((num_reqs,), self.max_model_len, dtype=torch.int32)
        metadata = self.attention.build(num_reqs, self.max_model_len, bound, capture=True, num_query=num_query)
        # The builder may have changed lengths while it built (vLLM's Triton backend sets them to 1).
        self.buffers.prepare_capture(num_reqs, shape)
        rows = shape.graph_context_rows(num_reqs)
        across_dp = torch.full((self.dp_size,), num_reqs * num_query, dtype=torch.int32) if self.dp_size > 1 else None
        return lambda: draft_pass.run(num_reqs, rows, metadata, across_dp, refresh=True, shape=shape)

    def _announce(self) -> None:
        """One start-up line with everything that decides speed or acceptance."""
        self.capability = of_speculator(self)
        facts = self.capability.facts
        self._start_line = announce(logger, self.draft, self.num_speculative_steps, facts, self._start_line)

    def _pick(self, hidden_states: torch.Tensor, rows: slice, width: int) -> torch.Tensor:
        """Drafts int64 [m] from hidden states [m, H] of the sample rows ``rows`` of a step that drafts ``width`` tokens."""
        query = self.buffers.query
        self._first_picked, self._picked_width = rows.start // width, width
        if self._top_tokens is not None:
            tokens: torch.Tensor
            if self._confidence is None:
                tokens = self._top_tokens(hidden_states)
                return tokens
            assert not isinstance(self._fused_head, str)
            states = query.sample_req_state[rows]
            winner = self._fused_head.winner(hidden_states, Temperatures(states, self.temperature))
            tokens, against = winner.tokens, winner.against
            assert against is not None
            self._confidence.of_odds(against, states, self._first_picked, width)
            return tokens
        sampled: torch.Tensor = self.sample_draft(
            hidden_states,
            query.sample_positions[rows],
            query.sample_req_state[rows],
            self.temperature,
            self.seeds,
            self.buffers.sample_steps[width][rows],
            self.draft_logits,
            **compat.sample_draft_extra(width),
        )
        return sampled

    def _maybe_predict_acceptance(self, logits: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor) -> None:
        """As in the base class, for a batch that is picked in chunks, and for steps that draft fewer than K tokens."""
        if self._confidence is not None:
            width = self._picked_width
            self._confidence.of_logits(logits, idx_mapping, draft_step, self.temperature, self._first_picked, width)


def _narrower(vllm_config: VllmConfig, draft: DraftConfig) -> tuple[int, ...]:
    """Widths below K that get draft steps of their own: where K follows the load."""
    speculative = vllm_config.speculative_config
    if not speculative.uses_dynamic_speculative_decoding():
        return ()
    return draft_widths(speculative.num_speculative_tokens, 0 if draft.sample_from_anchor else 1)[:-1]


def _without_context_parallel(vllm_config: VllmConfig) -> VllmConfig:
    """The draft runs whole requests on every rank, over a replicated cache (only MLA caches can be sharded)."""
    config = copy.copy(vllm_config)
    parallel = vllm_config.parallel_config
    sharded = vllm_config.speculative_config.draft_model_config.use_mla
    config.parallel_config = replace(
        parallel,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=parallel.decode_context_parallel_size if sharded else 1,
    )
    return config


def _without_logit_cache(vllm_config: VllmConfig) -> VllmConfig:
    """Keeps the base class from allocating the logit cache for ``max_num_seqs`` (4.7 GB at defaults); ours is smaller."""
    config = copy.copy(vllm_config)
    config.speculative_config = copy.copy(vllm_config.speculative_config)
    config.speculative_config.draft_sample_method = "greedy"
    return config
