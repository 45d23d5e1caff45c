# SPDX-License-Identifier: Apache-2.0
"""Smaller weights and a private draft head: exact against the full head where it has the row, over one and two ranks."""

from types import SimpleNamespace

import pytest
import torch

HIDDEN, VOCAB = 64, 300


class Ranks:
    """Two tensor-parallel ranks in one process: what the first rank sent is kept for the second."""

    def __init__(self, world_size):
        self.world_size, self.rank_in_group = world_size, 0
        self.messages, self.number = {}, 0

    def all_reduce(self, tensor):
        return self._meet(tensor, torch.add)

    def all_gather(self, tensor, dim):
        return self._meet(tensor, lambda a, b: torch.cat([a, b], dim))

    def _meet(self, tensor, join):
        if self.world_size == 1:
            return tensor
        key, self.number = (self.number, self.rank_in_group), self.number + 1
        self.messages[key] = tensor
        other = self.messages.get((key[0], 1 - self.rank_in_group), torch.zeros_like(tensor))
        return join(*((tensor, other) if self.rank_in_group == 0 else (other, tensor)))

    def as_rank(self, rank, run):
        self.rank_in_group, self.number = rank, 0
        return run()


@pytest.fixture
def ranks(monkeypatch):
    def make(world_size):
        group = Ranks(world_size)
        monkeypatch.setattr("vllm_dflash.engine.private_head.get_tp_group", lambda: group)
        return group

    return make


def head_of(weight, start=0, count=None):
    shard = SimpleNamespace(org_vocab_start_index=start, num_org_elements=len(weight) if count is None else count)
    return SimpleNamespace(weight=weight, shard_indices=shard)


@pytest.fixture
def problem():
    """Hidden states, a head, and the winner among `rows` in float64, after rounding the head to e4m3."""
    from dflash_kernels.fp8_linear import quantise_rows

    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(80, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    numbers, scales = quantise_rows(weight)
    logits = hidden.double() @ (numbers.double() * scales[:, None].double()).T
    return hidden, weight, logits


@pytest.mark.parametrize("num_rows", [9, 80])  # the fused kernel; whole logits
def test_it_finds_the_winner_of_the_full_head_where_it_has_its_row(problem, ranks, num_rows):
    """Breaks if rows are mapped to the ids of their neighbours, or padding rows win."""
    from vllm_dflash.engine.private_head import PrivateHead

    ranks(1)
    hidden, weight, logits = problem
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:150]
    private = PrivateHead(head_of(weight), chosen, None, fp8=True)
    found, full = private(hidden[:num_rows]), logits[:num_rows].argmax(-1)
    inside = torch.isin(full, chosen)
    assert inside.any()
    assert not inside.all()
    assert torch.equal(found[inside], full[inside])
    assert torch.isin(found, chosen).all()


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("reduced", [False, True])
def test_tokens_in_use_have_rows_until_others_take_them(fp8, reduced, problem, ranks):
    """Breaks if a guest's row is another token's, an empty guest row wins, or a weight update leaves rows of before."""
    from vllm_dflash.engine.private_head import PrivateHead

    ranks(1)
    hidden, weight, logits = problem
    generator = torch.Generator().manual_seed(5)
    table = torch.randperm(1000, generator=generator)[:VOCAB] if reduced else None
    ids = torch.arange(VOCAB) if table is None else table
    chosen = torch.randperm(VOCAB, generator=generator)[:40]
    head = head_of(weight.clone())
    private = PrivateHead(head, chosen, table, fp8=fp8, rounded=True, num_guests=24)

    def best(rows, logits):
        rows = rows.sort().values
        return ids[rows[logits[:, rows].argmax(-1)]]

    others = torch.tensor([row for row in range(VOCAB) if row not in chosen.tolist()])
    for used, guests in ((others[:10], others[:10]), (others[10:24], others[:24]), (others[24:48], others[24:48])):
        private.follow(torch.cat([ids[used], ids[chosen[:3]], torch.tensor([5000, -1])]).to(torch.int32))
        assert torch.equal(private(hidden[:9]), best(torch.cat([chosen, guests]), logits[:9]))
    head.weight.copy_(weight.flip(0))
    private.stale = True
    private.follow(None)
    assert torch.equal(private(hidden[:9]), best(chosen, logits[:9].flip(1)))


def test_every_row_of_a_reduced_head_and_a_later_update(problem, ranks):
    """Breaks if the map of a reduced vocabulary is lost, or a refill moves memory that graphs hold."""
    from vllm_dflash.engine.private_head import PrivateHead

    ranks(1)
    hidden, weight, logits = problem
    table = torch.randperm(1000, generator=torch.Generator().manual_seed(4))[:VOCAB]
    head = head_of(weight.clone())
    private = PrivateHead(head, None, table, fp8=True)
    assert torch.equal(private(hidden[:9]), table[logits[:9].argmax(-1)])
    address = private.weight.data_ptr()
    head.weight.copy_(weight.flip(0))
    private.fill()
    assert private.weight.data_ptr() == address
    assert torch.equal(private(hidden[:9]), table[VOCAB - 1 - logits[:9].argmax(-1)])


