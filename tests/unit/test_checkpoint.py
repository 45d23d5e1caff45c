# SPDX-License-Identifier: Apache-2.0
"""What each dialect of a draft's config means. A wrong value here never shows in the text, only in lost acceptance."""

import pytest
from draft_configs import SPECULATORS, ZLAB, changed, speculators, zlab

from vllm_dflash.checkpoint import claims_architectures, parse_draft_config, spread_layer_ids

SLIDING5 = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048}
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "rope_theta": 50000.0}

CASES = {
    # z-lab's dialect, one public checkpoint each
    "qwen3-4b": (ZLAB, {"dialect": "zlab", "target_layer_ids": (1, 9, 17, 25, 33), "max_num_speculative_tokens": 15}),
    "qwen3-8b": (zlab(hidden_size=4096), {"hidden_size": 4096, "target_hidden_size": 4096, "fc_input_size": 5 * 4096}),
    "llama3.1-8b, block 10": (zlab(block_size=10), {"draft_block_size": 10, "max_num_speculative_tokens": 9}),
    "gpt-oss, 8 layers": (
        zlab(num_hidden_layers=8, layer_types=["full_attention"] * 8, block_size=8),
        {"num_layers": 8, "max_num_speculative_tokens": 7},
    ),
    "qwen3.5-4b, eight taps": (
        zlab(dflash_config__target_layer_ids=[1, 5, 9, 13, 17, 21, 25, 29]),
        {"num_aux_layers": 8, "fc_input_size": 8 * 2560},
    ),
    "demo pair, eps and mask token": (
        zlab(rms_norm_eps=1e-5, dflash_config__mask_token_id=16),
        {"rms_norm_eps": 1e-5, "mask_token_id": 16},
    ),
    # target layers
    "descending ids keep their order": (
        zlab(dflash_config__target_layer_ids=[33, 25, 17, 9, 1]),
        {"target_layer_ids": (33, 25, 17, 9, 1)},
    ),
    "repeated ids are kept": (
        zlab(dflash_config__target_layer_ids=[5, 5, 9]),
        {"target_layer_ids": (5, 5, 9), "num_aux_layers": 3},
    ),
    "layer 0 is a layer output": (zlab(dflash_config__target_layer_ids=[0, 35]), {"target_layer_ids": (0, 35)}),
    "ids at the top level": (
        zlab("dflash_config__target_layer_ids", target_layer_ids=[3, 11]),
        {"target_layer_ids": (3, 11)},
    ),
    "dflash_config wins over the top level": (zlab(target_layer_ids=[3, 11]), {"target_layer_ids": (1, 9, 17, 25, 33)}),
    "eagle spelling is one higher": (
        zlab("dflash_config__target_layer_ids", eagle_aux_hidden_state_layer_ids=[2, 10]),
        {"target_layer_ids": (1, 9)},
    ),
    "missing ids spread over the target": (zlab("dflash_config__target_layer_ids"), {"target_layer_ids": (1, 9, 17, 25, 33)}),
    "another width of the target": (zlab(target_hidden_size=5120), {"target_hidden_size": 5120, "fc_input_size": 5 * 5120}),
    # block and mask token
    "block size defaults to 16": (zlab("block_size"), {"draft_block_size": 16}),
    "block size in dflash_config": (zlab("block_size", dflash_config__block_size=8), {"draft_block_size": 8}),
    "dspark spelling": (
        zlab("block_size", dspark_block_size=7, sample_from_anchor=True),
        {"draft_block_size": 7, "max_num_speculative_tokens": 7},
    ),
    "sampling from the anchor gives one more": (
        zlab(block_size=7, sample_from_anchor=True),
        {"max_num_speculative_tokens": 7, "sample_from_anchor": True},
    ),
    "mask token at the top level": (zlab("dflash_config__mask_token_id", mask_token_id=5), {"mask_token_id": 5}),
    "mask token 0 is an id": (zlab(dflash_config__mask_token_id=0), {"mask_token_id": 0}),
    "mask token, pard spelling": (zlab("dflash_config__mask_token_id", pard_token=7), {"mask_token_id": 7}),
    "mask token, dspark spelling": (zlab("dflash_config__mask_token_id", dspark_noise_token_id=8), {"mask_token_id": 8}),
    "mask token, ptd spelling": (zlab("dflash_config__mask_token_id", ptd_token_id=9), {"mask_token_id": 9}),
    # shapes
    "head_dim derived": (zlab("head_dim", num_attention_heads=20, num_key_value_heads=4), {"head_dim": 128}),
    "kv heads default to heads": (zlab("num_key_value_heads"), {"num_kv_heads": 32}),
    "no draft vocabulary": (ZLAB, {"draft_vocab_size": 151936}),
    "reduced draft vocabulary": (zlab(draft_vocab_size=32000), {"draft_vocab_size": 32000, "vocab_size": 151936}),
    "embedding scale of its own": (zlab(dflash_config__input_embedding_scale=12), {"embedding_scale": 12.0}),
    "embedding scale left to the target": (ZLAB, {"embedding_scale": None}),
    "extras of MiMo": (
        zlab(attention_value_scale=0.5, attention_sink_bias=True),
        {"value_scale": 0.5, "attention_sinks": True},
    ),
    # speculators dialect
    "speculators": (
        SPECULATORS,
        {"dialect": "speculators", "target_layer_ids": (1, 9, 17, 25, 33), "hidden_size": 4096, "draft_vocab_size": 32000},
    ),
    "speculators, block default": (speculators("block_size"), {"draft_block_size": 8, "max_num_speculative_tokens": 7}),
    "speculators, as vLLM rewrites it": (
        speculators(dflash_config={"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669}),
        {"target_layer_ids": (1, 9, 17, 25, 33)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_config_means_what_its_writer_meant(name):
    """A field read from the wrong place, or an id shifted by one, changes one of these."""
    config, expected = CASES[name]
    draft = parse_draft_config(config)
    assert {field: getattr(draft, field) for field in expected} == expected


ATTENTION_CASES = {
    "full layers see the whole block": (ZLAB, [(None, False)] * 5),
    "sliding layers of z-lab are causal": (zlab(**SLIDING5), [(2048, True)] * 4 + [(None, False)]),
    "unless the config says otherwise": (zlab(**SLIDING5, is_causal=False), [(2048, False)] * 4 + [(None, False)]),
    "a flag for all layers": (zlab(dflash_config__causal=True), [(None, True)] * 5),
    "window from dflash_config": (
        zlab(dflash_config__use_swa=True, dflash_config__swa_window_size=4096),
        [(4096, False)] * 5,
    ),
    "speculators say it for windows": (
        speculators(
            sliding_window_non_causal=True,
            transformer_layer_config=SPECULATORS["transformer_layer_config"] | SLIDING5,
        ),
        [(2048, False)] * 4 + [(None, False)],
    ),
    "speculators, causal windows": (
        speculators(transformer_layer_config=SPECULATORS["transformer_layer_config"] | SLIDING5),
        [(2048, True)] * 4 + [(None, False)],
    ),
    "layers of older configs": (
        zlab("layer_types", sliding_window=4096, use_sliding_window=True, max_window_layers=3),
        [(None, False)] * 3 + [(4096, True)] * 2,
    ),
    "a window that nobody asks for": (zlab("layer_types", sliding_window=4096), [(None, False)] * 5),
    "window without sliding layers is ignored": (zlab(sliding_window=4096, use_sliding_window=False), [(None, False)] * 5),
}


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_every_layer_has_its_own_window_and_causality(name):
    """One flag for all layers, or a dropped window, changes a row."""
    config, expected = ATTENTION_CASES[name]
    assert [(layer.window, layer.causal) for layer in parse_draft_config(config).layers] == expected


ROPE_CASES = {
    "flat theta": (ZLAB, 1e6, True, {"rope_type": "default", "rope_theta": 1e6}),
    "transformers 5": (
        zlab("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 1e7}),
        1e7,
        True,
        {"rope_type": "default", "rope_theta": 1e7},
    ),
    "kimi's yarn": (zlab("rope_theta", rope_parameters=YARN), 5e4, True, YARN),
    "old spelling of the type": (
        zlab(rope_scaling={"type": "linear", "factor": 2.0}),
        1e6,
        True,
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    ),
    "mrope of a vision target is dropped": (
        zlab(rope_scaling={"rope_type": "default", "mrope_section": [24, 20, 20]}),
        1e6,
        True,
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "copied partial rotation is dropped": (
        zlab(partial_rotary_factor=0.25),
        1e6,
        True,
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "stamped partial rotation counts": (
        zlab(dflash_config__partial_rotary_factor=0.5),
        1e6,
        True,
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    ),
    "rope_dim copied into the rope parameters is dropped": (
        zlab(rope_scaling={"rope_type": "default", "rope_dim": 64}),
        1e6,
        True,
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "mrope without its section": (
        zlab(rope_scaling={"type": "mrope"}),
        1e6,
        True,
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "an old name of longrope": (
        zlab(rope_scaling={"type": "su", "long_factor": [2.0], "short_factor": [1.0], "original_max_position_embeddings": 4096}),
        1e6,
        True,
        {
            "rope_type": "longrope",
            "long_factor": [2.0],
            "short_factor": [1.0],
            "rope_theta": 1e6,
            "original_max_position_embeddings": 4096,
        },
    ),
    "both spellings of the type": (
        zlab(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2.0}),
        1e6,
        True,
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    ),
    **{
        f"{kind} from the maximum length": (
            zlab(rope_scaling={"rope_type": kind} | extra),
            1e6,
            True,
            {"rope_type": kind, "rope_theta": 1e6, "original_max_position_embeddings": 40960} | extra,
        )
        for kind, extra in {
            "yarn": {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "longrope": {"long_factor": [2.0], "short_factor": [1.0]},
        }.items()
    },
    "trained length at the top level wins": (
        zlab("rope_theta", rope_parameters=YARN, original_max_position_embeddings=8192),
        5e4,
        True,
        YARN | {"original_max_position_embeddings": 8192},
    ),
    "equal ropes per layer type": (
        zlab("rope_theta", rope_parameters={"full_attention": YARN, "sliding_attention": YARN}),
        5e4,
        True,
        YARN,
    ),
    "the rope of the only layer type": (
        zlab("rope_theta", rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}),
        5e4,
        True,
        YARN,
    ),
    "interleaved only when said": (zlab(rope_interleaved=True), 1e6, False, {"rope_type": "default", "rope_theta": 1e6}),
}


@pytest.mark.parametrize("name", ROPE_CASES)
def test_rope_is_the_drafts_own(name):
    """A rope that is copied from the target, or scaled by a factor that nobody trained, changes a value."""
    config, theta, is_neox, parameters = ROPE_CASES[name]
    rope = parse_draft_config(config).rope
    assert (rope.theta, rope.is_neox, rope.parameters) == (theta, is_neox, parameters)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (zlab("block_size"), "block_size missing: assumed 16"),
        (zlab("dflash_config__target_layer_ids"), "target_layer_ids missing"),
        (zlab(partial_rotary_factor=0.25), "partial_rotary_factor 0.25 ignored"),
        (zlab("head_dim", num_attention_heads=20, num_key_value_heads=4), "head_dim missing"),
        (zlab(rope_scaling={"rope_type": "default", "rope_dim": 64}), "rope_dim in the rope parameters ignored"),
        (
            zlab(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
            "original_max_position_embeddings missing: assumed max_position_embeddings = 40960",
        ),
        (zlab("rms_norm_eps"), "rms_norm_eps missing: assumed 1e-06"),
        (zlab(block_size=7), "sample_from_anchor missing: assumed false, so that blocks of 7 draft 6 tokens"),
        (zlab("layer_types", sliding_window=4096), "sliding_window 4096 ignored"),
        (
            zlab("layer_types", sliding_window=4096, use_sliding_window=True, max_window_layers=3),
            "layer_types missing: assumed that layers from max_window_layers = 3 on slide",
        ),
        (
            speculators("sliding_window_non_causal", transformer_layer_config=SPECULATORS["transformer_layer_config"] | SLIDING5),
            "sliding_window_non_causal missing: assumed false",
        ),
        (zlab(final_logit_softcapping=30.0), "final_logit_softcapping ignored"),
        (zlab("max_position_embeddings"), "max_position_embeddings missing: assumed 32768"),
    ],
)
def test_an_assumption_is_noted(config, note):
    """An assumption without a note is one that nobody can find when acceptance is low."""
    assert any(found.startswith(note) for found in parse_draft_config(config).notes)
    assert parse_draft_config(ZLAB).notes == ()


@pytest.mark.parametrize(
    ("layers", "target_layers", "expected"),
    [
        (5, 36, (1, 9, 17, 25, 33)),
        (5, 32, (1, 8, 15, 22, 29)),
        (5, 24, (1, 6, 11, 16, 21)),
        (8, 64, (1, 10, 18, 27, 35, 44, 52, 61)),
        (1, 36, (1,)),
    ],
)
def test_default_taps_are_the_papers(layers, target_layers, expected):
    """Public checkpoints for targets of these depths state these very ids; breaks if a guess would read other layers."""
    assert spread_layer_ids(layers, target_layers) == expected


@pytest.mark.parametrize(
    ("names", "ours"),
    [
        (["DFlashDraftModel"], True),
        (["Qwen3DFlashDraftModel"], True),
        (["DFlash2DraftModel"], False),
        (["LiLiCorrDraftModel"], False),
        (["DFlashQwen3XPressForCausalLM"], False),
        (["DFlashDraftModel", "DFlash2DraftModel"], False),
        ([], False),
        (None, False),
    ],
)
def test_only_plain_dflash_is_claimed(names, ours):
    """A prefix test would claim DFlash2 and lose its extra heads silently."""
    assert claims_architectures(names) is ours


def test_parsing_leaves_the_config_alone():
    """vLLM goes on to use the same dictionary; breaks if parsing takes a field out or writes one in."""
    config = zlab(rope_scaling={"type": "linear", "factor": 2.0, "mrope_section": [1]})
    before = changed(config)
    parse_draft_config(config)
    assert config == before
