# SPDX-License-Identifier: Apache-2.0
"""Requests that each get a length of their own, as on CPUs: one alone is tried for long, many lose next to nothing."""

import numpy as np
import pytest

from vllm_dflash.planner.acceptance import SPREAD, AcceptanceStats
from vllm_dflash.planner.costs import StepCosts
from vllm_dflash.planner.plan import fitted_plan
from vllm_dflash.planner.planner import Planner
from vllm_dflash.planner.widths import widths_up_to

WIDTHS = widths_up_to(7)


def planner_of():
    return Planner(WIDTHS, StepCosts(8), lambda width: width + 1, per_request=True, clock=lambda: 0.0)


def seconds_of(requests, rows, query):
    """As measured with the demo pair on one core, float32: at one request 8 rows and a draft pass take 1.6 plain steps."""
    verify = np.interp(rows, [1, 8, 16, 32, 64, 128], [28e-3, 33e-3, 56e-3, 97e-3, 129e-3, 217e-3])
    return float(verify + (np.interp(query, [2, 8, 32, 128], [10e-3, 12e-3, 26e-3, 75e-3]) if query else 0.0))


def serve(planner, names, rate, random, steps=None, tokens=64):
    """Run a batch until each has its ``tokens``, or for ``steps``; the plans, tokens written and seconds taken."""
    written, plans, seconds = dict.fromkeys(names, 0), [], 0.0
    while len(plans) < steps if steps else min(written.values()) < tokens:
        plan = planner.plan(names, 0)
        lengths, drafting = plan.lengths, int((plan.lengths > 0).sum())
        rows, query = len(names) + int(lengths.sum()), drafting * (plan.width + 1)
        true, noise = seconds_of(len(names), rows, query), 1 + 0.08 * random.standard_normal()
        planner.costs.observe(rows, query, 0, true * noise, len(names))
        if query:
            planner.costs.observe_draft(query, noise * (true - seconds_of(len(names), rows, 0)))
        accepted = np.minimum(random.geometric(1 - rate, len(names)) - 1, lengths).tolist()
        planner.observe(names, lengths.tolist(), accepted)
        written = {name: n + 1 + a for (name, n), a in zip(written.items(), accepted, strict=True)}
        plans.append(plan)
        seconds += true
    return plans, sum(written.values()), seconds


def test_a_single_request_is_not_given_up_on_too_soon():
    """Text that drafting is worth 13 to 50 % on, answers of 64 tokens one by one: as fast as with K drafts always.

    Breaks if a few rejections in a row end drafting: plain steps teach nothing.
    """
    reached = []
    for rate in (0.45, 0.5, 0.6):
        best = sum(rate**j for j in range(8)) / seconds_of(1, 8, 8)
        for seed in range(6):
            planner, random = planner_of(), np.random.default_rng(seed)
            runs = [serve(planner, [f"r{number}"], rate, random) for number in range(12)]
            reached.append(sum(run[1] for run in runs) / sum(run[2] for run in runs) / best)
    assert np.mean(reached) > 1.0


@pytest.mark.parametrize("requests", [1, 16])
def test_other_text_is_tried_at_once(requests):
    """Breaks if what a request was like decides about those that come after it, or a trial is narrow where rows are free."""
    planner, random = planner_of(), np.random.default_rng(0)
    names = [f"a{number}" for number in range(requests)]
    assert not serve(planner, names, 0.01, random, steps=100)[0][-1].width
    first = planner.plan([f"b{number}" for number in range(requests)], 0)
    assert int((first.lengths > 0).sum()) == max(1, requests // 8)
    assert requests > 1 or first.lengths.max() >= 5


def test_trials_cost_by_what_is_at_stake():
    """A thousand steps of hopeless text. Breaks if one request is tried as seldom as many, or many as often as one."""
    for requests, most, least in (1, 0.02, 20), (16, 0.002, 3):
        planner, random = planner_of(), np.random.default_rng(1)
        names = [f"r{number}" for number in range(requests)]
        serve(planner, names, 0.0, random, steps=60)
        plans, tokens, seconds = serve(planner, names, 0.0, random, steps=1000)
        lost = 1 - tokens / seconds / (requests / seconds_of(requests, requests, 0))
        assert lost < most, requests
        assert sum(plan.width > 0 for plan in plans) >= least


@pytest.mark.parametrize("requests", [1, 8])
def test_only_the_luckiest_of_many_must_promise_more(requests):
    """Drafts that promise 6 % more than none. Breaks if one request pays for a choice among many, or many do not."""
    planner, random = planner_of(), np.random.default_rng(3)
    names = [f"r{number}" for number in range(requests)]
    serve(planner, names, 0.9, random, steps=200)
    low, high = 0.0, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        survival = np.tile(rate ** np.arange(1, 8), (requests, 1))
        survivals = [survival[:, :width] for width in WIDTHS]
        plans = [fitted_plan(survival, width, planner.costs, width + 1, 0) for width in WIDTHS]
        low, high = (low, rate) if max(plan.rate for plan in plans) > 1.06 * plans[0].rate else (rate, high)
    assert any(plan.width for plan in planner._fitted(survivals, 0)) == (requests == 1)


def test_a_batch_without_drafts_is_seldom_planned_for():
    """Breaks if a plan is made again though nothing new is known: 1 % of a step of 16 requests on a CPU."""
    planner, random = planner_of(), np.random.default_rng(2)
    names = [f"r{number}" for number in range(16)]
    serve(planner, names, 0.0, random, steps=100)
    made, real = [], planner._replan
    planner._replan = lambda *batch, **more: (made.append(1), real(*batch, **more))[1]
    serve(planner, names, 0.0, random, steps=200)
    assert 1 <= len(made) <= 12


def test_hope_fades_with_what_is_known():
    """Breaks if a request that was tried is hoped for as much as a new one, or a batch of many as much as one request."""
    hopeful, sober = AcceptanceStats(7, hope=1.5), AcceptanceStats(7)

    def beyond(names):
        """Log-odds of the second draft, which nobody tries here."""
        rates = [stats.survival(names)[0, 1] / stats.survival(names)[0, 0] for stats in (hopeful, sober)]
        more, less = (np.log(rate / (1 - rate)) for rate in rates)
        return more - less

    assert beyond(["a"]) == pytest.approx(1.5 * SPREAD)
    assert beyond([f"m{number}" for number in range(16)]) == pytest.approx(1.5 * SPREAD / 4)
    for accepted in [0, 1] * 20:
        for stats in (hopeful, sober):
            stats.observe(["a"], [1], [accepted])
    assert 0.4 * SPREAD < beyond(["a"]) < 1.0 * SPREAD
