# SPDX-License-Identifier: Apache-2.0
"""Q, K and V of the query rows in one kernel per layer: norms, RoPE, value scale and the paged write of K and V.

``torch.ops.dflash.query_kv_layer`` is opaque to torch.compile and finds cache and slots at run time, since layers are traced
before a cache exists. Under a CUDA graph it runs once, at capture: the addresses it reads then stay until the next KV cache,
for which the graphs are captured again. Attention is called without K and V afterwards, so vLLM does not write them again.
"""

import dataclasses
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op

from dflash_kernels.query_kv import query_kv
from vllm_dflash.engine.kv_views import cache_views, why_foreign

logger = init_logger("vllm.plugins.dflash")


@dataclasses.dataclass(frozen=True, slots=True)
class QueryRows:
    """What the kernel reads of one draft layer besides its rows. Hung on vLLM's attention layer, where the op finds it.

    Weights are read through their modules in every call: loading may replace them.
    """

    q_norm: Any  # RMSNorm over a head
    k_norm: Any
    rotary_emb: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_scale: float | None

    def write(self, layer: Any, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
        """Store K and V of ``qkv`` [n, (heads + 2 * kv heads) * head size] at ``slots`` int64 in ``layer``'s cache.

        Returns:
            Q [n, heads * head size], normed and rotated. ``slots`` None stores nothing (memory profiling, no cache yet).
        """
        rows = qkv.shape[0]
        if slots is None:
            slots = positions.new_full((rows,), -1)
            k_cache = v_cache = qkv.new_empty(1, 1, self.num_kv_heads, self.head_dim)
        else:
            k_cache, v_cache = cache_views(layer, self.head_dim)
        if slots.shape[0] < rows:  # rows of padding may come without slots
            slots = torch.nn.functional.pad(slots, (0, rows - slots.shape[0]), value=-1)
        quantised = k_cache.dtype == torch.float8_e4m3fn
        return query_kv(
            qkv,
            positions,
            slots,
            self.rotary_emb._match_cos_sin_cache_dtype(qkv),  # the table that the context KV is rotated with
            self.q_norm.weight,
            self.k_norm.weight,
            k_cache,
            v_cache,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.q_norm.variance_epsilon,
            is_neox=self.rotary_emb.is_neox_style,
            value_scale=self.value_scale,
            k_scale=layer._k_scale if quantised else None,  # vLLM's names
            v_scale=layer._v_scale if quantised else None,
        )


def fuse_query_rows(attention: Any, vllm_config: Any) -> bool:
    """Make the op serve ``attention`` (a ``DraftAttention``); False where it cannot, with the reason in the log."""
    reason = why_separate(attention, vllm_config)
    if reason is None:
        attention.attn.query_rows = QueryRows(
            attention.q_norm,
            attention.k_norm,
            attention.rotary_emb,
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            attention.value_scale,
        )
    if current_platform.is_cuda():
        logger.info_once(
            f"DFlash draft: norms, rotation and KV write of the query rows "
            f"{'in one kernel per layer' if reason is None else f'in separate kernels ({reason})'}"
        )
    return reason is None


def why_separate(attention: Any, vllm_config: Any) -> str | None:
    """Why this draft layer keeps vLLM's chain of kernels; None if it can do without.

    Depends on nothing that vLLM's compile cache does not hash: a cached graph holds one answer.
    """
    layer = attention.attn
    if not current_platform.is_cuda():
        return "no CUDA device"
    if not vllm_config.use_v2_model_runner:
        # Its piecewise graphs would record the op without slots; vLLM keeps its own cache write out of them.
        return "V1 model runner"
    if type(attention.rotary_emb).forward_cuda is not RotaryEmbedding.forward_cuda:
        return f"rotary embedding {type(attention.rotary_emb).__name__}"
    if layer.get_attn_backend().forward_includes_kv_cache_update:
        return f"attention backend {layer.get_attn_backend().get_name()} writes its cache itself"
    if getattr(layer.impl, "dcp_world_size", 1) > 1:
        return "decode context parallelism"  # attention reads K and V of the query rows from its arguments
    scales = [getattr(layer, name, None) for name in ("k_scale", "v_scale")]
    if any(scale is not None and scale.numel() != 1 for scale in scales):
        return "KV scales per head"
    return why_foreign(layer)


def query_rows(attention: Any, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """:meth:`QueryRows.write` for ``attention`` in the current forward context; traceable."""
    queries: torch.Tensor = torch.ops.dflash.query_kv_layer(
        qkv, positions, attention.q_size, _encode_layer_name(attention.attn.layer_name)
    )
    return queries


def _query_kv_layer(qkv: torch.Tensor, positions: torch.Tensor, q_size: int, layer_name: LayerNameType) -> torch.Tensor:  # noqa: ARG001  # q_size is for tracing
    """Implementation of the op; the cache write is a side effect that attention depends on through Q."""
    name = _resolve_layer_name(layer_name)
    context = get_forward_context()
    layer = context.no_compile_layers[name]
    queries: torch.Tensor = layer.query_rows.write(layer, qkv, positions, context.slot_mapping.get(name))
    return queries


def _query_kv_layer_fake(qkv: torch.Tensor, positions: torch.Tensor, q_size: int, layer_name: LayerNameType) -> torch.Tensor:  # noqa: ARG001
    return qkv.new_empty(qkv.shape[0], q_size)


_LIBRARY = torch.library.Library("dflash", "FRAGMENT")  # type: ignore[no-untyped-call]  # must stay referenced
direct_register_custom_op("query_kv_layer", _query_kv_layer, fake_impl=_query_kv_layer_fake, target_lib=_LIBRARY)
