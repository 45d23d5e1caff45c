# SPDX-License-Identifier: Apache-2.0
"""Adaptive verification with the fused head's odds and a planner that changes the width: vLLM's features, the target's text.

vLLM allows it with CUDA graphs only, by whose step times it decides; a CPU has neither. Here its demand is lifted, its manager
gets a cost per row, and the fused head runs through the interpreter. Estimator, manager, runner and planner are the real ones.
"""

import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check
from confidence_odds import odds_of
from reference_check import Reference

K, VOCAB = 3, 160
MOST = 48  # rows of a step: beyond, the costs below are prohibitive


# -- the engine ------------------------------------------------------------------------------------------------------------


class Watched:
    """The fused head over the target's head, with whole logits beside every answer."""

    def __init__(self, model, max_rows):
        from dflash_kernels.draft_head import HeadWorkspace
        from vllm_dflash.engine.fused_head import FusedHead

        weight = model.lm_head.weight
        size = {"max_rows": max_rows, "vocab_rows": weight.shape[0], "dtype": weight.dtype, "device": "cpu"}
        self.model, self.seen = model, []
        self.head = FusedHead(model, HeadWorkspace(**size, odds=True), 0, model.lm_head.org_vocab_size)

    def __call__(self, hidden_states):
        return self.head(hidden_states)

    def winner(self, hidden_states, temperatures):
        found = self.head.winner(hidden_states, temperatures)
        rows = temperatures.states >= 0
        logits = self.model.compute_logits(hidden_states)
        self.seen.append((found.against[rows], odds_of(logits, temperatures)[rows], temperatures.states[rows]))
        return found


