# SPDX-License-Identifier: Apache-2.0
"""Steps without drafts are what drafting is compared with: their time is known from such steps, not from a pass on its own."""

import numpy as np
import pytest

from vllm_dflash.planner.costs import StepCosts
from vllm_dflash.planner.planner import Planner
from vllm_dflash.planner.trimmed import TrimmedPlanner
from vllm_dflash.planner.turns import PlainTries
from vllm_dflash.planner.widths import widths_up_to

BARE = {1: 4.6, 32: 5.0, 64: 5.3, 128: 5.9, 256: 7.3, 512: 11.9, 1024: 22.3}
"""Milliseconds of the target's pass by rows, about those of an 8B model on an H200."""


def bare(rows):
    return float(np.interp(rows, list(BARE), list(BARE.values())))


def draft(rows):
    return 0.7 + 0.0028 * rows if rows else 0.0


def measured_costs():
    """Costs of an engine that has just started, all passes timed on their own."""
    costs = StepCosts(184.0)
    costs.measure_drafts((rows, draft(rows) / 1e3) for rows in (8, 64, 256, 1024, 2048))
    costs.verify.measure((rows, milliseconds / 1e3) for rows, milliseconds in BARE.items())
    return costs


def make(kind):
    costs = measured_costs()
    if kind == "trimmed":
        return TrimmedPlanner((0, 1, 3, 7), costs, lambda width: {1: 2, 3: 4, 7: 8}[width])
    return Planner(widths_up_to(7, 256), costs, lambda width: width + 1, per_request=False)


def cut(planner, requests, width, chance):
    """Drafts of all requests that are verified: of an adaptive verification that prices rows as the planner does."""
    if not isinstance(planner, TrimmedPlanner):
        return requests * width
    survival = np.repeat(np.cumprod(np.full(width, chance)), requests)
    seconds = planner.costs.seconds(requests + np.arange(survival.size + 1), 0, 0, requests)
    return int(np.argmax((requests + np.concatenate([[0.0], np.cumsum(survival)])) / seconds))


def serve(planner, requests, steps, chance, host, widths=None):
    """Steps at ``requests``; drafts are accepted with ``chance`` each. Returns the time of the last half over that of steps
    without drafts for as many tokens.

    ``host``: milliseconds that a step takes more where it verifies, and where it drafts; ``widths``: a list to append the chosen
    ones to.
    """
    random, names = np.random.default_rng(0), [str(number) for number in range(requests)]
    lengths, seconds, tokens = np.zeros(requests, dtype=int), 0.0, 0.0
    for step in range(steps):
        width = planner.plan(names, 0).width
        if widths is not None:
            widths.append(width)
        verified, query_rows = int(lengths.sum()), requests * (width + 1) if width else 0
        kept = np.minimum(random.geometric(1 - chance, requests) - 1, lengths)
        taken = bare(requests + verified) + draft(query_rows) + host * (bool(verified) + bool(width))
        planner.costs.observe(requests + verified, query_rows, 0, taken / 1e3, requests)
        if verified:
            planner.observe(names, lengths.tolist(), kept.tolist())
        if width and isinstance(planner, TrimmedPlanner):
            planner.note(names, np.full((requests, width), chance))
        if step >= steps // 2:
            seconds, tokens = seconds + taken, tokens + requests + kept.sum()
        drafts = cut(planner, requests, width, chance) if width else 0
        lengths = drafts // requests + (np.arange(requests) < drafts % requests)
    return seconds / tokens * requests / bare(requests)


@pytest.mark.parametrize("kind", ["equal", "trimmed"])
def test_what_the_host_adds_to_drafting_is_found_out(kind):
    """128 requests that are guessed well, on a host to which drafting costs more than it gains: passes timed alone say it gains.

    Breaks if only neighbouring widths are tried, or a single step without drafts, which still verifies the drafts before it, is
    taken for what such steps cost.
    """
    planner = make(kind)
    assert planner.plan([str(number) for number in range(128)], 0).width > 0
    assert serve(planner, 128, 300, 0.75, host=5.0) < 1.03


@pytest.mark.parametrize("kind", ["equal", "trimmed"])
def test_what_the_host_adds_is_found_out_soon(kind):
    """Breaks if a batch that drafts in vain waits for its turn to probe: short answers are over by then."""
    planner, widths = make(kind), []
    serve(planner, 128, 20, 0.75, host=5.0, widths=widths)
    assert widths[0] > 0
    assert 0 in widths[:13]


