# SPDX-License-Identifier: Apache-2.0
"""`draft_head` against plain logits: both methods, ties, padding, reduced vocabularies and vocabulary shards."""

import pytest
import torch

from dflash_kernels import draft_head as module
from dflash_kernels import reference_compute as reference
from dflash_kernels.draft_head import HeadWorkspace, Temperatures, Winner, combine_shards, draft_head, draft_head_local

METHODS = ["fused", "matmul"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Small tiles and chunks of at most 16 rows (below), so that tiny heads cross both."""
    monkeypatch.setattr(module, "LOGIT_TILE", 128)
    monkeypatch.setattr(module, "FUSED_MAX_ROWS", 20)


def make_case(rows, vocab, width, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(device, dtype)
    weight = torch.randn(vocab, width, generator=generator).to(device, dtype)
    logit_bytes = 16 * -(-vocab // 64) * 64 * dtype.itemsize
    options = {"max_rows": max(rows, 64), "vocab_rows": vocab, "logit_bytes": logit_bytes, "odds": True}
    workspace = HeadWorkspace(**options, dtype=dtype, device=device)
    workspace.values.fill_(float("nan"))
    workspace.indices.fill_(2**30)
    workspace.others.fill_(float("nan"))
    workspace.logits.fill_(float("inf"))  # columns past the vocabulary, up to the next row, stay as they are
    return hidden, weight, workspace


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("rows", "vocab", "width", "dtype"),
    [
        (1, 128, 64, torch.float32),
        (7, 301, 96, torch.bfloat16),
        (16, 257, 64, torch.float16),
        (17, 130, 32, torch.float32),
        (33, 640, 80, torch.bfloat16),
        (130, 40, 64, torch.float16),  # three row tiles of the fused kernel
    ],
)
def test_finds_the_largest_logit(rows, vocab, width, dtype, method, device, assert_accurate):
    """Breaks on a wrong row, tile or chunk offset: the winner's true logit would be far below the true maximum."""
    hidden, weight, workspace = make_case(rows, vocab, width, dtype, device)
    winner = draft_head(hidden, weight, workspace=workspace, method=method)
    plain = reference.draft_head(hidden, weight)
    truth = hidden.double() @ weight.double().T
    assert_accurate(winner.values, plain.values, truth.gather(1, winner.tokens[:, None])[:, 0])
    lost = truth.amax(1) - truth.gather(1, winner.tokens[:, None])[:, 0]
    # Rounding may swap near-ties, never more: 16-bit logits of this size are exact to 2**-4 (bf16) or better.
    assert lost.max() <= (1e-4 if dtype == torch.float32 else 0.13)
    assert (lost == 0).double().mean() >= 0.95


@pytest.mark.parametrize("method", METHODS)
def test_ties_go_to_the_lowest_token(method, device):
    """Breaks when a later lane, tile or chunk wins a tie: greedy drafts would differ from torch.argmax."""
    hidden, weight, workspace = make_case(3, 600, 64, device=device)
    for row, copies in enumerate([(5, 6, 140), (130, 258, 599), (127, 128)]):
        weight[list(copies)] = hidden[row] * 10
    winner = draft_head(hidden, weight, workspace=workspace, method=method)
    assert winner.tokens.tolist() == [5, 130, 127]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("padding", [1e4, float("nan")])
def test_padded_vocabulary_never_wins(padding, method, device):
    """Breaks when a row past num_valid, large or uninitialised, is picked: the token would be outside the vocabulary."""
    hidden, weight, workspace = make_case(4, 390, 64, device=device)
    expected = draft_head(hidden, weight[:300], workspace=workspace, method=method)
    weight[300:] = padding
    winner = draft_head(hidden, weight, workspace=workspace, num_valid=300, method=method)
    assert winner.tokens.tolist() == expected.tokens.tolist()
    assert torch.equal(winner.values, expected.values)


@pytest.mark.parametrize("method", METHODS)
def test_garbage_rows_stay_in_range_and_alone(method, device):
    """Breaks when the NaN states of a padded row yield a token outside the vocabulary or reach a neighbour."""
    hidden, weight, workspace = make_case(3, 300, 64, device=device)
    expected = draft_head(hidden, weight, workspace=workspace, method=method).tokens
    hidden[1] = float("nan")
    tokens = draft_head(hidden, weight, workspace=workspace, method=method).tokens
    assert tokens.tolist() == [expected[0].item(), 0, expected[2].item()]


def test_auto_switches_by_rows(device, monkeypatch):
    """Breaks when "auto" runs the weight-bound kernel on compute-bound batches, or the other way round."""
    used = []
    for name in ("_fused_tiles", "_matmul_tiles"):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, name=name: used.append(name) or real(*args))
    for rows in (20, 21):
        hidden, weight, workspace = make_case(rows, 130, 32, device=device)
        expected = reference.draft_head(hidden, weight).tokens
        assert torch.equal(draft_head(hidden, weight, workspace=workspace).tokens, expected)
    assert used == ["_fused_tiles", "_matmul_tiles"]


@pytest.mark.parametrize("op", [draft_head, reference.draft_head])
def test_reduced_vocabulary_is_mapped(op, device):
    """Breaks when offsets are read as target ids or the other way round, or a map is applied to the wrong token."""
    hidden, weight, workspace = make_case(5, 200, 64, device=device)
    plain = op(hidden, weight, workspace=workspace).tokens
    d2t = 3 * torch.arange(200, device=device) + 11
    mapped = op(hidden, weight, workspace=workspace, d2t=d2t).tokens
    assert mapped.tolist() == [4 * token + 11 for token in plain.tolist()]
    ids = torch.randperm(1000, device=device)[:200]
    assert op(hidden, weight, workspace=workspace, target_ids=ids).tokens.tolist() == ids[plain].tolist()


def test_shards_combine_to_the_whole(device):
    """Breaks when a shard's offset, its padding or an empty shard shifts the token that tensor parallelism picks."""
    hidden, weight, workspace = make_case(6, 384, 64, device=device)
    weight[128] = weight[3] = hidden[0] * 10  # a tie across shards
    expected = draft_head(hidden, weight, workspace=workspace, num_valid=250)
    starts, valid = (0, 128, 256), (128, 122, 0)
    local = [
        draft_head_local(hidden, weight[start : start + 128], workspace=workspace, vocab_start=start, num_valid=count)
        for start, count in zip(starts, valid, strict=True)
    ]
    tokens, values = (torch.stack(part) for part in list(zip(*local, strict=True))[:2])
    d2t = torch.arange(250, device=device)
    winner = combine_shards(values, tokens, d2t=d2t)
    assert winner.tokens.tolist() == [2 * token for token in expected.tokens.tolist()]
    assert torch.equal(winner.values, expected.values)
    assert winner.tokens[0] == 6
    oracle = reference.combine_shards(values, tokens, d2t=d2t)
    assert torch.equal(winner.tokens, oracle.tokens)
    assert torch.equal(winner.values, oracle.values)
    ids = torch.arange(1000, 750, -1, device=device)
    for combine in (combine_shards, reference.combine_shards):
        assert torch.equal(combine(values, tokens, target_ids=ids).tokens, ids[expected.tokens])


def test_local_matches_oracle(device):
    """Breaks when the local winner is not reported by its global index."""
    hidden, weight, workspace = make_case(3, 150, 32, device=device)
    options = {"vocab_start": 1000, "num_valid": 140}
    found = draft_head_local(hidden, weight, workspace=workspace, **options)
    assert torch.equal(found.tokens, reference.draft_head_local(hidden, weight, **options).tokens)
    assert (found.tokens >= 1000).all()


@pytest.mark.parametrize("method", METHODS)
def test_strided_hidden_and_given_outputs(method, device):
    """Breaks when hidden rows are assumed dense, or when the captured output buffers are not the ones written."""
    hidden, weight, workspace = make_case(4, 200, 64, device=device)
    expected = draft_head(hidden, weight, workspace=workspace, method=method)
    wide = torch.randn(4, 3, 64, device=device)
    wide[:, 1] = hidden
    out = Winner(torch.full((6,), -7, device=device)[:4], torch.zeros(6, device=device)[:4])
    found = draft_head(wide[:, 1], weight, workspace=workspace, method=method, out=out)
    assert found.tokens.data_ptr() == out.tokens.data_ptr()
    assert torch.equal(out.tokens, expected.tokens)
    torch.testing.assert_close(out.values, expected.values)


