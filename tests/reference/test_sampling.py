# SPDX-License-Identifier: Apache-2.0
"""The acceptance rule keeps the target's distribution, whatever the draft, and filters are those of transformers."""

import pytest
import torch
from scipy.stats import chisquare

from vllm_dflash.reference.sampling import (
    RandomStreams,
    SamplingSettings,
    accept_by_rejection,
    accept_greedy,
    distribution,
    one_hot,
    sample,
)

VOCAB, ROUNDS = 16, 8_000
ALARM = 1e-4  # the seed is fixed, so this never fails by chance: it fails when the numbers change


def logits_of(rows, seed, spread=1.5):
    return spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def p_value(counts, expected):
    """Chi-square over tokens with an expectation of at least five; tokens with probability 0 must not occur."""
    assert not counts[expected == 0].any(), "a token that the target never gives was generated"
    large = expected * counts.sum() >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]]) * counts.sum()
    keep = wanted > 0
    if keep.sum() < 2:
        return 1.0  # a draft that is hardly ever kept leaves too few second tokens to say anything
    return chisquare(observed[keep].numpy(), wanted[keep].numpy()).pvalue


def rounds(q, draft_distribution, greedy_drafts):
    """Blocks of two drafts -> counts of the first token, counts of the second where the first draft was kept, and how often."""
    streams = RandomStreams(0)
    first, second, kept = torch.zeros(VOCAB), torch.zeros(VOCAB), 0
    p = one_hot(draft_distribution.argmax(dim=-1), VOCAB) if greedy_drafts else draft_distribution
    every_draft = torch.stack([torch.multinomial(row, ROUNDS, replacement=True, generator=streams.draft) for row in p])
    for drafts in every_draft.T:
        tokens = accept_by_rejection(drafts, q, p, streams)
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[tokens[1]] += 1
            kept += 1
    return first, second, kept / ROUNDS


@pytest.mark.parametrize("greedy_drafts", [True, False], ids=["argmax drafts", "sampled drafts"])
@pytest.mark.parametrize("draft", ["same as target", "unrelated", "opposite"])
def test_output_has_the_targets_distribution(draft, greedy_drafts):
    """Breaks when the ratio, the residual or its normalisation is wrong, or a stream is used twice."""
    target_logits = logits_of(3, seed=1)
    draft_logits = {
        "same as target": target_logits[:2],
        "unrelated": logits_of(2, seed=2),
        "opposite": -target_logits[:2],
    }[draft]
    settings = SamplingSettings(temperature=0.8)
    q, p = distribution(target_logits, settings), distribution(draft_logits, settings)
    first, second, kept = rounds(q, p, greedy_drafts)
    assert p_value(first, q[0]) > ALARM
    assert p_value(second, q[1]) > ALARM
    expected_kept = q[0, p[0].argmax()] if greedy_drafts else torch.minimum(p[0], q[0]).sum()
    assert kept == pytest.approx(float(expected_kept), abs=0.02)


@pytest.mark.parametrize("greedy_drafts", [True, False], ids=["argmax drafts", "sampled drafts"])
def test_filtered_target_never_gives_a_filtered_token(greedy_drafts):
    """Breaks when the draft is sampled from another distribution than the p that is handed over, or q is not filtered."""
    q = distribution(logits_of(3, seed=1), SamplingSettings(temperature=1.2, top_k=5, top_p=0.9))
    p = distribution(logits_of(2, seed=7), SamplingSettings(temperature=1.2))
    assert (q == 0).any()
    assert q[0, p[0].argmax()] > 0  # or no draft would ever be kept, and the second token not be tested
    first, second, _ = rounds(q, p, greedy_drafts)
    assert p_value(first, q[0]) > ALARM
    assert p_value(second, q[1]) > ALARM


def test_the_test_sees_a_wrong_rule():
    """Breaks when the chi-square above could not tell lossless from nearly lossless: resampling from q instead of r."""
    q, p = (distribution(logits_of(1, seed), SamplingSettings(temperature=0.8))[0] for seed in (1, 2))
    overlap = torch.minimum(p, q)
    naive = overlap + (1 - overlap.sum()) * q
    counts = torch.bincount(sample(naive.expand(ROUNDS, -1), torch.Generator().manual_seed(0)), minlength=VOCAB)
    assert p_value(counts, q) < ALARM


def test_greedy_keeps_the_agreeing_prefix_and_one_more():
    """Breaks when a draft after the first wrong one is kept, or the bonus token is missing."""
    wanted = torch.tensor([4, 9, 2, 7])
    logits = one_hot(wanted, VOCAB)
    assert accept_greedy(torch.tensor([4, 9, 2]), logits) == [4, 9, 2, 7]
    assert accept_greedy(torch.tensor([4, 0, 2]), logits) == [4, 9]
    assert accept_greedy(torch.tensor([0, 9, 2]), logits) == [4]


def test_rejection_sampling_at_temperature_0_is_the_greedy_rule():
    """Breaks when one-hot targets divide 0 by 0 or accept a draft that the target gives no probability."""
    logits = logits_of(4, seed=3)
    q = distribution(logits, SamplingSettings())
    for drafts in (logits.argmax(dim=-1)[:3], torch.tensor([0, 1, 2]), torch.tensor([int(logits[0].argmax()), 1, 2])):
        p = one_hot(drafts, VOCAB)
        assert accept_by_rejection(drafts, q, p, RandomStreams(1)) == accept_greedy(drafts, logits)


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(0.7),
        SamplingSettings(1.0, top_k=4),
        SamplingSettings(1.3, top_p=0.6),
        SamplingSettings(1.0, min_p=0.2),
        SamplingSettings(0.9, min_p=0.05, top_k=9, top_p=0.8),
    ],
    ids=str,
)
def test_filters_are_those_of_transformers(settings):
    """Breaks when a filter keeps one token more or less, or the order of the filters changes."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = logits_of(8, seed=4).double()
    expected = TemperatureLogitsWarper(settings.temperature)(None, logits)
    if settings.min_p:
        expected = MinPLogitsWarper(settings.min_p)(None, expected)
    if settings.top_k:
        expected = TopKLogitsWarper(settings.top_k)(None, expected)
    if settings.top_p < 1:
        expected = TopPLogitsWarper(settings.top_p)(None, expected)
    torch.testing.assert_close(distribution(logits, settings), expected.softmax(dim=-1))


def test_streams_of_a_seed_are_apart_and_repeatable():
    """Breaks when two streams give the same numbers (the draft's choice would then decide its acceptance)."""

    def numbers(seed):
        streams = RandomStreams(seed)
        return [torch.rand(3, generator=g).tolist() for g in (streams.draft, streams.accept, streams.resample)]

    assert numbers(4) == numbers(4)
    assert len({tuple(row) for seed in range(3) for row in numbers(seed)}) == 9


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -0.1), ("min_p", 1.5), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1)]
)
def test_values_out_of_range_are_named(field, value):
    """Breaks when nonsense is sampled from instead of refused."""
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be"):
        SamplingSettings(**{field: value})
