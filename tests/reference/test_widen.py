# SPDX-License-Identifier: Apache-2.0
"""The widened demo pair computes what the small one computes: same tokens, same drafts, same states, real weights, fp32."""

import pytest
import torch

from vllm_dflash.demo_pair.widen import PRESETS, WidenError, WideShape, widen

LAYERS, TAPS, TOKENS = 31, 5, 24
SHAPE = WideShape(hidden=768, layers=LAYERS, heads=12, kv_heads=3, head_dim=128, mlp=1600, vocab=49_300)
PROMPTS = ("Write a Python function that counts the vowels in a string.", "Explain what a tide is to a child.")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The small pair and the wide one: (target, draft) of the reference loop, and the tokenizer."""
    from tokenizers import Tokenizer

    from vllm_dflash.demo_pair.prepare import prepare
    from vllm_dflash.reference.decode import load_pair

    small = prepare()
    out = tmp_path_factory.mktemp("wide")
    wide = widen(small.target, small.draft, out, SHAPE, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(small.target / "tokenizer.json"))
    return load_pair(small.target, small.draft), load_pair(*wide), tokenizer


def ids_of(tokenizer, text):
    return tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids


def test_logits_and_captured_states_are_equal(pairs):
    """Breaks on a wrong factor, a rotary row in a wrong place, a query head in a wrong group, or a leaking channel."""
    (small, _), (wide, _), tokenizer = pairs
    ids = ids_of(tokenizer, " ".join(PROMPTS))
    (logits, aux), (wide_logits, wide_aux) = small.forward(ids), wide.forward(ids)
    hidden = aux.shape[-1] // TAPS
    wide_aux = wide_aux.view(len(ids), TAPS, SHAPE.hidden)
    size = aux.abs().max()
    assert (wide_aux[..., :hidden] - aux.view(len(ids), TAPS, hidden)).abs().max() < 1e-4 * size
    assert (wide_aux[..., hidden] == 2.0**-10).all()
    assert (wide_aux[..., hidden + 1 :] == 0).all()
    vocab = logits.shape[-1]
    assert (wide_logits[..., :vocab] - logits).abs().max() < 1e-3 * logits.abs().max()


def test_spare_tokens_have_no_probability(pairs):
    """Breaks if the marker gets lost: at temperature 1 spare tokens would be drawn, and greedy would pick one on flat logits."""
    _, (wide, draft), tokenizer = pairs
    logits, aux = wide.forward(ids_of(tokenizer, PROMPTS[0]))
    context = draft.new_context()
    draft.extend_context(context, aux)
    for rows in (logits, draft.block_logits(context, 17, 7)):
        spare = rows.float().softmax(-1)[..., 49_152:].sum(-1)
        assert spare.max() < 1e-12


@pytest.mark.parametrize("text", PROMPTS)
def test_tokens_and_drafts_are_equal(pairs, text):
    """Breaks if the draft of the wide pair proposes anything else: acceptance would not be the small pair's."""
    from vllm_dflash.reference.decode import speculative_decode

    small, wide, tokenizer = pairs
    ids = ids_of(tokenizer, text)
    expected, found = (speculative_decode(*pair, ids, TOKENS, num_speculative_tokens=7) for pair in (small, wide))
    assert found.tokens == expected.tokens
    assert found.accepted == expected.accepted


def test_presets_have_the_size_of_their_name():
    """Breaks when a preset's shape no longer fits its name, or no longer holds the demo pair."""
    for name, shape in PRESETS.items():
        assert shape.num_params / 1e9 == pytest.approx(float(name[:-1]), rel=0.08)


def test_a_shape_that_is_too_small_is_refused(tmp_path):
    """Breaks if weights are cut silently."""
    from vllm_dflash.demo_pair.prepare import prepare

    small = prepare()
    shape = WideShape(hidden=512, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49_152)
    with pytest.raises(WidenError, match=r"hidden: found 512; expected at least 577"):
        widen(small.target, small.draft, tmp_path, shape)
