# SPDX-License-Identifier: Apache-2.0
"""Attention metadata of the draft's query block on the V1 runner.

Every row of a block sees the whole context and, in a non-causal layer, the whole block; causality is a property of the layer.
One builder call gives one causality, so layers are grouped by (backend, causality, window) and each group gets its own
metadata. Grouping by window as well keeps the CPU backend's schedule narrow: it assumes a window only where all layers of a
group share it.

``CPU_ATTN`` takes ``causal=False`` from the common metadata and applies windows symmetrically then: row p sees keys
``p - (w - 1) .. p + (w - 1)``.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import AttentionGroup


@dataclasses.dataclass(frozen=True, slots=True)
class DraftAttentionGroup:
    """Draft layers that share one metadata object, and whether their rows see only earlier rows."""

    group: AttentionGroup
    causal: bool


def cache_group_of(kv_cache_config: KVCacheConfig, layer_names: Iterable[str]) -> int:
    """Index of the one KV-cache group that holds all draft layers.

    Raises:
        ValueError: the layers are spread over several groups, which the V1 runner cannot serve.
    """
    wanted = set(layer_names)
    holding = [i for i, group in enumerate(kv_cache_config.kv_cache_groups) if wanted & set(group.layer_names)]
    if len(holding) != 1:
        raise ValueError(
            f"disable_hybrid_kv_cache_manager: is off, and the DFlash draft's layers are in {len(holding)} KV-cache groups, as "
            "layers with and without a window meet; the V1 runner drafts from one. Set it to true, or use vLLM's V2 runner "
            "(VLLM_USE_V2_MODEL_RUNNER=1)."
        )
    return holding[0]


def build_groups(
    layers: Mapping[str, Any],
    causal: Mapping[str, bool],
    kv_cache_spec: KVCacheSpec,
    kv_cache_group_id: int,
    kernel_block_size: int | None,
    vllm_config: Any,
    device: torch.device,
) -> list[DraftAttentionGroup]:
    """Group the draft's attention layers and create a metadata builder per group.

    Args:
        layers: vLLM ``Attention`` modules by name, in layer order.
        causal: causality by name.
        kv_cache_spec: spec of the KV-cache group that holds them.
        kv_cache_group_id: its index.
        kernel_block_size: block size of the backend's kernels, None for the cache's own.
        vllm_config: of the engine; the builders read it.
        device: of the KV cache.
    """
    groups: dict[tuple[str, bool, int | None], DraftAttentionGroup] = {}
    for name, layer in layers.items():
        backend = layer.get_attn_backend()
        key = (backend.full_cls_name(), causal[name], layer.sliding_window)
        if key not in groups:
            spec = kv_cache_spec.kv_cache_specs[name] if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs) else kv_cache_spec
            group = AttentionGroup(backend=backend, layer_names=[], kv_cache_spec=spec, kv_cache_group_id=kv_cache_group_id)
            groups[key] = DraftAttentionGroup(group, causal[name])
        groups[key].group.layer_names.append(name)
    for entry in groups.values():
        entry.group.create_metadata_builders(vllm_config, device, kernel_block_size=kernel_block_size)
    return list(groups.values())


def build_metadata(groups: Sequence[DraftAttentionGroup], common: CommonAttentionMetadata) -> dict[str, Any]:
    """Metadata by layer name for one draft forward.

    Raises:
        ValueError: a backend ignores ``causal=False``, so that rows of the block would not see each other.
    """
    by_layer: dict[str, Any] = {}
    for entry in groups:
        metadata = entry.group.build_metadata_for_drafting(dataclasses.replace(common, causal=entry.causal), draft_index=0)
        if not entry.causal and getattr(metadata, "causal", None) is not False:
            raise ValueError(
                f"attention_backend: {entry.group.backend.get_name()} has no non-causal mode, which this DFlash draft needs. Set "
                "speculative_config attention_backend to one that has it (FLASH_ATTN, TRITON_ATTN or FLEX_ATTENTION)."
            )
        by_layer.update(dict.fromkeys(entry.group.layer_names, metadata))
    return by_layer
