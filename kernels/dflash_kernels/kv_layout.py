# SPDX-License-Identifier: Apache-2.0
"""Where the draft layers' paged K and V caches lie, for one kernel that writes all of them; no kernel here."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """Paged caches of the L draft layers and their device-side description; built once per KV-cache allocation.

    Attributes:
        k_caches, v_caches: per layer a view [pages, kv_block_size, num_kv_heads, head_dim], any strides but unit last.
        layer_groups: per layer the row of the slot tensor (its draft KV group).
        table: int64 [L, 10] on the device: K and V address; K strides of page, token, head; the same for V; page size;
            group. Per layer, so that layers may differ in layout and page size without a slower path.
        alignment: elements by which every row address is divisible; 16 bytes where possible, for wide stores.
    """

    k_caches: tuple[torch.Tensor, ...]
    v_caches: tuple[torch.Tensor, ...]
    layer_groups: tuple[int, ...]
    table: torch.Tensor
    alignment: int

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.k_caches[0].shape[2]

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.k_caches[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Element type of all caches."""
        return self.k_caches[0].dtype

    @classmethod
    def build(
        cls,
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        layer_groups: Sequence[int],
    ) -> "LayerCaches":
        """Describe caches given as views [pages, kv_block_size, heads, hd]: transpose those with heads before tokens.

        Synchronises once; never call it in a step.

        Raises:
            ValueError: what keeps these layers from one fused write; the caller then writes layer by layer.
        """
        if not k_caches or not len(k_caches) == len(v_caches) == len(layer_groups):
            raise ValueError(
                f"one K cache, V cache and group per layer is needed; got {len(k_caches)}, {len(v_caches)} and "
                f"{len(layer_groups)}"
            )
        rows = []
        for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
            _check_layer(layer, k_cache, v_cache, k_caches[0])
            strides = [*k_cache.stride()[:3], *v_cache.stride()[:3]]
            rows.append([k_cache.data_ptr(), v_cache.data_ptr(), *strides, k_cache.shape[1], layer_groups[layer]])
        itemsize = k_caches[0].element_size()
        alignment = 16 // itemsize
        for row in rows:
            alignment = gcd(alignment, row[0] // itemsize, row[1] // itemsize, *row[2:8])
        table = torch.tensor(rows, dtype=torch.int64, device=k_caches[0].device)
        return cls(tuple(k_caches), tuple(v_caches), tuple(layer_groups), table, alignment)


def _check_layer(layer: int, k_cache: torch.Tensor, v_cache: torch.Tensor, first: torch.Tensor) -> None:
    """Refuse a layer that one fused write cannot serve."""
    if k_cache.dtype not in _DTYPES:
        raise ValueError(
            f"KV cache of layer {layer} is {k_cache.dtype}; the fused write serves bf16, fp16, fp32 and fp8 e4m3 "
            "(view a uint8 fp8 cache as torch.float8_e4m3fn)"
        )
    for name, cache in (("K", k_cache), ("V", v_cache)):
        if cache.dim() != 4 or cache.stride(3) != 1:
            raise ValueError(
                f"{name} cache of layer {layer} must be 4-D with unit stride in the last dimension; got shape "
                f"{tuple(cache.shape)} with strides {cache.stride()}"
            )
        same = cache.dtype == first.dtype and cache.shape[2:] == first.shape[2:] and cache.shape[1] == k_cache.shape[1]
        if not same:
            raise ValueError(
                f"{name} cache of layer {layer} is {cache.dtype} {tuple(cache.shape)}, which differs in dtype, heads, "
                f"head size or page size from {first.dtype} {tuple(first.shape)}"
            )
