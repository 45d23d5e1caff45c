# SPDX-License-Identifier: Apache-2.0
"""The reference draft against transformers' Qwen3 where the two are the same thing, and against plain arithmetic elsewhere."""

import copy
from pathlib import Path
from runpy import run_path

import pytest
import torch

from vllm_dflash.checkpoint import CheckpointError, LayerAttention, parse_draft_config
from vllm_dflash.reference.model import Rope, visible

VOCAB, MASK = 24, 3


def context_of(draft, aux):
    context = draft.new_context()
    draft.extend_context(context, aux)
    return context


def qwen3_with(draft, **changes):
    """transformers' Qwen3 with the draft's layers and final norm; fc and hidden_norm have no counterpart there."""
    from transformers import Qwen3Config, Qwen3Model

    c = draft.config
    config = Qwen3Config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=c.rope.parameters,
        attention_bias=c.attention_bias,
        **changes,
    )
    model = Qwen3Model(config).eval()
    ours = {name: value for name, value in draft.state_dict().items() if not name.startswith(("fc.", "hidden_norm."))}
    missing = model.load_state_dict(ours, strict=False)
    assert missing.missing_keys == ["embed_tokens.weight"]
    assert not missing.unexpected_keys
    return model


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "attention bias"])
def test_causal_layers_without_context_are_qwen3(target_of, draft_of, bias):
    """Breaks when norms, projections, biases, rope, residuals or the MLP differ from the model that drafts are shaped like."""
    draft = draft_of(target_of(VOCAB), is_causal=True, attention_bias=bias)
    logits = draft.block_logits(draft.new_context(), anchor=7, num_speculative_tokens=5)
    block = draft.embed(torch.tensor([7] + [MASK] * 5))
    hidden = qwen3_with(draft)(inputs_embeds=block[None]).last_hidden_state[0]
    torch.testing.assert_close(logits, hidden[1:] @ draft.head.T, rtol=1e-5, atol=1e-5)


def test_sliding_layers_without_context_are_qwen3(target_of, draft_of):
    """Breaks when a window of w counts w - 1 or w + 1 tokens."""
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}
    draft = draft_of(target_of(VOCAB), is_causal=True, **sliding)
    logits = draft.block_logits(draft.new_context(), anchor=7, num_speculative_tokens=5)
    block = draft.embed(torch.tensor([7] + [MASK] * 5))
    hidden = qwen3_with(draft, **sliding)(inputs_embeds=block[None]).last_hidden_state[0]
    torch.testing.assert_close(logits, hidden[1:] @ draft.head.T, rtol=1e-5, atol=1e-5)


def test_context_rows_are_keys_and_values_of_earlier_tokens(target_of, draft_of):
    """Breaks when context positions, the context norm, K-norm or rope are off.

    One layer whose context equals what Qwen3 would feed itself: fc is the identity and hidden_norm is input_layernorm.
    """
    target = target_of(VOCAB)
    draft = draft_of(
        target,
        is_causal=True,
        num_hidden_layers=1,
        dflash_config={"target_layer_ids": [0]},
        edit={"fc.weight": lambda w: torch.eye(len(w))},
    )
    draft.hidden_norm.weight.data = draft.layers[0].input_layernorm.weight.data
    ids = torch.tensor([5, 9, 1, 12, 7] + [MASK] * 5)
    rows = draft.embed(ids)
    logits = draft.block_logits(context_of(draft, rows[:4]), anchor=7, num_speculative_tokens=5)
    hidden = qwen3_with(draft)(inputs_embeds=rows[None]).last_hidden_state[0]
    torch.testing.assert_close(logits, hidden[5:] @ draft.head.T, rtol=1e-5, atol=1e-5)


