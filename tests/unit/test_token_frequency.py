# SPDX-License-Identifier: Apache-2.0
"""The order of a small draft head's rows, and the file that keeps it."""

import json
import random
from collections import Counter

import pytest

from vllm_dflash.token_frequency import (
    RowList,
    RowListError,
    count,
    coverage,
    expected_coverage,
    merge_order,
    parse_list,
    ranked,
    write_list,
)

BPE = {
    "added_tokens": [{"id": 7, "content": "<end>"}],
    "model": {
        "vocab": {"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4, "abc": 5, "x y": 6},
        "merges": ["a b", ["b", "c"], "ab c", ["never", "made"]],
    },
}


def test_merges_rank_tokens_behind_added_and_base_ones():
    """Breaks if the end token is missing from the head, or merges are ranked by id instead of by their place."""
    assert merge_order(BPE) == [7, 0, 1, 2, 6, 4, 3, 5]


def test_unigram_vocabularies_rank_by_probability():
    """Breaks if a SentencePiece vocabulary is taken for a list of merges."""
    assert merge_order({"model": {"type": "Unigram", "vocab": [["<s>", 0.0], ["rare", -9.5], ["often", -2.0]]}}) == [0, 2, 1]


def test_counted_tokens_come_first_and_merge_order_breaks_ties():
    """Breaks if ties follow ids, a token that was never counted passes for a counted one, or one is listed twice."""
    assert ranked(Counter({5: 2, 3: 2, 9: 4, 1: 0}), [0, 1, 3, 5]) == [9, 3, 5, 0, 1]


def test_coverage_counts_tokens_not_types():
    """Breaks if a rare token weighs as much as a frequent one, or an empty text divides by zero."""
    assert coverage(Counter({1: 3, 2: 1}), [1]) == 0.75
    assert coverage(Counter(), [1]) == 0.0


def test_expected_coverage_leaves_each_text_out():
    """Breaks if a list is judged by the texts that it was made from: their own rare words would then all seem covered."""
    rng = random.Random(2)
    order = rng.sample(range(40), 40)
    texts = [[min(int(rng.expovariate(0.12)), 39)] * 2 for _ in range(75)]  # every text is one word said twice
    counts = count(texts)
    for rows in (3, 10, 25):
        held = 0
        for i, text in enumerate(texts):
            others = count(texts[:i] + texts[i + 1 :])
            held += text[0] in ranked(others.times, order)[:rows]
        assert expected_coverage(counts, order, rows) == pytest.approx(held / len(texts))
    assert expected_coverage(counts, order, 25) < coverage(counts.times, ranked(counts.times, order)[:25]) - 0.01
    assert expected_coverage(counts, order, 40) == 1
    assert expected_coverage(count([]), order, 10) == 0


def test_a_written_list_reads_back(tmp_path):
    """Breaks if writer and reader of the file disagree about a field."""
    path = tmp_path / "draft_head_rows.json"
    rows = RowList((4, 2, 9), 10, "3 counted tokens", calibrated=True, coverage=0.75, num_rows=3)
    write_list(path, rows, Counter({4: 2, 2: 1}), {"coverage": 1.0})
    assert parse_list(json.loads(path.read_text()), str(path), 10) == rows


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1, 2], 'no list "token_ids" of integers'),
        ({"token_ids": []}, 'no list "token_ids" of integers'),
        ({"token_ids": [1, True]}, 'no list "token_ids" of integers'),
        ({"token_ids": [1], "vocab_size": 11}, "made for a vocabulary of 11 tokens; the target has 10"),
        ({"token_ids": [1, 1]}, "1 repeated"),
        ({"token_ids": [1, 10]}, "between 0 and 9; found 1 to 10"),
    ],
)
def test_a_list_that_cannot_be_used_says_why(document, message):
    """Breaks when a list of another tokenizer drafts the wrong tokens without a word."""
    with pytest.raises(RowListError, match=message):
        parse_list(document, "rows.json", 10)
