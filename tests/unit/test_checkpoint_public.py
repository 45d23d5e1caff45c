# SPDX-License-Identifier: Apache-2.0
"""Public checkpoints by the fields that their configs, logs and cards state, and mask tokens that no config states."""

import json

import pytest
import torch
from draft_configs import speculators, zlab

from vllm_dflash.checkpoint import CheckpointError, parse_draft_config, read_draft_config

FULL, SLIDING = "full_attention", "sliding_attention"


def qwen_like(layers, hidden, mlp, ids, block=16, *, window=None, mask=248070, **changes):
    """A z-lab config; with a window all layers slide but the last."""
    types = [FULL] * layers if window is None else [SLIDING] * (layers - 1) + [FULL]
    return zlab(
        "num_target_layers",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        block_size=block,
        layer_types=types,
        dflash_config__mask_token_id=mask,
        dflash_config__target_layer_ids=ids,
        **({"sliding_window": window} if window else {}),
        **{"vocab_size": 248320, **changes},
    )


PUBLIC = {
    # name: (config, K, layers, (windows), fc input, mask token)
    "Qwen3-Coder-30B-A3B-DFlash": (
        qwen_like(8, 2048, 6144, [1, 12, 23, 34, 45], mask=151669, vocab_size=151936),
        (15, 8, {None}, 5 * 2048, 151669),
    ),
    "Qwen3.5-4B-DFlash": (
        qwen_like(6, 2560, 9216, [1, 5, 9, 13, 17, 21, 25, 29], window=4096, mask=248077),
        (15, 6, {4096, None}, 8 * 2560, 248077),
    ),
    "Qwen3.5-122B-A10B-DFlash": (
        qwen_like(6, 3072, 9216, [1, 7, 14, 20, 26, 32, 39, 45], window=4096, mask=248077),
        (15, 6, {4096, None}, 8 * 3072, 248077),
    ),
    "Qwen3.6-27B-DFlash": (
        qwen_like(5, 5120, 17408, [1, 16, 31, 46, 61], window=2048, rope_theta=1e7),
        (15, 5, {2048, None}, 5 * 5120, 248070),
    ),
    "gemma-4-31B-it-DFlash": (
        qwen_like(
            5, 5376, 10752, [1, 12, 23, 35, 46, 57], window=2048, mask=4, num_attention_heads=64, final_logit_softcapping=30.0
        ),
        (15, 5, {2048, None}, 6 * 5376, 4),
    ),
    "gpt-oss-20b-DFlash": (
        qwen_like(8, 2880, 7680, [1, 6, 11, 16, 21], 8, num_attention_heads=64),
        (7, 8, {None}, 5 * 2880, 248070),
    ),
    "Kimi-K2.5-DFlash": (
        qwen_like(
            6,
            7168,
            18432,
            [1, 12, 24, 35, 47, 58],
            8,
            mask=163838,
            vocab_size=163840,
            num_attention_heads=64,
            rope_theta=50000.0,
            rope_scaling={"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
        ),
        (7, 6, {None}, 6 * 7168, 163838),
    ),
    "MiMo-V2.5-Pro-FP4-DFlash": (
        zlab(
            "layer_types",
            vocab_size=152576,
            block_size=8,
            partial_rotary_factor=0.5,
            attention_value_scale=0.612,
            dflash_config__use_swa=True,
            dflash_config__swa_window_size=1024,
        ),
        (7, 5, {1024}, 5 * 2560, 151669),
    ),
    "Muse-Glimmer-30B-assistant": (
        qwen_like(5, 2560, 9728, [1, 13, 25, 37, 49], num_target_layers=52),
        (15, 5, {None}, 5 * 2560, 248070),
    ),
    "Qwen3-8B-speculator.dflash": (speculators(), (7, 5, {None}, 5 * 4096, 151669)),
    "a draft of NeMo": (zlab(dflash_config__causal=False), (15, 5, {None}, 5 * 2560, 151669)),
    "DeepSpec's block of 7": (zlab(block_size=7, sample_from_anchor=True), (7, 5, {None}, 5 * 2560, 151669)),
    "SpecForge's Domino taps, the last layer among them": (
        zlab(num_target_layers=32, dflash_config__target_layer_ids=[3, 11, 19, 27, 31]),
        (15, 5, {None}, 5 * 2560, 151669),
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_checkpoint_is_read(name):
    """Breaks if a key that a real checkpoint has is refused, or read from another place."""
    config, (width, layers, windows, fc_input, mask) = PUBLIC[name]
    draft = parse_draft_config(config)
    assert (draft.max_num_speculative_tokens, draft.num_layers) == (width, layers)
    assert {layer.window for layer in draft.layers} == windows
    assert (draft.fc_input_size, draft.mask_token_id) == (fc_input, mask)
    assert draft.rope.parameters.get("partial_rotary_factor") is None


MASK = "<|mask|>"
TOKENIZERS = {
    "added tokens of the tokenizer's config": {
        "tokenizer_config.json": {"mask_token": MASK, "added_tokens_decoder": {"3": {"content": "<s>"}, "77": {"content": MASK}}}
    },
    "an object, and tokenizer.json": {
        "tokenizer_config.json": {"mask_token": {"content": MASK, "lstrip": False}},
        "tokenizer.json": {"added_tokens": [{"id": 77, "content": MASK}], "model": {"vocab": {}}},
    },
    "the plain vocabulary": {
        "special_tokens_map.json": {"mask_token": MASK},
        "tokenizer.json": {"model": {"vocab": {MASK: 77}}},
    },
    "added_tokens.json": {"tokenizer_config.json": {"mask_token": MASK}, "added_tokens.json": {MASK: 77}},
}


def write(folder, config, files):
    for name, content in {"config.json": config, **files}.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_mask_token_of_the_tokenizer(name, tmp_path):
    """Breaks if speculators' ``"mask_token_id": null`` is refused although the checkpoint tells, or taken without a word."""
    draft = read_draft_config(write(tmp_path, speculators(mask_token_id=None), TOKENIZERS[name]))
    assert draft.mask_token_id == 77
    assert f"mask_token_id missing: assumed 77, the tokenizer's mask token {MASK!r}" in draft.notes


def test_a_mask_token_of_the_trained_embedding(tmp_path):
    """The embedding was trained for that id, so it comes before the tokenizer's; the file is not unpickled."""
    write(tmp_path, zlab("dflash_config__mask_token_id"), TOKENIZERS["added_tokens.json"])
    torch.save({"embedding": torch.zeros(4), "mask_token_id": 1234}, tmp_path / "mask_embedding.pt")
    draft = read_draft_config(tmp_path)
    assert draft.mask_token_id == 1234
    assert "mask_token_id missing: assumed 1234, mask_embedding.pt" in draft.notes


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config.json": {"mask_token": None}},
        {"tokenizer_config.json": {"mask_token": MASK}},
        {"tokenizer_config.json": {"mask_token": MASK, "added_tokens_decoder": {"x": 5, "7": []}}, "added_tokens.json": [1]},
        {"tokenizer_config.json": [], "special_tokens_map.json": 5, "tokenizer.json": {"added_tokens": [1], "model": 2}},
        {"tokenizer_config.json": {"mask_token": MASK}, "added_tokens.json": {MASK: True}},
    ],
)
def test_no_mask_token_anywhere(files, tmp_path):
    """Breaks if an id is guessed, or if a strange tokenizer file ends in a traceback."""
    write(tmp_path, speculators(mask_token_id=None), files)
    torch.save(torch.zeros(4), tmp_path / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=r"mask_token_id: missing .* tokenizer has no mask token"):
        read_draft_config(tmp_path)


def test_the_configs_own_mask_token_counts(tmp_path):
    """Two ids occur for the same family of targets: the config is the one that was trained with."""
    write(tmp_path, zlab(), TOKENIZERS["added_tokens.json"])
    assert read_draft_config(tmp_path).mask_token_id == 151669
