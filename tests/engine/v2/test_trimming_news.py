# SPDX-License-Identifier: Apache-2.0
"""What the planner is told of a step's drafts: by whose they are, and of those alone that still have their place."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trimming_steps import EASY, HARD, MOST, K, budget, priced_of, step, trimmer_of


@pytest.fixture
def trimmer(monkeypatch):
    return trimmer_of(monkeypatch)


@pytest.fixture
def priced(trimmer):
    return priced_of(trimmer)


def test_news_is_of_the_requests_that_drafted(trimmer):
    """Breaks if a step's confidences go to the batch that follows, or a prefill counts as having drafted."""
    assert step(trimmer, {"a": 2, "b": 0, "c": 5}, prefills=("c",)) == []
    found = step(trimmer, {"b": 0, "c": 5}, {2: [0.9, 0.5, 0.1], 0: [0.8, 0.4, 0.2], 5: [0.7, 0.7, 0.7]})
    assert found == [(["b"], [[0.8, 0.4, 0.2]])]  # a has left


def test_a_place_that_another_has_taken_says_nothing_of_its_last_owner(trimmer):
    """Breaks if what vLLM puts down for a new request, certainty, counts for the one that has left."""
    step(trimmer, {"a": 2, "b": 0})
    assert step(trimmer, {"new": 2, "b": 0}, {2: [1.0, 1.0, 1.0], 0: [0.8, 0.4, 0.2]}) == [(["b"], [[0.8, 0.4, 0.2]])]


def test_certain_drafts_count(trimmer):
    """Breaks if confidences that round to 1 are taken for those of a new request: the easiest text would teach nothing."""
    step(trimmer, {"a": 2, "b": 0})
    found = step(trimmer, {"a": 2, "b": 0}, {2: [1.0, 1.0, 1.0], 0: [0.5, 0.5, 0.5]})
    assert found == [(["a", "b"], [[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]])]


def test_the_list_of_names_stays_while_the_batch_does(trimmer):
    """Breaks if every step brings a list of its own: steps of a batch could not be counted together."""
    from vllm_dflash.planner import confidences as mailbox

    values, lists = {2: [0.5, 0.5, 0.5], 0: [0.5, 0.5, 0.5]}, []
    for _ in range(3):
        trimmer._manager.req_states.req_id_to_index = {"a": 2, "b": 0}
        for place, row in values.items():
            trimmer._manager._stale_confidences[trimmer._manager._stale_idx].np[place] = row
        batch = SimpleNamespace(
            num_reqs=2, req_ids=["a", "b"], idx_mapping_np=np.array([2, 0]), is_prefilling_np=np.array([False, False])
        )
        trimmer.record_confidences(None, batch)
        lists += [names for names, _ in mailbox.take_confidences()]
    assert len(lists) == 2
    assert lists[0] is lists[1]


def test_a_hard_block_does_not_cut_the_easy_one_behind_it(priced):
    """Breaks if the budget of one request follows the block before, which says next to nothing of the next."""
    step(priced, {"a": 2})
    for values in (EASY, HARD, EASY, EASY, HARD):
        step(priced, {"a": 2}, {2: values})
    assert budget(priced, {"a": 2}) == K
    for _ in range(30):
        step(priced, {"a": 2}, {2: HARD})
    assert budget(priced, {"a": 2}) == 0  # text that is hard throughout is cut


def test_a_new_request_is_not_cut_by_the_one_before_it(priced):
    """Breaks if blocks of a request that has left stand for those of the next, or for one that has joined: its first drafts, of
    which vLLM knows nothing and takes all, and its second, of which its own block is known."""
    manager = priced._manager

    def own(place, values):
        manager._stale_confidences[manager._stale_idx].np[place] = values

    step(priced, {"a": 2})
    for _ in range(20):
        step(priced, {"a": 2}, {2: HARD})
    assert budget(priced, {"a": 2}) == 0
    own(5, 1.0)
    assert budget(priced, {"a": 2, "new": 5}) == K
    step(priced, {"new": 5})
    own(5, 1.0)
    assert budget(priced, {"new": 5}) == K
    own(5, EASY)
    assert budget(priced, {"new": 5}) == K
    step(priced, {"new": 5}, {5: EASY})
    assert budget(priced, {"new": 5}) == K


