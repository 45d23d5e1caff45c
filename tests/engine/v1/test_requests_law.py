# SPDX-License-Identifier: Apache-2.0
"""Parameters that change the distribution, all in one request: sampled answers follow the target's law under them.

As in test_sampling.py a target with a dozen tokens answers one prompt thousands of times, and the joint counts of the second and
third token are compared with exact probabilities. These are computed here from transformers' logits, parameter by parameter.
"""

import pytest
import torch
from joint_law import PROMPT, VOCAB, joint_law, unsure_pair
from scipy.stats import chisquare
from tiny_models import Draft

N = 1500
PARAMS = {
    "temperature": 0.9,
    "min_p": 0.2,
    "logit_bias": {4: 2.0, 9: -1.5, 10: 1.5},
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.8,
}


def law(logits, outputs):
    """P(next token), float64 [V], after ``outputs``: bias, penalties, temperature, min_p, in vLLM's order."""
    logits = logits.clone()
    for token, bias in PARAMS["logit_bias"].items():
        logits[token] += bias
    for token in {*PROMPT, *outputs}:
        logits[token] *= PARAMS["repetition_penalty"] ** (-1 if logits[token] > 0 else 1)
    for token in set(outputs):
        logits[token] -= PARAMS["presence_penalty"] + PARAMS["frequency_penalty"] * outputs.count(token)
    p = (logits / PARAMS["temperature"]).softmax(-1)
    p[p < PARAMS["min_p"] * p.max()] = 0
    return p / p.sum()


@pytest.fixture(scope="module")
def folders(write_pair):
    return unsure_pair(write_pair, Draft(heads=2, kv_heads=1, block=4, layers=1))


@pytest.fixture(scope="module")
def probabilities(folders):
    """Exact P(second token, third token), [V * V]."""
    return joint_law(folders[0], law)


def test_distribution_under_all_parameters(folders, engine_of, probabilities):
    """Breaks if bias, penalties or min_p miss the rows of the drafts, or come in another order than without speculation."""
    engine = engine_of(
        *folders,
        speculative={"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
        max_num_seqs=250,
        max_num_batched_tokens=2048,
        max_model_len=32,
        additional_config={"vllm_dflash": {"planner": "off"}},
    )
    answers, grown = engine.counted(lambda: engine.generate([PROMPT] * N, 4, **PARAMS))
    assert 0.02 < grown["num_accepted_tokens"] / grown["num_draft_tokens"] < 0.95
    counts = torch.zeros(VOCAB * VOCAB)
    for answer in answers:
        counts[answer[1] * VOCAB + answer[2]] += 1
    assert counts[probabilities == 0].sum() == 0
    common = N * probabilities >= 5  # the usual condition of the test; the rest is one cell
    observed = torch.cat([counts[common], counts[~common].sum().view(1)]).double()
    expected = torch.cat([probabilities[common], probabilities[~common].sum().view(1)]) * N
    assert chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-4
