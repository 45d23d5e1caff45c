# SPDX-License-Identifier: Apache-2.0
"""Steps of ``Trimming`` before vLLM's real manager on a CPU, which has neither streams nor events."""

from types import SimpleNamespace

import numpy as np
import torch

K, MOST = 3, 8
EASY, HARD = [0.9, 0.9, 0.9], [0.001, 0.001, 0.001]


def trimmer_of(monkeypatch):
    """``Trimming`` whose copies arrive at once."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllms

    from vllm_dflash.engine.trimming import Trimming

    for name in ("Stream", "Event"):
        monkeypatch.setattr(vllms.torch.cuda, name, lambda *_, **__: None)
    states = SimpleNamespace(num_speculative_steps=K, device=torch.device("cpu"), max_num_reqs=MOST, req_id_to_index={})
    manager = vllms.AdaptiveVerificationManager(states, torch.zeros(MOST + 1, dtype=torch.int32), 1, max_total_logits=1 << 20)
    manager.record_confidences = lambda _probs, _batch: None
    return Trimming(manager, {1: 2, K: 4}, lambda: True)


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


def budget(trimmer, places, drafts=K):
    """Drafts of the next step that are verified."""
    manager = trimmer._manager
    manager.req_states.req_id_to_index = dict(places)
    rows = trimmer.get_num_tokens(dict.fromkeys(places, 1 + drafts), {name: [0] * drafts for name in places})
    return rows - len(places)


def curves(draft, row, most=64):
    """Tables of vLLM's: ``draft`` milliseconds a draft pass, 5 a verification and ``row`` for each of its rows."""
    return np.full(MOST + 1, draft), 5.0 + row * np.arange(most)


def priced_of(trimmer):
    """The same with prices: 1 ms a draft pass, 5 ms a verification and 0.5 ms for each of its rows."""
    manager, states = trimmer._manager, trimmer._manager.req_states
    states.num_computed_tokens_np = np.full(MOST, 9)
    states.prefill_len = SimpleNamespace(np=np.full(MOST, 8))
    manager.cost_tables = curves(1.0, 0.5)
    return trimmer
