# SPDX-License-Identifier: Apache-2.0
"""What `vllm-dflash bench` makes of greedy answers that differ; a table stands for the target, a real one is in tests/server."""

from types import SimpleNamespace

import pytest

from vllm_dflash.bench.ties import BATCH, NEAR_TIE, NEAR_TIE_FLOAT32, complaints, judged


class Target:
    """Answers the question for the best next tokens as an engine does, from a table by the tokens so far."""

    def __init__(self, table, dtype="bfloat16"):
        self.table, self.spec, self.asked = table, SimpleNamespace(dtype=dtype), []

    def ask(self, question, prompts):
        assert question == "best"
        self.asked.append(len(prompts))
        return {"best": [self.table[tuple(prompt["then"])] for prompt in prompts]}


def judged_row(target, answers, prompts):
    """The row of `ours` after its answers, by arm, were judged."""
    results = {name: [{"outputs": [{"token_ids": ids} for ids in found]}] for name, found in answers.items()}
    row = {"arm": "ours", "prompts": "code", "concurrency": 3, "same_tokens": 0, "answers": len(prompts)}
    judged([row], [prompts], results, "none", target)
    return row


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", NEAR_TIE), ("float16", NEAR_TIE), ("float32", NEAR_TIE_FLOAT32)])
def test_a_difference_is_a_near_tie_only_if_the_target_finds_both_tokens_alike(dtype, limit):
    """Breaks if a lossy answer passes as rounding: the two tokens count, not merely the two best, and rounding is of a dtype."""
    answers = {"none": [[7, 1, 2], [8, 1, 2], [9, 1, 2]], "ours": [[7, 1, 2], [8, 5, 2], [9, 1, 6]]}
    for gap, near in ((limit / 2, 1), (2 * limit, 0)):
        target = Target({(8,): [[1, -1.0], [5, -1.0 - gap]], (9, 1): [[2, -0.1], [3, -0.1]]}, dtype)
        row = judged_row(target, answers, ["p", "q", "r"])
        assert (row["differences_checked"], row["near_ties"]) == (2, near)
        assert row["largest_gap"] >= round(limit, 4)
        (complaint,) = complaints([row])
        assert f"code, 3 at a time: ours differs where the target is sure, at {2 - near} of 2 places" in complaint


def test_every_distinct_difference_is_looked_at_and_a_repeated_one_once():
    """Breaks if only the first few count, or a set of prompts that is gone through again is asked about again."""
    count = BATCH + 3
    prompts = [f"p{number}" for number in range(count)] * 2
    answers = {"none": [[7, 1]] * 2 * count, "ours": [[7, 2]] * (count - 1) + [[7, 3]] + [[7, 2]] * (count - 1) + [[7, 3]]}
    target = Target({(7,): [[1, -1.0], [2, -1.0], [3, -9.0]]})
    row = judged_row(target, answers, prompts)
    assert target.asked == [BATCH, 3]
    assert (row["differences_checked"], row["near_ties"], row["largest_gap"]) == (count, count - 1, 8.0)


def test_an_answer_that_ends_early_is_no_near_tie():
    """Breaks if the beginning of the right answer passes for the answer."""
    row = judged_row(Target({}), {"none": [[7, 1, 2]], "ours": [[7, 1]]}, ["p"])
    assert (row["differences_checked"], row["near_ties"], row["cut_short"]) == (1, 0, 1)
    assert [complaint.count("ends 1 answers") for complaint in complaints([row])] == [1]
