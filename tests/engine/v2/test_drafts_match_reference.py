# SPDX-License-Identifier: Apache-2.0
"""Every draft of the V2 engine equals the plain-PyTorch reference: eager, in chunks, and in steps padded as a replay's."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check

SLIDING = ("use_sliding_window", True), ("sliding_window", 7)
DRAFTS = {
    "full, non-causal": {},
    "two KV groups: windowed causal, full non-causal": {
        "config": (("layer_types", ["sliding_attention", "full_attention"]), *SLIDING)
    },
    "windowed, non-causal, layer ids descending": {
        "config": (("layer_types", ["sliding_attention"] * 2), *SLIDING, ("is_causal", False)),
        "layer_ids": (2, 0),
    },
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_equal_the_reference(kind, target, make_draft, prompts, engine_of):
    """Breaks if metadata (causality, window, lengths), inputs or the context KV differ from the algorithm."""
    from reference_check import Reference

    draft = make_draft(**DRAFTS[kind])
    long = [(5 * i * i + i + 9) % 150 for i in range(50)]
    engine = engine_of(target, draft, max_num_batched_tokens=32)
    proposals = engine.watch([*prompts, long])
    outputs = engine.generate([*prompts, long], 14)
    reference = Reference(Path(target), Path(draft))
    assert outputs == reference.answers([*prompts, long], 14)
    texts = [p + o for p, o in zip([*prompts, long], outputs, strict=True)]
    log = [(number, anchor + 1, drafts) for (number, anchor), drafts in proposals.items()]
    assert reference.wrong_drafts(texts, log) == []
    assert len(log) > 40
    assert len(engine.speculator.attention.group_ids) == (2 if "two" in kind else 1)
    if "two" in kind:
        # The draft's own KV group leaves the runner's list: otherwise every target step builds metadata for it.
        runners = {name for row in engine.runner.attn_groups for group in row for name in group.layer_names}
        assert engine.speculator.model.get_draft_kv_cache_layer_names()[0] not in runners
