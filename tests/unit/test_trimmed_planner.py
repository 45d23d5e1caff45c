# SPDX-License-Identifier: Apache-2.0
"""Draft widths where drafts are cut on the device: rates against brute force, survival from confidences, the choice itself."""

import itertools
from collections import Counter, deque

import numpy as np
import pytest

from vllm_dflash.planner import confidences
from vllm_dflash.planner.confidences import ConfidenceStats, UsualConfidence
from vllm_dflash.planner.costs import StepCosts
from vllm_dflash.planner.planner import Planner
from vllm_dflash.planner.trimmed import TrimmedPlanner, corrected, trimmed_rates

WIDTHS = (0, 1, 3, 7)


class Costs:
    """8B on an H200, roughly: flat up to 184 rows, then linear; drafts a fifth of it."""

    pace, late = 0.006, 0

    def __init__(self, base=0.005, knee=184.0):
        self.base, self.knee, self.plain_steps = base, knee, Counter()

    def seconds(self, verify_rows, query_rows, context, requests=0):
        del context, requests
        verify, query = (np.hypot(1.0, np.asarray(rows) / self.knee) for rows in (verify_rows, query_rows))
        return self.base * (verify + 0.2 * query * (np.asarray(query_rows) > 0))

    def by_rows(self, requests, most_rows, context):
        rows = np.arange(requests, most_rows + 1)
        return rows, self.seconds(rows, 0, context)

    def drafting(self, query_rows):
        return self.seconds(0, query_rows, 0) - self.seconds(0, 0, 0)

    def plain(self, requests, context):
        return float(self.seconds(requests, 0, context))

    def least(self, requests):
        return float(requests) + 1.0  # seconds


def test_rates_are_those_of_the_best_cut():
    """Breaks if positions are not admitted in the order of their survival, or a width pays for another's draft pass."""
    survival = np.cumprod(np.random.default_rng(0).uniform(0.1, 1.0, (3, 3)), axis=1)
    costs, widths, rows = Costs(knee=2.0), np.array([0, 1, 3]), np.array([0, 2, 4])
    found = trimmed_rates([survival[:, :width] for width in widths], widths, costs, rows, 0)
    for width, row, rate in zip(widths, rows, found, strict=True):
        best = max(
            (3 + sum(survival[r, :n].sum() for r, n in enumerate(lengths))) / costs.seconds(3 + sum(lengths), 3 * row, 0)
            for lengths in itertools.product(range(width + 1), repeat=3)
        )
        assert rate == pytest.approx(best)


def test_a_long_context_slows_steps_without_drafts_too():
    """Breaks if it is left out of their price alone: long answers would end up without drafts."""
    costs = StepCosts(184.0)
    for step in range(400):
        context = 1000 * (step % 40)
        costs.observe(64, 0, context, 5e-3 + 2e-7 * context, 64)
    near, far = (float(trimmed_rates([np.empty((64, 0))], np.array([0]), costs, np.array([0]), at)[0]) for at in (0, 40_000))
    assert near / far == pytest.approx(13 / 5, rel=0.1)


def test_survival_keeps_the_spread_and_the_level():
    """Breaks if confident drafts are averaged with hopeless ones: a batch's best positions would look worse than they are."""
    stats, names = ConfidenceStats(2), [f"r{number}" for number in range(64)]
    sharp = np.tile([[0.9, 0.9], [0.1, 0.1]], (32, 1))
    for step in range(40):  # each request is easy in every other step
        stats.note(names, np.roll(sharp, step, axis=0))
    found = stats.survival(names)
    assert found[:32, 0].mean() > 0.8
    assert found[32:, 0].mean() < 0.2
    np.testing.assert_allclose(found.mean(0), [0.5, 0.41], atol=0.02)
    np.testing.assert_allclose(stats.survival(names[:5]).mean(0), found.mean(0), atol=0.05)
    assert (np.diff(found, axis=1) <= 0).all()
    stats.observe(names, [2] * 64, [0] * 64)
    np.testing.assert_allclose(stats.survival(names), found)


def test_positions_that_were_not_drafted_follow_those_that_were():
    """Breaks if a narrow draft hides what a wider one would gain: the planner would never widen again."""
    stats, names = ConfidenceStats(3), [f"r{number}" for number in range(64)]
    for _ in range(60):
        stats.note(names, np.full((64, 3), 0.8))
    for _ in range(80):
        stats.note(names, np.full((64, 1), 0.5))
    first, second, third = stats.survival(names)[0]
    assert first == pytest.approx(0.5, abs=0.02)
    assert 0.45 < second / first < 0.8
    assert 0.45 < third / second < 0.8