def test_a_wide_block_behind_a_narrow_one_is_verified(priced):
    """Breaks if positions that a narrow step did not draft count as hopeless, or what is usual stands for what is known."""
    manager = priced._manager
    manager._stale_confidences[manager._stale_idx].np[[2, 0]] = [HARD, [0.9, 0.0, 0.0]]
    priced._usual.by_position[:] = 0.9
    assert budget(priced, {"a": 2, "b": 0}) == K


def test_a_probe_of_another_width_leaves_what_is_known(priced):
    """Breaks if one narrow step makes a block forget all others: the hard one behind it would cut the next."""
    step(priced, {"a": 2})
    for _ in range(16):
        step(priced, {"a": 2}, {2: EASY})
    step(priced, {"a": 2}, {2: [0.9, 0.0, 0.0]})
    step(priced, {"a": 2}, {2: HARD})
    assert budget(priced, {"a": 2}) == K


def test_what_was_known_before_a_pause_is_forgotten():
    """Breaks if, after many steps without drafts, text of long ago decides how many drafts of a probe are verified."""
    from vllm_dflash.planner.confidences import RecentBlocks

    recent = RecentBlocks()
    for _ in range(20):
        recent.note(["a"], np.full((1, K), 0.1))
    assert recent.expected(1, K) is not None
    for _ in range(40):
        recent.idle()
    assert recent.expected(1, K) is None


def manager_with_copies(monkeypatch):
    """vLLM's manager with its own two copies, and a device that answers at once."""
    import contextlib

    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllms

    still = SimpleNamespace(synchronize=lambda: None, record=lambda *_: None, wait_stream=lambda *_: None)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(vllms.torch.cuda, name, lambda *_, **__: still)
    for name in ("stream", "gpu_sync_allowed"):
        monkeypatch.setattr(vllms, name, lambda *_: contextlib.nullcontext())
    states = SimpleNamespace(num_speculative_steps=K, device=torch.device("cpu"), max_num_reqs=MOST, req_id_to_index={})
    states.num_computed_tokens_np, states.prefill_len = np.full(MOST, 9), SimpleNamespace(np=np.full(MOST, 8))
    manager = vllms.AdaptiveVerificationManager(states, torch.zeros(MOST + 1, dtype=torch.int32), 1, max_total_logits=1 << 20)
    manager._confidence_probs.fill_(1.0)
    for copy in manager._stale_confidences:
        copy.gpu = torch.empty_like(copy.cpu)  # memory of its own
    manager.cost_tables = np.full(MOST + 1, 1.0), 5.0 + 0.02 * np.arange(64)
    return manager


def test_nothing_that_is_expected_is_taken_for_a_confidence(monkeypatch):
    """Breaks if averages that were put into one of them come back as
    what a step's drafts were worth, whichever requests leave, come, or are passed over, and whatever the widths; or if, while
    nothing is drafted, copies are made all the same, or are left out too soon: the next drafts would be judged by old ones."""
    from vllm_dflash.engine.trimming import Trimming
    from vllm_dflash.planner import confidences as mailbox

    manager = manager_with_copies(monkeypatch)
    states = manager.req_states
    width, copies = 0, 0
    record = manager.record_confidences

    def recorded(*args):
        nonlocal copies
        copies += 1
        record(*args)

    manager.record_confidences = recorded
    trimming = Trimming(manager, {1: 2, K: 4}, lambda: width > 0)
    random, alive, drafted, told = np.random.default_rng(0), {}, {}, 0
    truth, idle, last = {}, 0, []
    for number in range(800):
        resting = number % 50 > 30
        alive = {name: place for name, place in alive.items() if random.random() > (0.01 if resting else 0.05)}
        fresh = {f"r{number}": next(place for place in range(MOST) if place not in alive.values())} if len(alive) < 3 else {}
        alive |= fresh
        states.req_id_to_index = dict(alive)
        for place in fresh.values():
            manager.add_request(place)
        names = list(alive)[: None if random.random() > 0.1 else -1] or list(alive)
        waiting = {name: [0] * drafted[name] for name in names if drafted.get(name)}
        trimming.get_num_tokens({name: 1 + len(waiting.get(name, ())) for name in names}, waiting)
        width = 0 if resting else int(random.choice([0, 1, K], p=[0.2, 0.2, 0.6]))
        probabilities = torch.zeros(len(names), K)
        probabilities[:, :width] = torch.from_numpy(random.uniform(0.2, 0.99, (len(names), width)))
        places = np.array([alive[name] for name in names])
        prefills = np.array([name in fresh for name in names])
        batch = SimpleNamespace(num_reqs=len(names), req_ids=names, idx_mapping_np=places, is_prefilling_np=prefills)
        batch.idx_mapping = torch.from_numpy(places)
        trimming.record_confidences(probabilities, batch)
        for owners, news in mailbox.take_confidences():
            for owner, row in zip(owners, news, strict=True):
                np.testing.assert_allclose(row, truth[owner][: len(row)], rtol=1e-6)
                told += 1
        truth = dict(zip(names, probabilities.numpy(), strict=True))
        drafted = dict.fromkeys(names, width)
        idle = idle + 1 if not width and names == last else 0
        last = names
        if idle > 2:  # both copies have come since the last draft of these requests, or since one of them was new
            assert not manager._stale_confidences[0].np[places].any()
            assert not manager._stale_confidences[1].np[places].any()
    assert told > 500
    assert 500 < copies < 700