@pytest.mark.parametrize("kind", ["equal", "trimmed"])
def test_a_price_of_plain_steps_that_was_too_high_is_corrected(kind):
    """Breaks if a probe without drafts is one step, which still verifies and tells nothing of plain ones."""
    planner = make(kind)
    for _ in range(8):
        planner.costs.observe(128, 0, 0, 14e-3, 128)  # a neighbour on the host, say
    assert serve(planner, 128, 900, 0.75, host=5.0) < 1.03


@pytest.mark.parametrize("kind", ["equal", "trimmed"])
def test_where_drafting_pays_trying_without_costs_little(kind):
    """Breaks if steps without drafts are tried again and again, or a batch that gains by far is asked at all."""
    for requests in (8, 64):
        widths: list[int] = []
        best = serve(make(kind), requests, 400, 0.75, host=0.3, widths=widths)
        assert widths.count(0) <= (0 if requests == 8 else 9)
        assert min(widths[:3]) > 0
        assert best < (0.5 if requests == 8 else 0.75)


@pytest.mark.parametrize("kind", ["equal", "trimmed"])
def test_what_is_never_seen_is_not_tried_for_ever(kind):
    """Breaks if a busy server, whose steps have prefills in them and tell no time, runs without drafts again and again."""
    planner, names, widths = make(kind), [str(number) for number in range(128)], []
    for step in range(600):
        width = planner.plan(names, 0).width
        widths.append(width)
        rows = 128 * (1 + width)
        if width and step < 20:
            planner.costs.observe(rows, rows, 0, (bare(rows) + draft(rows) + 10.0) / 1e3, 128)
        if width and kind == "trimmed":
            planner.note(names, np.full((128, width), 0.75))
    assert max(widths) > 0
    assert 3 <= widths.count(0) <= 12  # two probes of three steps, and 1 % of the steps as neighbours of 1


def test_tries_that_tell_nothing_become_rare():
    """Breaks if a busy server tries steps without drafts for ever or never again, or as seldom once it hears of them."""
    tries, at = PlainTries(), []
    for now in range(20_000):
        if tries.due(now, told=0):
            at.append(now)
            tries.note(now, 0.99, told=0)
    assert (at[0], np.diff(at).tolist()) == (0, [64, 256, 1024, 4096, 4096, 4096, 4096])
    tries.note(20_000, 0.99, told=1)
    assert not tries.due(20_063, told=1)
    assert tries.due(20_064, told=1)


@pytest.mark.parametrize(("ratio", "steps"), [(0.5, 150), (0.98, 32), (2.0, 32)])
def test_tries_that_tell_cost_little(ratio, steps):
    """Breaks if dear ones come as often as those that lose nothing, or those that should win wait as if they were dear."""
    tries = PlainTries()
    tries.note(1000, ratio, told=0)
    assert not tries.due(1000 + steps - 1, told=1)
    assert tries.due(1000 + steps, told=1)


def test_a_held_width_begins_and_ends_at_once():
    """Breaks if steps of an unfinished probe follow a width that was held."""
    planner, names = make("equal"), [str(number) for number in range(128)]
    while not planner.plan(names, 0).probe:
        pass
    planner.hold(7)
    planner.hold(None)
    assert not planner.plan(names, 0).probe


def test_plain_steps_are_told_from_steps_that_draft():
    """Breaks if a step that verifies nothing but drafts, or one that verifies and drafts nothing, counts as plain, or none does:
    a try of plain steps would be taken for one that told nothing, and the next would come too late."""
    costs = measured_costs()
    for _ in range(6):
        costs.observe(256, 512, 0, 20e-3, 256)
        costs.observe(512, 0, 0, 21e-3, 256)
    assert costs.plain(256, 0) > 12e-3
    for _ in range(3):
        costs.observe(256, 0, 0, 9e-3, 256)
    assert costs.plain(256, 0) == pytest.approx(9e-3)
    assert costs.plain_steps == {(256).bit_length(): 3}
    assert costs.plain(64, 0) < 9e-3  # another load, with a quarter of the host's part


def test_a_batch_size_is_not_priced_by_the_hosts_part_of_another():
    """Breaks if what 128 requests add to a pass lies upon the rows that only they have: 32 would draft too narrow a block."""
    costs = measured_costs()
    for rows in (384, 512):
        for _ in range(8):
            costs.observe(rows, 0, 0, (bare(rows) + 4.0) / 1e3, 128)
    for _ in range(4):
        costs.observe(64, 0, 0, (bare(64) + 0.5) / 1e3, 32)
    seconds = costs.seconds([32, 64, 128, 256], 0, 0, 32)
    assert 1e3 * (seconds[3] - seconds[1]) == pytest.approx(bare(256) - bare(64), abs=0.1)
    fresh = costs.seconds([64, 256], 0, 0, 8)  # never seen: the difference is that of the passes, too
    assert 1e3 * (fresh[1] - fresh[0]) == pytest.approx(bare(256) - bare(64), abs=0.1)


