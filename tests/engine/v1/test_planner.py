# SPDX-License-Identifier: Apache-2.0
"""Cuts and widths that change from step to step leave the output's distribution alone: the real V1 engine, forced decisions."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chisquare
from tiny_models import Draft, Target, edit_weights, write_markov_pair

K = 3
VOCAB = 8
SMALL = Target(vocab=VOCAB, hidden=48, heads=2, kv_heads=1, layers=3, mlp=64)
PROMPT = [3, 6, 7, 2]
N = 3000
PLANNED = {"vllm_dflash": {"planner": "on"}}


def planning(engine):
    from vllm_dflash.engine.planning import planning_of

    return planning_of(engine.llm.llm_engine.engine_core.engine_core.scheduler)


def force(planner, monkeypatch, choose):
    """Plans whose lengths are ``choose()`` for each request; the width is the largest of them."""
    from vllm_dflash.planner.plan import Plan

    def plan(names, _context, **_):
        lengths = np.array([choose() for _ in names])
        return Plan(int(lengths.max()), lengths, 1.0)

    monkeypatch.setattr(planner, "plan", plan)


def test_greedy_text_stays_whatever_is_cut(write_pair, engine_of, prompts, monkeypatch):
    """Breaks if rows of a request that is not drafted for go to another, or a request without drafts leaves a hole in its
    context: later drafts are compared with those of an engine that always drafts."""
    target, draft = write_pair(Draft(block=8), Target())
    expected = engine_of(target).generate(prompts)
    engine = engine_of(target, draft, speculative={"num_speculative_tokens": 7}, additional_config=PLANNED)
    force(planning(engine).planner, monkeypatch, lambda: 7)
    steady = engine.record(monkeypatch)
    assert engine.generate(prompts) == expected
    first = int(steady[-1][0]) // 1 - len(prompts) + 1
    known = {(number - first, length): drafts for number, length, drafts in steady}
    random = np.random.default_rng(7)
    steps = itertools.count()

    def choose():
        return 7 if next(steps) > 40 else int(random.integers(0, 8))

    force(planning(engine).planner, monkeypatch, choose)
    start = len(steady)
    assert engine.generate(prompts) == expected
    again = [(number - first - len(prompts), length, drafts) for number, length, drafts in steady[start:]]
    compared = [drafts == known[number, length] for number, length, drafts in again if len(drafts) == 7 and any(drafts)]
    assert len(compared) >= 12
    assert all(compared[-12:])


def test_what_is_cut_counts_for_the_block_that_made_it(write_pair, engine_of, prompts, monkeypatch):
    """Blocks of 7, of which 2 are verified, and of 3 in between. Breaks if the drafts of a step count for the block that it makes
    itself, or for one of as many as are verified."""
    from vllm_dflash.planner.plan import Plan

    target, draft = write_pair(Draft(block=8), Target())
    engine = engine_of(target, draft, speculative={"num_speculative_tokens": 7}, additional_config=PLANNED)
    planner, told, widths = planning(engine).planner, [], itertools.cycle((7, 7, 3))

    def plan(names, _context, **_):
        return Plan(next(widths), np.full(len(names), 2), 1.0)

    monkeypatch.setattr(planner, "plan", plan)
    monkeypatch.setattr(planner, "observe", lambda _names, drafted, _accepted, width: told.append((width, max(drafted))))
    engine.generate(prompts[:1], 20)
    made = [width for width, drafted in told if drafted]
    assert {drafted for _, drafted in told if drafted} == {2}
    assert made[:6] == list(itertools.islice(itertools.cycle((7, 7, 3)), 6))


def test_drafting_resumes_over_a_whole_context(write_pair, engine_of, prompts, monkeypatch):
    """Sixteen steps without any draft, then full ones: their drafts are those of an engine that always drafted.

    Breaks if what waited while nothing was drafted is lost, late, or stored elsewhere.
    """
    target, draft = write_pair(Draft(block=8), Target())
    engine = engine_of(target, draft, speculative={"num_speculative_tokens": 7}, additional_config=PLANNED)
    force(planning(engine).planner, monkeypatch, lambda: 7)
    steady = engine.record(monkeypatch)
    expected = engine.generate(prompts, 40)
    first = int(steady[-1][0]) - len(prompts) + 1
    known = {(number - first, length): drafts for number, length, drafts in steady}
    steps = itertools.count()
    force(planning(engine).planner, monkeypatch, lambda: 7 if next(steps) > 16 * len(prompts) else 0)
    start = len(steady)
    assert engine.generate(prompts, 40) == expected
    again = [(number - first - len(prompts), length, drafts) for number, length, drafts in steady[start:]]
    compared = [drafts == known[number, length] for number, length, drafts in again if len(drafts) == 7 and any(drafts)]
    assert len(compared) >= 12
    assert all(compared)


def test_accepted_drafts_survive_cuts(tmp_path, engine_of, monkeypatch):
    """A pair whose drafts are right for long runs: 42 % accepted uncut. Breaks if a cut loses, repeats or misplaces tokens, or
    counters see drafts that were cut."""
    target, draft = write_markov_pair(tmp_path, half=False)
    expected = engine_of(target).generate([[1, 40, 50, 22]] * 3, 60)
    engine = engine_of(target, draft, speculative={"num_speculative_tokens": 7}, additional_config=PLANNED)
    cuts = itertools.cycle([0, 7, 2, 5, 0, 0, 1])
    force(planning(engine).planner, monkeypatch, lambda: next(cuts))
    found, grown = engine.counted(lambda: engine.generate([[1, 40, 50, 22]] * 3, 60))
    assert found == expected
    assert 0.55 < grown["num_accepted_tokens"] / grown["num_draft_tokens"] <= 1


@pytest.fixture(scope="module")
def unsure(write_pair, engine_of):
    """An engine whose target is unsure and whose draft is bad: accepting, rejecting and resampling all happen often."""
    target, draft = write_pair(Draft(heads=2, kv_heads=1, block=4), SMALL)
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    if not (target / "flattened").exists():
        edit_weights(target, {"lm_head.weight": 0.3 * head})
        (target / "flattened").touch()
    return target, engine_of(
        target,
        draft,
        speculative={"num_speculative_tokens": K, "draft_sample_method": "probabilistic"},
        additional_config=PLANNED,
        max_num_seqs=250,
        max_num_batched_tokens=2048,
        max_model_len=32,
    )


def law(target, temperature):
    """Exact P(second token, third token), [V * V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()

    def after(texts):
        with torch.no_grad():
            return (model(torch.tensor(texts)).logits[:, -1] / temperature).softmax(-1)

    every = range(VOCAB)
    first, second = after([PROMPT])[0], after([[*PROMPT, a] for a in every])
    third = after([[*PROMPT, a, b] for a in every for b in every]).view(VOCAB, VOCAB, VOCAB)
    return torch.einsum("a,ab,abc->bc", first, second, third).flatten()


def p_value(engine, probabilities, temperature):
    counts = torch.zeros(VOCAB * VOCAB)
    for answer in engine.generate([PROMPT] * N, 4, temperature=temperature):
        counts[answer[1] * VOCAB + answer[2]] += 1
    common = N * probabilities >= 5  # the usual condition of the test; the rest is one cell
    observed = torch.cat([counts[common], counts[~common].sum().view(1)]).double() + 1e-9
    expected = torch.cat([probabilities[common], probabilities[~common].sum().view(1)]) * N + 1e-9
    return chisquare(observed.numpy(), expected.numpy(), sum_check=False).pvalue


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_cuts_by_history_keep_the_distribution(temperature, unsure, monkeypatch):
    """Breaks if the draft's probabilities and its tokens no longer belong together once widths and lengths change."""
    target, engine = unsure
    random = np.random.default_rng(11)
    force(planning(engine).planner, monkeypatch, lambda: int(random.integers(0, K + 1)))
    assert p_value(engine, law(target, temperature), temperature) > 1e-4


def test_a_cut_by_the_sampled_token_would_show(unsure, monkeypatch):
    """The construction that a lossy planner fails: drafts are dropped where their first token is odd, so that an odd token is
    drawn twice. Breaks if the test above cannot see such a bias, i.e. if it proves nothing."""
    target, engine = unsure
    plans = planning(engine)
    force(plans.planner, monkeypatch, lambda: K)
    original = plans.before

    def before(scheduler):
        original(scheduler)
        for request in scheduler.running:
            if request.spec_token_ids and request.spec_token_ids[0] % 2:
                request.spec_token_ids = []

    monkeypatch.setattr(plans, "before", before)
    assert p_value(engine, law(target, 1.0), 1.0) < 1e-6
