# SPDX-License-Identifier: Apache-2.0
"""Targets that scale their embeddings outside the shared table: the draft reads scaled rows, as it did in training."""

import pytest
from reference_check import Reference
from tiny_models import Draft, Target

TARGETS = {
    "gemma2": (
        Target(model_type="gemma2", hidden=128, heads=4, kv_heads=2),
        Draft(heads=4),
        128**0.5,
    ),  # and no LM head of its own: tied to the embedding
    "granite": (Target(model_type="granite", hidden=128, heads=4, kv_heads=2), Draft(heads=4), 3.0),
    "granite, the draft states another scale": (
        Target(model_type="granite", hidden=128, heads=4, kv_heads=2),
        Draft(heads=4, dflash=(("input_embedding_scale", 0.4),)),
        0.4,
    ),
    "granite, the draft's own table": (
        Target(model_type="granite", hidden=128, heads=4, kv_heads=2),
        Draft(heads=4, own_embedding=True),
        1.0,
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_drafts_read_the_scaled_embedding(name, write_pair, engine_of, prompts, monkeypatch):
    """Breaks if the raw table is shared without the target's factor, or a factor is put on the draft's own table."""
    target, draft, scale = TARGETS[name]
    folders = write_pair(draft, target)
    engine = engine_of(*folders, speculative={"num_speculative_tokens": 7})
    log = engine.record(monkeypatch)
    outputs = engine.generate(prompts, 12)
    texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
    reference = Reference(*folders)
    backbone = engine.proposer.model.model
    assert backbone.embedding_scale == pytest.approx(scale)
    assert outputs == reference.answers(prompts, 12)
    assert reference.wrong_drafts(texts, log) == []
    log.clear()
    backbone.embedding_scale = 1.7 if scale == 1.0 else 1.0  # what the drafts would be without the rule
    assert engine.generate(prompts, 12) == outputs
    assert reference.wrong_drafts(texts, [(number - len(prompts), known, drafts) for number, known, drafts in log]) != []
