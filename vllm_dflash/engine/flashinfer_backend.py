# SPDX-License-Identifier: Apache-2.0
"""Attention backend for drafts that ask for FlashInfer: its kernels behind vLLM's interface, without planning in a step.

vLLM's own FlashInfer backend reads lengths back to the host for every non-causal batch, which no CUDA graph can replay. Here
metadata is that of vLLM's Triton backend, whose cache layout our fused writes know, and ``flashinfer_prefill.py`` keeps what
FlashInfer needs at fixed addresses. Registered as ``CUSTOM``, like ``block_backend.py``.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, is_quantized_kv_cache

from vllm_dflash.engine.flashinfer_prefill import CACHE_DTYPES, HEAD_SIZES, BlockPrefill, PrefillSpec
from vllm_dflash.engine.query_attention import QueryAttentionImpl


@dataclasses.dataclass
class FlashInferDraftMetadata(TritonAttentionMetadata):
    """Metadata of one KV group and causality, with the kernels that run it."""

    prefill: BlockPrefill | None = None


class FlashInferDraftBuilder(TritonAttentionMetadataBuilder):
    """Metadata builder of one group of draft layers; what depends on lengths is rebuilt in the graph.

    Args:
        kv_cache_spec: of the group, in kernel blocks.
        layer_names: of the group.
        vllm_config: of the draft's layers.
        device: of the KV cache.
        block_table_width: pages per request in the block table.
    """

    requires_block_table_width = True
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        block_table_width: int,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.prefill = BlockPrefill(vllm_config.scheduler_config.max_num_seqs, block_table_width, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferDraftMetadata:
        """Metadata of a step whose pages and lengths are on the device already."""
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        metadata = FlashInferDraftMetadata(**fields, prefill=self.prefill)
        self.update_draft_decode_metadata(metadata)
        return metadata

    def update_draft_decode_metadata(self, metadata: FlashInferDraftMetadata) -> None:
        """Follow new lengths and block tables; recorded in the graph."""
        self.prefill.refresh(metadata.block_table, metadata.seq_lens, self.block_size)


class FlashInferDraftBackend(TritonAttentionBackend):
    """FlashInfer's kernels over the cache of vLLM's Triton backend."""

    draft_name = "FLASHINFER (one plan per batch size)"
    """In the start-up line: the registered name says nothing."""
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The registered enum member."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["FlashInferDraftImpl"]:
        """Implementation of one layer."""
        return FlashInferDraftImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferDraftBuilder]:
        """Metadata builder of one group."""
        return FlashInferDraftBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """FlashInfer compiles its prefill for these."""
        return head_size in HEAD_SIZES

    @classmethod
    def supports_sink(cls) -> bool:
        """Its prefill has none."""
        return False


class FlashInferDraftImpl(QueryAttentionImpl):
    """Attention of the query block of one layer."""

    def attend(
        self, layer: Any, query: torch.Tensor, cache: Any, metadata: FlashInferDraftMetadata, output: torch.Tensor
    ) -> None:
        """One launch, planned when its batch size was captured."""
        assert metadata.prefill is not None
        scales: dict[str, float] = {}
        if is_quantized_kv_cache(self.kv_cache_dtype):
            scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}  # vLLM's names
        k_cache, v_cache = cache.split(self.head_size, dim=-1)
        metadata.prefill.run(query, k_cache, v_cache, self._spec(query, k_cache, metadata), output, **scales)

    def _spec(self, query: torch.Tensor, k_cache: torch.Tensor, metadata: FlashInferDraftMetadata) -> PrefillSpec:
        return PrefillSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            kv_block_size=k_cache.shape[2],
            num_query_per_req=metadata.max_query_len,
            dtype=query.dtype,
            cache_dtype=k_cache.dtype,
            scale=self.scale,
            causal=bool(metadata.causal),
            window=self.sliding_window[0] + 1 if self.sliding_window[0] >= 0 else None,
            softcap=self.logits_soft_cap,
        )