def test_visible_keys_written_out():
    """Breaks when the window or causality is read differently from: w keys back with oneself, and forwards if not causal."""
    rows, keys = torch.tensor([4, 5, 6]), torch.arange(7)

    def seen(window, causal):
        return [row.nonzero().flatten().tolist() for row in visible(rows, keys, LayerAttention(window, causal))]

    assert seen(None, causal=False) == [[0, 1, 2, 3, 4, 5, 6]] * 3
    assert seen(None, causal=True) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]
    assert seen(3, causal=True) == [[2, 3, 4], [3, 4, 5], [4, 5, 6]]
    assert seen(2, causal=False) == [[3, 4, 5], [4, 5, 6], [5, 6]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_context", [7, 8, 9], ids=["w-1", "w", "w+1"])
def test_what_lies_outside_the_window_has_no_influence(target_of, draft_of, aux_of, num_context, causal):
    """Breaks when the window is applied to the context only, or is one token too long or too short.

    The anchor is at position n with w = 8: it sees positions n-7 and up, the last drafting row n-2 and up.
    """
    window = 8
    draft = draft_of(
        target_of(VOCAB),
        num_hidden_layers=1,
        is_causal=causal,
        layer_types=["sliding_attention"],
        sliding_window=window,
    )
    aux = aux_of(num_context)

    def rows_changed_by(position):
        changed = aux.clone()
        changed[position] += 5
        before, after = (draft.block_logits(context_of(draft, a), 7, 5) for a in (aux, changed))
        return ((before - after).abs().amax(dim=-1) > 1e-4).tolist()

    for position in range(num_context):
        expected = [row - position < window for row in range(num_context + 1, num_context + 6)]
        assert rows_changed_by(position) == expected, f"context position {position}"


def test_rows_see_later_rows_only_when_not_causal(target_of, draft_of, aux_of):
    """Breaks when causality is ignored: the first draft of a non-causal block depends on how many masks follow it."""
    for causal in (True, False):
        draft = draft_of(target_of(VOCAB), is_causal=causal)
        context = context_of(draft, aux_of(4))
        short, long = (draft.block_logits(context, 7, k)[0] for k in (1, 5))
        assert torch.allclose(short, long, atol=1e-5) is causal


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_is_transformers_rope(draft_of, target_of, rope):
    """Breaks when a scaling or its attention factor is dropped (Kimi drafts need a factor of 1.416)."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    draft = draft_of(target_of(VOCAB), rope_parameters=rope | {"rope_theta": 10000.0})
    x, positions = torch.randn(6, 4, draft.config.head_dim), torch.tensor([0, 1, 17, 63, 64, 200])
    cos, sin = Qwen3RotaryEmbedding(qwen3_with(draft, max_position_embeddings=256).config)(x, positions[None])
    expected = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0]
    torch.testing.assert_close(draft.rope(x, positions), expected, rtol=1e-5, atol=1e-5)


def rope_with(draft, **changes):
    config = copy.copy(draft.config)
    rope = copy.copy(config.rope)
    for name, value in changes.items():
        object.__setattr__(rope, name, value)
    object.__setattr__(config, "rope", rope)
    return Rope(config)


def test_interleaved_rope_is_neox_on_reordered_channels(draft_of, target_of):
    """Breaks when pairs (2i, 2i+1) are not rotated together; a mix-up leaves an acceptance length near 1."""
    draft = draft_of(target_of(VOCAB))
    x, positions = torch.randn(5, 2, 8), torch.tensor([0, 3, 9, 50, 77])
    pairs_last = [0, 2, 4, 6, 1, 3, 5, 7]
    expected = torch.empty_like(x)
    expected[..., pairs_last] = rope_with(draft, is_neox=True)(x[..., pairs_last], positions)
    torch.testing.assert_close(rope_with(draft, is_neox=False)(x, positions), expected)


def test_partial_rope_leaves_the_rest_of_the_head_alone(draft_of, target_of):
    """Breaks when a stated partial rotation turns the whole head, or uses the frequencies of the whole head."""
    draft = draft_of(target_of(VOCAB), dflash_config={"partial_rotary_factor": 0.5})
    x, positions = torch.randn(3, 2, 8), torch.tensor([1, 5, 40])
    half_head = draft_of(target_of(VOCAB), head_dim=4).rope(x[..., :4], positions)
    torch.testing.assert_close(draft.rope(x, positions), torch.cat([half_head, x[..., 4:]], dim=-1))


def test_reduced_vocabulary_maps_to_target_ids(target_of, draft_of, aux_of):
    """Breaks when d2t is read as absolute ids instead of offsets, or the target's head replaces the draft's own."""
    target_ids = torch.tensor([1, 2, 5, 7, 11, 13, 17, 19])
    head = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    tensors = {"d2t": target_ids - torch.arange(8), "t2d": torch.zeros(VOCAB, dtype=torch.bool), "lm_head.weight": head}
    draft = draft_of(target_of(VOCAB), draft_vocab_size=8, tensors=tensors)
    logits = draft.block_logits(context_of(draft, aux_of(3)), 7, 5)
    assert logits.shape == (5, 8)
    assert torch.equal(draft.head, head)
    assert torch.equal(draft.to_target_ids(torch.arange(8)), target_ids)
    with pytest.raises(ValueError, match=r"d2t: no such tensor; needed \[8\]"):
        draft_of(target_of(VOCAB), draft_vocab_size=8, tensors={"lm_head.weight": head})


def test_own_mask_embedding_replaces_the_row_of_the_table(target_of, draft_of):
    """Breaks when mask_embedding.pt is ignored: masks would be embedded as an untrained vocabulary row."""
    own = torch.randn(32, generator=torch.Generator().manual_seed(4))
    target = target_of(VOCAB)
    for content in (own, {"embedding": own[None], "mask_token_id": MASK}):
        rows = draft_of(target, files={"mask_embedding.pt": content}).embed(torch.tensor([7, MASK]))
        assert torch.equal(rows, torch.stack([target.get_input_embeddings().weight[7], own]))
    with pytest.raises(ValueError, match="made for mask_token_id 9"):
        draft_of(target, files={"mask_embedding.pt": {"embedding": own, "mask_token_id": 9}})


def test_value_scale_scales_context_and_block(target_of, draft_of, aux_of):
    """Breaks when the scale is applied to query rows only, or to context rows only."""
    target, aux = target_of(VOCAB), aux_of(4)
    scaled = draft_of(target, dflash_config={"attention_value_scale": 2.0})
    doubled = draft_of(target, edit={f"layers.{i}.self_attn.v_proj.weight": lambda weight: 2 * weight for i in range(2)})
    a, b = (draft.block_logits(context_of(draft, aux), 7, 5) for draft in (scaled, doubled))
    torch.testing.assert_close(a, b)


def test_a_sink_takes_attention_away(target_of, draft_of, aux_of):
    """Breaks when the sink logit is ignored, or adds a value: an infinite sink must leave no attention output at all."""
    target, aux = target_of(VOCAB), aux_of(4)
    plain, sinking = draft_of(target), draft_of(target, dflash_config={"attention_sink_bias": True})
    mute = draft_of(target, edit={f"layers.{i}.self_attn.o_proj.weight": torch.zeros_like for i in range(2)})
    for sink, same_as in ((-1e4, plain), (1e4, mute)):
        sinks = {f"layers.{i}.self_attn.attention_sink_bias": torch.full((4,), sink) for i in range(2)}
        sinking.load_state_dict(plain.state_dict() | sinks)
        logits, expected = (draft.block_logits(context_of(draft, aux), 7, 5) for draft in (sinking, same_as))
        torch.testing.assert_close(logits, expected)


def test_drafts_sampled_from_the_anchor_use_k_rows(target_of, draft_of, aux_of):
    """Breaks when such a draft gets K + 1 rows, or its anchor row is thrown away (acceptance below 1 %)."""
    target, aux = target_of(VOCAB), aux_of(4)
    anchored, classic = draft_of(target, sample_from_anchor=True, block_size=3), draft_of(target)
    assert anchored.config.max_num_speculative_tokens == 3
    logits = anchored.block_logits(context_of(anchored, aux), 7, 3)
    torch.testing.assert_close(logits[1:], classic.block_logits(context_of(classic, aux), 7, 2))


def test_context_grown_in_pieces_equals_context_at_once(target_of, draft_of, aux_of):
    """Breaks when positions restart with each piece, or `prefix` cuts at the wrong end."""
    draft, aux = draft_of(target_of(VOCAB)), aux_of(9)
    whole, grown = context_of(draft, aux), draft.new_context()
    for piece in aux.split([4, 1, 4]):
        draft.extend_context(grown, piece)
    assert grown.num_tokens == 9
    torch.testing.assert_close(draft.block_logits(grown, 7, 5), draft.block_logits(whole, 7, 5))
    before = context_of(draft, aux[:6])
    torch.testing.assert_close(draft.block_logits(whole.prefix(6), 7, 5), draft.block_logits(before, 7, 5))


def test_mistakes_are_explained(target_of, draft_of, aux_of):
    """Breaks when K above the trained block, a left-over tensor or an unfit target gets through."""
    target = target_of(VOCAB)
    draft = draft_of(target)
    with pytest.raises(CheckpointError, match="num_speculative_tokens: 6 is more than"):
        draft.block_logits(draft.new_context(), 7, 6)
    with pytest.raises(ValueError, match=r"(?s)the weights do not fit config.json.*markov_head"):
        draft_of(target, tensors={"markov_head.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"embed_tokens: found \[24, 32\], needed at least 48 rows"):
        draft_of(target, vocab_size=48)


def test_captured_layers_come_in_the_order_of_the_config(target_of):
    """Breaks when capture is off by one, sorted, de-duplicated, or takes the last layer after the final norm."""
    from vllm_dflash.reference.decode import Target

    model = target_of(VOCAB)
    ids = [1, 5, 2, 9]
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    logits, aux = Target(model, (2, 0, 2, 3)).forward(ids)
    parts = aux.split(32, dim=-1)
    for layer_id, part in zip((2, 0, 2), parts[:3], strict=True):
        torch.testing.assert_close(part, states[layer_id + 1][0])
    torch.testing.assert_close(model.model.norm(parts[3]), states[-1][0])  # transformers hands the last one out normed
    torch.testing.assert_close(logits, model(torch.tensor([ids])).logits[0])


def test_config_of_the_fixture_is_what_these_tests_assume():
    """Breaks when the parser's defaults move under these tests: two full, non-causal layers, five drafts."""
    draft_json = run_path(str(Path(__file__).with_name("conftest.py")))["draft_json"]
    config = parse_draft_config(draft_json(VOCAB))
    assert config.layers == (LayerAttention(None, causal=False),) * 2
    assert (config.max_num_speculative_tokens, config.target_layer_ids) == (5, (2, 0))