def test_a_new_text_is_known_within_a_few_steps():
    """Breaks if blocks of the requests before are part of an estimate: a single request would not draft for a whole answer."""
    stats = ConfidenceStats(3)
    for step in range(300):
        stats.note(["hard"], np.full((1, 3), 0.02 + 0.01 * (step % 2)))
    stats.forget(["hard"])
    for _ in range(6):
        stats.note(["easy"], np.full((1, 3), 0.9))
    assert stats.survival(["easy"])[0, 0] > 0.6
    stats.forget(["easy"])
    assert not stats._row_of


def test_usual_confidence_counts_drafts_that_are_reached():
    """Breaks if a position behind a certain rejection counts as much as one that is looked at."""
    usual = UsualConfidence(2)
    for _ in range(80):
        usual.note(np.array([[1.0, 0.9], [1e-6, 0.1]]))
    np.testing.assert_allclose(usual.by_position, [0.5, 0.9], atol=0.01)


@pytest.mark.parametrize(("requests", "confidence", "least", "most"), [(1, 0.9, 7, 7), (256, 0.3, 0, 1), (64, 0.6, 1, 3)])
def test_width_follows_load_and_confidence(requests, confidence, least, most):
    """Breaks if the planner reckons with the rows of whole drafts, or takes counts of cut drafts for rejections."""
    planner = TrimmedPlanner(WIDTHS, Costs(), lambda width: width + 1)
    names = [str(number) for number in range(requests)]
    chosen = []
    for _ in range(200):
        width = planner.plan(names, 0).width
        chosen.append(width)
        planner.observe(names, [width] * requests, [0] * requests)
        if width:
            planner.note(names, np.full((requests, width), confidence))
    usual = int(np.median(chosen[100:]))
    assert least <= usual <= most


def test_a_batch_that_stopped_drafting_starts_again():
    """Breaks if nothing is learnt from a probe's confidences while no draft is verified."""
    planner = TrimmedPlanner(WIDTHS, Costs(), lambda width: width + 1)
    names = [str(number) for number in range(16)]

    def run(confidence, steps):
        for _ in range(steps):
            width = planner.plan(names, 0).width
            if width:
                planner.note(names, np.full((16, width), confidence))
        return width

    assert run(0.02, 300) == 0
    run(0.99, 150)
    assert np.median([run(0.99, 1) for _ in range(20)]) > 0


@pytest.mark.parametrize(("kept", "usual"), [(1.0, 1), (0.8, 0)])
def test_what_drafting_promises_and_does_not_keep_ends_it(kept, usual):
    """Breaks if confidences that promise more than comes hold a large batch to drafts that lose, or a promise that is kept ends
    them. Without looking at what came both would draft for good."""
    planner = TrimmedPlanner(WIDTHS, Costs(), lambda width: width + 1)
    names, random = [str(number) for number in range(160)], np.random.default_rng(0)
    widths, plain = [], 160 / Costs().plain(160, 0)
    for _ in range(400):
        plan = planner.plan(names, 0)
        widths.append(plan.width)
        planner.note(names, random.uniform(0.7, 1.0, (160, plan.width)))
        seconds = 0.006
        share = planner._shares[WIDTHS.index(plan.width)]
        came = plan.rate / share * seconds * kept if plan.width else plain * seconds
        if not plan.probe:
            planner.came(plan, seconds, came, 160)
    assert int(np.median(widths[100:])) == usual
    assert np.count_nonzero(widths) > 10  # it was tried


def test_drafting_has_to_be_worth_it_and_none_at_all_has_not():
    """Breaks if a batch that gains nothing by drafting goes on as long as it loses less than the margin, if it flips between the
    two at equal rates, or if it stops for a price that no step was seen to have."""
    costs = Costs()
    planner = TrimmedPlanner(WIDTHS, costs, lambda width: width + 1)
    planner._held, planner._since_change = 1, 100
    assert planner._choose(np.array([1.01, 1.0, 0.9]), 64) == 1
    costs.plain_steps[(64).bit_length()] = 4
    assert planner._choose(np.array([1.0, 1.0, 0.9]), 64) == 1
    assert planner._choose(np.array([1.0, 0.99, 1.0]), 64) == 0
    planner._since_change = 100
    assert planner._choose(np.array([1.0, 1.015, 0.9]), 64) == 0
    assert planner._choose(np.array([1.0, 1.03, 0.9]), 64) == 1
    planner._since_change = 1
    assert planner._choose(np.array([1.0, 0.97, 0.9]), 64) == 1  # right after a change more is asked for, here too
    by_request = Planner(WIDTHS, costs, lambda width: width + 1, per_request=True)
    by_request._held, by_request._since_change = 1, 100
    assert by_request._choose(np.array([1.0, 0.99, 0.9]), 64) == 1  # the context that was kept back is dear


