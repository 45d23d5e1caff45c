# SPDX-License-Identifier: Apache-2.0
"""Context K/V that is written later ends up as if it had been written at once."""

import random

import torch

from vllm_dflash.engine.late_context import LATEST, ContextWriter
from vllm_dflash.engine.query_block import CommittedRows


class Cache:
    """Stands for the draft network: a row's K and V are its state, and writes are counted."""

    def __init__(self, slots):
        self.rows, self.writes = torch.zeros(slots, 2), 0

    def combine_hidden_states(self, states):
        return states

    def precompute_and_store_context_kv(self, states, positions, slots):
        assert len(set(slots.tolist())) == len(slots)  # with duplicates the order of writes is anybody's guess
        self.rows[slots] = torch.stack([states[:, 0], positions.float()], 1)
        self.writes += 1


def test_late_rows_are_those_of_prompt_ones_whoever_has_the_slots():
    """Steps of all kinds over few slots, so that blocks change hands while their rows wait.

    Breaks if an old row overwrites a new one, a row is lost, or a draft reads the cache before they are written.
    """
    chooser = random.Random(3)
    late, prompt = Cache(40), Cache(40)
    writer = ContextWriter(late, 900, compact=True, may_wait=True)
    at_once = ContextWriter(prompt, 900, compact=True, may_wait=False)
    for step in range(400):
        slots = torch.tensor(chooser.sample(range(40), chooser.randint(1, 12)))
        positions = torch.randint(0, 1000, slots.shape)
        kept = torch.arange(len(slots))[torch.rand(len(slots)) < 0.8] if step % 2 else None
        states = torch.rand(len(slots), 1)
        rows = slice(None) if kept is None else kept
        committed = CommittedRows(kept, positions[rows], slots[rows], positions)
        drafts = chooser.random() < 0.2
        writer.store(committed, states, drafts=drafts)
        at_once.store(committed, states, drafts=drafts)
        if drafts:
            assert torch.equal(late.rows, prompt.rows)
    assert late.writes < prompt.writes


def test_waiting_is_bounded():
    """Breaks if states pile up while nothing is drafted."""
    cache = Cache(8192)
    writer = ContextWriter(cache, None, compact=True, may_wait=True)
    for step in range(4 * LATEST):
        slots = torch.arange(4) + 4 * step
        writer.store(CommittedRows(None, slots, slots, slots), torch.rand(4, 1), drafts=False)
        assert writer.rows_waiting < LATEST
    assert cache.writes == 16