def test_of_many_requests_the_latest_step_counts(priced):
    """Breaks if a batch that is large enough is averaged over steps: where its text changes, the budget would lag behind."""
    from vllm_dflash.planner.confidences import RecentBlocks

    recent, names = RecentBlocks(), [str(number) for number in range(64)]
    for chance in (0.9, 0.1):
        recent.note(names, np.full((64, K), chance))
    assert recent.expected(64, K) is None
    for _ in range(2):
        recent.note(names[:16], np.full((16, K), 0.5))
    assert recent.expected(16, K) is not None
    assert recent.expected(16, K - 1) is None
    assert recent.known([*names[:2], "new", names[20]]) == names[:2]


def test_what_is_expected_of_few_requests_is_what_comes(priced):
    """Breaks if the averages are of another order than that of survivals, or change with the number of requests."""
    from vllm_dflash.planner.confidences import RecentBlocks

    random, names = np.random.default_rng(0), ["a", "b", "c", "d"]
    recent, steps = RecentBlocks(), random.uniform(0.1, 1.0, (16, 4, K))
    for confidences in steps:
        recent.note(names, confidences)
    found = recent.expected(4, K)
    ranked = np.mean([np.sort(np.cumprod(one, axis=1), axis=None)[::-1] for one in steps], axis=0)
    np.testing.assert_allclose(np.sort(np.cumprod(found, axis=1), axis=None)[::-1], ranked)
    fewer = recent.expected(3, K)
    assert np.cumprod(fewer, axis=1).mean() == pytest.approx(ranked.mean(), rel=0.02)
    assert ((fewer > 0) & (fewer <= 1)).all()


def test_copies_stay_off_while_requests_leave_and_come_back_on_for_new_ones(trimmer):
    """Breaks if, while nothing is drafted, a server whose answers end waits for a copy in nearly every step, or if a request that
    is new, or comes again, keeps the certainty that vLLM puts down for it."""
    manager, copies = trimmer._manager, []
    trimmer._has_drafted = lambda: False
    trimmer._record = lambda *_: copies.append(manager._pending_resets.clear())
    places = {name: place for place, name in enumerate("abcdef")}

    def steps(count):
        copies.clear()
        for _ in range(count):
            step(trimmer, places)
        return len(copies)

    assert steps(10) == 2
    for name in "acf":
        del places[name]
        assert steps(5) == 0
    places["new"] = 0
    assert steps(5) == 2
    manager._pending_resets.append(places["b"])  # preempted, and scheduled again in its old place
    assert steps(5) == 2


def test_text_goes_on_while_nothing_is_copied(trimmer):
    """Breaks if blocks from before a long stretch without drafts count as the latest ones."""
    drafted = True
    trimmer._has_drafted = lambda: drafted
    for _ in range(8):
        step(trimmer, {"a": 2}, {2: EASY})
    assert trimmer._recent.expected(1, K) is not None
    drafted = False
    for _ in range(60):
        step(trimmer, {"a": 2}, {2: [0.0, 0.0, 0.0]})
    assert trimmer._recent.expected(1, K) is None


def test_a_request_that_comes_again_in_its_old_place_says_nothing_of_its_drafts(trimmer):
    """Breaks if the certainty that vLLM puts down for a request that was preempted counts as what its drafts were worth."""
    manager = trimmer._manager
    step(trimmer, {"a": 2, "b": 0})
    manager._pending_resets.append(2)
    assert step(trimmer, {"a": 2, "b": 0}, {2: [1.0, 1.0, 1.0], 0: EASY}) == [(["b"], [EASY])]
