# SPDX-License-Identifier: Apache-2.0
"""`admit_guests` against its oracle: who gets a row, who goes, and what the row holds; integers exact, numbers as quantised."""

import pytest
import torch

from dflash_kernels import reference_fp8 as reference
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
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(LISTED + GUESTS, WIDTH).to(torch.float8_e4m3fn),
            torch.ones(LISTED + GUESTS),
            torch.zeros(LISTED + GUESTS, dtype=torch.int64),
        )
        return [t.to(device) for t in tensors]

    return make


def check(found, expected, *, ordered):
    """Equal tensors; without an order of arrival (compiled programs have none) equal rows by token."""
    if ordered:
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-6, atol=0)
        return
    for number, ours in enumerate(found[3].tolist()):
        if ours >= 0:
            place = expected[3].tolist().index(ours)
            assert found[2][ours] == number
            assert found[7][LISTED + number] + LISTED + number == ours
            torch.testing.assert_close(found[5][LISTED + number].float(), expected[5][LISTED + place].float(), rtol=0.13, atol=0)
            assert found[6][LISTED + number].item() == pytest.approx(expected[6][LISTED + place].item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unknown_tokens_get_rows_and_the_oldest_go(dtype, state, device):
    """Breaks if a token takes two rows, a listed one or another rank's takes one, an evicted one never comes back, or numbers are
    rounded otherwise than the listed rows are."""
    found, expected = state(dtype), state(dtype)
    for ids in ([3, 20, 20, 65, -1, 99, 17, 30], [20, 21], [], [40, 41, 42, 43, 44, 45], [20, 17], list(range(20, 27))):
        tokens = torch.tensor(ids, dtype=torch.int32, device=device)
        admit_guests(tokens, *found, first_row=LISTED)
        reference.admit_guests(tokens, *expected, first_row=LISTED)
        check(found, expected, ordered=device.type == "cpu")
    assert (found[3] >= 0).all()


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
