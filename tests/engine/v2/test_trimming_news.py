# SPDX-License-Identifier: Apache-2.0
"""What the planner is told of a step's drafts: by whose they are, and of those alone that still have their place."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

K, MOST = 3, 8


@pytest.fixture
def trimmer(monkeypatch):
    """``Trimming`` before a real manager whose copies arrive at once: a CPU has neither streams nor events to wait for."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllms

    from vllm_dflash.engine.trimming import Trimming

    for name in ("Stream", "Event"):
        monkeypatch.setattr(vllms.torch.cuda, name, lambda *_, **__: None)
    states = SimpleNamespace(num_speculative_steps=K, device=torch.device("cpu"), max_num_reqs=MOST, req_id_to_index={})
    manager = vllms.AdaptiveVerificationManager(states, torch.zeros(MOST + 1, dtype=torch.int32), 1, max_total_logits=1 << 20)
    manager.record_confidences = lambda _probs, _batch: None
    return Trimming(manager, {1: 2, K: 4})


def step(trimmer, places, confidences=None, prefills=()):
    """Tell a step of requests by name and place; ``confidences`` of the step before, by place. Returns what the planner gets."""
    from vllm_dflash.planner import confidences as mailbox

    manager = trimmer._manager
    manager.req_states.req_id_to_index = dict(places)
    for place, values in (confidences or {}).items():
        manager._stale_confidences[manager._stale_idx].np[place] = values
    batch = SimpleNamespace(
        num_reqs=len(places),
        req_ids=list(places),
        idx_mapping_np=np.array(list(places.values())),
        is_prefilling_np=np.array([name in prefills for name in places]),
    )
    trimmer.record_confidences(None, batch)
    return [(list(names), news.round(3).tolist()) for names, news in mailbox.take_confidences()]


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
