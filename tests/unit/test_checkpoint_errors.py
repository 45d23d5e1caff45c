# SPDX-License-Identifier: Apache-2.0
"""A config that cannot be served is refused in a sentence that names the field, what was found and what to do."""

import json

import pytest
from draft_configs import ZLAB, speculators, zlab
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dflash.checkpoint import (
    CheckpointError,
    DraftConfig,
    TargetFacts,
    check_pair,
    check_width,
    parse_draft_config,
    read_draft_config,
)

QWEN3_4B = TargetFacts(hidden_size=2560, num_layers=36, vocab_size=151936)

BAD_CONFIGS = {
    "no hidden size": (zlab("hidden_size"), "hidden_size: missing"),
    "hidden size as text": (zlab(hidden_size="2560"), "hidden_size: found '2560'; expected a positive integer"),
    "no layers": (zlab(num_hidden_layers=0), "num_hidden_layers: found 0; expected a positive integer"),
    "no heads": (zlab("num_attention_heads"), "num_attention_heads: missing"),
    "true is no number": (zlab(num_attention_heads=True), "num_attention_heads: found True"),
    "heads do not divide": (zlab(num_key_value_heads=5), "num_key_value_heads: 5 does not divide num_attention_heads = 32"),
    "head_dim not derivable": (
        zlab("head_dim", num_attention_heads=24),
        "head_dim: missing, and hidden_size 2560 is no multiple",
    ),
    "no vocabulary": (zlab("vocab_size"), "vocab_size: missing"),
    "no mlp": (zlab("intermediate_size"), "intermediate_size: missing"),
    "no mask token": (zlab("dflash_config__mask_token_id"), "mask_token_id: missing"),
    "mask token null": (zlab(dflash_config__mask_token_id=None), "mask_token_id: missing"),
    "mask token as text": (zlab(dflash_config__mask_token_id="<mask>"), "mask_token_id: found '<mask>'"),
    "negative mask token": (zlab(dflash_config__mask_token_id=-1), "mask_token_id: found -1"),
    "mask token outside": (zlab(dflash_config__mask_token_id=151936), "mask_token_id: 151936 is outside"),
    "block of one": (zlab(block_size=1), "block_size: 1 leaves no token to draft; expected at least 2"),
    "block as float": (zlab(block_size=16.0), "block_size: found 16.0; expected a positive integer"),
    "layer ids empty": (zlab(dflash_config__target_layer_ids=[]), "target_layer_ids: the list is empty"),
    "layer ids as a number": (zlab(dflash_config__target_layer_ids=5), "target_layer_ids: found 5; expected a list"),
    "layer ids with text": (zlab(dflash_config__target_layer_ids=[1, "9"]), "target_layer_ids: found [1, '9']"),
    "layer ids negative": (zlab(dflash_config__target_layer_ids=[-1, 9]), "target_layer_ids: found [-1, 9]"),
    "shifted id of the embedding": (
        speculators(aux_hidden_state_layer_ids=[0, 9]),
        "names a layer below the first decoder layer",
    ),
    "no layer ids, no depth": (zlab("dflash_config__target_layer_ids", "num_target_layers"), "target_layer_ids: missing"),
    "no theta": (zlab("rope_theta"), "rope_theta: found None; expected a positive number"),
    "theta zero": (zlab(rope_theta=0), "rope_theta: found 0"),
    "theta not finite": (zlab(rope_theta=float("inf")), "rope_theta: found inf"),
    "theta not finite, nested": (zlab(rope_parameters={"rope_theta": float("inf")}), "rope_theta: found inf"),
    "a rope type of tomorrow": (
        zlab(rope_scaling={"rope_type": "spiral"}),
        "rope_type: found 'spiral'; expected one of default,",
    ),
    "linear without its factor": (zlab(rope_scaling={"type": "linear"}), "factor: found None; expected a positive number"),
    "llama3 without a band": (
        zlab(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
        "high_freq_factor: found None; expected a positive number",
    ),
    "longrope without factors": (
        zlab(rope_scaling={"rope_type": "longrope", "short_factor": [1.0]}),
        "long_factor: found None; expected a list of numbers",
    ),
    "rope type as a number": (zlab(rope_scaling={"rope_type": 3}), "rope_type: found 3; expected text"),
    "rotating more than the head": (zlab(dflash_config__rope_dim=256), "partial_rotary_factor: found 2.0"),
    "ropes per layer type": (
        zlab(
            layer_types=["sliding_attention"] * 4 + ["full_attention"],
            sliding_window=64,
            rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        ),
        "rope_parameters: found other values per layer type (full_attention, sliding_attention)",
    ),
    "no rope for the layer type": (
        zlab(rope_parameters={"full_attention": None}),
        "rope_parameters: found other values per layer type (full_attention)",
    ),
    "yarn without any length": (
        zlab("max_position_embeddings", rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "original_max_position_embeddings: found None; expected a positive integer",
    ),
    "yarn's length as text": (
        zlab(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "4k"}),
        "original_max_position_embeddings: found '4k'",
    ),
    "embedding scale as text": (zlab(dflash_config__input_embedding_scale="8"), "input_embedding_scale: found '8'"),
    "rope not an object": (zlab(rope_scaling=[1]), "rope_scaling: found [1]; expected an object"),
    "dflash_config not an object": (zlab(dflash_config=7), "dflash_config: found 7; expected an object"),
    "layer types too few": (zlab(layer_types=["full_attention"]), "layer_types: 1 entries for num_hidden_layers = 5"),
    "layers of a hybrid target": (
        zlab(layer_types=["linear_attention"] * 4 + ["full_attention"]),
        "layer_types: found 'linear_attention'; expected 'full_attention' or 'sliding_attention'",
    ),
    "block named as in DSpark": (zlab("block_size", dspark_block_size=7), "sample_from_anchor: missing, and the block of 7"),
    "norms of Gemma": (zlab(use_gemma_norm=True), "use_gemma_norm: found True"),
    "layer types as text": (zlab(layer_types="full_attention"), "layer_types: found 'full_attention'"),
    "window missing": (zlab(layer_types=["sliding_attention"] * 5), "sliding_window: missing"),
    "causality as text": (zlab(is_causal="no"), "is_causal: found 'no'; expected true or false"),
    "draft vocabulary too large": (zlab(draft_vocab_size=200000), "draft_vocab_size: 200000 is more than vocab_size = 151936"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_bad_config_is_refused_in_a_sentence(name):
    """Breaks when a field is guessed, or a raw TypeError or KeyError comes through."""
    config, sentence = BAD_CONFIGS[name]
    with pytest.raises(CheckpointError) as error:
        parse_draft_config(config)
    message = str(error.value)
    assert sentence in message
    assert message.endswith((".", "?"))
    assert "\n" not in message


BAD_PAIRS = {
    "hidden size": (TargetFacts(4096, 36, 151936), "target_hidden_size: the DFlash draft expects a target with hidden size 2560"),
    "depth": (TargetFacts(2560, 40, 151936), "num_target_layers: the DFlash draft was trained on a target with 36 layers"),
    "vocabulary": (TargetFacts(2560, 36, 49152), "vocab_size: the DFlash draft has 151936 tokens; this target has 49152"),
}


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_a_draft_for_another_target_is_refused(name):
    """Breaks when a mismatch only shows as low acceptance, or as a shape error deep in the engine."""
    target, sentence = BAD_PAIRS[name]
    with pytest.raises(CheckpointError, match="Use a draft trained for this target") as error:
        check_pair(parse_draft_config(ZLAB), target)
    assert sentence in str(error.value)


def test_layer_ids_beyond_the_target_are_refused():
    """Breaks when an id equal to the number of layers passes: outputs are numbered from 0."""
    draft = parse_draft_config(zlab("num_target_layers", dflash_config__target_layer_ids=[1, 35, 36]))
    with pytest.raises(CheckpointError, match=r"target_layer_ids: .* target layers \[36\]; this target has layers 0 to 35"):
        check_pair(draft, QWEN3_4B)
    check_pair(parse_draft_config(zlab(dflash_config__target_layer_ids=[1, 35])), QWEN3_4B)


def test_a_padded_target_vocabulary_fits():
    """Breaks when vocabularies are compared for equality: targets pad theirs."""
    check_pair(parse_draft_config(ZLAB), TargetFacts(2560, 36, 152064))


def test_k_above_the_trained_block_is_refused():
    """Breaks when K = block size passes: at block size all positions collapse."""
    draft = parse_draft_config(ZLAB)
    for k in (1, 15):
        check_width(draft, k)
    with pytest.raises(CheckpointError, match=r"num_speculative_tokens: 16 is more .* Set it to 15 or less"):
        check_width(draft, 16)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "has no config.json"), ("{", "is not JSON"), ("[1]", "holds a list; expected an object"), ("", "is not JSON")],
)
def test_a_bad_file_is_refused(tmp_path, content, sentence):
    """Breaks when a truncated download ends in a traceback of json."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=sentence):
        read_draft_config(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    """Breaks when a typing error in the path reads as a broken checkpoint."""
    with pytest.raises(CheckpointError, match="no such folder"):
        read_draft_config(tmp_path / "nowhere")


def test_a_file_in_another_encoding_is_refused(tmp_path):
    """Breaks when bytes that are no UTF-8 escape as UnicodeDecodeError."""
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_draft_config(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200000) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = sorted(
    {*ZLAB, *ZLAB["dflash_config"], *speculators(), "rope_parameters", "rope_scaling", "use_swa", "rope_dim", "text_config"}
    | {"use_sliding_window", "sliding_window", "max_window_layers", "dspark_block_size", "use_gemma_norm", "sample_from_anchor"}
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([ZLAB, speculators()]), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), st.booleans())
def test_whatever_the_config_holds_the_answer_is_a_draft_or_a_sentence(base, changes, nested):
    """Breaks on any value that some reader forgets to check."""
    config = dict(base)
    if nested and isinstance(config.get("dflash_config"), dict):
        config["dflash_config"] = config["dflash_config"] | changes
    else:
        config |= changes
    try:
        draft = parse_draft_config(json.loads(json.dumps(config)))
    except CheckpointError:
        return
    assert isinstance(draft, DraftConfig)
    assert draft.max_num_speculative_tokens >= 1
    assert len(draft.layers) == draft.num_layers


ROPES = st.dictionaries(
    st.sampled_from(
        ["rope_type", "type", "rope_theta", "factor", "mrope_section", "partial_rotary_factor", "full_attention", "long_factor"]
    ),
    JSON | st.sampled_from(["linear", "yarn", "llama3", "longrope"]),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["rope_parameters", "rope_scaling"]), ROPES)
def test_whatever_the_rope_holds_the_answer_is_a_draft_or_a_sentence(key, rope):
    """Breaks when a nested rope value reaches arithmetic unchecked."""
    try:
        found = parse_draft_config(zlab(**{key: rope})).rope
    except CheckpointError:
        return
    assert 0 < found.theta < float("inf")
    assert isinstance(found.parameters["rope_type"], str)


@pytest.mark.parametrize("config", [None, [], "text", 7])
def test_a_config_that_is_no_object(config):
    """Breaks when the parser is handed something else and answers with an AttributeError."""
    with pytest.raises(CheckpointError, match="expected an object"):
        parse_draft_config(config)
