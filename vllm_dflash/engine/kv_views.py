# SPDX-License-Identifier: Apache-2.0
"""Which KV caches of vLLM our kernels write, and where K and V lie in them; the one place that knows the layout."""

from typing import Any

import torch
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

# Backends whose cache is [pages, heads, tokens, K and V of a head side by side] and takes plain writes at slots.
_BACKENDS = {"FLASH_ATTN", "TRITON_ATTN", "CUSTOM"}  # CUSTOM: block_backend.py
_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def why_foreign(layer: Any) -> str | None:
    """Why our kernels cannot write the cache of vLLM's attention ``layer``; None if they can. Needs no bound cache."""
    backend = layer.get_attn_backend().get_name()
    if backend not in _BACKENDS:
        return f"attention backend {backend} has a cache layout of its own"
    if is_quantized_kv_cache(layer.kv_cache_dtype) and layer.kv_cache_dtype not in _FP8:
        return f"KV cache dtype {layer.kv_cache_dtype}"
    return None


def cache_views(layer: Any, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer's bound cache, each a view [pages, kv_block_size, kv heads, head_dim]; ``why_foreign`` is None."""
    cache = layer.kv_cache.transpose(1, 2)  # -> [pages, tokens, heads, 2 * head size]
    if cache.dtype == torch.uint8:
        cache = cache.view(_FP8[layer.kv_cache_dtype])
    k_cache, v_cache = cache.split(head_dim, dim=-1)
    return k_cache, v_cache
