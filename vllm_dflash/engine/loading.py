# SPDX-License-Identifier: Apache-2.0
"""Loading the draft network beside its target: configuration of the draft's layers, weights, shared embedding and head."""

import copy
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from vllm import envs
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig, replace
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.worker.gpu.spec_decode.utils import get_pp_safe_draft_load_config

from vllm_dflash.draft_config import DraftConfig
from vllm_dflash.engine.block_backend import choose_backend
from vllm_dflash.engine.private_head import watch_updates
from vllm_dflash.engine.target_vocabulary import shared_vocabulary
from vllm_dflash.engine.variant_choice import resolve_weights


def draft_layer_config(vllm_config: VllmConfig, draft: DraftConfig) -> VllmConfig:
    """What the draft's attention layers are built with: its own causality, backend and KV-cache dtype, not the target's."""
    speculative = vllm_config.speculative_config
    config = copy.copy(vllm_config)
    non_causal = not all(layer.causal for layer in draft.layers)
    if speculative.kv_cache_dtype is not None:
        config.cache_config = replace(vllm_config.cache_config, cache_dtype=speculative.kv_cache_dtype)
    backend = speculative.attention_backend
    if non_causal:
        num_heads = max(1, draft.num_heads // vllm_config.parallel_config.tensor_parallel_size)
        backend = choose_backend(backend, _attention_needs(config, draft), num_heads)
    config.attention_config = replace(vllm_config.attention_config, use_non_causal=non_causal, backend=backend)
    if backend is AttentionBackendEnum.CUSTOM and isinstance(config.additional_config, Mapping):
        # One name for several backends, whose compiled graphs differ: this is where vLLM's hash of a configuration sees it.
        config.additional_config = dict(config.additional_config) | {"dflash_draft_attention": backend.get_path()}
    config.load_config = get_pp_safe_draft_load_config(get_draft_load_config(vllm_config))
    return config


def _attention_needs(vllm_config: VllmConfig, draft: DraftConfig) -> AttentionSelectorConfig:
    """What a non-causal draft's layers ask of an attention backend, as vLLM's ``get_attn_backend`` will put it."""
    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    return AttentionSelectorConfig(
        head_size=draft.head_dim,
        dtype=vllm_config.model_config.dtype,
        kv_cache_dtype=cache.cache_dtype,
        block_size=cache.block_size if cache.user_specified_block_size else None,
        has_sink=draft.attention_sinks,
        has_sliding_window=any(layer.window is not None for layer in draft.layers),
        use_non_causal=True,
        use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
        use_kv_connector=transfer is not None and transfer.is_kv_transfer_instance,
        use_dcp=vllm_config.parallel_config.decode_context_parallel_size > 1,
    )


def compile_tag(config: VllmConfig) -> str:
    """Name of the draft's graphs in vLLM's compile cache; ``config``: what its layers are built with.

    vLLM keeps the graphs of all models of an engine in one folder, which it finds by the *target's* configuration and code, and
    numbers them within a tag. So what changes the draft's graphs alone (attention backend, cache dtype, a precision that was
    chosen by measuring, this plugin's code) is part of the tag: a graph with other inputs would be called.
    """
    return f"dflash_draft_{hashlib.sha256((config.compute_hash() + _code()).encode()).hexdigest()[:10]}"


@functools.cache
def _code() -> str:
    """Of the modules beside this one, which hold everything that a forward pass of the draft runs through."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def load_draft(target: nn.Module, vllm_config: VllmConfig, draft: DraftConfig) -> nn.Module:
    """Build and load the draft network; embedding and head come from ``target`` where the checkpoint ships none.

    Raises:
        ValueError: the checkpoint does not fit its config, or this rank has no embedding or head to share.
    """
    config = resolve_weights(draft_layer_config(vllm_config, draft), draft)
    with set_model_tag(compile_tag(config)):
        model: nn.Module = get_model(vllm_config=config, model_config=vllm_config.speculative_config.draft_model_config)
    model.share(*shared_vocabulary(target))  # type: ignore[operator]  # our DFlashDraftModel, found through vLLM's registry
    watch_updates(target, model)
    return model
