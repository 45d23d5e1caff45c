# SPDX-License-Identifier: Apache-2.0
"""Attention backend of our own for the draft: ``dflash_kernels.block_attention`` behind vLLM's backend interface.

For machines without FlashAttention, and in place of backends that plan a non-causal batch on the host (Flex, and FlashInfer
where ``flashinfer_backend.py`` does not fit), which no CUDA graph can replay. Cache layout, cache writes and metadata are those
of vLLM's Triton backend: they need no CPU lengths and always support full graphs. Registered as ``CUSTOM``, the one member of
vLLM's backend enum that every process can unpickle.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention import selector
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionMetadata
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from dflash_kernels.block_attention import AttentionWorkspace, block_attention
from vllm_dflash.engine.flashinfer_prefill import why_not_flashinfer
from vllm_dflash.engine.query_attention import QueryAttentionImpl

logger = init_logger("vllm.plugins.dflash")

_HOST_PLANNED = ("FLASHINFER", "FLEX_ATTENTION")
_OURS = f"{__name__}.BlockAttentionBackend"
_OUR_FLASHINFER = "vllm_dflash.engine.flashinfer_backend.FlashInferDraftBackend"


def choose_backend(
    chosen: AttentionBackendEnum | None, needs: AttentionSelectorConfig, num_heads: int
) -> AttentionBackendEnum | None:
    """Backend for a non-causal draft: the user's choice where a graph can replay it, None for vLLM's own selection.

    Registers ours where it is needed.

    Args:
        chosen: ``attention_backend`` of the speculative config.
        needs: what the draft's layers ask of a backend; vLLM's own rules are applied to it.
        num_heads: query heads on this rank.

    Raises:
        ValueError: ours is needed, but another plugin has taken the name CUSTOM; or FlashInfer is asked for and not installed.
    """
    if not current_platform.is_cuda():
        return chosen
    if chosen is not None and chosen.name not in (*_HOST_PLANNED, "CUSTOM"):
        return chosen
    if chosen is None:
        reason = _why_not_flash_attention(needs, num_heads)
        if reason is None:
            return None
    elif chosen.name == "FLASHINFER":
        reason = why_not_flashinfer(needs.head_size, needs.dtype, needs.kv_cache_dtype, sinks=needs.has_sink)
        if reason is None:
            return _register(_OUR_FLASHINFER)
    else:
        reason = f"attention backend {chosen.name} plans non-causal batches on the host"
    if chosen is None or chosen.name in _HOST_PLANNED:
        logger.info_once(
            f"DFlash draft: {reason}; the block attention of vllm-dflash takes its place, so that the draft step stays in CUDA "
            "graphs"
        )
    return _register(_OURS)


def _why_not_flash_attention(needs: AttentionSelectorConfig, num_heads: int) -> str | None:
    """None where vLLM itself would give layers with these needs FlashAttention."""
    if get_flash_attn_version() is None:
        return "there is no FlashAttention on this machine"
    try:
        found = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(None, needs, num_heads)).get_name()
    except ValueError:  # no backend of vLLM's fits; ours goes through the same checks when it is built
        return "no attention backend of vLLM fits its layers"
    return (
        None if found == AttentionBackendEnum.FLASH_ATTN.name else f"FlashAttention does not fit its layers, and {found} is next"
    )


def _register(ours: str) -> AttentionBackendEnum:
    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden() or custom.get_path() in (_OURS, _OUR_FLASHINFER):  # of an earlier engine in this process
        register_backend(custom, ours)
        selector._cached_get_attn_backend.cache_clear()  # it remembers which class the name stood for
    if custom.get_path() != ours:
        raise ValueError(
            f"attention_backend: the DFlash draft needs {ours} under the name CUSTOM, which {custom.get_path()} has taken. Set "
            '"attention_backend": "TRITON_ATTN" in the speculative config, or remove the other plugin.'
        )
    return custom


class BlockAttentionBackend(TritonAttentionBackend):
    """vLLM's Triton backend with another attention kernel, which reads no scales per token."""

    draft_name = "block attention of vllm-dflash"
    """In the start-up line: the registered name says nothing."""
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]

    @staticmethod
    def get_name() -> str:
        """The registered enum member."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["BlockAttentionImpl"]:
        """Implementation of one layer."""
        return BlockAttentionImpl


class BlockAttentionImpl(QueryAttentionImpl):
    """Attention of the query block; every request has the same number of rows."""

    workspace: AttentionWorkspace | None = None
    """Scratch shared by the draft's layers; set when they are bound to a KV cache."""
    narrower: Mapping[int, AttentionWorkspace] = {}
    """Scratch of blocks with fewer rows, by their rows."""

    def attend(
        self, layer: Any, query: torch.Tensor, cache: Any, metadata: TritonAttentionMetadata, output: torch.Tensor
    ) -> None:
        """One launch, or two where keys are split."""
        assert self.workspace is not None
        scales: dict[str, Any] = {}
        if is_quantized_kv_cache(self.kv_cache_dtype):
            scales = {"k_scale": layer._k_scale.view(1), "v_scale": layer._v_scale.view(1)}
        k_cache, v_cache = cache.transpose(1, 2).split(self.head_size, dim=-1)
        block_attention(
            query,
            k_cache,
            v_cache,
            metadata.block_table,
            metadata.seq_lens,
            workspace=self.narrower.get(metadata.max_query_len, self.workspace),
            num_query_per_req=metadata.max_query_len,
            scale=self.scale,
            causal=metadata.causal,
            window=self.sliding_window[0] + 1 if self.sliding_window[0] >= 0 else None,
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
            out=output,
            **scales,
        )


def share_workspace(
    layers: list[Any],
    max_requests: int,
    num_query_per_req: int,
    max_seq_len: int,
    device: torch.device,
    narrower: tuple[int, ...] = (),
) -> int:
    """Give all layers that run our kernel one scratch, and one for each of the ``narrower`` numbers of rows.

    Returns:
        Their bytes, 0 where no layer runs it.
    """
    impls = [layer.impl for layer in layers if isinstance(layer.impl, BlockAttentionImpl)]
    if not impls:
        return 0
    first = impls[0]
    workspaces = {
        rows: AttentionWorkspace(
            max_num_reqs=max_requests,
            num_query_per_req=rows,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_size,
            max_seq_len=max_seq_len,
            device=device,
        )
        for rows in (*narrower, num_query_per_req)
    }
    for impl in impls:
        impl.workspace, impl.narrower = workspaces[num_query_per_req], workspaces
    return sum(workspace.nbytes for workspace in workspaces.values())