@pytest.mark.parametrize(("ratio", "told", "least", "most"), [(0.97, True, 9, 13), (0.7, True, 3, 6), (0.97, False, 2, 3)])
def test_plain_steps_are_tried_as_often_as_they_are_cheap(ratio, told, least, most):
    """Breaks if a price from a bad time stands for hundreds of steps though a try costs nothing, a dear try is made as often, or
    tries that tell nothing go on: prefills in between, on a busy server.

    ``ratio``: of the rate without drafts to that with.
    """

    class Tried(Costs):
        def least(self, requests):
            return 1e-6 * requests

        def plain(self, requests, context):
            return requests / (ratio * rate) if rate else super().plain(requests, context)

    costs, rate = Tried(), 0.0
    planner, names, plain = TrimmedPlanner(WIDTHS, costs, lambda width: width + 1), [str(number) for number in range(96)], []
    for _ in range(400):
        plan = planner.plan(names, 0)
        rate = rate if plan.probe or not plan.width else plan.rate
        plain.append(plan.probe and not plan.width)
        costs.plain_steps[(96).bit_length()] += told and plain[-1]
        planner.note(names, np.full((96, plan.width), 0.9))
    tries = sum(now and not before for before, now in zip([False, *plain], plain, strict=False))
    assert least <= tries <= most
    rate = 0.0
    few = [planner.plan(names[:20], 0) for _ in range(20)]  # a batch of another size has turns of its own
    assert any(plan.probe and not plan.width for plan in few)


def test_news_is_taken_once():
    """Breaks if the confidences of a step count twice, or those of an earlier engine count at all."""
    confidences.forget()
    confidences.record_confidences(["a"], np.ones((1, 2)))
    confidences.record_rows(7)
    assert len(confidences.take_confidences()) == 1
    assert confidences.take_rows() == [7]
    confidences.record_rows(8)
    confidences.forget()
    assert confidences.take_confidences() == []
    assert confidences.take_rows() == []


BARE = np.maximum(5.0, 0.03 * np.arange(513))  # milliseconds by rows


def costs_of(*steps):
    """Costs of steps (rows, requests, milliseconds), five of each, that started from ``BARE``."""
    costs = StepCosts(184.0)
    costs.verify.measure([(rows, BARE[rows] / 1e3) for rows in (64, 128, 256, 512)])
    for rows, requests, milliseconds in steps:
        for _ in range(5):
            costs.observe(rows, 0, 0, milliseconds / 1e3, requests)
    return costs


def test_a_cut_is_priced_with_what_steps_take_beyond_the_bare_pass():
    """Breaks if head, sampling and the host's part of a step are left out: too few drafts would be worth a step's fixed cost."""
    np.testing.assert_array_equal(corrected(BARE, costs_of().observed(64)), BARE)
    found = corrected(BARE, costs_of((64, 64, 6.0), (256, 64, BARE[256] + 3.0)).observed(64))
    at = [1, 64, 160, 256, 512]
    np.testing.assert_allclose(found[at] - BARE[at], [1.0, 1.0, 2.0, 3.0, 3.0], rtol=0.02)


def test_a_stall_makes_no_row_count_dearer_than_a_larger_one():
    """Breaks if a few slow steps of 64 rows make 128 rows look cheaper: the cut would avoid 64, and never learn better."""
    found = corrected(BARE, costs_of((64, 64, 7.4), *[(128, 64, 6.0)] * 4).observed(64))
    assert (np.diff(found) >= 0).all()
    assert found[64] < 6.5
    apart = corrected(BARE, costs_of((64, 64, 8.0), (256, 64, 8.2)).observed(64))  # in between the bare curve is flat
    assert (np.diff(apart) >= 0).all()


