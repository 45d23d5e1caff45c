# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of the draft: Qwen3-shaped, per-head q/k norm, causality and window per layer.

The layers see only the query block ``[anchor, mask x K]``. The context is already in their KV cache when they run
(:mod:`vllm_dflash.engine.context_kv`), so attention reads keys that no query row of this pass has produced.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from vllm_dflash.draft_config import DraftConfig
from vllm_dflash.engine.query_rows import fuse_query_rows, query_rows


class DraftNorm(RMSNorm):
    """RMSNorm that uses the C++ ops on CPUs, where vLLM's own layer runs about ten eager torch ops.

    4 against 26 us for [8, 576] in float32 on one core, 22 times per step of five layers. Compiled code does not come here:
    custom ops are off then.
    """

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normed ``x`` [..., H]; with ``residual``, (normed ``x + residual``, the sum), both in place."""
        if residual is not None:
            ops.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
            return x, residual
        x = x.contiguous()  # the op reads rows densely
        normed = torch.empty_like(x)
        ops.rms_norm(normed, x, self.weight, self.variance_epsilon)
        return normed


class KeptAttention(Attention):
    """Attention that reads a window only, over a KV cache that keeps everything: it shares the target's KV-cache group."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """The spec of a layer without a window."""
        window: int | None = self.sliding_window
        self.sliding_window: int | None = None
        try:
            return super().get_kv_cache_spec(vllm_config)
        finally:
            self.sliding_window = window


@contextlib.contextmanager
def _no_window_of_the_target(cache_config: Any) -> Iterator[None]:
    """Where a layer states no window, vLLM's ``Attention`` falls back to that of the *target* (Mistral's)."""
    window, cache_config.sliding_window = cache_config.sliding_window, None
    try:
        yield
    finally:
        cache_config.sliding_window = window


def storable(values: torch.Tensor) -> torch.Tensor:
    """Values for the KV cache: finite ones on CPUs.

    CPU attention multiplies what a page holds behind a request's end by zero, and NaN stays NaN: values that overflowed once
    would spoil the drafts of every later request that gets the page. (Keys there are masked, not multiplied.)
    """
    return values.nan_to_num() if values.device.type == "cpu" else values


class DraftAttention(nn.Module):
    """Self-attention of one draft layer over its KV cache.

    Args:
        draft: the whole draft; ``draft.layers[index]`` gives this layer's window and causality.
        index: layer number inside the draft (names the weights).
        cache_index: layer number behind the target's last (names the KV cache).
        max_position: rows of the rotary table; vLLM may have raised it to the target's ``max_model_len``.
    """

    def __init__(
        self,
        draft: DraftConfig,
        index: int,
        cache_index: int,
        max_position: int,
        vllm_config: VllmConfig,
        quant_config: Any,
    ) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        _check_heads(draft, tp_size)
        self.num_heads = draft.num_heads // tp_size
        self.num_kv_heads = max(1, draft.num_kv_heads // tp_size)  # fewer KV heads than ranks: vLLM replicates them
        self.head_dim = draft.head_dim
        self.q_size = self.num_heads * draft.head_dim
        self.kv_size = self.num_kv_heads * draft.head_dim
        self.value_scale = draft.value_scale
        self.causal = draft.layers[index].causal
        self.window = draft.layers[index].window
        linear: dict[str, Any] = {"bias": draft.attention_bias, "quant_config": quant_config}
        name = f"layers.{index}.self_attn"
        self.qkv_proj = QKVParallelLinear(
            draft.hidden_size, draft.head_dim, draft.num_heads, draft.num_kv_heads, prefix=f"{name}.qkv_proj", **linear
        )
        self.o_proj = RowParallelLinear(draft.num_heads * draft.head_dim, draft.hidden_size, prefix=f"{name}.o_proj", **linear)
        self.q_norm = DraftNorm(draft.head_dim, eps=draft.rms_norm_eps)
        self.k_norm = DraftNorm(draft.head_dim, eps=draft.rms_norm_eps)
        self.rotary_emb = get_rope(
            draft.head_dim,
            max_position=max_position,
            is_neox_style=draft.rope.is_neox,
            rope_parameters=dict(draft.rope.parameters),
        )
        extra: dict[str, Any] = {}
        if draft.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.empty(self.num_heads), requires_grad=False)
            set_weight_attrs(self.attention_sink_bias, {"weight_loader": sharded_weight_loader(0)})
            extra["sinks"] = self.attention_sink_bias
        keeps = self.window is not None and not draft.layers[index].frees
        with _no_window_of_the_target(vllm_config.cache_config):
            self.attn = (KeptAttention if keeps else Attention)(
                self.num_heads,
                draft.head_dim,
                draft.head_dim**-0.5,
                num_kv_heads=self.num_kv_heads,
                cache_config=vllm_config.cache_config,
                quant_config=quant_config,
                per_layer_sliding_window=self.window,
                prefix=f"model.layers.{cache_index}.self_attn.attn",
                **extra,
            )
        self.fused_query_rows = fuse_query_rows(self, vllm_config)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """``hidden_states`` [n, H] at ``positions`` [n] -> [n, H]."""
        qkv, _ = self.qkv_proj(hidden_states)
        if self.fused_query_rows:
            fused: torch.Tensor = self.o_proj(self.attn(query_rows(self, qkv, positions), None, None))[0]
            return fused
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim))).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.head_dim))).flatten(-2)
        q, k = self.rotary_emb(positions, q, k)
        if self.value_scale is not None:
            v = v * self.value_scale
        output: torch.Tensor = self.o_proj(self.attn(q, k, storable(v)))[0]
        return output


class DraftMLP(nn.Module):
    """Gated MLP of one draft layer."""

    def __init__(self, draft: DraftConfig, index: int, quant_config: Any) -> None:
        super().__init__()
        name = f"layers.{index}.mlp"
        self.gate_up_proj = MergedColumnParallelLinear(
            draft.hidden_size,
            [draft.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{name}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            draft.intermediate_size, draft.hidden_size, bias=False, quant_config=quant_config, prefix=f"{name}.down_proj"
        )
        self.activation = get_act_and_mul_fn(draft.hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, H]."""
        gate_up, _ = self.gate_up_proj(hidden_states)
        output: torch.Tensor = self.down_proj(self.activation(gate_up))[0]
        return output


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP with vLLM's fused residual convention."""

    def __init__(
        self,
        draft: DraftConfig,
        index: int,
        cache_index: int,
        max_position: int,
        vllm_config: VllmConfig,
        quant_config: Any,
    ) -> None:
        super().__init__()
        self.self_attn = DraftAttention(draft, index, cache_index, max_position, vllm_config, quant_config)
        self.mlp = DraftMLP(draft, index, quant_config)
        self.input_layernorm = DraftNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.post_attention_layernorm = DraftNorm(draft.hidden_size, eps=draft.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden_states`` [n, H] and the running ``residual`` [n, H] (None in the first layer) -> the same pair."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


def _check_heads(draft: DraftConfig, tp_size: int) -> None:
    kv_fits = draft.num_kv_heads % tp_size == 0 or tp_size % draft.num_kv_heads == 0
    if draft.num_heads % tp_size or not kv_fits:
        raise ValueError(
            f"tensor_parallel_size: {tp_size} does not divide the DFlash draft's {draft.num_heads} query and "
            f"{draft.num_kv_heads} KV heads. Use a tensor_parallel_size that divides both."
        )
