# SPDX-License-Identifier: Apache-2.0
"""Every draft token of the engine equals the plain-PyTorch reference, and greedy output equals plain decoding, in float32.

One engine per kind of draft; the batch mixes lengths, and the longest prompt is prefilled in chunks.
"""

import pytest
from reference_check import Reference
from tiny_models import Draft

SLIDING = ("layer_types", ["sliding_attention"] * 2), ("use_sliding_window", True), ("sliding_window", 7)
DRAFTS = {
    "odd shapes, layer ids descending": (Draft(layers=3, heads=3, kv_heads=1, head_dim=64, layer_ids=(2, 0)), 7),
    "ids repeated, own embedding and head, mask file": (
        Draft(layer_ids=(1, 0, 1), block=4, own_embedding=True, own_head=True, mask_file=True),
        3,
    ),
    "reduced vocabulary, K = 1": (Draft(draft_vocab=90, block=2), 1),
    "reduced vocabulary, K below the trained block": (Draft(draft_vocab=90, layer_ids=(2,), block=8), 5),
    "sliding window, non-causal": (Draft(config=(*SLIDING, ("is_causal", False)), block=4), 3),
    "sliding window, causal": (Draft(config=SLIDING, block=6), 5),
    "full attention, causal": (Draft(dflash=(("causal", True),), block=6), 5),
    "biases, value scale, other KV geometry": (
        Draft(biases=True, heads=4, kv_heads=4, head_dim=64, dflash=(("attention_value_scale", 0.6),)),
        7,
    ),
    "attention sinks, yarn, K of the trained block": (
        Draft(
            sinks=True,
            dflash=(("attention_sink_bias", True),),
            config=(
                (
                    "rope_parameters",
                    {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128},
                ),
            ),
        ),
        7,
    ),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_and_tokens_equal_the_reference(kind, write_pair, engine_of, prompts, monkeypatch):
    """Breaks if any part of the draft network, its loading, its inputs or its KV cache differs from the algorithm."""
    draft, width = DRAFTS[kind]
    folders = write_pair(draft)
    engine = engine_of(*folders, speculative={"num_speculative_tokens": width}, max_num_batched_tokens=64)
    log = engine.record(monkeypatch)
    outputs = engine.generate(prompts, 20)
    reference = Reference(*folders)
    assert outputs == reference.answers(prompts, 20)
    assert reference.wrong_drafts([p + o for p, o in zip(prompts, outputs, strict=True)], log) == []
    assert len(log) >= 60
