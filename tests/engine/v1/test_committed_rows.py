# SPDX-License-Identifier: Apache-2.0
"""Which rows a step commits, and where: token indices whatever positions the target counts in."""

import pytest
import torch

from vllm_dflash.engine.query_block import PAD_SLOT, committed_rows, query_block

KV_BLOCK = 8
# Request 0: 40 tokens, the last 4 in this step, 2 of them rejected. Request 1: a prefill of 5 from the start. With an image
# before them, an M-RoPE target would number request 0's rows from, say, 21 on: no length can be told from those.
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
SEQ_LENS = torch.tensor([40, 5], dtype=torch.int32)
REJECTED = torch.tensor([2, 0], dtype=torch.int32)
POSITIONS = [36, 37, 38, 39, 0, 1, 2, 3, 4]
TABLE = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
SLOTS = torch.tensor([int(TABLE[int(i > 3), p // KV_BLOCK]) * KV_BLOCK + p % KV_BLOCK for i, p in enumerate(POSITIONS)])


@pytest.mark.parametrize("compact", [True, False])
def test_positions_and_anchors_are_token_indices(compact):
    """Breaks when positions come from the target's M-RoPE rows, or a rejected row counts."""
    found = committed_rows(STARTS, SEQ_LENS, SLOTS, REJECTED, compact=compact)
    kept = found.slots != PAD_SLOT
    assert found.positions[kept].tolist() == [36, 37, 0, 1, 2, 3, 4]
    assert found.slots[kept].tolist() == SLOTS[[0, 1, 4, 5, 6, 7, 8]].tolist()
    assert found.anchors.tolist() == [38, 5]


def test_without_rejected_rows_every_row_is_committed():
    """Breaks when the layout without padding is counted in another way."""
    found = committed_rows(STARTS, SEQ_LENS, SLOTS, None, compact=True)
    assert found.rows is None
    assert (found.positions.tolist(), found.anchors.tolist()) == (POSITIONS, [40, 5])


def test_one_row_of_each_request_is_counted_as_any_number():
    """Breaks when the short way of plain decoding finds other positions or anchors."""
    starts, lengths, slots = (
        torch.arange(4, dtype=torch.int32),
        torch.tensor([40, 5, 1], dtype=torch.int32),
        torch.tensor([9, 3, 7]),
    )
    short, full = (committed_rows(starts, lengths, slots, None, compact=compact) for compact in (True, False))
    assert short.rows is full.rows is None
    for name in ("positions", "slots", "anchors"):
        ours, theirs = getattr(short, name), getattr(full, name)
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())


def test_no_query_row_lands_on_a_committed_token():
    """Breaks when anchors lag behind the token index: the query rows would overwrite the context's keys."""
    committed = committed_rows(STARTS, SEQ_LENS, SLOTS, REJECTED, compact=True)
    block = query_block(
        committed.anchors,
        torch.tensor([7, 8], dtype=torch.int32),
        TABLE,
        None,
        num_speculative_tokens=3,
        skip=1,
        mask_token_id=5,
        kv_block_size=KV_BLOCK,
        max_model_len=80,
        compact=True,
    )
    assert block.positions.tolist() == [38, 39, 40, 41, 5, 6, 7, 8]
    assert set(block.slots.tolist()).isdisjoint(committed.slots.tolist())
    assert block.seq_lens.tolist() == [42, 9]
