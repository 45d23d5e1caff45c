# SPDX-License-Identifier: Apache-2.0
"""Speed without weights: a shape, dummy values, and acceptance drawn from given rates.

The rejection kernel still reads all logits, so time is real. Nothing that depends on draft quality can be judged; output is
noise. Needs a GPU: vLLM's CPU builds refuse synthetic rates.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from vllm_dflash.bench.prompts import random_prompts
from vllm_dflash.cli.failure import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class DummyShape:
    """Sizes of a target; its draft has layers of the same width."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    draft_layers: int = 5
    draft_block_size: int = 16


SHAPES = {
    "1b": DummyShape(hidden=1536, layers=28, heads=12, kv_heads=2, mlp=8960, vocab=151_936),
    "8b": DummyShape(hidden=4096, layers=36, heads=32, kv_heads=8, mlp=12_288, vocab=151_936),
    "32b": DummyShape(hidden=5120, layers=64, heads=64, kv_heads=8, mlp=25_600, vocab=151_936),
}
"""Shapes of Qwen2.5-1.5B, Qwen3-8B and Qwen3-32B."""
ENGINE = {"load_format": "dummy", "skip_tokenizer_init": True}


def write_dummy_pair(name: str, folder: Path) -> tuple[str, str]:
    """Folders of target and draft that hold a config.json only.

    Raises:
        UserError: no such shape.
    """
    if name not in SHAPES:
        raise UserError(f"--dummy: found {name!r}; expected one of {', '.join(SHAPES)}.")
    shape = SHAPES[name]
    common = {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 128,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    count = shape.draft_layers
    draft = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": count,
        "block_size": shape.draft_block_size,
        "num_target_layers": shape.layers,
        "layer_types": ["full_attention"] * count,
        "dflash_config": {
            "mask_token_id": shape.vocab - 267,
            "target_layer_ids": [1 + i * (shape.layers - 4) // (count - 1) for i in range(count)],
        },
    }
    target = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": shape.layers}
    for place, config in (("target", common | target), ("draft", common | draft)):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder / "target"), str(folder / "draft")


def synthetic(survival: float, k: int) -> dict[str, Any]:
    """Speculative config that accepts the first n drafts with probability survival^n, whatever they are."""
    return {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(survival**n, 6) for n in range(1, k + 1)],
    }


def dummy_prompts(name: str, length: int) -> list[list[int]]:
    """Random token ids, enough for 256 different requests."""
    return random_prompts(SHAPES[name].vocab - 1000, length, 256)
