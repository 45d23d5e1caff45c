# SPDX-License-Identifier: Apache-2.0
"""Tiny random targets of the families that people serve, written by transformers itself from each family's own config class.

Three layers, hidden size 128, and what makes a family special switched on: soft caps, scaled embeddings, tied heads, windows
shorter than the prompts, partial rotation, experts.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, Target

WINDOW = 24
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of targets.

    Attributes:
        model_type: as transformers has it.
        vllm_class: "module:class" below vllm.model_executor.models.
        special: what is switched on, for the table in docs/requests.md.
        config: keys beyond the common ones.
        capture: how hidden states are read, "native" or "hook".
        embedding_scale: factor on embeddings that the draft borrows.
        engine: engine options that this family needs.
    """

    model_type: str
    vllm_class: str
    special: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    capture: str = "native"
    embedding_scale: float = 1.0
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> Target:
        """What a draft for this target must agree with."""
        return Target(layers=3, hidden=128)


TIED = {"tie_word_embeddings": True}
GEMMA = TIED | {"query_pre_attn_scalar": 32, "sliding_window": WINDOW}
ONE_CACHE_GROUP = {"disable_hybrid_kv_cache_manager": True}
FAMILIES = {
    "Llama": Family(
        "llama",
        "llama:LlamaForCausalLM",
        "llama3 rope scaling",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "Qwen2": Family("qwen2", "qwen2:Qwen2ForCausalLM", "q/k/v biases, tied head", TIED),
    "Qwen3-MoE": Family("qwen3_moe", "qwen3_moe:Qwen3MoeForCausalLM", "4 experts, q/k norms", EXPERTS | {"num_experts": 4}),
    "Mistral": Family("mistral", "mistral:MistralForCausalLM", "a window in every layer", {"sliding_window": WINDOW}),
    "Gemma 2": Family(
        "gemma2",
        "gemma2:Gemma2ForCausalLM",
        "soft caps, scaled embeddings, tied head, windows in some layers",
        GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        "hook",
        128**0.5,
        ONE_CACHE_GROUP,
    ),
    "Gemma 3": Family(
        "gemma3_text",
        "gemma3:Gemma3ForCausalLM",
        "q/k norms, a rope per layer type, scaled embeddings, tied head, windows in some layers",
        GEMMA | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        "hook",
        128**0.5,
        ONE_CACHE_GROUP,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        "gpt_oss:GptOssForCausalLM",
        "4 experts with biases, attention sinks, windows in some layers",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        engine=ONE_CACHE_GROUP,
    ),
    "GLM-4": Family(
        "glm4", "glm4:Glm4ForCausalLM", "half of each head rotated, interleaved; four norms per layer", capture="hook"
    ),
    "Phi-3": Family("phi3", "phi3:Phi3ForCausalLM", "fused projections"),
    "Cohere": Family(
        "cohere",
        "commandr:CohereForCausalLM",
        "parallel attention and MLP, LayerNorm, scaled logits, tied head",
        TIED | {"logit_scale": 0.25},
        "hook",
    ),
}
"""Qwen3, StableLM and Granite are in other tests of this folder."""


def write_family(folder: Path, family: Family) -> Path:
    """Write config.json and weights of a random target; return ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(family.model_type, **common | family.config)
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.1 if name.endswith("bias") else 0.3)
            elif "embed" in name:  # a tied table drawn large answers each token with itself
                weight.normal_(std=0.25 / family.embedding_scale**0.5 if family.config.get("tie_word_embeddings") else 1.0)
            else:
                weight.normal_(std=1.4 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder
