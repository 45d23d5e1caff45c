# SPDX-License-Identifier: Apache-2.0
"""What the runner may ask of a speculator besides greedy decoding."""

import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check

K = 3
PROBABILISTIC = {"draft_sample_method": "probabilistic"}


def test_synthetic_acceptance(target, draft, prompts, engine_of):
    """Rates are obeyed at every position; breaks if drafts do not reach the rejection sampler."""
    rates = [1.0, 1.0, 0.0]
    engine = engine_of(target, draft, speculative={"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates})
    drafted, accepted, _ = engine.acceptance_of(lambda: engine.generate(prompts, 13))
    assert accepted == drafted * 2 // K


def test_dynamic_k_by_batch_size(target, draft, prompts, baseline, engine_of):
    """Fewer drafts at higher concurrency; breaks if masked columns are verified."""
    expected = baseline(prompts, 16)
    table = [[1, 1, 3], [2, 3, 2], [4, 4, 1]]
    engine = engine_of(target, draft, speculative={"num_speculative_tokens_per_batch_size": table})
    engine.watch(prompts, replay=expected)
    drafted, accepted, outputs = engine.acceptance_of(lambda: engine.generate(prompts, 16))
    assert outputs == expected
    assert drafted == accepted
    assert drafted < 4 * 4 * K


SIZES = {"max_num_seqs": 32, "max_num_batched_tokens": 256}


def test_probabilistic_drafts(target, draft, prompts, baseline, engine_of):
    """Breaks if kept logits belong to another request's drafts, or a greedy request beside sampled ones is no longer exact."""
    engine = engine_of(target, draft, speculative=PROBABILISTIC, **SIZES)
    cache = engine.speculator.draft_logits
    assert cache.shape[1:] == (K, 160)
    three = [prompts[0], prompts[1], prompts[1]]
    sampling = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.0, "seed": 8}]
    greedy, seven, eight = engine.generate(three, 10, each=sampling)
    assert [greedy] == baseline(prompts[:1], 10)
    assert seven != eight
    assert engine.generate([prompts[1]], 10, temperature=1.0, seed=7) == [seven]
    assert cache.abs().sum() > 0


@pytest.fixture(scope="module")
def second_token(target, draft):
    """Law of the second token after [5, 6, 7] at temperature 0.5, float64 [160], by the plain-PyTorch reference."""
    from reference_check import Reference

    model = Reference(Path(target), Path(draft)).target

    def law(ids):
        model.reset()
        return (model.forward(ids)[0][-1].double() / 0.5).softmax(dim=-1)

    first = law([5, 6, 7])
    return sum(p * law([5, 6, 7, token]) for token, p in enumerate(first.tolist()))


@pytest.fixture(scope="module")
def narrow_draft(make_draft):
    """A draft that says and knows only 100 of the target's 160 tokens."""
    return make_draft(draft_vocab=100, config=(("vocab_size", 100),))


CHEAP = {"vllm_dflash": {"draft_weights": "fp8", "draft_head": "small", "draft_head_rows": 64}}


@pytest.mark.parametrize(
    ("name", "speculative", "additional"),
    [
        ("draft", PROBABILISTIC, {}),
        pytest.param("narrow_draft", PROBABILISTIC, {}, marks=pytest.mark.slow),
        ("draft", {}, {}),
        ("draft", {}, CHEAP),
    ],
    ids=["drawn drafts", "drawn from fewer tokens", "greedy drafts", "greedy drafts, fp8 weights and a small head"],
)
def test_sampled_tokens_follow_the_target(name, speculative, additional, target, second_token, engine_of, request):
    """Chi-square of the second token, the first that a draft precedes, against its exact law.

    Breaks if a draft is accepted too readily, its noise is the noise that verification draws with, or the cache of draft
    logits has the columns of the draft's vocabulary: the target's tokens behind them then never come.
    """
    requests = 64
    engine = engine_of(target, request.getfixturevalue(name), speculative=speculative, additional_config=additional, **SIZES)
    if speculative:
        assert engine.speculator.draft_logits.shape[-1] == 160
    tokens = [tokens[1] for tokens in engine.generate([[5, 6, 7]] * requests, 2, temperature=0.5)]
    seen, expected = torch.bincount(torch.tensor(tokens), minlength=160).double(), second_token * requests
    often = expected >= 2.5
    seen, expected = (torch.cat([x[often], x[~often].sum()[None]]) for x in (seen, expected))
    assert len(seen) > 4
    assert chisquare(seen.numpy(), expected.numpy()).pvalue > 1e-4