def test_no_number_of_rows_is_free():
    """Breaks if steps that were quicker than their bare pass price small ones at nothing: rates would be endless."""
    assert corrected(np.array([1.0, 5.0, 20.0]), [(2, 0.01)]).min() > 0


def test_a_cut_is_priced_for_its_batch_and_context():
    """Breaks if steps of few requests, or of short contexts, price those of many: verifying nothing would look too cheap."""
    costs = costs_of((64, 8, 5.5), (64, 64, 8.0), (256, 64, 11.0))
    assert costs.observed(8) == [(64.0, pytest.approx(5.5e-3, rel=0.05))]
    assert costs.observed(64) == [(64.0, pytest.approx(8.0e-3, rel=0.05)), (256.0, pytest.approx(11.0e-3, rel=0.05))]
    costs = StepCosts(184.0)
    for step in range(400):
        context = 1000 * (step % 40)
        costs.observe(64, 0, context, 5e-3 + 2e-7 * context, 64)
    costs.observe(64, 0, 40_000, 13e-3, 64)
    assert costs.observed(64)[0][1] == pytest.approx(13e-3, rel=0.1)


def test_costs_of_an_earlier_engine_are_forgotten():
    """Breaks if the next engine of the process cuts by the step times of another model."""
    confidences.offer_costs(costs_of((64, 64, 6.0)))
    assert confidences.observed_costs(64)
    confidences.forget()
    assert confidences.observed_costs(64) == []


def test_neighbours_are_probed_in_turn_and_less_and_less():
    """Breaks if rows that are cut away count for what was tried: every probe would be wider, and none would wait longer."""
    drafts = {1: 3e-4, 3: 6e-4, 7: 4e-3}  # seconds: 3 is best
    planner = TrimmedPlanner(WIDTHS, StepCosts(184.0), lambda width: width + 1)
    planner.costs.measure_drafts((16 * (width + 1), seconds) for width, seconds in drafts.items())
    names, probes = [str(number) for number in range(16)], []
    for step in range(1500):
        plan = planner.plan(names, 0)
        if plan.width:
            planner.note(names, np.full((16, plan.width), 0.6))
        rows = 16 * (plan.width + 1) if plan.width else 0
        planner.costs.observe(16 + 8 * bool(plan.width), rows, 0, 0.005 + drafts.get(plan.width, 0.0), 16)
        if plan.probe:
            probes.append((step, plan.width))
    assert {width for _, width in probes} == {1, 7}
    gaps = np.diff([step for step, _ in probes])
    assert np.median(gaps[-4:]) > 2 * np.median(gaps[:4])


def test_a_held_width_leaves_probes_as_they_were():
    """Breaks if the fixed widths of a benchmark count as tried: the planner would then look at its neighbours less often."""
    served = []
    for held in (0, 40):
        planner, names = TrimmedPlanner(WIDTHS, Costs(), lambda width: width + 1), [str(number) for number in range(16)]
        planner._clock = lambda: 0.0
        for width in (*WIDTHS, None) if held else ():
            planner.hold(width)
            for _ in range(held if width is not None else 0):
                planner.plan(names, 0)
        widths = []
        for _ in range(300):
            widths.append(planner.plan(names, 0).width)
            planner.note(names, np.full((16, widths[-1]), 0.6))
        served.append(widths)
    assert served[0] == served[1]


def test_a_wider_probe_is_judged_by_its_own_confidences():
    """Breaks if confidences of the steps before, which come after the probe was planned, stand for it."""
    planner, names = TrimmedPlanner(WIDTHS, Costs(), lambda width: width + 1), [str(number) for number in range(4)]
    planner._probed, planner._probed_width, planner._wait = dict.fromkeys(names, 1.0), 7, 100
    planner.note(names, np.full((4, 3), 0.99))
    assert planner._wait == 100
    planner.note(names, np.full((4, 7), 0.99))
    assert planner._wait == 0


def test_survival_of_hopeless_drafts_is_a_number():
    """Breaks if products that vanish are divided by each other: the planner would choose what is no rate at all."""
    stats, names = ConfidenceStats(80), ["a", "b"]
    for _ in range(40):
        stats.note(names, np.full((2, 80), 1e-9))
    stats.survival(names)
    halves = np.repeat([[-30.0, 30.0]], 40, axis=1)
    stats._offsets = deque([np.concatenate([halves, -halves])])  # each block is hopeless in one half
    assert np.isfinite(stats.survival(names)).all()
