# SPDX-License-Identifier: Apache-2.0
"""How far the draft looks back and up to where it drafts: option ``draft_window``, trained length, ``draft_max_context``.

Two engines: a yarn draft with a short trained length and a narrow window, and one with a window wider than any context.
"""

import logging

import pytest
from reference_check import Reference
from tiny_models import Draft

K, WINDOW, TRAINED = 3, 24, 124
LIMIT = 120  # by hand: the anchor comes to position 120, the last mask to 123, and 124 is the first that nobody trained
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 62}
CONFIG = ("rope_parameters", YARN), ("max_position_embeddings", TRAINED)
NARROW = (
    ("layer_types", ["sliding_attention"] * 2),
    ("use_sliding_window", True),
    ("sliding_window", WINDOW),
    ("is_causal", False),
)
SIZES = {"max_num_batched_tokens": 64, "enable_prefix_caching": False, "speculative": {"num_speculative_tokens": K}}


@pytest.fixture(scope="module")
def limited(write_pair, engine_of):
    """Engine and reference of a full-attention draft under ``draft_window``; the reference's checkpoint has that window."""
    folders = write_pair(Draft(block=K + 1, config=CONFIG))
    reference = Reference(*write_pair(Draft(block=K + 1, config=(*CONFIG, *NARROW))))
    return engine_of(*folders, additional_config={"vllm_dflash": {"draft_window": WINDOW, "planner": "off"}}, **SIZES), reference


@pytest.fixture
def log_lines():
    """What the plugin logs."""
    lines, logger = [], logging.getLogger("vllm.plugins.dflash")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def null_blocks(engine):
    """Freed leading blocks of the draft's KV group, by running request."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    group = engine.proposer.kv_cache_gid
    return [sum(b.is_null for b in scheduler.kv_cache_manager.get_blocks(r.request_id).blocks[group]) for r in scheduler.running]


def test_past_the_trained_length_by_single_tokens(limited, log_lines):
    """Breaks if the target's length is cut to the draft's, a request ends or changes at the border, or drafts go on beyond it."""
    engine, reference = limited
    assert engine.llm.llm_engine.vllm_config.model_config.max_model_len == 192
    told = str(engine.proposer.capability)
    for fact in (
        "contexts up to 120 tokens",
        "windows [24]",
        "attention CPU_ATTN",
        "2 of 2 layers non-causal",
        "one rank",
    ):
        assert fact in told
    prompt = [(7 * i * i + 3 * i + 11) % 150 for i in range(114)]
    expected = reference.answers([prompt], 24)[0]
    # Up to the border, then over it token by token. The first drafts follow 114 tokens of context, the last ones 120: 7 times.
    for extra, drafts in ((5, 4), (6, 5), (7, 6), (8, 7), (9, 7), (24, 7)):
        (found,), grown = engine.counted(lambda extra=extra: engine.generate([prompt], extra))
        assert found == expected[:extra]
        assert grown.get("num_accepted_tokens", 0) == 0  # random drafts; so each step below is one token
        assert grown["num_drafts"] == drafts
    assert sum("go on without drafts" in line for line in log_lines) == 1


def test_drafts_under_the_window_and_beside_a_long_request(limited, prompts, monkeypatch):
    """Breaks if the window is not that of a checkpoint with the same window, or a long request takes its neighbours' drafts."""
    engine, reference = limited
    log = engine.record(monkeypatch)
    long = [(5 * i * i + i + 9) % 150 for i in range(129)]
    freed = []
    propose = engine.proposer.propose
    monkeypatch.setattr(engine.proposer, "propose", lambda **call: (freed.append(null_blocks(engine)), propose(**call))[1])
    batch = [*prompts, long]
    outputs, grown = engine.counted(lambda: engine.generate(batch, 16))
    assert outputs == reference.answers(batch, 16)
    drafted = [(number, known, drafts) for number, known, drafts in log if known - 1 <= LIMIT]
    first = min(number for number, _, _ in log)
    drafted = [(number - first, known, drafts) for number, known, drafts in drafted]
    assert reference.wrong_drafts([p + o for p, o in zip(batch, outputs, strict=True)], drafted) == []
    assert {number for number, _, _ in drafted} == {0, 1, 2, 3}
    assert grown["num_draft_tokens"] == K * grown["num_drafts"]
    assert max(map(max, filter(None, freed))) >= 2  # blocks of 32 behind a window of 24


def test_a_window_beyond_every_context_changes_nothing(write_pair, engine_of, prompts, monkeypatch):
    """Breaks if the option costs drafts where it should not: here it also shares the target's KV-cache group."""
    folders = write_pair(Draft(block=K + 1))
    options = {"draft_window": 300, "draft_window_frees_memory": False, "draft_max_context": 90, "planner": "off"}
    engine = engine_of(*folders, additional_config={"vllm_dflash": options}, **SIZES)
    assert len(engine.runner.kv_cache_config.kv_cache_groups) == 1
    reference, log = Reference(*folders), engine.record(monkeypatch)
    outputs, grown = engine.counted(lambda: engine.generate(prompts, 16))
    assert outputs == reference.answers(prompts, 16)
    log = [entry for entry in log if entry[1] - 1 <= 90]
    assert reference.wrong_drafts([p + o for p, o in zip(prompts, outputs, strict=True)], log) == []
    # The prompt of 101 tokens is never drafted for; drafts of the others may be right now and then.
    assert 3 * 15 - grown.get("num_accepted_tokens", 0) <= grown["num_drafts"] <= 3 * 15


def test_options_are_refused_before_weights_are_loaded(write_pair, engine_of):
    """Breaks if a mistyped option is ignored, or reported by a worker after minutes of loading."""
    target, draft = write_pair(Draft(block=K + 1))
    (draft / "model.safetensors").rename(draft / "hidden")
    try:
        with pytest.raises(ValueError, match=r"unknown option 'draft_windw'.* Did you mean 'draft_window'\?"):
            engine_of(target, draft, additional_config={"vllm_dflash": {"draft_windw": 4}}, **SIZES)
    finally:
        (draft / "hidden").rename(draft / "model.safetensors")
