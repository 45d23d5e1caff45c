# SPDX-License-Identifier: Apache-2.0
"""DFlash for vLLM's V1 model runner (what CPU builds run).

The runner calls :meth:`DFlashProposer.propose` once per step, after the target's forward and rejection sampling. It finds this
class under the name ``DFlashProposer`` in ``vllm.v1.worker.gpu_model_runner``, constructs it through that name and tests
``isinstance`` against it, so rebinding the name is the whole integration.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig, get_layers_from_vllm_config, replace
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_dflash.engine import attention, capture
from vllm_dflash.engine.announce import announce
from vllm_dflash.engine.capability import of_proposer
from vllm_dflash.engine.draft_sampling import sample_drafts
from vllm_dflash.engine.embedded_prompts import EmbeddedPrompts
from vllm_dflash.engine.kept_context import KeptContext
from vllm_dflash.engine.loading import compile_tag
from vllm_dflash.engine.pair import drafted_context, resolve_draft
from vllm_dflash.engine.plain_steps import PlainSteps, VerificationClock, sample_plainly
from vllm_dflash.engine.private_head import watch_updates
from vllm_dflash.engine.query_block import CommittedRows, QueryBlock, committed_rows, place, query_block
from vllm_dflash.engine.target_vocabulary import shared_vocabulary
from vllm_dflash.engine.variant_choice import resolve_weights
from vllm_dflash.planner import measured

logger = init_logger("vllm.plugins.dflash")


class DFlashProposer(PlainSteps, KeptContext, EmbeddedPrompts, SpecDecodeBaseProposer):
    """Drafts K tokens per request with one pass over ``[anchor, mask x K]``.

    Raises:
        CheckpointError: draft, target and ``num_speculative_tokens`` do not fit together.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        assert vllm_config.speculative_config is not None and vllm_config.speculative_config.method == "dflash"  # noqa: PT018
        self.draft = resolve_draft(vllm_config)
        super().__init__(vllm_config=vllm_config, device=device, pass_hidden_states_to_model=True, runner=runner)
        self._runner = runner
        self._limit = drafted_context(vllm_config, self.draft)
        self._start_line = ""
        self._skip = 0 if self.draft.sample_from_anchor else 1
        self.supports_mm_inputs = False  # the draft reads hidden states, which hold the images already
        # Leaving rows out needs their number on the host, and every DP rank must run the same forwards.
        self._compact = device.type == "cpu"
        self._idle: frozenset[str] = frozenset()  # requests that the planner does not draft for in this step
        self._skip_prefill = self._compact and vllm_config.parallel_config.data_parallel_size == 1
        self._allocate_query_buffers()
        capture.announce_layers(self.speculative_config, self.draft)
        self._verification = sample_plainly(runner) if self._compact and runner is not None else VerificationClock()

    # -- set-up, called by the runner ------------------------------------------------------------------------------------

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft next to ``target_model``, share vocabulary modules, and make the target return aux states.

        Raises:
            ValueError: checkpoint, target or configuration cannot be served; the message says which and how to go on.
        """
        before = set(_attention_layers(self.vllm_config))
        self.model = self._get_model()
        layers = _attention_layers(self.vllm_config)
        self._draft_attn_layer_names = set(layers) - before
        self.model.share(*shared_vocabulary(target_model))
        watch_updates(target_model, self.model)
        how = capture.ensure_capture(target_model, self.vllm_config)
        self._lift_length_gate()
        self._aux_fact = f"aux hidden states captured by {how}"

    def initialize_attn_backend(self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None) -> None:
        """Find the draft's KV-cache group and build its metadata builders."""
        names = self.model.get_draft_kv_cache_layer_names()
        self.kv_cache_gid = attention.cache_group_of(kv_cache_config, names)
        all_layers = _attention_layers(self.vllm_config)
        spec = kv_cache_config.kv_cache_groups[self.kv_cache_gid].kv_cache_spec
        self._groups = attention.build_groups(
            {name: all_layers[name] for name in names},
            dict(zip(names, self.model.get_draft_attn_causal(), strict=True)),
            spec,
            self.kv_cache_gid,
            kernel_block_sizes[self.kv_cache_gid] if kernel_block_sizes else None,
            self.vllm_config,
            self.device,
        )
        self.draft_attn_groups = [entry.group for entry in self._groups]  # the runner binds KV caches through these
        self.block_size = spec.block_size
        self._bind_context(kv_cache_config)
        self.capability = of_proposer(self)
        self._start_line = announce(logger, self.draft, self.num_speculative_tokens, self.capability.facts, self._start_line)

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,  # noqa: ARG002  # part of the runner's call
        slot_mappings: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Run the step's heavy parts without storing: memory profiling, compilation, DP ranks without requests."""
        states = self.model.combine_hidden_states(torch.zeros(num_tokens, self._aux_size, dtype=self.dtype, device=self.device))
        self.model.precompute_and_store_context_kv(states, states.new_zeros(num_tokens, dtype=torch.int64), None)
        rows = min(num_tokens, self.max_query_tokens)
        names = self._draft_attn_layer_names
        mapped = slot_mappings is not None and not names.isdisjoint(slot_mappings)
        self._slot_mapping_buffer.fill_(-1)
        self._run_model(None, rows, use_cudagraphs=use_cudagraphs, slot_names=names if mapped else ())

    # -- one step --------------------------------------------------------------------------------------------------------

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,  # noqa: ARG002  # part of the runner's call
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,  # noqa: ARG002
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Any = None,  # noqa: ARG002
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Draft tokens for every request of the target step that just ended.

        Args:
            num_speculative_tokens: K of this step; 0 only keeps the draft's KV cache in step with the target.
            target_positions: unused: those of M-RoPE targets are no token indices.
            target_hidden_states: [T, U * H_target] captured layers, ascending.
            next_token_ids: int32 [B] last sampled token, or the next prompt token in mid-prefill.
            common_attn_metadata: the target step's, for the draft's KV-cache group.
            sampling_metadata: of the B requests.
            num_rejected_tokens_gpu: int32 [B] rejected rows at the end of each request's span; None when left out.
            target_token_ids: int [T], input of the target's step.
            token_indices_to_sample: unused, like the rest; the draft reads hidden states.
            mm_embed_inputs: unused.
            slot_mappings: unused.

        Returns:
            int64 [B, K]; requests that cannot use drafts get zeros.
        """
        began = time.perf_counter() - self._verification.seconds  # drafting costs all that a plain step does without
        self.num_speculative_tokens = int(num_speculative_tokens)
        self._idle = getattr(num_speculative_tokens, "idle", frozenset())
        self._last_draft_probs: torch.Tensor | None = None
        self.model.refresh_head(target_token_ids)
        committed = committed_rows(
            common_attn_metadata.query_start_loc,
            common_attn_metadata.seq_lens,
            common_attn_metadata.slot_mapping[: target_hidden_states.shape[0]],
            num_rejected_tokens_gpu,
            compact=self._compact,
        )
        self._keep_context(committed, target_hidden_states)
        if num_speculative_tokens == 0:
            return next_token_ids.new_empty((next_token_ids.shape[0], 0), dtype=torch.int64)
        drafting = self._drafting(committed.anchors)
        began += self._catch_up(committed, common_attn_metadata, drafting)
        block = self._query_block(committed, next_token_ids, common_attn_metadata, drafting)
        if block.sample_rows is not None and block.sample_rows.numel() == 0:
            if not self._skip_prefill:  # other data-parallel ranks wait for this one in their forward
                self.dummy_run(1)
            return next_token_ids.new_zeros((next_token_ids.shape[0], num_speculative_tokens), dtype=torch.int64)
        hidden_states = self._draft_forward(block, common_attn_metadata)
        drafts = self._pick(hidden_states, block, sampling_metadata, next_token_ids.shape[0])
        if self._compact:  # elsewhere the host only launches
            measured.record_draft(block.input_ids.shape[0], time.perf_counter() - began)
        return drafts

    def _query_block(
        self,
        committed: CommittedRows,
        next_token_ids: torch.Tensor,
        common: CommonAttentionMetadata,
        drafting: torch.Tensor | None,
    ) -> QueryBlock:
        """Step 3: ids, positions and slots of the query rows."""
        width = self.num_speculative_tokens + self._skip
        return query_block(
            committed.anchors,
            next_token_ids,
            common.block_table_tensor,
            drafting,
            num_speculative_tokens=self.num_speculative_tokens,
            skip=self._skip,
            mask_token_id=self.draft.mask_token_id,
            kv_block_size=self.block_size,
            max_model_len=self.max_model_len if self._limit is None else min(self.max_model_len, self._limit + width),
            compact=self._compact,
        )

    def _draft_forward(self, block: QueryBlock, common: CommonAttentionMetadata) -> torch.Tensor:
        """Step 4: one pass over the query rows -> [n, H]."""
        rows = block.input_ids.shape[0]
        self.input_ids[:rows] = block.input_ids
        self.positions[:rows] = block.positions
        self._slot_mapping_buffer[:rows] = block.slots
        num_reqs = block.seq_lens.shape[0]
        bound = common.seq_lens_cpu_upper_bound
        if bound is not None:
            bound = (bound if block.requests is None else bound[block.requests]) + block.width
        table = common.block_table_tensor
        metadata = attention.build_metadata(
            self._groups,
            CommonAttentionMetadata(
                query_start_loc=block.query_start_loc,
                query_start_loc_cpu=block.query_start_loc.cpu()
                if self._compact
                else torch.arange(num_reqs + 1, dtype=torch.int32) * block.width,
                seq_lens=block.seq_lens,
                seq_lens_cpu_upper_bound=bound,
                num_reqs=num_reqs,
                num_actual_tokens=rows,
                max_query_len=block.width,
                max_seq_len=min(common.max_seq_len + block.width, self.max_model_len),
                block_table_tensor=table if block.requests is None else table[block.requests],
                slot_mapping=self._slot_mapping_buffer[:rows],
                causal=self.draft.is_causal,
            ),
        )
        return self._run_model(metadata, rows, use_cudagraphs=True, slot_names=self._draft_attn_layer_names)[:rows]

    def _pick(
        self, hidden_states: torch.Tensor, block: QueryBlock, sampling_metadata: SamplingMetadata, batch_size: int
    ) -> torch.Tensor:
        """Step 5: K tokens per request from the mask rows' hidden states [n, H] -> int64 [B, K]."""
        width = self.num_speculative_tokens
        if block.sample_rows is None:
            rows = hidden_states.view(batch_size, block.width, -1)[:, self._skip :].reshape(batch_size * width, -1)
        else:
            rows = hidden_states[block.sample_rows]
        if not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
            return place(self.model.get_top_tokens(rows), block.places, batch_size * width).view(batch_size, width)
        temperature = sampling_metadata.temperature.repeat_interleave(width)
        if block.places is not None:
            temperature = temperature[block.places]
        tokens, probs = sample_drafts(self.model.compute_logits(rows), temperature)
        self._last_draft_probs = place(probs, block.places, batch_size * width).view(batch_size, width, -1)
        return place(tokens, block.places, batch_size * width).view(batch_size, width)

    # -- overridden parts of the base class ------------------------------------------------------------------------------

    def _init_parallel_drafting_params(self) -> None:
        self.parallel_drafting_token_id = self.draft.mask_token_id
        self.parallel_drafting_hidden_state_tensor = None

    def _raise_if_padded_drafter_batch_disabled(self) -> None:
        """Both batch layouts are served: a batch without padding has no rejected rows."""

    def _warn_if_multimodal(self) -> None:
        """Nothing to warn about: the target's hidden states hold the images."""

    def _get_eagle3_use_aux_hidden_state_from_config(self) -> bool:
        return True

    def _create_draft_vllm_config(self) -> VllmConfig:
        base = super()._create_draft_vllm_config()
        return replace(base, attention_config=replace(base.attention_config, use_non_causal=not self.draft.is_causal))

    def _get_model(self) -> Any:  # a DFlashDraftModel, possibly in one of vLLM's graph wrappers later
        draft_config = resolve_weights(self._create_draft_vllm_config(), self.draft)
        with set_model_tag(compile_tag(draft_config)):
            return get_model(
                vllm_config=draft_config,
                model_config=self.draft_model_config,
                load_config=get_draft_load_config(draft_config),
            )

    # -- details ---------------------------------------------------------------------------------------------------------

    def _allocate_query_buffers(self) -> None:
        """Fixed-address inputs of the draft forward: one block per request, or the largest captured graph."""
        self.max_query_tokens = self.max_batch_size * (self.num_speculative_tokens + self._skip)
        size = max(self.max_query_tokens, self.compilation_config.max_cudagraph_capture_size or 0)
        self.input_ids = torch.zeros(size, dtype=torch.int32, device=self.device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=self.device)
        self._slot_mapping_buffer = torch.zeros(size, dtype=torch.int64, device=self.device)

    def _run_model(
        self, metadata: dict[str, Any] | None, num_rows: int, *, use_cudagraphs: bool, slot_names: Any
    ) -> torch.Tensor:
        mode, padded, across_dp = self._determine_batch_execution_and_padding(num_rows, use_cudagraphs=use_cudagraphs)
        if padded > num_rows:
            self._slot_mapping_buffer[num_rows:padded].fill_(-1)
        slots = self._slot_mapping_buffer[:padded]
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across_dp,
            cudagraph_runtime_mode=mode,
            slot_mapping=dict.fromkeys(slot_names, slots),
        ):
            hidden_states: torch.Tensor = self.model(
                input_ids=self.input_ids[:padded], positions=self.positions[:padded], inputs_embeds=None
            )
        return hidden_states

    def _lift_length_gate(self) -> None:
        """Let the runner call us near ``max_model_len``: query rows beyond it are handled one by one here.

        It would skip the *whole* batch for one such request and leave holes in the others' context (``_input_fits_in_drafter``).
        """
        if self._runner is not None:
            self._runner.effective_drafter_max_model_len = self.max_model_len + self.num_speculative_tokens + 1


def _attention_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Attention layers with a KV cache, by name."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return {name: layer for name, layer in layers.items() if layer.get_kv_cache_spec(vllm_config) is not None}
