# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2: sixteen requests at once, cold, warm and alone draft the same tokens, with two KV groups in the draft.

One group is windowed and shorter than the cached prefix, so that a hit brings back only a part of its blocks.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check

TOKENS = 6
SHARED = [(7 * i * i + 3 * i + 11) % 150 for i in range(64)]
CROWD = [[*SHARED, 20 + i, 3] for i in range(4)] + [[30 + i, 2 * i + 1, 9 * i + 4][: 1 + i % 3] for i in range(12)]


@pytest.fixture(scope="module")
def served(target, make_draft, engine_of):
    """(prompts -> (answers, {(number, anchor): drafts}), engine, reference)."""
    from reference_check import Reference

    windowed = ("layer_types", ["sliding_attention", "full_attention"]), ("use_sliding_window", True), ("sliding_window", 20)
    draft = make_draft(config=windowed)
    engine = engine_of(target, draft, max_num_seqs=16, max_num_batched_tokens=96, enable_prefix_caching=True, block_size=32)

    def serve(prompts):
        drafts = engine.watch(prompts)
        return engine.generate(prompts, TOKENS), drafts

    return serve, engine, Reference(Path(target), Path(draft))


def needed(drafts):
    """Without proposals behind the last token: vLLM 0.33 skips them only when no request of the batch needs drafts."""
    return {(i, anchor): found for (i, anchor), found in drafts.items() if anchor < len(CROWD[i]) + TOKENS - 1}


@pytest.fixture(scope="module")
def cold(served):
    return served[0](CROWD)


def test_sixteen_at_once_draft_as_the_reference(served, cold):
    """Breaks if a request's rows, slots or blocks mix with a neighbour's, or a chunk of a prompt is lost."""
    answers, drafts = cold
    assert answers == served[2].answers(CROWD, TOKENS)
    texts = [p + a for p, a in zip(CROWD, answers, strict=True)]
    assert served[2].wrong_drafts(texts, [(number, anchor + 1, found) for (number, anchor), found in drafts.items()]) == []
    assert len(needed(drafts)) >= 5 * 16 - 8


def test_a_warm_cache_gives_the_same_drafts(served, cold):
    """Breaks if cached blocks lack the draft's K/V in one of its groups, or a hit is longer than what the window kept."""
    before = hits(served[1])
    answers, drafts = served[0](CROWD[:6])
    assert hits(served[1]) - before >= 4 * 32  # of two blocks of 32; 0.32 recomputes the last one
    assert answers == cold[0][:6]
    assert needed(drafts) == {key: found for key, found in needed(cold[1]).items() if key[0] < 6}


def test_alone_the_drafts_are_the_same(served, cold):
    """Breaks if proposals depend on what else is in the batch."""
    answers, drafts = served[0](CROWD[2:3])
    assert answers == cold[0][2:3]
    assert {(2, anchor): found for (_, anchor), found in needed(drafts).items()} == {
        key: found for key, found in needed(cold[1]).items() if key[0] == 2
    }


def hits(engine):
    return next(m.value for m in engine.llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
