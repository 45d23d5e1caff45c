# SPDX-License-Identifier: Apache-2.0
"""The cut of adaptive verification by our kernel, beside vLLM's own on managers of the same state."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

MOST, K = 20, 5


@pytest.fixture
def make_manager(monkeypatch):
    """Real managers for MOST requests with the confidences given; a CPU has neither streams nor events to give them."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllms

    for name in ("Stream", "Event"):
        monkeypatch.setattr(vllms.torch.cuda, name, lambda *_, **__: None)
    monkeypatch.setattr(vllms, "_assign_draft_token_budget_compiled", vllms._assign_draft_token_budget)

    def make(confidences=None, bonus=1, most=MOST):
        states = SimpleNamespace(num_speculative_steps=K, device=torch.device("cpu"), max_num_reqs=most)
        starts = torch.full((most + 1,), -7, dtype=torch.int32)
        manager = vllms.AdaptiveVerificationManager(states, starts, bonus, max_total_logits=1 << 20)
        manager._confidence_probs.copy_(torch.rand(most, K) if confidences is None else confidences)
        return manager

    return make


def batch(generator, count):
    """(names, states, drafts and other tokens by name in another order) of ``count`` requests, the last of which are prefills."""
    names = [f"r{i}" for i in range(count)]
    drafts = [int(d) for d in generator.integers(1, K + 1, count)]
    drafts[max(1, count - 2) :] = [0] * (count - max(1, count - 2))
    others = [1 if d else int(generator.integers(1, 40)) for d in drafts]
    shuffled = [int(i) for i in generator.permutation(count)]
    by_name = [{names[i]: values[i] for i in shuffled} for values in (drafts, others)]
    return names, torch.from_numpy(generator.permutation(MOST)[:count].astype(np.int64)), *by_name


def fields(result):
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in result]


@pytest.mark.parametrize("bonus", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 7, MOST])
def test_ours_returns_what_vllms_returns(make_manager, count, bonus):
    """Breaks on a swapped argument, numbers of one request on another's row, a stale tail, or a budget that outlives its step."""
    from vllm_dflash.engine.draft_budget import DraftBudget, prepare_cut

    torch.manual_seed(count)
    generator = np.random.default_rng(count)
    vllms = make_manager(bonus=bonus)
    ours = make_manager(vllms._confidence_probs, bonus)
    prepare_cut(ours)
    assert isinstance(ours.reallocate_drafts.__self__, DraftBudget)
    for _ in range(3):
        names, states, drafts, others = batch(generator, count)
        total = sum(drafts.values())
        for budget in sorted({0, 1, total // 3, total // 2, total - 1, total}):
            for manager in (ours, vllms):
                manager._batch_budget = drafts, others, budget
            found = ours.reallocate_drafts(names, states)
            assert fields(found) == fields(vllms.reallocate_drafts(names, states))
            assert found[1] is ours.query_start_loc
            assert ours._batch_budget is None


def test_every_tile_is_compiled_before_the_cut_is_ours(make_manager, monkeypatch):
    """Breaks if a batch compiles while serving, start-up writes into the runner's tensors, or a fault takes vLLM's cut away."""
    from vllm_dflash.engine import draft_budget

    launched = []
    for most, tiles in ((20, {20}), (64, {64}), (65, {64, 65}), (1000, {64, 256, 1000})):
        manager = make_manager(most=most)
        launched.clear()
        with monkeypatch.context() as patch:
            kernel = draft_budget.draft_budget

            def watched(confidences, mapping, *rest, kernel=kernel):
                launched.append(len(mapping))
                kernel(confidences, mapping, *rest)

            patch.setattr(draft_budget, "draft_budget", watched)
            draft_budget.prepare_cut(manager)
            draft_budget.prepare_cut(manager)  # once per manager
        assert sorted(launched) == sorted(tiles)
        assert manager.query_start_loc.unique().tolist() == [-7]
    manager = make_manager()
    monkeypatch.setattr(draft_budget, "draft_budget", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        draft_budget.prepare_cut(manager)
    assert manager.reallocate_drafts.__self__ is manager


@pytest.mark.parametrize(("on_host", "most", "drafts"), [(True, MOST, K), (False, 1025, K), (False, MOST, 33)])
def test_vllms_cut_is_compiled_where_it_stays(make_manager, monkeypatch, on_host, most, drafts):
    """Breaks if the kernel replaces what it does not do, or one request or one draft is compiled for while serving.

    torch.compile takes sizes of 1 for constants.
    """
    from vllm_dflash.engine import draft_budget

    seen = []

    def cut(confidences, mapping, capacities, budget, steps):
        assert budget < int(capacities.sum()) or capacities.sum() == 1
        assert confidences.shape[1] == steps == int(capacities[0])
        seen.append((len(mapping), budget))

    real = make_manager(most=most)
    manager = SimpleNamespace(
        num_speculative_steps=drafts,
        query_start_loc=SimpleNamespace(device=SimpleNamespace(type="cuda")),
        req_states=SimpleNamespace(max_num_reqs=most),
        _batch_draft_capacity=torch.empty(drafts + 2, dtype=torch.int32),
        _confidence_probs=torch.rand(most, drafts),
        _copy_admitted_drafts_to_host=on_host,
        reallocate_drafts=real.reallocate_drafts,
    )
    monkeypatch.setattr(draft_budget.adaptive_verification, "_assign_draft_token_budget_compiled", cut)
    monkeypatch.setattr(draft_budget.torch, "arange", lambda count, **_: range(count))
    draft_budget.prepare_cut(manager)
    assert manager.reallocate_drafts.__self__ is real
    assert {requests == 1 for requests, _ in seen} == {True, False}
    assert {budget == 1 for _, budget in seen} == {True, False}


def test_the_cut_is_prepared_once_graphs_exist(make_manager):
    """Breaks if the runner keeps vLLM's cut, or a dry capture takes part."""
    from vllm_dflash.engine.draft_budget import DraftBudget
    from vllm_dflash.planner_patches import verification_timing

    capture_model = verification_timing(lambda _: True).wrap(lambda _, **__: "captured")
    runner = SimpleNamespace(vllm_config=None, adaptive_verification=make_manager(), cudagraph_manager=None)
    for dry in (True, False):
        assert capture_model(runner, profile_only=dry) == "captured"
        assert isinstance(runner.adaptive_verification.reallocate_drafts.__self__, DraftBudget) != dry
