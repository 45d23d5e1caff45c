# SPDX-License-Identifier: Apache-2.0
"""What our two draft backends share: the layer interface over the cache of vLLM's Triton backend."""

from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import is_quantized_kv_cache


class QueryAttentionImpl(TritonAttentionImpl):
    """Attention of the query block of one layer. Abstract: ``attend`` runs the kernels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # vLLM would hand over fp8 queries with an fp8 cache; the kernels take 16 bits

    def fused_output_quant_supported(self, quant_key: Any) -> bool:  # noqa: ARG002  # vLLM's signature
        """The kernels write their output in the query's dtype only."""
        return False

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002  # in the cache already
        value: torch.Tensor,  # noqa: ARG002
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query`` [n, heads, head size] over ``kv_cache`` [pages, kv heads, tokens, 2 * head size] into ``output`` like query.

        Raises:
            NotImplementedError: fused quantisation of the output was asked for.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("the draft's attention does not quantise its output; turn off the attention fusion pass")
        if attn_metadata is None:  # memory profiling
            return output.fill_(0)
        cache = kv_cache
        if is_quantized_kv_cache(self.kv_cache_dtype):
            cache = cache.view(self.fp8_dtype)  # e4m3 for "fp8_e5m2" too: that is what vLLM's Triton backend stores
        rows = attn_metadata.num_actual_tokens
        self.attend(layer, query[:rows], cache, attn_metadata, output[:rows])
        return output

    def attend(self, layer: Any, query: torch.Tensor, cache: torch.Tensor, metadata: Any, output: torch.Tensor) -> None:
        """Run the kernels; arguments as in ``forward``, without padding rows and with the cache in the dtype it holds."""
        raise NotImplementedError
