# SPDX-License-Identifier: Apache-2.0
"""Draft configs as public checkpoints write them, cut down to the keys that matter."""

from typing import Any

ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "block_size": 16,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
"""z-lab's dialect: everything flat but the two keys in dflash_config (Qwen3-4B-DFlash-b16)."""

SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "block_size": 8,
    "draft_vocab_size": 32000,
    "mask_token_id": 151669,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "sliding_window_non_causal": False,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    },
}
"""The speculators dialect: layer shapes nested, layer ids already one higher (Qwen3-8B-speculator.dflash)."""


def changed(config: dict[str, Any], *removed: str, **changes: Any) -> dict[str, Any]:
    """A deep enough copy without `removed` and with `changes`; `a__b` is key b of the nested object a."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for path in removed:
        place, _, key = path.rpartition("__")
        del (result[place] if place else result)[key]
    for path, value in changes.items():
        place, _, key = path.rpartition("__")
        (result[place] if place else result)[key] = value
    return result


def zlab(*removed: str, **changes: Any) -> dict[str, Any]:
    """`ZLAB` with changes."""
    return changed(ZLAB, *removed, **changes)


def speculators(*removed: str, **changes: Any) -> dict[str, Any]:
    """`SPECULATORS` with changes."""
    return changed(SPECULATORS, *removed, **changes)
