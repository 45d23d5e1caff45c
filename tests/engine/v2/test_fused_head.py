# SPDX-License-Identifier: Apache-2.0
"""The fused head over one and two vocabulary shards, against argmax over full logits."""

from types import SimpleNamespace

import pytest
import torch

ROWS, HIDDEN, VOCAB = 9, 64, 300


class Group:
    """A tensor-parallel group of two as the second rank sees it; the first rank's message is known."""

    world_size = 2

    def __init__(self, first=None):
        self.first, self.sent = first, None

    def all_gather(self, pair, dim):
        self.sent = pair
        return torch.cat([pair if self.first is None else self.first, pair], dim=dim)


def head_over(weight, start, num_valid, table=None):
    from dflash_kernels.draft_head import FUSED_MAX_ROWS, HeadWorkspace
    from vllm_dflash.engine.fused_head import FusedHead

    workspace = HeadWorkspace(max_rows=3 * FUSED_MAX_ROWS, vocab_rows=weight.shape[0], dtype=weight.dtype, device="cpu")
    model = SimpleNamespace(lm_head=SimpleNamespace(weight=weight), draft_to_target=table)
    return FusedHead(model, workspace, start, num_valid)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    return hidden, weight, (hidden @ weight.T).argmax(dim=-1)


def test_one_rank(problem, monkeypatch):
    """Breaks if the head is read in another layout than plain logits read it, or a row's argmax lands on another row."""
    hidden, weight, expected = problem
    monkeypatch.setattr("vllm_dflash.engine.fused_head.get_tp_group", lambda: SimpleNamespace(world_size=1))
    assert head_over(weight, 0, VOCAB)(hidden).tolist() == expected.tolist()


def test_reduced_draft_vocabulary(problem, monkeypatch):
    """Breaks if draft ids are returned as target ids."""
    hidden, weight, expected = problem
    monkeypatch.setattr("vllm_dflash.engine.fused_head.get_tp_group", lambda: SimpleNamespace(world_size=1))
    table = torch.randperm(1000, generator=torch.Generator().manual_seed(4))[:VOCAB]
    assert head_over(weight, 0, VOCAB, table)(hidden).tolist() == table[expected].tolist()


def test_two_ranks_with_a_padded_shard(problem, monkeypatch):
    """Breaks if values or tokens are mixed up in the exchange, padding rows win, or a reduced vocabulary is not mapped."""
    hidden, weight, expected = problem
    group = Group()
    monkeypatch.setattr("vllm_dflash.engine.fused_head.get_tp_group", lambda: group)
    head_over(weight[:192], 0, 192)(hidden)
    group.first = group.sent
    second = torch.cat([weight[192:], torch.full((84, HIDDEN), 100.0)])
    assert head_over(second, 192, VOCAB - 192)(hidden).tolist() == expected.tolist()
    table = torch.randperm(1000, generator=torch.Generator().manual_seed(4))[:VOCAB]
    assert head_over(second, 192, VOCAB - 192, table)(hidden).tolist() == table[expected].tolist()


def test_more_rows_than_the_fused_kernel_takes(problem, monkeypatch):
    """Large batches take the plain product over bounded logits; breaks if its rows or padding are mixed up."""
    from dflash_kernels.draft_head import FUSED_MAX_ROWS

    _, weight, _ = problem
    monkeypatch.setattr("vllm_dflash.engine.fused_head.get_tp_group", lambda: SimpleNamespace(world_size=1))
    hidden = torch.randn(2 * FUSED_MAX_ROWS + 1, HIDDEN, generator=torch.Generator().manual_seed(5))
    padded = torch.cat([weight, torch.full((20, HIDDEN), 100.0)])
    assert head_over(padded, 0, VOCAB)(hidden).tolist() == (hidden @ weight.T).argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant_method": object()}, "quantised"),
        ({"bias": torch.zeros(1)}, "bias"),
        ({"scale": -1.0}, "not positive"),
        ({}, "no CUDA device"),
    ],
)
def test_reasons_against_it(change, reason):
    """Breaks if a head is fused that the kernel reads wrongly: packed weights, a bias, a scale that turns argmax around."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from vllm_dflash.engine.fused_head import fuse_head

    facts = {"quant_method": UnquantizedEmbeddingMethod(), "bias": None, "scale": 1.0} | change
    head = SimpleNamespace(quant_method=facts["quant_method"], bias=facts["bias"], weight=torch.zeros(4, 4))
    model = SimpleNamespace(lm_head=head, logits_processor=SimpleNamespace(scale=facts["scale"]))
    assert reason in fuse_head(model, 64, None)
