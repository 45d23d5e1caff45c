# SPDX-License-Identifier: Apache-2.0
"""Context KV in one kernel after the projection: K norm, RoPE, scales and the paged write of all layers.

Takes the place of :meth:`vllm_dflash.engine.context_kv.ContextKV.store` (5 + L kernels) where the layers' caches allow it;
:func:`fuse_context` says why not otherwise, and the draft then writes layer by layer.
"""

import dataclasses
from typing import Any

import torch

from dflash_kernels.context_kv import LayerCaches, context_kv
from vllm_dflash.engine.context_kv import ContextKV
from vllm_dflash.engine.kv_views import cache_views, why_foreign


@dataclasses.dataclass(frozen=True, slots=True)
class FusedContext:
    """Everything that the kernel reads besides the step's rows; addresses are fixed until the next KV cache."""

    context: ContextKV
    caches: LayerCaches
    cos_sin: torch.Tensor  # [positions, rotary size]
    is_neox: bool
    value_scale: torch.Tensor | None  # fp32 [L]
    k_scale: torch.Tensor | None  # fp32 [L], fp8 caches only
    v_scale: torch.Tensor | None

    def write(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Project context states [n, H] at ``positions`` int64 [n] and store them at ``slots`` int64 [G, n]; -1 is skipped."""
        context_kv(
            self.caches,
            self.context.project(states),
            positions,
            slots,
            self.cos_sin,
            self.context.k_norm_weight,
            eps=self.context.eps,
            is_neox=self.is_neox,
            value_scale=self.value_scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )


def fuse_context(model: Any, layer_rows: list[int]) -> FusedContext | str:
    """The fused writer for ``model``'s bound KV caches, or the reason against it.

    Args:
        model: our draft model, KV caches bound.
        layer_rows: row of the slot tensor for each layer.
    """
    attentions = [layer.self_attn for layer in model.model.layers]
    layers = [attention.attn for attention in attentions]
    reasons = [reason for layer in layers if (reason := why_foreign(layer)) is not None]
    if reasons:
        return reasons[0]
    ropes = [attention.rotary_emb for attention in attentions]
    if any(rope is not ropes[0] for rope in ropes):
        return "layers differ in their rotary embedding"
    k_caches, v_caches = zip(*(cache_views(layer, model.context_kv.head_dim) for layer in layers), strict=True)
    try:
        caches = LayerCaches.build(k_caches, v_caches, layer_rows)
    except ValueError as error:
        return str(error)
    quantised = caches.dtype == torch.float8_e4m3fn
    value_scale = model.context_kv.value_scale
    return FusedContext(
        context=model.context_kv,
        caches=caches,
        cos_sin=ropes[0].cos_sin_cache,
        is_neox=ropes[0].is_neox_style,
        value_scale=None if value_scale is None else caches.table.new_full((len(layers),), value_scale, dtype=torch.float32),
        k_scale=torch.stack([layer._k_scale for layer in layers]).float() if quantised else None,  # vLLM's name
        v_scale=torch.stack([layer._v_scale for layer in layers]).float() if quantised else None,
    )
