# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2: option ``draft_window`` and the longest drafted context. One engine; see the tests of the same name for V1."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check

K, WINDOW, TRAINED = 3, 20, 64
LIMIT = 60  # by hand: the anchor comes to position 60, the last mask to 63, and 64 is the first that nobody trained
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 32}
CONFIG = ("rope_parameters", YARN), ("max_position_embeddings", TRAINED)
NARROW = (
    ("layer_types", ["sliding_attention"] * 2),
    ("use_sliding_window", True),
    ("sliding_window", WINDOW),
    ("is_causal", False),
)


@pytest.fixture(scope="module")
def limited(target, make_draft, engine_of):
    """Engine and reference of a full-attention draft under ``draft_window``; the reference's checkpoint has that window."""
    from reference_check import Reference

    options = {"vllm_dflash": {"draft_window": WINDOW, "draft_window_frees_memory": False, "planner": "off"}}
    engine = engine_of(target, make_draft(config=CONFIG), max_num_batched_tokens=32, additional_config=options)
    return engine, Reference(Path(target), Path(make_draft(config=(*CONFIG, *NARROW))))


def test_past_the_trained_length_by_single_tokens(limited):
    """Breaks if the target's length is cut, as vLLM 0.33 does for scaled rotary embeddings, or drafts go on past the border."""
    engine, reference = limited
    assert engine.llm.llm_engine.vllm_config.model_config.max_model_len == 128
    prompt = [(7 * i * i + 3 * i + 11) % 90 for i in range(57)]
    expected = reference.answers([prompt], 24)[0]
    for extra, drafts in ((3, 2), (4, 3), (5, 4), (6, 4), (24, 4)):  # drafts follow 57, 58, 59 and 60 tokens of context
        before, steps = engine.counters(), engine.speculator.counters.eager
        assert engine.generate([prompt], extra) == [expected[:extra]]
        grown = {name: value - before[name] for name, value in engine.counters().items()}
        assert grown["num_accepted_tokens"] == 0  # random drafts; so each step below is one token
        assert grown["num_drafts"] == drafts
    assert engine.speculator.counters.eager - steps <= 24 - 10  # soon the draft step is left out altogether


def test_drafts_under_the_window_and_beside_a_long_request(limited, prompts):
    """Breaks if the window is not that of a checkpoint with the same window, or a long request spoils its neighbours' drafts.

    The long request's rows are padding of the draft step: its rotary positions would lie behind the end of the table.
    """
    engine, reference = limited
    long = [(5 * i * i + i + 9) % 150 for i in range(80)]
    batch = [*prompts[:3], long]
    proposals = engine.watch(batch)
    outputs = engine.generate(batch, 30)
    assert outputs == reference.answers(batch, 30)
    texts = [p + o for p, o in zip(batch, outputs, strict=True)]
    log = [(number, anchor + 1, drafts) for (number, anchor), drafts in proposals.items() if anchor <= LIMIT]
    assert {number for number, _, _ in log} == {0, 1, 2}
    assert reference.wrong_drafts(texts, log) == []
    speculator = engine.speculator
    assert len(engine.runner.kv_cache_config.kv_cache_groups) == 1
    assert "drafts for contexts up to 60 tokens" in speculator._start_line
    assert "no CUDA graphs" in speculator._start_line
    able = speculator.capability  # what the speculator does must be what it says
    assert able.fused_head == "no CUDA device"
    assert (able.fused_context is None) == (speculator.draft_pass.fused_context is not None)
    assert (able.num_kv_groups, able.longest_context, able.sampling) == (1, 60, "greedy")
    # The draft step never saw a position behind the table: the long request ended the batch as padding.
    assert int(speculator.buffers.query.context_positions.max()) <= 63
