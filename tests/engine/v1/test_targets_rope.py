# SPDX-License-Identifier: Apache-2.0
"""The draft's rotary tables in the engine are transformers', for each spelling that changes angles or their scale."""

import pytest
import torch

ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"type": "linear", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 128},
    "yarn with both mscale fields": {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "yarn with its own attention factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


@pytest.mark.parametrize("name", ROPES)
def test_tables_are_those_of_transformers(name):
    """Breaks if a factor, a ramp or the attention scale is dropped: the text stays right and acceptance is gone."""
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from vllm_dflash.checkpoint import parse_draft_config

    stated = {"rope_type": ROPES[name].get("type"), **ROPES[name], "rope_theta": 50000.0}
    shape = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 512}
    draft = parse_draft_config(
        shape
        | {
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "vocab_size": 100,
            "rope_theta": 50000.0,
            "rope_scaling": ROPES[name],
            "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1]},
        }
    )
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(64, max_position=512, is_neox_style=True, rope_parameters=dict(draft.rope.parameters))
    if stated["rope_type"] == "default":
        frequencies, scale = 50000.0 ** -(torch.arange(0, 64, 2) / 64), 1.0
    else:
        config = PretrainedConfig(**shape, rope_parameters=stated)
        frequencies, scale = ROPE_INIT_FUNCTIONS[stated["rope_type"]](config, torch.device("cpu"))
    angles = torch.arange(512)[:, None] * frequencies
    expected = scale * torch.cat([angles.cos(), angles.sin()], dim=-1)
    torch.testing.assert_close(rope.cos_sin_cache[:512].float(), expected, rtol=0, atol=1e-4)
