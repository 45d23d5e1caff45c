# SPDX-License-Identifier: Apache-2.0
"""`draft_budget` against its oracle and by hand: exact integers, poisoned outputs compared whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_kernels import reference
from dflash_kernels.draft_budget import TILES, Admission, draft_budget

POISON = -777
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def poisoned(max_num_reqs, device):
    out = Admission.empty(max_num_reqs, device)
    for tensor in (out.admitted, out.cu_num_logits, out.query_start_loc):
        tensor.fill_(POISON)
    return out


def run(confidences, drafts, others, budget, bonus=1, spare=3, device=DEVICE):
    """(admitted, cu_num_logits, query_start_loc) whole, of kernel and oracle; states are scattered over unused rows of NaN."""
    count, (_, width) = len(drafts), confidences.shape
    room = count + spare
    mapping = torch.randperm(room)[:count]
    table = torch.full((room, width), math.nan)
    table[mapping] = confidences
    scheduled = torch.tensor([drafts, others], dtype=torch.int32)
    results = []
    for op, where in ((draft_budget, device), (reference.draft_budget, "cpu")):
        # One entry more than the op may write: a store behind the last one is seen.
        out = poisoned(room + 1, where)
        cut = Admission(out.admitted[:room], out.cu_num_logits[: room + 1], out.query_start_loc[: room + 1])
        op(table.to(where), mapping.to(where), scheduled.to(where), budget, bonus, cut)
        results.append([tensor.tolist() for tensor in (out.admitted, out.cu_num_logits, out.query_start_loc)])
    return results


@pytest.mark.parametrize(
    ("count", "width", "share"),
    [
        (1, 1, 1.0), (1, 7, 0.5), (2, 3, 0.3), (63, 31, 0.2), (64, 8, 0.9), (65, 7, 0.4), (256, 15, 0.1), (257, 5, 0.7),
        (1000, 31, 0.3),
    ],
)  # fmt: skip
def test_matches_oracle(count, width, share):
    """Breaks on a wrong product, threshold, tile or sum; a third of the requests have fewer drafts, some none."""
    torch.manual_seed(count)
    drafts = torch.where(torch.rand(count) < 0.3, torch.randint(0, width + 1, (count,)), width).tolist()
    others = torch.randint(1, 9, (count,)).tolist()
    budget = round(share * sum(drafts))
    kernel, oracle = run(torch.rand(count, width) ** 0.2, drafts, others, budget)
    assert kernel == oracle
    assert sum(kernel[0][:count]) == budget


def test_by_hand(device):
    """Breaks if kernel and oracle share an error: survivals are .9 .81 .081, .5 .5, 1 .8, and the fourth best is .8."""
    table = torch.tensor([[1.0, 0.8, 9.0], [0.5, 1.0, 1.0], [0.9, 0.9, 0.1], [9.0, 9.0, 9.0]], device=device)
    mapping = torch.tensor([2, 1, 3, 0], device=device)
    scheduled = torch.tensor([[3, 2, 0, 2], [1, 1, 40, 1]], dtype=torch.int32, device=device)
    out = poisoned(6, device)
    draft_budget(table, mapping, scheduled, 4, 1, out)
    assert out.admitted.tolist() == [2, 0, 0, 2, POISON, POISON]
    assert out.cu_num_logits.tolist() == [0, 3, 4, 5, 8, POISON, POISON]
    assert out.query_start_loc.tolist() == [0, 3, 4, 44, 47, 47, 47]


@pytest.mark.parametrize("confidence", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("budget", [0, 1, 5, 6, 7, 11, 12, 13])
def test_ties_go_to_earlier_requests(confidence, budget):
    """Breaks if equal survivals are all admitted or all left out, or a later request comes first."""
    (admitted, _, starts), oracle = run(torch.full((3, 4), confidence), [4, 4, 4], [1, 1, 1], budget)
    assert [admitted, starts] == [oracle[0], oracle[2]]
    assert sum(admitted[:3]) == min(budget, 12)
    if confidence == 1.0:
        assert admitted[:3] == [min(max(budget - 4 * r, 0), 4) for r in range(3)]


# Products of these are exact in any order, so that kernel and oracle agree on every tie.
ODD = st.sampled_from([1.0, 0.5, 0.25, 0.0, math.nan, math.inf, -math.inf, -1.0, 3.0, 1e-30])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_batch_is_cut_to_the_budget(data):
    """Breaks on confidences that are none, an order nobody thought of, or a total that is not the budget."""
    width = data.draw(st.integers(1, 9))
    count = data.draw(st.integers(1, 9))
    drafts = data.draw(st.lists(st.integers(0, width), min_size=count, max_size=count))
    confidences = torch.tensor(data.draw(st.lists(st.lists(ODD, min_size=width, max_size=width), min_size=count, max_size=count)))
    budget = data.draw(st.integers(0, sum(drafts) + 2))
    bonus = data.draw(st.integers(0, 2))
    kernel, oracle = run(confidences, drafts, [1] * count, budget, bonus)
    assert kernel == oracle
    admitted = kernel[0][:count]
    assert sum(admitted) == min(budget, sum(drafts))
    assert all(a <= d for a, d in zip(admitted, drafts, strict=True))


@pytest.mark.parametrize("budget", [2, 7, 99])
def test_no_more_than_the_confidences_there_are(budget):
    """Breaks if the confidences of the next state are read for a request with more drafts than the table is wide."""
    kernel, oracle = run(torch.tensor([[0.5, 0.5, 0.5], [1.0, 1.0, 1.0], [0.9, 0.2, 0.9]]), [4, 9, 3], [1, 1, 1], budget)
    assert kernel == oracle
    assert sum(kernel[0][:3]) == min(budget, 9)


def test_the_tail_holds_the_end_of_the_batch(device):
    """Breaks if entries behind the batch keep those of a larger one: more of them than a tile has rows."""
    room = 3 * TILES[0] + 5
    out = poisoned(room, device)
    table = torch.ones(room, 2, device=device)
    scheduled = torch.tensor([[2, 2], [5, 1]], dtype=torch.int32, device=device)
    draft_budget(table, torch.arange(2, device=device), scheduled, 3, 1, out)
    assert out.query_start_loc.tolist() == [0, 7, *[9] * (room - 1)]
    draft_budget(table, torch.arange(0, device=device), scheduled[:, :0].contiguous(), 3, 1, out)
    assert out.query_start_loc.tolist() == [0, 7, *[9] * (room - 1)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is compiled in the interpreter")
def test_one_compilation_per_tile(device, compile_counter):
    """Breaks if a budget, a number of requests or where a slice begins compiles while serving."""
    out, table = Admission.empty(300, device), torch.rand(300, 7, device=device)
    room, mapping = torch.ones(700, dtype=torch.int32, device=device), torch.arange(300, device=device)
    for requests in (1, 2, 16, 17, 64, 65, 128, 256):
        for budget in (0, 1, 2, 16, 7 * requests):
            scheduled = room[requests % 3 :][: 2 * requests].view(2, requests)
            draft_budget(table, mapping[requests % 5 :][:requests], scheduled, budget, 1, out)
    assert compile_counter() <= 2


GOOD = {
    "confidences": torch.ones(3, 2),
    "idx_mapping": torch.arange(2),
    "scheduled": torch.ones(2, 2, dtype=torch.int32),
    "budget": 1,
    "num_bonus_tokens": 1,
    "out": Admission.empty(2, "cpu"),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidences": torch.ones(3, 2).double()}, "confidences must be torch.float32"),
        ({"confidences": torch.ones(3, 4)[:, ::2]}, "confidences must be torch.float32, contiguous"),
        ({"confidences": torch.ones(3, 33)}, "1 to 32 drafts per request are served; got 33"),
        ({"idx_mapping": torch.arange(2).int()}, "idx_mapping must be torch.int64"),
        ({"scheduled": torch.ones(2, 3, dtype=torch.int32)}, r"scheduled must be torch.int32, contiguous, \[2, 2\]"),
        ({"out": Admission.empty(1, "cpu")}, "outputs hold 1 requests; 2 were given"),
    ],
)
def test_errors_say_what_was_needed(change, message):
    """Breaks when a bad argument reaches the kernel (which assumes) instead of a sentence."""
    with pytest.raises(ValueError, match=message):
        draft_budget(**(GOOD | change))
