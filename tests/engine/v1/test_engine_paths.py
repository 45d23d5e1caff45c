# SPDX-License-Identifier: Apache-2.0
"""Greedy output with drafts is the output without, and drafts stay right, on every path that a request can take.

Two engines on one pair. The replay draft proposes the known answer, so every draft must be accepted: it catches off-by-one
errors in anchors, positions and slots that a random draft never reaches.
"""

import pytest
from reference_check import Reference
from tiny_models import Draft

K = 3
PAIR = Draft(layer_ids=(2, 0, 2), block=4)


@pytest.fixture(scope="module")
def folders(write_pair):
    return write_pair(PAIR)


@pytest.fixture(scope="module")
def reference(folders):
    return Reference(*folders)


@pytest.fixture(scope="module")
def expected(folders, engine_of, prompts):
    """Answers of the real engine without speculation, 40 tokens each."""
    return engine_of(folders[0]).generate(prompts, 40)


@pytest.fixture(scope="module")
def engine(folders, engine_of, expected):
    return engine_of(
        *folders,
        speculative={"num_speculative_tokens": K},
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        max_model_len=160,
        num_gpu_blocks_override=12,
    )


def texts(prompts, outputs):
    return [p + o for p, o in zip(prompts, outputs, strict=True)]


def fresh(prompts, salt):
    """The same prompts behind another first token, so that no earlier test's prefix cache helps."""
    return [[salt, *p[1:]] for p in prompts]


def renumbered(log, prompts):
    """Requests of one ``generate`` call numbered from 0."""
    first = min(number for number, _, _ in log)
    return [(number - first, known, drafts) for number, known, drafts in log]


def replaying(engine, monkeypatch, prompts, answers):
    """Make the proposer propose ``answers``; request numbers count on from the engine's last request."""
    start = []

    def replace(number, known, width):
        start.append(number)
        index = number - min(start)
        return answers[index][known - len(prompts[index]) :][:width]

    return engine.record(monkeypatch, replace)


def test_equal_to_no_speculation_in_a_mixed_batch(engine, prompts, expected, reference):
    """Breaks if drafts can change the output at all, or if the reference and vLLM do not run the same target."""
    assert engine.generate(prompts, 40) == expected == reference.answers(prompts, 40)
    assert engine.counters()["num_drafts"] > 0


def test_replayed_answers_are_all_accepted(engine, prompts, expected, monkeypatch):
    """1 token from the prefill, then 9 steps of K + 1: breaks on any off-by-one between proposing and verifying."""
    replaying(engine, monkeypatch, prompts[:1], expected[:1])
    outputs, grown = engine.counted(lambda: engine.generate(prompts[:1], 37))
    assert outputs == [expected[0][:37]]
    assert (grown["num_draft_tokens"], grown["num_accepted_tokens"]) == (27, 27)


def test_replay_in_a_mixed_batch_with_chunked_prefill(engine, prompts, expected, monkeypatch):
    """Breaks if one request reads another's rows, or if a prompt chunk shifts the rows behind it."""
    replaying(engine, monkeypatch, prompts, expected)
    outputs, grown = engine.counted(lambda: engine.generate(prompts, 25))
    assert outputs == [e[:25] for e in expected]
    assert grown["num_draft_tokens"] == grown["num_accepted_tokens"] == 4 * 6 * K


def test_stop_token_inside_a_block(engine, prompts, expected, monkeypatch):
    """The accepted block goes on behind the stop token; breaks if tokens behind it leak into the output."""
    answer = expected[1]
    position = next(i for i in range(8, 40) if i % (K + 1) == 2 and answer[i] not in answer[:i])
    replaying(engine, monkeypatch, prompts[1:2], [answer])
    assert engine.generate(prompts[1:2], 40, stop_token_ids=[answer[position]]) == [answer[: position + 1]]


def test_prefix_cache_keeps_the_drafts_context(engine, prompts, reference, monkeypatch):
    """Breaks if cached blocks lack the draft's K/V: drafts after a hit would differ from the reference."""
    same = fresh(prompts[3:], 9)
    engine.generate(same, 8)
    log = engine.record(monkeypatch)
    outputs, grown = engine.counted(lambda: engine.generate(same, 24))
    assert grown["prefix_cache_hits"] >= 64  # of 3 full blocks of 32; 0.32 recomputes the last one
    assert outputs == reference.answers(same, 24)
    assert reference.wrong_drafts(texts(same, outputs), renumbered(log, same)) == []


def test_preempted_requests_resume_with_a_whole_context(engine, prompts, reference, monkeypatch):
    """Twelve KV blocks do not hold these requests; breaks if a resumed request has holes in its draft context."""
    crowd = fresh([*prompts, *prompts], 10)
    crowd = [[*p, i + 20] for i, p in enumerate(crowd)]
    log = engine.record(monkeypatch)
    outputs, grown = engine.counted(lambda: engine.generate(crowd, 36))
    assert grown["num_preemptions"] > 0
    assert outputs == reference.answers(crowd, 36)
    assert reference.wrong_drafts(texts(crowd, outputs), renumbered(log, crowd)) == []


def test_a_request_at_max_model_len_does_not_disturb_the_others(engine, prompts, reference, monkeypatch):
    """One request runs into the limit of 160 positions while others go on.

    Breaks if rows beyond the limit write into a block that is in use, or if the runner skips the step for the whole batch:
    the others' context would have holes and their later drafts would differ.
    """
    batch = fresh([prompts[3] + prompts[2], prompts[1]], 11)  # 135 and 17 tokens
    log = engine.record(monkeypatch)
    outputs = engine.generate(batch, 60)
    assert [len(o) for o in outputs] == [25, 60]
    assert outputs == [reference.answers(batch[:1], 25)[0], reference.answers(batch[1:], 60)[0]]
    inside = [(n, known, drafts) for n, known, drafts in renumbered(log, batch) if known - 1 + K < 160]
    assert reference.wrong_drafts(texts(batch, outputs), inside) == []
    assert max(known for n, known, _ in renumbered(log, batch) if n == 0) >= 158


def test_sampled_and_greedy_requests_share_a_batch(engine, prompts, expected):
    """Breaks if greedy requests take anything from a neighbour that samples."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=t, max_tokens=24, ignore_eos=True, detokenize=False, seed=s)
        for t, s in ((0.0, None), (1.0, 7), (0.0, None), (0.7, None))
    ]
    results = engine.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    outputs = [list(r.outputs[0].token_ids) for r in results]
    assert [outputs[0], outputs[2]] == [expected[0][:24], expected[2][:24]]
    assert len(outputs[1]) == len(outputs[3]) == 24


def test_batches_without_padding_and_steps_without_drafts(folders, engine_of, prompts, expected, reference, monkeypatch):
    """``disable_padded_drafter_batch`` leaves rejected rows out; the schedule drafts 0 tokens for three or more requests.

    Breaks if the unpadded layout is read wrongly, or if a step with K = 0 does not store its context: the drafts of the
    requests that go on alone would differ.
    """
    engine = engine_of(
        *folders,
        speculative={
            "num_speculative_tokens": K,
            "disable_padded_drafter_batch": True,
            "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 2], [3, 8, 0]],
        },
        max_num_batched_tokens=48,
    )
    log = engine.record(monkeypatch)
    lengths = (6, 14, 30, 40)
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    results = engine.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    outputs = [list(r.outputs[0].token_ids) for r in results]
    assert outputs == [e[:n] for e, n in zip(expected, lengths, strict=True)]
    assert {len(drafts) for _, _, drafts in log} == {0, 2, 3}
    assert reference.wrong_drafts(texts(prompts, outputs), log) == []
