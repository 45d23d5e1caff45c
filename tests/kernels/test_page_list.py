# SPDX-License-Identifier: Apache-2.0
"""`page_list` against its oracle and by hand: exact integers, poisoned outputs compared whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_kernels import reference
from dflash_kernels.page_list import PageList, page_list

POISON = -777


def outputs(max_num_reqs, capacity, device="cpu"):
    return PageList(
        *(torch.full((n,), POISON, dtype=torch.int32, device=device) for n in (max_num_reqs + 1, capacity, max_num_reqs))
    )


def run(lens, kv_block_size, columns, device="cpu", spare=2):
    """Kernel and oracle over the same scattered pages; a page id is never a position, and garbage rows hold 2**30."""
    max_num_reqs = len(lens) + spare
    table = torch.randperm(1000 + max_num_reqs * columns)[: max_num_reqs * columns].view(-1, columns).int() + 5000
    for request, length in enumerate(lens):
        if length == 0:
            table[request] = 2**30
    results = []
    for op, where in ((page_list, device), (reference.page_list, "cpu")):
        out = outputs(max_num_reqs, max_num_reqs * columns, where)
        op(table.to(where), torch.tensor(lens, dtype=torch.int32, device=where), kv_block_size, out)
        results.append([tensor.cpu() for tensor in (out.indptr, out.pages, out.last_page_len)])
    return results


@pytest.mark.parametrize(
    ("lens", "kv_block_size", "columns"),
    [
        ((37,), 16, 4),
        ((16, 17, 0, 1, 64), 16, 4),  # a full page, one key more, padding in the middle, a full row
        ((0, 0), 16, 3),
        ((3, 2, 1), 1, 3),
        ((528, 529, 40), 528, 2),
        ((2100, 5), 1, 2101),  # three column tiles
        ((500, 3), 16, 2),  # longer than its row: cut
    ],
)
def test_matches_oracle(lens, kv_block_size, columns, device):
    """Breaks on a wrong start, a page too many or too few, or a store behind the last page."""
    kernel, oracle = run(lens, kv_block_size, columns, device)
    for found, expected in zip(kernel, oracle, strict=True):
        assert found.tolist() == expected.tolist()


def test_by_hand(device):
    """Breaks if kernel and oracle share an error: these numbers are FlashInfer's definition."""
    table = torch.tensor([[7, 8, 9], [4, 5, 6]], dtype=torch.int32, device=device)
    out = outputs(3, 9, device)
    page_list(table, torch.tensor([20, 32], dtype=torch.int32, device=device), 16, out)
    assert out.indptr.tolist() == [0, 2, 4, POISON]
    assert out.pages.tolist() == [7, 8, 4, 5, *[POISON] * 5]
    assert out.last_page_len.tolist() == [4, 16, POISON]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.sampled_from([1, 3, 16]))
def test_any_batch(lens, kv_block_size):
    """Breaks on an order of full, empty and partial requests that nobody thought of."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel, oracle = run(lens, kv_block_size, 40 // kv_block_size + 1, device)
    assert [t.tolist() for t in kernel] == [t.tolist() for t in oracle]


def test_strided_table_and_no_requests(device):
    """Breaks when rows are assumed dense, or an empty batch launches a grid of zero programs."""
    wide = torch.arange(24, dtype=torch.int32, device=device).view(3, 8)
    out = outputs(3, 9, device)
    page_list(wide[:, :3], torch.tensor([3, 0, 2], dtype=torch.int32, device=device), 1, out)
    assert out.pages[:5].tolist() == [0, 1, 2, 16, 17]
    page_list(wide[:, :3], torch.zeros(0, dtype=torch.int32, device=device), 1, out)
    assert out.indptr.tolist() == [0, 3, 3, 5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a device")
def test_graph_replay_follows_new_lengths(device, compile_counter):
    """Breaks when lengths are baked into a captured graph, or another batch size compiles."""
    table, lens = torch.arange(40, dtype=torch.int32, device=device).view(4, 10), torch.ones(4, dtype=torch.int32, device=device)
    out = outputs(4, 40, device)
    page_list(table, lens, 16, out)
    compiled = compile_counter()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        page_list(table, lens[:3], 16, out)
    lens.copy_(torch.tensor([17, 0, 160, 9]))
    graph.replay()
    assert out.indptr[:4].tolist() == [0, 2, 2, 12]
    assert out.pages[:12].tolist() == [0, 1, *range(20, 30)]
    assert compile_counter() == compiled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(2, 3)}, "block_table must be int32"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int32)}, "at least 2 rows"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be int32"),
        ({"kv_block_size": 0}, "kv_block_size must be at least 1; got 0"),
        ({"out": PageList.empty(1, 9, "cpu")}, "outputs hold 1 requests and 9 pages; 2 requests of up to 3 pages"),
        ({"out": PageList.empty(2, 2, "cpu")}, "outputs hold 2 requests and 4 pages; 2 requests of up to 3 pages"),
    ],
)
def test_errors_say_what_was_needed(change, message):
    """Breaks when a bad argument reaches the kernel (which assumes) instead of a sentence."""
    good = {
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "kv_block_size": 16,
        "out": PageList.empty(2, 3, "cpu"),
    }
    with pytest.raises(ValueError, match=message):
        page_list(**(good | change))