def mixed_temperatures(rows, device):
    """Greedy, cold, warm and hot requests in turn, and rows without one."""
    states = torch.tensor([2, -1, 0, 3, 1], device=device).repeat(-(-rows // 5))[:rows].contiguous()
    return Temperatures(states, torch.tensor([0.0, 0.3, 1.0, 4.0], device=device))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("rows", "vocab", "num_valid", "dtype"),
    [
        (1, 128, 128, torch.float32),
        (17, 301, 290, torch.float32),  # two chunks of logits
        (33, 640, 513, torch.bfloat16),
        (5, 40, 1, torch.float32),  # one token: certain
    ],
)
def test_odds_against_the_winner(rows, vocab, num_valid, dtype, method, device):
    """Breaks if a tile's sum is taken relative to another tile's winner, the winner counts among the others, padding counts, or a
    row gets another request's temperature: what is admitted to verification would follow noise."""
    hidden, weight, workspace = make_case(rows, vocab, 64, dtype, device)
    weight[num_valid:] = 1e3
    weight *= 0.3  # odds of every size: 1e-9 to 1e3
    options = {"num_valid": num_valid, "temperatures": mixed_temperatures(rows, device)}
    found = draft_head(hidden, weight, workspace=workspace, method=method, **options)
    # Of the same logits: those of the matmul method are rounded to the dtype.
    truth = (hidden.double() @ weight.double().T) if method == "fused" else (hidden @ weight.T).double()
    expected = reference._winner(truth[:, :num_valid], 0, None, None, None, options["temperatures"])
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.against, expected.against, rtol=3e-4 if dtype == torch.float32 else 2e-2, atol=1e-30)
    plain = draft_head(hidden, weight, workspace=workspace, method=method, num_valid=num_valid)
    assert plain.against is None
    assert torch.equal(plain.tokens, found.tokens)
    assert torch.equal(plain.values, found.values)


@pytest.mark.parametrize("method", METHODS)
def test_odds_of_garbage_rows_and_of_certain_ones(method, device):
    """Breaks if a row of NaN looks certain (it would be verified first), or reaches a neighbour, or 1 - q loses its digits."""
    hidden, weight, workspace = make_case(3, 300, 64, device=device)
    weight[7] = hidden[2] / hidden[2].square().sum() * 60
    expected = reference.draft_head(hidden.double(), weight.double(), temperatures=mixed_temperatures(3, device)).against
    hidden[1] = float("nan")
    found = draft_head(hidden, weight, workspace=workspace, method=method, temperatures=mixed_temperatures(3, device))
    assert found.against[1] == float("inf")
    torch.testing.assert_close(found.against[[0, 2]], expected[[0, 2]], rtol=3e-4, atol=1e-30)
    assert found.against[2] < 1e-9


def test_odds_of_shards_combine_to_the_whole(device):
    """Breaks if a losing rank's winner is left out, or an empty or garbage shard turns the sum into NaN."""
    hidden, weight, workspace = make_case(6, 384, 64, device=device)
    weight[128] = weight[3] = hidden[0] * 10  # a tie across shards
    weight[:128, 0] = float("nan")  # the first shard knows nothing
    hidden[:, 0] = 1.0
    temperatures = mixed_temperatures(6, device)
    expected = draft_head(hidden, weight, workspace=workspace, num_valid=250, temperatures=temperatures)
    local = [
        draft_head_local(
            hidden, weight[at : at + 64], workspace=workspace, vocab_start=at, num_valid=count, temperatures=temperatures
        )
        for at, count in ((64, 64), (128, 64), (192, 58), (256, 0))
    ]
    tokens, values, against = (torch.stack(part) for part in zip(*local, strict=True))
    options = {"against": against, "temperatures": temperatures}
    found, oracle = combine_shards(values, tokens, **options), reference.combine_shards(values, tokens, **options)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.against, expected.against, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(oracle.against, expected.against, rtol=1e-4, atol=1e-6)


def test_odds_need_room_and_states(device):
    """Breaks if a missing scratch or states of another batch reach the kernel."""
    hidden, weight, workspace = make_case(4, 200, 64, device=device)
    temperatures = mixed_temperatures(4, device)
    bare = HeadWorkspace(max_rows=64, vocab_rows=200, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="odds=True"):
        draft_head(hidden, weight, workspace=bare, temperatures=temperatures)
    with pytest.raises(ValueError, match=r"one state per row, \[4\]; got \[3\]"):
        draft_head(hidden, weight, workspace=workspace, temperatures=temperatures.rows(slice(0, 3)))
    with pytest.raises(ValueError, match="with temperatures; got none"):
        draft_head(hidden, weight, workspace=workspace, temperatures=temperatures, out=Winner.empty(4, device))
    with pytest.raises(ValueError, match="Pass both or neither"):
        combine_shards(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int64), temperatures=temperatures)