def test_rows_kept_together_make_no_stair():
    """Breaks if all row counts of a knot cost the same: the best cut would be the last one of a stair, rows for nothing."""
    costs, random = measured_costs(), np.random.default_rng(0)
    for rows in random.integers(440, 620, 200).tolist():  # a cut varies from step to step
        costs.observe(rows, 0, 0, (bare(rows) + 2.0) / 1e3, 256)
    rows = np.arange(450, 610, 10)
    seconds = 1e3 * costs.seconds(rows, 0, 0, 256)
    np.testing.assert_allclose(seconds, [bare(each) + 2.0 for each in rows], rtol=0.02)
    assert (np.diff(seconds) > 0.05).all()  # 0.2 of what ten rows cost


def test_a_probe_that_did_well_but_does_not_pay_is_not_followed_for_ever():
    """Breaks if each probe that beats its expectation is followed by another: 200 requests would draft in two steps of five."""
    planner, names, probes = make("trimmed"), [str(number) for number in range(200)], 0
    for _ in range(200):
        plan = planner.plan(names, 0)
        probes += plan.probe
        rows = 300 if plan.width else 200
        taken = bare(rows) + draft(200 * (plan.width + 1) if plan.width else 0) + bool(plan.width)
        planner.costs.observe(rows, 200 * (plan.width + 1) if plan.width else 0, 0, taken / 1e3, 200)
        if plan.width:  # easy just where nobody looks twice
            planner.note(names, np.full((200, plan.width), 0.99 if plan.probe else 0.5))
    assert 4 <= probes < 40


@pytest.mark.parametrize("kind", ["equal", "trimmed"])
def test_other_text_behind_hopeless_text_is_tried_at_once(kind):
    """Breaks if requests that have just come wait for the probe of those before them, whose text was never guessed."""
    planner, random = make(kind), np.random.default_rng(0)
    for text, chance in ("hard", 0.01), ("easy", 0.8):
        names, widths = [f"{text}{number}" for number in range(64)], []
        for _ in range(150):
            width = planner.plan(names, 0).width
            widths.append(width)
            rows, query_rows = 64 * (1 + width), 64 * (width + 1) if width else 0
            planner.costs.observe(rows, query_rows, 0, (bare(rows) + draft(query_rows)) / 1e3, 64)
            if width:
                planner.observe(names, [width] * 64, np.minimum(random.geometric(1 - chance, 64) - 1, width).tolist())
                if kind == "trimmed":
                    planner.note(names, np.full((64, width), chance))
        if text == "hard":
            assert widths[-1] == 0
            assert sum(width > 0 for width in widths[20:]) < 8
    assert widths[0] > 0
    assert np.mean(np.array(widths[:20]) >= 3) > 0.5


