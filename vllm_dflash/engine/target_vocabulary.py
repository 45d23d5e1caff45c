# SPDX-License-Identifier: Apache-2.0
"""What the draft borrows from the target: its embedding, the scale that the target puts on it, and its LM head.

vLLM's Gemma, Granite, MiniCPM and similar models multiply embeddings outside the module that holds the table. A draft was
trained on what its target's first layer reads, so a borrowed table without that factor costs acceptance and raises no error.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from vllm_dflash.engine.capture import text_model

logger = init_logger("vllm.plugins.dflash")

OWNER_FIELDS = ("normalizer", "embed_scale", "embedding_multiplier", "embedding_scale")
"""Names of the factor beside ``embed_tokens`` in vLLM's models: Gemma and Rnj-1, Gemma 3n, Granite MoE and Falcon-H1, HRM."""
CONFIG_FIELDS = ("embedding_multiplier", "scale_emb")
"""Names of the factor that is only in the target's config: Granite and HyperCLOVA X, MiniCPM."""


class SharedVocabulary(NamedTuple):
    """Modules of the target, None where this rank has none, and the factor on the embedding's output."""

    embed_tokens: nn.Module | None
    lm_head: nn.Module | None
    embedding_scale: float


def shared_vocabulary(target: nn.Module) -> SharedVocabulary:
    """The target's input embedding and LM head (without LoRA wrappers), and the embedding's scale.

    Targets with tied weights may have no head module at all and project through the embedding (Gemma 2, Cohere).
    """
    language_model = text_model(target)
    modules = dict(language_model.named_modules())
    embeddings = (n for n, m in modules.items() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead))
    name = next(embeddings, None)
    embedding = None if name is None else modules[name]
    head = getattr(language_model, "lm_head", None) or getattr(target, "lm_head", None)
    if isinstance(head, BaseLayerWithLoRA):
        head = head.base_layer
    if head is None:
        head = next((m for m in modules.values() if isinstance(m, ParallelLMHead)), None)
    config = getattr(language_model, "config", None)
    if head is None and getattr(config, "tie_word_embeddings", False):
        head = embedding
    scale = 1.0 if name is None else embedding_scale(_owner(modules, name), config)
    if scale != 1.0:
        logger.info_once(f"vllm-dflash: the target scales its embeddings by {scale:g}; so does the draft, which borrows them.")
    return SharedVocabulary(embedding, head if isinstance(head, VocabParallelEmbedding) else None, scale)


def embedding_scale(owner: nn.Module, config: Any) -> float:
    """The factor that the target puts on the output of ``owner.embed_tokens``, as the target rounds it.

    Args:
        owner: module that holds the embedding; Gemma keeps the factor there, rounded to the model's dtype.
        config: the text model's Hugging Face config.
    """
    candidates = [getattr(owner, field, None) for field in OWNER_FIELDS]
    candidates += [getattr(config, field, None) for field in CONFIG_FIELDS]
    for found in candidates:
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            return float(found)
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            return float(found)
    return 1.0


def checked_embedding(embed_tokens: nn.Module | None, hidden_size: int) -> nn.Module:
    """``embed_tokens`` as it is.

    Raises:
        ValueError: there is none, or its width is not the draft's ``hidden_size``.
    """
    if embed_tokens is None:
        raise ValueError(
            "embed_tokens: the DFlash draft ships no embedding, and the target has none on this rank to share. Use a draft "
            "checkpoint with embed_tokens.weight, or pipeline_parallel_size 1."
        )
    width = getattr(embed_tokens, "embedding_dim", hidden_size)
    if width != hidden_size:
        raise ValueError(
            f"hidden_size: the DFlash draft has {hidden_size} and no embedding of its own; the target's embedding is {width} "
            "wide. Use a draft trained for this target."
        )
    return embed_tokens


def _owner(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """The module that multiplies: the parent of ``name``, or of the LoRA wrapper around it."""
    parent = name.rpartition(".")[0]
    while isinstance(modules[parent], BaseLayerWithLoRA):
        parent = parent.rpartition(".")[0]
    return modules[parent]
