# SPDX-License-Identifier: Apache-2.0
"""``min_p`` and ``logit_bias`` on Model Runner V2, which applies both to every verified row once vLLM's refusal is lifted."""

import pytest
import torch

K, TOKENS = 3, 13
BIAS = {11: 4.0, 70: -6.0, 33: 2.5}


@pytest.fixture
def biased(target, prompts):
    """Greedy answers of transformers' own model with the bias added at every position."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([text])).logits[0, -1]
            for token, bias in BIAS.items():
                logits[token] += bias
            text.append(int(logits.argmax()))
        answers.append(text[len(prompt) :])
    return answers


def test_both_act_on_every_verified_row(engine, prompts, baseline, biased):
    """Breaks if vLLM refuses them, or if a row of a draft or the bonus row is verified without them.

    Perfect drafts reach every row of a block. ``min_p`` of 1 leaves the likeliest token alone, at any temperature.
    """
    plain = baseline(prompts, TOKENS)
    assert biased != plain
    for expected, sampling in ((biased, {"logit_bias": BIAS}), (plain, {"min_p": 1.0, "temperature": 1.7, "seed": 3})):
        engine.watch(prompts, replay=expected)
        drafted, accepted, outputs = engine.acceptance_of(lambda chosen=sampling: engine.generate(prompts, TOKENS, **chosen))
        assert outputs == expected
        assert drafted == accepted > 0