@pytest.mark.parametrize("kind", ["equal", "trimmed"])
@pytest.mark.parametrize("steps", [1, 4, 16, 64])
def test_batches_of_hopeless_text_lose_next_to_nothing_by_being_tried(kind, steps):
    """Breaks if each new batch is probed, for ever: answers of one step would be one probe each."""
    planner, lost, total = make(kind), 0.0, 0.0
    for batch in range(-(-1200 // steps)):
        names = [f"{batch}-{number}" for number in range(64)]
        for _ in range(steps):
            width = planner.plan(names, 0).width
            query_rows = 64 * (width + 1) if width else 0
            taken = bare(64 * (1 + width)) + draft(query_rows)
            planner.costs.observe(64 * (1 + width), query_rows, 0, taken / 1e3, 64)
            if width:
                planner.observe(names, [width] * 64, [0] * 64)
                if kind == "trimmed":
                    planner.note(names, np.full((64, width), 0.01))
            lost, total = lost + taken - bare(64), total + bare(64)
        planner.acceptance.forget(names)
    assert lost < 0.015 * total


def test_a_batch_in_its_prompt_is_tried_when_it_decodes():
    """Breaks if the probe of a new batch is spent on a step that is still a prompt's, where no drafts are made."""
    planner = make("equal")
    planner._clock = lambda: 0.0  # however long planning takes here, plans are made again soon
    hard = [f"hard{number}" for number in range(64)]
    while planner.plan(hard, 0).width or planner._age < 40:
        planner.costs.observe(64, 0, 0, bare(64) / 1e3, 64)
        planner.observe(hard, [3] * 64, [0] * 64)
    planner._wait = 500
    names = [f"easy{number}" for number in range(64)]
    assert not any(planner.plan(names, 0, decoding=False).width for _ in range(12))
    assert any(planner.plan(names, 0).width for _ in range(8))


def test_steps_without_drafts_have_their_own_turn():
    """Breaks if trying them brings a dear neighbour's turn forward, or a single step stands for them."""
    planner, names = make("equal"), [str(number) for number in range(128)]
    widths = []
    while widths[-3:] != [0, 0, 0] and len(widths) < 40:
        if 0 not in widths:
            planner._wait = 900
        width = planner.plan(names, 0).width
        widths.append(width)
        planner.costs.observe(128 * (1 + width), 128 * (1 + width), 0, (bare(256) + draft(256) + 6.0) / 1e3, 128)
    assert widths.index(0) == len(widths) - 3
    assert planner._wait > 800


def test_a_neighbour_without_drafts_is_probed_in_three_steps_and_pays_for_them():
    """Breaks if the price of plain steps is never seen from width 1, as one step still verifies, or three cost as one."""
    costs = StepCosts(184.0)  # no pass was timed: nothing is tried out of turn
    planner = Planner((0, 1), costs, lambda width: width + 1, per_request=False)
    names, random = [str(number) for number in range(64)], np.random.default_rng(0)
    widths = []
    for _ in range(600):
        width = planner.plan(names, 0).width
        widths.append(width)
        costs.observe(64 * (1 + width), 128 * width, 0, (6.0 + 1.5 * width) / 1e3, 64)
        if width:
            planner.observe(names, [1] * 64, (random.random(64) < 0.6).astype(int).tolist())
    spells = "".join(map(str, widths)).strip("0").replace("1", " ").split()
    assert spells
    assert set(spells) == {"000"}
    begins = [step for step in range(1, 600) if widths[step] == 0 < widths[step - 1]]
    assert min(np.diff(begins)) >= 30  # three steps that lose a tenth each, at 1 % of the time


@pytest.mark.parametrize(("steps", "milliseconds"), [(6, 12.0), (2, 5.0)])
def test_a_price_of_plain_steps_that_stands_is_kept(steps, milliseconds):
    """Breaks if steps that draft in vain, and are dearer or too few to tell, have one slow step without drafts decide."""
    costs = measured_costs()
    for _ in range(6):
        costs.observe(256, 0, 0, 9e-3, 256)
    for _ in range(steps):
        costs.observe(256, 512, 0, (milliseconds + draft(512)) / 1e3, 256)
    assert costs.plain(256, 0) == pytest.approx(9e-3, rel=0.02)
    costs.observe(256, 0, 0, 14e-3, 256)
    assert costs.plain(256, 0) < 10.5e-3


def test_a_stale_price_of_plain_steps_does_not_keep_drafts_in_vain():
    """As on a busy host: plain steps were seen in a bad time, and drafts of hopeless text have been made since. Breaks if the old
    price stands until plain steps have their next turn, some 1024 steps later: a whole answer at 256 requests did."""
    costs = measured_costs()
    for _ in range(6):
        costs.observe(256, 0, 0, 14e-3, 256)
    for _ in range(2):
        costs.observe(256, 512, 0, (bare(256) + 3.0 + draft(512)) / 1e3, 256)
    assert costs.plain(256, 0) == pytest.approx(14e-3, rel=0.02)  # two may be luck
    for _ in range(4):
        costs.observe(256, 512, 0, (bare(256) + 3.0 + draft(512)) / 1e3, 256)
        costs.observe(1024, 1024, 0, (bare(1024) + 3.0 + draft(1024)) / 1e3, 256)  # many rows, which say nothing of few
    assert costs.plain(256, 0) == pytest.approx((bare(256) + 3.0) / 1e3, rel=0.02)
    costs.observe(256, 0, 0, (bare(256) + 3.0) / 1e3, 256)
    assert costs.plain(256, 0) == pytest.approx((bare(256) + 3.0) / 1e3, rel=0.02)  # and does not come back with the first step
    for _ in range(3):
        costs.observe(256, 0, 0, 14e-3, 256)
    assert costs.plain(256, 0) == pytest.approx(14e-3, rel=0.02)  # what is seen now is not doubted
