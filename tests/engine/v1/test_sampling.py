# SPDX-License-Identifier: Apache-2.0
"""Above temperature 0 the output distribution is the target's, whatever the draft proposes and however it picks.

A target with a dozen tokens answers one prompt thousands of times. The second and third token of each answer are verified
ones (the first comes from the prefill); their joint counts are compared with the exact probabilities of the target. The draft
is a bad one (random weights), so that accepting, rejecting and resampling all happen often.
"""

import json
from pathlib import Path

import pytest
import torch
from joint_law import PROMPT, VOCAB, joint_law, unsure_pair
from scipy.stats import chisquare
from tiny_models import Draft

N, TEMPERATURE, TOP_P = 4000, 0.8, 0.9


@pytest.fixture(scope="module")
def folders(write_pair):
    return unsure_pair(write_pair, Draft(heads=2, kv_heads=1, block=4))


def law(logits, outputs):
    """P(next token), float64 [V]: temperature, then the smallest set that reaches TOP_P."""
    ordered, ids = (logits / TEMPERATURE).softmax(-1).sort(descending=True)
    ordered[ordered.cumsum(-1) - ordered >= TOP_P] = 0
    return torch.zeros_like(ordered).scatter(0, ids, ordered / ordered.sum())


@pytest.fixture(scope="module")
def probabilities(folders):
    """Exact P(second token, third token) of the target, [V * V], at the temperature and top-p of the test."""
    return joint_law(folders[0], law)


CHEAP = {"draft_weights": "fp8", "draft_head": "small", "draft_head_rows": 8, "draft_head_list": "rows.json"}


@pytest.mark.parametrize(("method", "cheap"), [("greedy", {}), ("probabilistic", {}), ("greedy", CHEAP)])
def test_distribution_is_the_targets(method, cheap, folders, engine_of, probabilities, tmp_path, monkeypatch):
    """Breaks if vLLM's expansion of temperature and top-p on CPUs is not repaired, if drafts are not drawn from the
    probabilities that the proposer hands over, or if a small head or rounded weights change more than acceptance."""
    monkeypatch.chdir(tmp_path)
    Path("rows.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": [*range(0, VOCAB, 2), 7, 9]}))
    engine = engine_of(
        *folders,
        speculative={"num_speculative_tokens": 3, "draft_sample_method": method},
        max_num_seqs=250,
        max_num_batched_tokens=2048,
        max_model_len=32,
        additional_config={"vllm_dflash": cheap},
    )
    answers, grown = engine.counted(lambda: engine.generate([PROMPT] * N, 4, temperature=TEMPERATURE, top_p=TOP_P))
    assert 0.02 < grown["num_accepted_tokens"] / grown["num_draft_tokens"] < 0.95
    counts = torch.zeros(VOCAB * VOCAB)
    for answer in answers:
        counts[answer[1] * VOCAB + answer[2]] += 1
    assert counts[probabilities == 0].sum() == 0
    common = N * probabilities >= 5  # the usual condition of the test; the rest is one cell
    observed = torch.cat([counts[common], counts[~common].sum().view(1)]).double()
    expected = torch.cat([probabilities[common], probabilities[~common].sum().view(1)]) * N
    assert chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-4


def test_seeded_requests_with_top_k_repeat(folders, engine_of):
    """Breaks if a request's seed no longer decides its answer once drafts are verified.

    With top-k, vLLM's CPU path also has to survive steps without any draft: the prefill is one.
    """
    engine = engine_of(*folders, speculative={"num_speculative_tokens": 3}, max_model_len=64)
    first, second = (engine.generate([PROMPT], 16, temperature=1.0, top_k=9, seed=11) for _ in range(2))
    assert first == second
