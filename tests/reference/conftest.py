# SPDX-License-Identifier: Apache-2.0
"""A tiny random target and drafts for it, written as checkpoints, so that loading is tested along the way."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, TARGET_LAYERS = 32, 4, 2, 8, 48, 4
MASK = 3


def randomise(module, seed):
    """Weights large enough that logits differ clearly and every part matters; norm weights differ per layer and channel."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(module.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data = 1 + 0.3 * noise
        else:
            parameter.data = noise * parameter.shape[-1] ** -0.5
    return module.requires_grad_(False).eval()


def make_target(vocab_size, seed=0):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    return randomise(Qwen3ForCausalLM(config), seed)


def draft_json(vocab_size, **changes):
    """config.json of a two-layer draft, z-lab style."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2, 0]},
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "vocab_size": vocab_size,
    }
    config["dflash_config"] |= changes.pop("dflash_config", {})
    return config | changes


@pytest.fixture
def target_of():
    """vocab_size -> random Qwen3 target."""
    return make_target


@pytest.fixture
def draft_of(tmp_path_factory):
    """(target, config changes, extra tensors) -> DFlashDraft loaded from a checkpoint with random weights."""
    from vllm_dflash.checkpoint import parse_draft_config
    from vllm_dflash.reference.model import DFlashDraft, load_draft

    def build(target, *, seed=1, tensors=None, files=None, edit=None, **changes):
        folder = tmp_path_factory.mktemp("draft")
        config = draft_json(**{"vocab_size": target.config.vocab_size} | changes)
        (folder / "config.json").write_text(json.dumps(config))
        shapes = DFlashDraft(parse_draft_config(config), torch.zeros(1, 1), torch.zeros(1, 1))
        weights = dict(randomise(shapes, seed).named_parameters()) | (tensors or {})
        for name in edit or {}:
            weights[name] = edit[name](weights[name])
        save_file({name: value.clone().contiguous() for name, value in weights.items()}, folder / "model.safetensors")
        for name, content in (files or {}).items():
            torch.save(content, folder / name)
        return load_draft(folder, target)

    return build


@pytest.fixture
def aux_of():
    """num_tokens -> random aux hidden states [n, 2 * H] for drafts of this folder."""
    return lambda num_tokens, seed=5: torch.randn(num_tokens, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed))
