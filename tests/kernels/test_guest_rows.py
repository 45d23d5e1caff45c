# SPDX-License-Identifier: Apache-2.0
"""`admit_guests` against its oracle: who gets a row, who goes, and what the row holds; integers exact, numbers as quantised."""

import random

import pytest
import torch

from dflash_kernels import reference_fp8 as reference
from dflash_kernels.fp8_linear import quantise_rows
from dflash_kernels.guest_rows import admit_guests

VOCAB, WIDTH, LISTED, GUESTS = 70, 48, 10, 8


@pytest.fixture
def state(device):
    """A function giving fresh tensors: tokens 0 to 9 are listed, 60 to 69 are another rank's."""
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(VOCAB, WIDTH, generator=generator) * torch.logspace(-6, 3, VOCAB)[:, None]
    head[:, 5] *= 1e-3  # numbers below e4m3's normal ones
    head[17] = 0

    def make(dtype=torch.float32):
        home = torch.arange(VOCAB, dtype=torch.int32)
        home[:LISTED] = home[60:] = -1
        tensors = (
            head.to(dtype),
            home,
            torch.full((VOCAB,), -1, dtype=torch.int32),
            torch.full((GUESTS,), -1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(LISTED + GUESTS, WIDTH).to(torch.float8_e4m3fn),
            torch.ones(LISTED + GUESTS),
            torch.zeros(LISTED + GUESTS, dtype=torch.int64),
        )
        return [t.to(device) for t in tensors]

    return make


@pytest.fixture
def arrive_in(monkeypatch):
    """A function that has the interpreter run the programs of every launch in that order: seed of a shuffle, -1 from behind."""
    from triton.runtime.interpreter import interpreter_builder

    place = interpreter_builder.set_grid_idx

    def choose(order):
        def shuffled(x, y, z):
            size = interpreter_builder.grid_dim[0]
            programs = list(range(size))[::-1] if order < 0 else random.Random(order).sample(range(size), size)
            place(programs[x], y, z)

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", shuffled)

    return choose


def owners_of(state):
    """Token by guest row, after checking that maps and rows agree: one row per token, with its numbers."""
    head, home, slot_of, owner, _, weight, scale, offsets = (tensor.cpu() for tensor in state)
    owners = owner.tolist()
    taken = {place: token for place, token in enumerate(owners) if token >= 0}
    assert {int(token): int(slot_of[token]) for token in (slot_of != -1).nonzero()[:, 0]} == {t: p for p, t in taken.items()}
    rows = torch.tensor(list(taken), dtype=torch.int64) + LISTED
    tokens = torch.tensor(list(taken.values()), dtype=torch.int64)
    assert torch.equal(offsets[rows] + rows, tokens)
    numbers, scales = quantise_rows(head[home[tokens].long()])
    torch.testing.assert_close(scale[rows], scales, rtol=1e-6, atol=0)
    # Compiled code divides otherwise: at the edge between two numbers it takes the next one.
    torch.testing.assert_close(weight[rows].float(), numbers.float(), rtol=0.13, atol=2**-9)
    assert not len(rows) or (weight[rows].float() != numbers.float()).float().mean() < 0.01
    return owners


@pytest.mark.parametrize(
    ("dtype", "order"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, -1), *((torch.float32, n) for n in range(3))],
)
def test_unknown_tokens_get_rows_and_the_oldest_go(dtype, order, state, device, arrive_in):
    """Breaks if a token takes two rows, a listed one or another rank's takes one, an evicted one never comes back, or numbers are
    rounded otherwise than the listed rows are.

    Programs of a launch take places in any order, which decides who of them goes first later: what holds in every order is
    asserted. The interpreter runs them in the oracle's order, or in any other one.
    """
    if order is not None and device.type == "cpu":
        arrive_in(order)
    found, expected = state(dtype), state(dtype)
    seen, returned = set(), set()
    for ids in ([3, 20, 20, 65, -1, 99, 17, 30], [20, 21], [], [40, 41, 42, 43, 44, 45], [20, 17], list(range(20, 27))):
        before, arrived = owners_of(found), int(found[4])
        tokens = torch.tensor(ids, dtype=torch.int32, device=device)
        admit_guests(tokens, *found, first_row=LISTED)
        after, guests = owners_of(found), {token for token in ids if LISTED <= token < 60}
        new, count = guests - set(before), int(found[4]) - arrived
        places = [(arrived + i) % GUESTS for i in range(count)]  # the oldest guests'
        assert new <= {after[place] for place in places} <= guests
        assert len(new) <= count <= len(guests)  # a token whose row went during the launch may take another
        assert all(after[place] == before[place] for place in range(GUESTS) if place not in places)
        returned |= new & seen
        seen |= guests
        reference.admit_guests(tokens, *expected, first_row=LISTED)
        if order is None and device.type == "cpu":
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-6, atol=0)
    assert returned & {17, 20}  # of three tokens that came first, two had gone
    assert min(after) >= 0


def test_more_tokens_than_guests(state, device):
    """Breaks if two programs of one launch share a row: its number, its owner and its offset would be of two tokens."""
    found = state()
    admit_guests(torch.arange(10, 60, device=device), *found, first_row=LISTED)
    owners = found[3].tolist()
    assert sorted(set(owners)) == sorted(owners)
    assert [int(found[2][token]) for token in owners] == list(range(GUESTS))
    assert int((found[2] >= 0).sum()) == GUESTS
    rows = found[5][LISTED:].float() * found[6][LISTED:, None]
    torch.testing.assert_close(rows, found[0][found[3].long()], rtol=0.07, atol=2.0)


def test_shapes_that_do_not_fit_are_refused(state):
    """Breaks if guests are written behind the head's memory."""
    with pytest.raises(ValueError, match="first_row 11 and 8 guests must lie in 18 rows"):
        admit_guests(torch.zeros(1, dtype=torch.int32), *state(), first_row=LISTED + 1)
