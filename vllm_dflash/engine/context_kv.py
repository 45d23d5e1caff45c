# SPDX-License-Identifier: Apache-2.0
"""Context KV: the draft's keys and values at positions whose target hidden states are known, for all layers at once.

Two steps with a seam between them. :meth:`ContextKV.project` is one GEMM over a copy of all layers' K and V weights; its
result has the layout that ``dflash_kernels.context_kv`` reads. :meth:`ContextKV.store` is the rest (K norm, RoPE, value
scale, cache write) in plain vLLM ops; a fused kernel may replace that one method.

Each layer keeps its own K norm. vLLM's built-in hands all layers' norm weights to one ``rms_norm`` call, and the CPU op then
uses layer 0's for every layer, a silent acceptance loss (``_normalize_context_k`` in ``qwen3_dflash.py``).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from vllm_dflash.engine.draft_layers import DraftAttention, storable

Slots = torch.Tensor | Sequence[torch.Tensor | None] | None
"""int64 [n] KV-cache slots, shared by all layers or one entry per layer; -1 is a row not to store; None stores nothing."""


class ContextKV(nn.Module):
    """Projects context states to K/V of every draft layer and stores them.

    The fused projection is a ``ReplicatedLinear`` of its own, so that vLLM packs it for the platform after loading (CPU builds
    free the layers' own weights then), or ``quant_config`` (ours, for plain checkpoints) quantises it. ``draft_weights.py`` fills
    it from the checkpoint's tensors. Layers of a quantised checkpoint keep their weights packed: no fused copy is made, and each
    projects through its quant method.
    """

    def __init__(self, attentions: Sequence[DraftAttention], norm: RMSNorm, hidden_size: int, quant_config: Any = None) -> None:
        super().__init__()
        self._attentions = tuple(attentions)  # a tuple: the modules are registered by the layers that own them
        self._norm = (norm,)
        first = attentions[0]
        self.num_layers = len(attentions)
        self.num_kv_heads = first.num_kv_heads
        self.head_dim = first.head_dim
        self.eps = first.k_norm.variance_epsilon
        self.value_scale = first.value_scale
        self.k_norm_weight: torch.Tensor  # [L, hd]
        self.unit_weight: torch.Tensor  # [hd], ones
        self.register_buffer("k_norm_weight", torch.ones(self.num_layers, self.head_dim), persistent=False)
        self.register_buffer("unit_weight", torch.ones(self.head_dim), persistent=False)
        self.projection: ReplicatedLinear | None = None
        if all(isinstance(a.qkv_proj.quant_method, UnquantizedLinearMethod) for a in attentions):
            self.projection = ReplicatedLinear(
                hidden_size,
                2 * self.num_layers * first.kv_size,
                bias=first.qkv_proj.bias is not None,
                quant_config=quant_config,
                return_bias=False,
                prefix="context_kv.projection",
            )

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [n, H] (output of ``fc``) -> [n, L * 2 * nkv * hd]: layer-major, K then V inside a layer."""
        normed = torch.empty_like(states)
        norm = self._norm[0]  # the module's own form is seven kernels on a GPU, 20 us at batch 1
        ops.rms_norm(normed, states.contiguous(), norm.weight, norm.variance_epsilon)
        if self.projection is not None:
            fused: torch.Tensor = self.projection(normed)
            return fused
        return torch.cat([a.qkv_proj(normed)[0][:, a.q_size :] for a in self._attentions], dim=-1)

    def store(self, kv: torch.Tensor, positions: torch.Tensor, slots: Slots) -> None:
        """K norm, RoPE and value scale on ``kv`` [n, L * 2 * nkv * hd] at ``positions`` int64 [n]; write to the caches."""
        k, v = kv.view(-1, self.num_layers, 2, self.num_kv_heads, self.head_dim).unbind(2)
        # The unit weight makes one norm call serve all layers; the op reads rows densely, so K must be contiguous.
        keys = torch.empty_like(k, memory_format=torch.contiguous_format)
        ops.rms_norm(keys, k.contiguous(), self.unit_weight, self.eps)
        keys.mul_(self.k_norm_weight.unsqueeze(1))
        self._rotate(keys, positions)
        if self.value_scale is not None:
            v = v * self.value_scale
        if slots is None:
            return
        v = storable(v)
        per_layer = [slots] * self.num_layers if isinstance(slots, torch.Tensor) else slots
        for index, (attention, layer_slots) in enumerate(zip(self._attentions, per_layer, strict=True)):
            if layer_slots is not None:
                attn = attention.attn
                attn.impl.do_kv_cache_update(attn, keys[:, index], v[:, index], attn.kv_cache, layer_slots)

    def _rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate ``keys`` [n, L, nkv, hd] in place: the layers of a row share its position, so they count as more heads."""
        ropes = [a.rotary_emb for a in self._attentions]
        if all(rope is ropes[0] for rope in ropes):  # get_rope returns one module for equal parameters
            self._rotate_heads(ropes[0], keys.flatten(1), positions)
            return
        for index, rope in enumerate(ropes):
            self._rotate_heads(rope, keys[:, index].flatten(1), positions)

    def _rotate_heads(self, rope: Any, keys: torch.Tensor, positions: torch.Tensor) -> None:
        table = rope._match_cos_sin_cache_dtype(keys)  # casts once, not the whole table every step
        ops.rotary_embedding(positions, keys, None, self.head_dim, table, rope.is_neox_style)