@pytest.fixture
def adaptive(target, draft, baseline, engine_of, monkeypatch):  # the baseline's engine has to come first
    """An engine that verifies some of the drafts, whose planner runs; ``engine.checked``: (drafts made, verified) by step."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllms

    from vllm_dflash.engine.draft_budget import prepare_cut
    from vllm_dflash.engine.planning import planning_of
    from vllm_dflash.engine.trimming import trim

    def manager(**arguments):
        names = ("req_states", "query_start_loc", "num_bonus_tokens")
        built = vllms.AdaptiveVerificationManager(**{n: arguments[n] for n in names}, max_total_logits=1 << 20)
        rows = np.arange(1 << 10)
        built.cost_tables = np.zeros(1 << 10), 4.0 + rows + 1e6 * (rows > MOST)
        return built

    monkeypatch.setattr(VllmConfig, "_validate_adaptive_verification", lambda _: None)
    monkeypatch.setattr(model_runner, "maybe_create_adaptive_verification_manager", manager)
    monkeypatch.setattr(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **_: mode)
    monkeypatch.setattr(vllms, "_assign_draft_token_budget_compiled", pytest.fail)  # our cut stands for it
    engine = engine_of(
        target,
        draft,
        speculative={"enable_adaptive_verification": True},
        additional_config={"vllm_dflash": {"planner": "on"}},
        max_num_seqs=32,
        max_num_batched_tokens=256,
    )
    speculator, trimmer = engine.speculator, engine.runner.adaptive_verification
    if not isinstance(speculator._fused_head, Watched):
        speculator._fused_head = speculator._top_tokens = Watched(speculator.model, 32 * K)
        speculator._needs_logits = False
        trim(trimmer, speculator)
        prepare_cut(trimmer)
    engine.checked, count = [], type(trimmer).get_num_tokens.__get__(trimmer)

    def counted(tokens, drafts):
        total = count(tokens, drafts)
        made = sum(map(len, drafts.values()))
        engine.checked.append((made, total - sum(tokens.values()) + made))
        return total

    trimmer.get_num_tokens.__self__._count = counted
    engine.planning = planning_of(engine.llm.llm_engine.engine_core.engine_core.scheduler)
    return engine


def force(planner, widths):
    """Plans with the widths of an iterator, in order."""
    from vllm_dflash.planner.plan import Plan

    def plan(names, _context, **_):
        width = next(widths)
        return Plan(width, np.full(len(names), width), 1.0)

    planner.plan = plan


def widths_of(engine, prompts):
    """Proposals as of ``engine.watch``, and the width of the step that made each."""
    proposals, width_of = engine.watch(prompts), {}
    watched = engine.speculator.propose

    def propose(*args, num_speculative_tokens=None, **kwargs):
        drafts = watched(*args, num_speculative_tokens=num_speculative_tokens, **kwargs)
        width_of.update(dict.fromkeys(proposals.keys() - width_of.keys(), num_speculative_tokens))
        return drafts

    engine.speculator.propose = propose
    return proposals, width_of


def test_text_and_confidences_whatever_the_widths(adaptive, target, draft, prompts, baseline):
    """Greedy text, the drafts of the reference, vLLM's odds; the planner sees confidences and the rows that were verified.

    Breaks if rows of drafts that were cut count as context, a narrow step's confidences land on another position or request, or
    the planner reckons with rows that were never verified, or reports them.
    """
    expected = baseline(prompts, 12)
    proposals, width_of = widths_of(adaptive, prompts)
    chooser = random.Random(3)
    force(adaptive.planning.planner, iter(lambda: chooser.choice([K, 1, 0, K]), None))
    learnt, observe = [], adaptive.planning.planner.costs.observe
    adaptive.planning.planner.costs.observe = lambda *args: learnt.append(args[0]) or observe(*args)
    head = adaptive.speculator._fused_head
    head.seen.clear()
    planning, verified, so_far = adaptive.planning, [], []
    finished = planning.finished

    def finished_and_reported(*args):
        finished(*args)
        verified.append(planning.report(reset=True)["verified"])
        so_far.append(sum(kept for _, kept in adaptive.checked))

    planning.finished = finished_and_reported
    planning.report(reset=True)
    assert adaptive.generate(prompts, 12) == expected
    del planning.finished
    assert np.cumsum(verified).tolist() == so_far  # each report has those of its own step, without what was cut
    vars(adaptive.planning.planner.costs).pop("observe")
    made, checked = np.array(adaptive.checked).sum(axis=0)
    assert 0 < checked < made
    texts = [p + e for p, e in zip(prompts, expected, strict=True)]
    reference = Reference(Path(target), Path(draft))
    for width in (1, K):
        log = [(n, anchor + 1, drafts[:width]) for (n, anchor), drafts in proposals.items() if width_of[n, anchor] == width]
        assert len(log) > 3
        assert reference.wrong_drafts(texts, log) == []
    found, exact, _ = (torch.cat(part) for part in zip(*head.seen, strict=True))
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-6)
    stats = adaptive.planning.planner.acceptance
    survival = stats.survival(["any", "other"])
    assert (survival > 0).all()
    assert (survival < 1).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    assert any(rows > 4 for rows in learnt)
    assert max(learnt) <= max(4 + kept for _, kept in adaptive.checked)


def test_the_planner_outlives_its_batches(adaptive, prompts, baseline):
    """Breaks if a step without any news ends the planner (all requests are new, their confidences are not known yet), or if
    confidences that come late keep finished requests for ever.
    """
    from vllm_dflash.engine.planning import planning_of

    scheduler = adaptive.llm.llm_engine.engine_core.engine_core.scheduler
    force(adaptive.planning.planner, itertools.repeat(K))
    for _ in range(3):
        assert adaptive.generate(prompts, 8) == baseline(prompts, 8)
    assert planning_of(scheduler) is adaptive.planning
    stats = adaptive.planning.planner.acceptance
    stats.survival(["any"])  # counts what has come
    assert 0 < len(stats._row_of) <= len(prompts)


def test_steps_without_drafts_leave_calibration_and_copies_alone(adaptive, prompts, baseline):
    """Breaks if a step without drafts launches kernels that count none and waits for copies that say nothing, as vLLM's does in
    every step, or if a step that verifies drafts goes uncounted."""
    manager, estimator = adaptive.runner.adaptive_verification, adaptive.speculator.acceptance_estimator
    trimmer, counted, copied, verified = manager.get_num_tokens.__self__, [], [], []
    step, record, rows = estimator.step, trimmer._record, manager.get_num_tokens

    def rows_of(tokens, drafts):
        total = rows(tokens, drafts)
        verified.append(total - sum(tokens.values()) + sum(map(len, drafts.values())))
        return total

    estimator.step = lambda *args: counted.append(int((args[1] + args[2] - 1).sum())) or step(*args)
    trimmer._record = lambda *args: copied.append(1) or record(*args)
    manager.get_num_tokens = rows_of
    for width in (K, 0):
        for seen in (counted, copied, verified):
            seen.clear()
        force(adaptive.planning.planner, itertools.repeat(width))
        assert adaptive.generate(prompts[:2], 12) == baseline(prompts[:2], 12)
        if width:
            assert sum(counted) == sum(verified) > 0
            assert len(copied) >= len(counted)
    assert len(counted) <= 1  # of what the answers before have left in flight
    assert 2 <= len(copied) <= 4
    estimator.step, trimmer._record, manager.get_num_tokens = step, record, rows


@pytest.mark.parametrize("drafted", [True, False])
def test_a_dummy_step_leaves_what_is_known_of_drafts(adaptive, drafted):
    """Breaks if vLLM's dummy steps, as of data-parallel ranks without requests, let the drafts before them go ungraded, or have
    the next step without drafts graded."""
    adaptive.speculator.drafted = drafted
    adaptive.runner._dummy_run(2)
    assert adaptive.speculator.drafted == drafted


def test_chosen_widths_and_prices(adaptive, prompts, baseline):
    """The planner chooses by itself, and a narrow draft is priced as such.

    Breaks if adaptive verification switches the planner off, or the manager pays for a full pass when a narrow one runs.
    """
    from vllm_dflash.engine import verification_prices

    vars(adaptive.planning.planner).pop("plan", None)
    assert adaptive.planning.planner.widths == (0, 1, K)
    assert adaptive.generate(prompts[:2], 6) == baseline(prompts[:2], 6)
    verification_prices.note_draft_times([(rows, 1e-3 * rows) for rows in (2, 4, 8, 16)])
    trimmer = adaptive.runner.adaptive_verification
    wrapped = trimmer.get_num_tokens.__self__
    wrapped._prices = None
    for width, price in ((1, 4.0), (K, 8.0)):
        wrapped._price(width, 2)
        assert trimmer.cost_tables[0][2] == price
    verification_prices.note_draft_times([])
    wrapped._prices = None


def test_a_cut_is_priced_by_what_the_planner_observes(adaptive, prompts):
    """Breaks if step times do not reach the manager, or those of another batch size stay when the batch changes."""
    trimmer, costs = adaptive.runner.adaptive_verification, adaptive.planning.planner.costs
    # Prices are for steps that verify, and next to none of these drafts is accepted: left alone, a planner may make none.
    force(adaptive.planning.planner, itertools.repeat(K))
    adaptive.generate(prompts[:2], 6)
    for requests, seconds in ((3, 100.0), (2, 300.0)):
        for _, rows in itertools.product(range(40), range(requests, requests * (1 + K) + 1)):  # any that steps may verify
            costs.observe(rows, 0, 0, seconds, requests)
        adaptive.generate(prompts[:requests], 6)
        assert trimmer.cost_tables[1][2 * requests] > 0.5e3 * seconds  # milliseconds
    vars(adaptive.planning.planner).pop("plan")


@pytest.fixture(scope="module")
def second_token(target, draft):
    """Law of the second token after [5, 6, 7] at temperature 1, float64, by the plain-PyTorch reference."""
    model = Reference(Path(target), Path(draft)).target

    def law(ids):
        model.reset()
        return model.forward(ids)[0][-1].double().softmax(dim=-1)

    first = law([5, 6, 7])
    return sum(p * law([5, 6, 7, token]) for token, p in enumerate(first.tolist()))


@pytest.mark.slow
def test_sampled_tokens_follow_the_target(adaptive, second_token):
    """Chi-square of the second token, the first that a draft precedes, while half of all requests verify nothing.

    Breaks if what is cut depends on the token that was drafted and not on the draft's distribution alone.
    """
    requests = 96
    vars(adaptive.planning.planner).pop("plan", None)
    force(adaptive.planning.planner, iter(lambda: K, None))
    tokens = [tokens[1] for tokens in adaptive.generate([[5, 6, 7]] * requests, 2, temperature=1.0)]
    made, checked = np.array(adaptive.checked).sum(axis=0)
    assert checked < 0.5 * made
    seen, expected = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double(), second_token * requests
    bins = (expected.cumsum(0) / 6).long()  # some 6 expected in each, 16 of them: the law is flat
    seen, expected = (torch.zeros(int(bins[-1]) + 1, dtype=torch.float64).index_add(0, bins, x) for x in (seen, expected))
    kept = expected > 2.5
    assert kept.sum() > 10
    scale = seen[kept].sum() / expected[kept].sum()
    assert chisquare(seen[kept].numpy(), (expected[kept] * scale).numpy()).pvalue > 1e-4


def test_text_and_planner_live_through_churn(adaptive, prompts, long_prompts, last_prompt, baseline):
    """Requests come at any step, end at any length, and are aborted; places change hands, batches are of one and of many.

    Breaks if confidences, budgets or prices of one request reach another, if any mixture of them ends the planner, or if those
    that have left are kept.
    """
    from vllm import SamplingParams

    from vllm_dflash.engine.planning import planning_of

    vars(adaptive.planning.planner).pop("plan", None)
    engine, choice = adaptive.llm.llm_engine, random.Random(7)
    known, expected, got, names = [*prompts, *long_prompts, last_prompt], {}, {}, itertools.count()
    for step in range(80):
        if step < 56 and choice.random() < 0.6:
            name, prompt, length = f"churn-{next(names)}", choice.choice(known), choice.randrange(1, 16)
            options = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": length}
            engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**options))
            expected[name] = baseline([prompt], length)[0]
        if expected.keys() - got.keys() and choice.random() < 0.06:
            gone = choice.choice(sorted(expected.keys() - got.keys()))
            engine.abort_request([gone])
            del expected[gone]
        for output in engine.step() if engine.has_unfinished_requests() else ():
            if output.finished and output.request_id in expected:
                got[output.request_id] = list(output.outputs[0].token_ids)
    assert not engine.has_unfinished_requests()
    assert len(got) > 20
    assert got == expected
    planner = adaptive.planning.planner
    assert planning_of(engine.engine_core.engine_core.scheduler) is adaptive.planning
    planner.acceptance.survival(["any"])
    assert len(planner.acceptance._row_of) <= 32
    assert len(set(adaptive.planning.record.widths)) > 1
