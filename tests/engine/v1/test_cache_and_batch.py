# SPDX-License-Identifier: Apache-2.0
"""Sixteen requests at once, cold, warm and one by one: the same draft tokens each time, and those of the reference.

Windowed drafts, because their cached blocks are kept by rules of their own; prompts are prefilled in chunks, end on, before and
behind the edge of a KV block, and half of them share a prefix of two blocks.
"""

import pytest
import torch
from reference_check import Reference
from tiny_models import VOCAB, Draft

K, TOKENS = 3, 12
SLIDING = ("layer_types", ["sliding_attention"] * 2), ("use_sliding_window", True), ("sliding_window", 20), ("is_causal", False)
LENGTHS = (70, 95, 96, 97, 65, 64, 66, 128, 5, 31, 32, 33, 1, 12, 48, 40)
"""Of the prompts; the first eight begin with the same 64 tokens."""


@pytest.fixture(scope="module")
def crowd():
    generator = torch.Generator().manual_seed(5)
    draw = lambda n: torch.randint(8, VOCAB, (n,), generator=generator).tolist()  # noqa: E731
    shared = draw(64)
    return [(shared + draw(n))[:n] if number < 8 else draw(n) for number, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def served(write_pair, engine_of):
    """(prompts -> (answers, {(number, known tokens): drafts}, counters), reference)."""
    folders = write_pair(Draft(block=K + 1, config=SLIDING))
    engine = engine_of(
        *folders,
        speculative={"num_speculative_tokens": K},
        max_num_seqs=16,
        max_num_batched_tokens=96,
        max_model_len=160,
        enable_prefix_caching=True,
    )

    def serve(prompts):
        with pytest.MonkeyPatch.context() as patch:
            log = engine.record(patch)
            answers, grown = engine.counted(lambda: engine.generate(prompts, TOKENS))
        first = min(number for number, _, _ in log)
        drafts = {(number - first, known): found for number, known, found in log}
        assert len(drafts) == len(log)
        return answers, drafts, grown

    return serve, Reference(*folders)


@pytest.fixture(scope="module")
def cold(served, crowd):
    return served[0](crowd)


def test_sixteen_at_once_draft_as_the_reference(served, crowd, cold):
    """Breaks if a request's rows, slots or blocks mix with a neighbour's, shared blocks included."""
    answers, drafts, _ = cold
    assert answers == served[1].answers(crowd, TOKENS)
    log = [(number, known, found) for (number, known), found in drafts.items()]
    assert served[1].wrong_drafts([p + a for p, a in zip(crowd, answers, strict=True)], log) == []
    assert len(log) > 120


def test_a_warm_cache_gives_the_same_drafts(served, crowd, cold):
    """Breaks if a cached block lacks the draft's K/V, holds a neighbour's, or was reached by query rows of another request."""
    answers, drafts, grown = served[0](crowd)
    assert grown["prefix_cache_hits"] >= 250  # 0.32 recomputes the last block of each hit
    assert (answers, drafts) == cold[:2]


def test_alone_after_a_partial_hit_the_drafts_are_the_same(served, crowd, cold):
    """One request at a time, all but the last tokens of its prompt cached; breaks if proposals depend on the batch."""
    for number in (0, 3, 7, 8, 13):
        answers, drafts, _ = served[0](crowd[number : number + 1])
        assert answers == cold[0][number : number + 1]
        assert drafts == {(0, known): found for (n, known), found in cold[1].items() if n == number}
