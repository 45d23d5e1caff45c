# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 with a target that has no aux hidden state interface of its own: captured through hooks."""

import sys
from pathlib import Path

import tiny_models
from tiny_models import Draft, Target

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check

STABLELM = Target(model_type="stablelm", hidden=128, heads=4, kv_heads=4, head_dim=32)


def test_hooked_target_drafts_as_the_reference(tmp_path, engine_of, prompts):
    """Breaks if the hooks are installed after the runner has looked for the interface, or read another value."""
    from reference_check import Reference

    draft = Draft(layer_ids=(2, 0), heads=4, kv_heads=4, block=4)
    folders = (
        tiny_models.write_target(tmp_path / "target", STABLELM),
        tiny_models.write_draft(tmp_path / "draft", draft, STABLELM),
    )
    engine = engine_of(*map(str, folders), max_num_batched_tokens=32)
    proposals = engine.watch(prompts)
    outputs = engine.generate(prompts, 14)
    reference = Reference(*folders)
    assert outputs == reference.answers(prompts, 14)
    texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
    log = [(number, anchor + 1, drafts) for (number, anchor), drafts in proposals.items()]
    assert reference.wrong_drafts(texts, log) == []
    assert len(log) > 20
