# SPDX-License-Identifier: Apache-2.0
"""The watchdog's statistics on synthetic streams: it speaks when acceptance collapses, and is silent when it only varies."""

import itertools
import random

import pytest

from vllm_dflash.acceptance import AcceptanceWatch, Class, Limits, Profile

K = 7


def run(requests, chance, classes=0, *, width=K, each=60, spread=0.15, seed=0):
    """Verdicts as (kind, class, number of the request), in order.

    Requests of ``each`` verifications run eight at a time; their drafts are accepted one by one with a chance of the request's
    own, which lies around ``chance``: some texts are easy. ``chance``, ``classes`` and ``width`` may be functions of its number.
    """
    rng, watch, found = random.Random(seed), AcceptanceWatch(K), []

    def of(number):
        bits, mean, drafted = (value(number) if callable(value) else value for value in (classes, chance, width))
        return str(number), drafted, min(0.95, max(0, mean + rng.gauss(0, spread))), int(bits)

    for start in range(0, requests, 8):
        batch = [of(number) for number in range(start, start + 8)]
        for _, (name, drafted, odds, bits) in itertools.product(range(each), batch):
            accepted = next((n for n in range(drafted) if rng.random() >= odds), drafted)
            found += [(v.kind, v.of, int(name)) for v in watch.observe(name, drafted, accepted, bits)]
    return found


def test_a_draft_that_never_helps_is_named_once_and_soon():
    """Breaks if the floor is not judged, is judged by a window too large to be reached, or warns again and again."""
    found = run(400, 0.03, spread=0.02)
    assert [verdict[:2] for verdict in found] == [("low", None)]
    assert found[0][2] < 40


def test_a_sudden_drop_is_named_once():
    """Half of 600 requests in, the acceptance length falls from about 2.8 to 1.5; breaks if classes repeat what holds for all."""
    found = run(600, lambda number: 0.65 if number < 300 else 0.3, lambda number: Class.FEW | (number % 2) * Class.CACHED)
    assert [verdict[:2] for verdict in found] == [("drop", None)]
    assert 300 < found[0][2] < 340


def test_a_drop_early_on_is_named():
    """Breaks if a bad window counts as history: the second one would then be compared with a lower figure and pass."""
    found = run(160, lambda number: 0.65 if number < 40 else 0.33, spread=0.02)
    assert [verdict[:2] for verdict in found] == [("drop", None)]


def test_one_bad_spell_is_no_verdict():
    """Sixteen hard texts in a row, a little more than one window; breaks if one window is enough."""
    assert run(400, lambda number: 0.2 if 200 <= number < 216 else 0.65, spread=0.02) == []


def test_a_slow_drift_is_named():
    """Breaks if the history follows the drift, as a moving average would: no window differs much from the one before."""
    found = run(1600, lambda number: 0.8 * (1 - number / 1600))
    assert ("drop", None) in [verdict[:2] for verdict in found]


@pytest.mark.parametrize(
    ("member", "share"), [(Class.CACHED, 0.75), (Class.RESUMED, 0.05), (Class.LONG, 0.15), (Class.MANY, 0.3)]
)
def test_a_fault_of_one_class_is_named_with_that_class_only(member, share):
    """The class is bad from its first request on, so that only the others tell.

    Breaks if rare classes never fill a window, or if a frequent one is compared with a mean that it is a part of.
    """
    inside = [(number * share) % 1 < share for number in range(1200)]
    found = run(
        1200, lambda number: 0.2 if inside[number] else 0.65, lambda number: member if inside[number] else number % 2 * Class.FEW
    )
    assert [verdict[:2] for verdict in found] == [("behind", member)]


def test_a_class_that_drops_later_is_named_with_that_class_only():
    """Breaks if a class is judged by the mean of all requests: two thirds of them stay as they were."""
    found = run(
        900,
        lambda number: 0.3 if number > 400 and number % 3 == 0 else 0.65,
        lambda number: 0 if number % 3 else Class.CACHED,
    )
    assert {of for _, of, _ in found} == {Class.CACHED}


def test_fewer_drafts_in_large_batches_are_no_loss():
    """K may shrink as the batch grows; breaks if acceptance lengths of different K are compared as they are."""
    large = lambda number: number // 8 % 2  # noqa: E731  # every second batch
    assert run(500, 0.8, lambda n: Class.MANY if large(n) else 0, width=lambda n: 2 if large(n) else K, spread=0.05) == []


def test_one_hard_text_is_no_verdict():
    """A single request never is, however long; breaks if windows count verifications only."""
    watch = AcceptanceWatch(K)
    assert [v for _ in range(20_000) for v in watch.observe("one", K, 0, 0)] == []


def test_false_alarms_are_rare():
    """40 servers with long or short requests of very mixed texts in three classes, nothing wrong: not one of them is warned.

    Breaks if windows are too small for the spread between requests.
    """
    kinds = [0, 0, Class.CACHED, Class.LONG, Class.FEW | Class.CACHED]
    alarms = []
    for seed, (requests, each) in itertools.product(range(20), [(400, 60), (4000, 4)]):
        rng = random.Random(seed)
        mean, members = rng.uniform(0.45, 0.8), rng.choices(kinds, k=requests)
        alarms += run(requests, mean, members.__getitem__, each=each, spread=0.25, seed=seed)
    assert alarms == []


def test_figures():
    """Breaks if a rate counts verifications that had no draft at its position.

    By hand: 4 verifications with 1, 2, 2 and 3 drafts, of which 1, 0, 2 and 2 are accepted; too few have a third draft.
    """
    profile = Profile(3)
    profile.drafted[1:] = 1, 2, 1
    profile.accepted[:] = 1, 1, 2, 0
    assert profile.rates() == pytest.approx([3 / 4, 2 / 3])
    assert profile.length() == pytest.approx(1 + 3 / 4 + 2 / 3)
    assert profile.length(1) == pytest.approx(1.75)


def test_limits_are_heeded():
    """Breaks if a limit is a number in the code: here two windows of 8 verifications of one request are enough."""
    watch = AcceptanceWatch(K, Limits(window=8, requests=1))
    found = [v for _ in range(16) for v in watch.observe("one", K, 0, 0)]
    assert [(v.kind, v.found, v.verifications, v.requests) for v in found] == [("low", 1.0, 8, 1)]