def test_no_rows(device):
    """Breaks when an empty batch launches a grid of zero programs."""
    hidden, weight, workspace = make_case(1, 200, 64, device=device)
    assert draft_head(hidden[:0], weight, workspace=workspace).tokens.shape == (0,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a device")
@pytest.mark.parametrize("method", METHODS)
def test_graph_replay_reads_new_states(method, device):
    """Breaks when something of the captured call is baked in."""
    hidden, weight, workspace = make_case(48, 2000, 256, torch.bfloat16, device)
    out = Winner.empty(48, device)
    draft_head(hidden, weight, workspace=workspace, method=method, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft_head(hidden, weight, workspace=workspace, method=method, out=out)
    hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    assert torch.equal(out.tokens, draft_head(hidden, weight, workspace=workspace, method=method).tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 32)}, r"\[m, H\] and weight \[V, H\] with one H"),
        ({"hidden": torch.zeros(2, 64, dtype=torch.bfloat16)}, "share bf16, fp16 or fp32"),
        ({"hidden": torch.zeros(64, 2).T}, "last stride 1"),
        ({"hidden": torch.zeros(65, 64)}, "made for 64 rows and 200 vocabulary rows; got 65 and 200"),
        ({"num_valid": 201}, "num_valid must be between 1 and the 200 rows"),
        ({"num_valid": 0}, "num_valid must be at least 1"),
        ({"method": "cublas"}, "method must be"),
        ({"d2t": torch.zeros(200, dtype=torch.int32)}, "d2t must hold int64 offsets"),
        ({"target_ids": torch.zeros(200, dtype=torch.int32)}, "target_ids must hold int64 ids, contiguous"),
        ({"d2t": torch.zeros(200).long(), "target_ids": torch.zeros(200).long()}, "two forms of one map"),
        ({"out": Winner(torch.zeros(3, dtype=torch.int64), torch.zeros(3))}, "out must be int64 tokens"),
    ],
)
def test_errors_say_what_was_needed(change, message, device):
    """Breaks when a bad argument reaches the kernel (which assumes) instead of a sentence."""
    hidden, weight, workspace = make_case(2, 200, 64, device=device)
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        draft_head(**({"hidden": hidden, "weight": weight, "workspace": workspace} | moved))


@pytest.mark.parametrize("options", [{"max_rows": 8}, {"max_rows": 64, "logit_bytes": 0}])
def test_matmul_needs_its_buffer(options, device):
    """Breaks when a workspace without logits is written past its end."""
    hidden, weight, _ = make_case(2, 200, 64, device=device)
    workspace = HeadWorkspace(**options, vocab_rows=200, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="need a workspace with logits"):
        draft_head(hidden, weight, workspace=workspace, method="matmul")


def test_fused_needs_its_scratch(device, monkeypatch):
    """Breaks when a fused call with more rows than the switch sends it writes past the scratch of the winners."""
    monkeypatch.setattr(module, "LOGIT_TILE", 8192)
    hidden, weight, _ = make_case(65, 1000, 64, device=device)
    options = {"vocab_rows": 1000, "dtype": torch.float32, "device": device}
    with pytest.raises(ValueError, match=r"scratch for 65 rows; this workspace has it for 64"):
        draft_head(hidden, weight, workspace=HeadWorkspace(max_rows=65, **options), method="fused")
    workspace = HeadWorkspace(max_rows=65, fused_rows=65, **options)
    assert torch.equal(
        draft_head(hidden, weight, workspace=workspace, method="fused").tokens, reference.draft_head(hidden, weight).tokens
    )


def test_scratch_is_bounded():
    """Breaks when logits of all rows are kept, or when a workspace for the fused kernel alone has any."""
    sizes = {
        rows: HeadWorkspace(max_rows=rows, vocab_rows=1000, dtype=torch.float32, device="cpu", logit_bytes=1 << 18).nbytes
        for rows in (20, 40, 200)
    }
    pairs = {rows: rows * 8 * 8 for rows in sizes}  # 8 tiles of 128, 8 bytes each
    assert {rows: size - pairs[rows] for rows, size in sizes.items()} == {20: 0, 40: 40 * 4096, 200: 64 * 4096}


def test_combine_checks_its_inputs():
    """Breaks when gathered tokens of the wrong dtype are read as int64."""
    with pytest.raises(ValueError, match=r"fp32 \[tp, m\] and tokens int64"):
        combine_shards(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int32))
