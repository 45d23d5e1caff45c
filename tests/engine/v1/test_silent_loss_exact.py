# SPDX-License-Identifier: Apache-2.0
"""Faults that acceptance shows too little or not at all: every draft token compared with the reference notices each of them.

The pair is random, so its acceptance is that of chance; but it has everything that the trained pair lacks: windows, a reduced
vocabulary, a mask embedding, scales, sinks, YaRN. Its clean drafts equal the reference's to the last token.
"""

import pytest
import torch
from faults import EXACT_FAULTS, Swap, context_kv
from reference_check import Reference
from tiny_models import Draft

from vllm_dflash.hooks import vllm_version

K, WINDOW, TOKENS = 7, 9, 10
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}
PAIR = Draft(
    layer_ids=(1, 0),
    draft_vocab=90,
    mask_file=True,
    biases=True,
    sinks=True,
    config=(
        ("layer_types", ["sliding_attention"] * 2),
        ("use_sliding_window", True),
        ("sliding_window", WINDOW),
        ("is_causal", False),
        ("rope_parameters", YARN),
    ),
    dflash=(("attention_sink_bias", True), ("attention_value_scale", 0.6), ("input_embedding_scale", 1.5)),
)


@pytest.fixture(scope="module")
def served(write_pair, engine_of, prompts):
    """(engine, () -> (drafts that differ from the reference's, number of drafts compared))."""
    folders = write_pair(PAIR)
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    engine = engine_of(*folders, speculative={"num_speculative_tokens": K}, **options)
    reference = Reference(*folders)
    answers = reference.answers(prompts, TOKENS)

    def differing():
        with pytest.MonkeyPatch.context() as patch:
            log = engine.record(patch)
            assert engine.generate(prompts, TOKENS) == answers  # no fault of a draft may show in the output
        first = min(number for number, _, _ in log)
        log = [(number - first, known, drafts) for number, known, drafts in log]
        texts = [p + a for p, a in zip(prompts, answers, strict=True)]
        return reference.wrong_drafts(texts, log), len(log)

    return engine, differing


def test_clean_drafts_equal_the_reference(served):
    """Breaks if any part of a draft with all of DFlash's options is served wrongly."""
    wrong, compared = served[1]()
    assert wrong == []
    assert compared >= 30


@pytest.mark.skipif(vllm_version().startswith("0.33"), reason="what a test notices does not depend on vLLM's version")
@pytest.mark.parametrize("fault", EXACT_FAULTS)
def test_a_fault_changes_drafts(fault, served):
    """Breaks if the comparison would not notice this fault; each is put into the loaded draft and taken out again."""
    engine, differing = served
    with Swap() as swap:
        EXACT_FAULTS[fault](engine, swap)
        wrong, _ = differing()
    assert wrong


def test_pages_of_a_request_that_overflowed_serve_others(served):
    """Breaks if NaN that one request left in a page spoils the drafts of the next one that gets it."""
    engine, differing = served
    with Swap() as swap:
        context_kv(lambda kv: torch.full_like(kv, torch.inf))(engine, swap)
        assert differing()[0]
    assert differing()[0] == []


def test_all_faults_are_gone(served):
    """Breaks if a fault stays behind, so that the ones after it prove nothing."""
    assert served[1]()[0] == []