def test_two_ranks_share_the_chosen_rows(problem, ranks):
    """Breaks if a rank copies rows that it does not hold, or the frequent tokens all land on one rank."""
    from vllm_dflash.engine import private_head

    hidden, weight, logits = problem
    group = ranks(2)
    shards = head_of(weight[:192], 0), head_of(torch.cat([weight[192:], torch.full((84, HIDDEN), 100.0)]), 192, VOCAB - 192)
    chosen = torch.arange(0, 250)
    chosen = chosen[torch.randperm(250, generator=torch.Generator().manual_seed(2))][:181]
    built = {}
    for _ in range(3):  # the exchange has two rounds; each round needs what the other rank sent in the one before
        for rank in (0, 1):
            built[rank] = group.as_rank(rank, lambda rank=rank: private_head.PrivateHead(shards[rank], chosen, None, fp8=True))
    assert [built[rank].num_rows for rank in (0, 1)] == [91, 90]
    winners = [group.as_rank(rank, lambda rank=rank: built[rank]._winner(hidden[:9])) for rank in (0, 1)]
    group.messages.clear()
    group.as_rank(0, lambda: private_head.across_ranks(winners[0]))
    tokens = group.as_rank(1, lambda: private_head.across_ranks(winners[1])).tokens
    ordered = chosen.sort().values
    assert torch.equal(tokens, ordered[logits[:9, ordered].argmax(-1)])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"draft_head": "full"}, "draft_head is full"),
        ({"method": "probabilistic"}, "probabilistic drafts need the whole distribution"),
        ({"quant_method": object()}, "the LM head is quantised"),
        ({"bias": torch.zeros(1)}, "the LM head has a bias"),
        ({"scale": -1.0}, "logit_scale -1.0 is not positive"),
        ({"draft_head": "auto"}, "a CPU keeps the full head unless asked"),
    ],
)
def test_reasons_for_the_full_head(change, reason):
    """Breaks if a smaller head is made where it cannot serve: kept logits, packed weights, a bias, a negative scale."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from vllm_dflash.engine.private_head import build_private_head

    facts = {"quant_method": UnquantizedEmbeddingMethod(), "bias": None, "scale": 1.0, "draft_head": "small", "method": "greedy"}
    facts |= change
    head = SimpleNamespace(quant_method=facts["quant_method"], bias=facts["bias"], weight=torch.zeros(4, 4))
    model = SimpleNamespace(lm_head=head, logits_processor=SimpleNamespace(scale=facts["scale"]))
    config = SimpleNamespace(
        additional_config={"vllm_dflash": {"draft_head": facts["draft_head"]}},
        speculative_config=SimpleNamespace(draft_sample_method=facts["method"]),
    )
    assert reason in build_private_head(model, config)


@pytest.mark.parametrize("num_rows", [5, 40])  # one launch; more rows than that is for
def test_fp8_linear_layers_are_packed_and_packed_again(num_rows):
    """Breaks if scales or bias get lost, or a reload moves what captured graphs read."""
    from dflash_kernels.fp8_linear import quantise_rows
    from vllm_dflash.engine.draft_quantization import Fp8LinearMethod

    generator = torch.Generator().manual_seed(6)
    method, layer, bias = Fp8LinearMethod(), torch.nn.Module(), torch.randn(48, generator=generator)
    x = torch.randn(num_rows, HIDDEN, generator=generator)
    addresses = set()
    for _ in range(2):
        plain = torch.nn.Module()
        plain.weight = torch.nn.Parameter(torch.randn(48, HIDDEN, generator=generator), requires_grad=False)
        numbers, scales = quantise_rows(plain.weight.data)
        method.process_weights_after_loading(plain)
        if not addresses:
            layer = plain
        else:  # vLLM's reload copies what was processed into the first tensors
            layer.weight.data.copy_(plain.weight.data)
            layer.weight_scale.data.copy_(plain.weight_scale.data)
        addresses.add(layer.weight.data_ptr())
        assert layer.weight.dtype == torch.float8_e4m3fn
        expected = x.double() @ (numbers.double() * scales[:, None].double()).T + bias
        torch.testing.assert_close(method.apply(layer, x, bias).double(), expected, rtol=1e-4, atol=1e-4)
    assert len(addresses) == 1


def test_the_text_is_the_targets(target, draft, baseline, prompts, engine_of):
    """Breaks if smaller weights or a small head change what Model Runner V2 answers, or the line at start does not say so."""
    given = {"draft_weights": "fp8", "draft_head": "small", "draft_head_rows": 64, "draft_head_guests": 16}
    expected = baseline(prompts, 12)
    engine = engine_of(target, draft, additional_config={"vllm_dflash": given})
    assert engine.generate(prompts, 12) == expected
    assert "with fp8 weights, private draft head of 64 rows and 16 for tokens in use" in engine.speculator._start_line
