# SPDX-License-Identifier: Apache-2.0
"""`draft_head_fp8` and `winner_of_logits` against plain logits: mapping, ties, padding, NaN."""

import pytest
import torch

from dflash_kernels import draft_head_fp8 as module
from dflash_kernels import reference_fp8 as reference
from dflash_kernels.draft_head import HeadWorkspace, Temperatures
from dflash_kernels.draft_head_fp8 import draft_head_fp8, winner_of_logits
from dflash_kernels.fp8_linear import quantise_rows

VOCAB, WIDTH = 300, 96


@pytest.fixture
def case(device):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, WIDTH, generator=generator).to(device)
    weight, scale = quantise_rows(torch.randn(VOCAB, WIDTH, generator=generator).to(device))
    workspace = HeadWorkspace(max_rows=64, vocab_rows=304, dtype=torch.float32, device=device, odds=True)
    workspace.values.fill_(float("nan"))
    workspace.others.fill_(float("nan"))
    return hidden, weight, scale, workspace


@pytest.mark.parametrize("rows", [0, 1, 16, 37])
def test_finds_the_largest_logit_and_maps_it(rows, case, device):
    """Breaks on a wrong tile, a scale of another row, or offsets read as target ids."""
    hidden, weight, scale, workspace = case
    d2t = 3 * torch.arange(VOCAB, device=device) + 11
    found = draft_head_fp8(hidden[:rows], weight, scale, d2t, workspace=workspace)
    expected = reference.draft_head_fp8(hidden[:rows].double(), weight, scale, d2t)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.values, expected.values)


def test_padding_and_nan_never_win_and_ties_go_to_the_lowest_row(case, device):
    """Breaks when rows past num_valid or the NaN states of a padded row give a token outside the list."""
    hidden, weight, scale, workspace = case
    weight[280:] = torch.full((20, WIDTH), 448.0, device=device).to(weight.dtype)
    big = (hidden[0].sign() * 400).to(weight.dtype)
    weight[5] = weight[140] = big
    scale[5] = scale[140] = 1.0
    hidden[1] = float("nan")
    tokens = draft_head_fp8(hidden[:3], weight, scale, None, workspace=workspace, num_valid=280).tokens
    assert tokens[:2].tolist() == [5, 0]
    assert tokens[2] < 280
    same = torch.ones(48, WIDTH, device=device).to(weight.dtype)  # every real logit is negative, so that a zero would win
    eighths = -(hidden[2:3].abs() * 8).round() / 8  # sums without rounding: processors add columns in different orders
    found = draft_head_fp8(eighths, same, torch.ones(48, device=device), None, workspace=workspace, num_valid=40)
    assert found.tokens.tolist() == [0]
    assert found.values < 0


def test_many_rows_through_logits(case, device, monkeypatch):
    """Breaks when padded columns of the logits win, or the map is not applied."""
    monkeypatch.setattr(module, "LOGIT_TILE", 128)
    hidden, weight, scale, workspace = case
    logits = torch.nn.functional.pad(reference.fp8_linear(hidden, weight, scale), (0, 4), value=99.0).contiguous()
    d2t = torch.arange(VOCAB, device=device)
    found = winner_of_logits(logits, d2t, workspace=workspace, num_valid=VOCAB)
    expected = reference.winner_of_logits(logits, d2t, num_valid=VOCAB)
    assert torch.equal(found.tokens, expected.tokens)
    with pytest.raises(ValueError, match="R a multiple of 16"):
        winner_of_logits(logits[:, :VOCAB].contiguous(), d2t, workspace=workspace, num_valid=VOCAB)


@pytest.mark.parametrize("rows", [1, 37])
def test_odds_against_the_winner(rows, case, device, monkeypatch):
    """Breaks if the odds leave out a row's scale, count rows past num_valid, or read another request's temperature."""
    monkeypatch.setattr(module, "LOGIT_TILE", 128)
    hidden, weight, scale, workspace = case
    hidden = hidden[:rows] * 0.3
    states = torch.tensor([2, -1, 0, 1], device=device).repeat(10)[:rows].contiguous()
    options = {"num_valid": 280, "temperatures": Temperatures(states, torch.tensor([0.0, 0.3, 2.0], device=device))}
    found = draft_head_fp8(hidden, weight, scale, None, workspace=workspace, **options)
    expected = reference.draft_head_fp8(hidden.double(), weight, scale, None, **options)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.against, expected.against, rtol=3e-4, atol=1e-30)
    logits = torch.nn.functional.pad(reference.fp8_linear(hidden, weight, scale), (0, 4), value=99.0).contiguous()
    many = winner_of_logits(logits, None, workspace=workspace, **options)
    torch.testing.assert_close(many.against, expected.against, rtol=3e-4, atol=1e-30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(65, WIDTH)}, "at most 64 rows and 304 vocabulary rows fit; got 65"),
        ({"hidden": torch.zeros(2, 32)}, "with one H"),
        ({"weight": torch.zeros(VOCAB, WIDTH)}, "contiguous float8_e4m3fn"),
        ({"scale": torch.ones(3)}, r"scale must be fp32 \[300\]"),
        ({"num_valid": 301}, "num_valid must be between 1 and the 300 rows"),
    ],
)
def test_errors_say_what_was_needed(change, message, case, device):
    """Breaks when a bad argument reaches the kernel (which assumes) instead of a sentence."""
    hidden, weight, scale, workspace = case
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        draft_head_fp8(**({"hidden": hidden[:2], "weight": weight, "scale": scale, "d2t": None} | moved), workspace=workspace)
