# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused in one sentence (field, found, needed, cure), and leaves nothing half-registered."""

import shutil

import pytest
import torch
from tiny_models import Draft, Target, edit_config, edit_weights

DFLASH = {"num_speculative_tokens": 3}
CASES = {
    "mask token missing": (lambda f: edit_config(f, dflash_config={"mask_token_id": None}), r"mask_token_id: missing"),
    "layer id out of range": (
        lambda f: edit_config(f, num_target_layers=None, dflash_config={"target_layer_ids": [1, 9]}),
        r"target_layer_ids: .*target layers \[9\]; this target has layers 0 to 2",
    ),
    "another hidden size": (
        lambda f: edit_config(f, target_hidden_size=96),
        r"target_hidden_size: .*96; this target has 80|target_hidden_size: .*96; this target",
    ),
    "larger vocabulary": (lambda f: edit_config(f, vocab_size=200), r"vocab_size: .*200 tokens; this target has 160"),
    "missing tensor": (
        lambda f: edit_weights(f, {"layers.1.self_attn.k_norm.weight": None}),
        r"no tensors for 'model.layers.1.self_attn.k_norm.weight'",
    ),
    "extra trained head": (
        lambda f: edit_weights(f, {"selector.weight": torch.zeros(2, 2)}),
        r"unexpected tensors 'model.selector.weight'|unexpected tensors .*selector.weight",
    ),
    "fc of another width": (
        lambda f: edit_weights(f, {"fc.weight": torch.zeros(80, 80)}),
        r"fc.weight: found shape \[80, 80\]; config.json asks for \[80, 160\]",
    ),
    "misshapen tensor": (
        lambda f: edit_weights(f, {"norm.weight": torch.zeros(79)}),
        r"tensor '(model\.)?norm.weight' has shape \[79\]",
    ),
    "d2t missing": (
        lambda f: edit_weights(edit_config(f, draft_vocab_size=90), {"lm_head.weight": torch.zeros(90, 80)}),
        r"d2t: missing from the draft checkpoint",
    ),
    "mixed windows": (
        lambda f: edit_config(f, layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=16),
        r"mixed sliding/full dflash drafts",
    ),
}


@pytest.fixture
def broken(write_pair, tmp_path):
    """(edit) -> target folder and an edited copy of its draft."""

    def build(edit):
        target, draft = write_pair(Draft(block=4))
        return target, edit(shutil.copytree(draft, tmp_path / "draft"))

    return build


@pytest.mark.parametrize("case", CASES)
def test_bad_pairs_are_refused_in_a_sentence(case, broken, engine_of):
    """Breaks if a bad checkpoint is served (acceptance lost silently) or fails somewhere deep with a traceback only."""
    edit, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        engine_of(*broken(edit), speculative=DFLASH)


def test_more_drafts_than_trained_are_refused(write_pair, engine_of):
    """Breaks if K above the trained block is served: all positions collapse then, not only the extra ones."""
    with pytest.raises(ValueError, match=r"num_speculative_tokens: 6 is more .* Set it to 3 or less"):
        engine_of(*write_pair(Draft(block=4)), speculative={"num_speculative_tokens": 6})


def test_missing_draft_folder(write_pair, engine_of, tmp_path):
    """Breaks if a mistyped path gives no hint of the path."""
    with pytest.raises((ValueError, OSError), match="nowhere"):
        engine_of(write_pair()[0], tmp_path / "nowhere", speculative=DFLASH)


def test_a_good_engine_starts_after_the_errors(write_pair, engine_of, prompts):
    """Breaks if an error leaves a class or a name behind that the next engine of the process trips over."""
    target, draft = write_pair(Draft(block=4))
    with pytest.raises(ValueError, match="vocab_size"):
        engine_of(write_pair(None, Target(vocab=64, layers=3))[0], draft, speculative=DFLASH)
    plain = engine_of(target).generate(prompts[:2], 8)
    assert engine_of(target, draft, speculative=DFLASH).generate(prompts[:2], 8) == plain
