# SPDX-License-Identifier: Apache-2.0
"""`query_block` against its list-based oracle, hand-computed blocks, and random batches.

Every buffer starts poisoned in both runs and is compared whole, so a missing store and a store behind the padded rows
both show.
"""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from dflash_kernels import reference
from dflash_kernels.query_block import PAD_SLOT, DraftBlockTables, QueryBlockBuffers, QueryBlockSpec, TargetStep, query_block

POISON = 777
MASK = 500


@dataclass
class Request:
    """One request of a target step: `span` rows from position `start`, the last `rejected` of them refused."""

    start: int
    span: int
    rejected: int = 0
    sampled: int = 1
    state: int = 0


def make_spec(k=3, **changes):
    return replace(QueryBlockSpec(1 + k, k, MASK, max_model_len=64), **changes)


def make_step(requests, num_states=16, num_blocks=None):
    """Target-step tensors on the CPU; last sampled token of state s is 100 + s, next prompt token 200 + s."""
    starts = torch.tensor([0, *(r.span for r in requests)], dtype=torch.int32).cumsum(0).to(torch.int32)
    positions = [r.start + i for r in requests for i in range(r.span)]
    return TargetStep(
        query_start_loc=starts,
        positions=torch.tensor(positions or [0], dtype=torch.int64),
        idx_mapping=torch.tensor([r.state for r in requests] or [0], dtype=torch.int64),
        num_sampled=torch.tensor([r.sampled for r in requests] or [0], dtype=torch.int32),
        num_rejected=torch.tensor([r.rejected for r in requests] or [0], dtype=torch.int32),
        last_sampled=100 + torch.arange(num_states, dtype=torch.int64)[:, None],
        next_prefill_tokens=200 + torch.arange(num_states, dtype=torch.int32)[None, :],
        num_blocks=num_blocks,
    )


def page_tables(kv_block_sizes, num_reqs, max_model_len=64, seed=0):
    """Block tables of distinct non-null pages that cover max_model_len."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for size in kv_block_sizes:
        columns = -(-max_model_len // size)
        pages = 1 + torch.randperm(num_reqs * columns, generator=generator)
        tables.append(pages.reshape(num_reqs, columns).to(torch.int32))
    return tables


def poisoned(num_reqs, spec, num_context_rows, num_groups, device="cpu"):
    buffers = QueryBlockBuffers.allocate(
        num_reqs, spec.num_query_per_req, spec.num_speculative_tokens, num_context_rows, num_groups, device
    )
    for field in fields(buffers):
        getattr(buffers, field.name).fill_(POISON)
    return buffers


def on(device, step):
    moved = {f.name: getattr(step, f.name) for f in fields(step)}
    return TargetStep(**{name: None if t is None else t.to(device) for name, t in moved.items()})


def run(device, requests, spec, tables, kv_block_sizes, *, padded=None, rows=None, hint=None, num_blocks=None, extra=2):
    """Run kernel and oracle on poisoned buffers with `extra` requests and rows behind the padded ones; compare all."""
    padded = len(requests) if padded is None else padded
    num_tokens = sum(r.span for r in requests)
    rows = num_tokens if rows is None else rows
    step = make_step(requests, num_blocks=num_blocks)
    sizes = {
        "num_reqs": len(requests),
        "num_reqs_padded": padded,
        "num_context_rows": rows,
        "max_query_len": hint or max((r.span for r in requests), default=1),
    }
    expected = poisoned(padded + extra, spec, rows + extra, len(tables))
    reference.query_block(expected, DraftBlockTables.build(tables, kv_block_sizes), spec, step, **sizes)
    actual = poisoned(padded + extra, spec, rows + extra, len(tables), device)
    device_tables = [table.to(device) for table in tables]
    query_block(actual, DraftBlockTables.build(device_tables, kv_block_sizes), spec, on(device, step), **sizes)
    for field in fields(actual):
        torch.testing.assert_close(
            getattr(actual, field.name).cpu(),
            getattr(expected, field.name),
            rtol=0,
            atol=0,
            msg=lambda text, name=field.name: f"{name}: {text}",
        )
    return actual


def test_block_after_two_rejections_by_hand(device):
    """Off-by-one errors in anchor, positions, slots or sample rows; the numbers are worked out by hand."""
    spec = make_spec(k=3)
    # Rows at positions 10..13, the last two refused: 11 is the last committed one, the anchor sits at 12.
    out = run(device, [Request(10, 4, rejected=2, state=5)], spec, [torch.tensor([[7, 8, 9, 4]]).int()], [8])
    assert out.input_ids[:4].tolist() == [105, MASK, MASK, MASK]
    assert out.positions[:4].tolist() == [12, 13, 14, 15]
    assert out.slots[0, :4].tolist() == [8 * 8 + 4, 8 * 8 + 5, 8 * 8 + 6, 8 * 8 + 7]
    assert out.query_start_loc[:2].tolist() == [0, 4]
    assert out.seq_lens[:1].tolist() == [16]
    # The draft for position 13 is drawn with the key of position 12, and so on.
    assert out.sample_positions[:3].tolist() == [12, 13, 14]
    assert out.sample_req_state[:3].tolist() == [5, 5, 5]
    assert out.context_positions[:4].tolist() == [10, 11, 0, 0]
    assert out.context_slots[0, :4].tolist() == [8 * 8 + 2, 8 * 8 + 3, PAD_SLOT, PAD_SLOT]


def test_mid_prefill_chunk_is_anchored_on_the_next_prompt_token(device):
    """A chunk that sampled nothing must not be anchored on a stale sampled token."""
    out = run(device, [Request(0, 9, sampled=0, state=2)], make_spec(), page_tables([16], 1), [16])
    assert out.input_ids[0] == 202
    assert out.positions[0] == 9


def test_mid_prefill_can_be_left_out_but_its_context_is_stored(device):
    """Skipping the query block of a chunk must not skip its context rows: they would be missing for good."""
    spec = make_spec(draft_mid_prefill=False)
    requests = [Request(0, 9, sampled=0, state=2), Request(5, 4, rejected=1, state=3)]
    out = run(device, requests, spec, page_tables([16], 2), [16])
    assert out.seq_lens[0] == 0
    assert out.sample_req_state[:3].tolist() == [-1] * 3
    assert (out.slots[0, :4] == PAD_SLOT).all()
    assert (out.context_slots[0, :9] >= 0).all()
    assert out.seq_lens[1] == 12


def test_positions_from_max_model_len_on_are_never_stored(device):
    """The in-block offset of a position past the end would land on an earlier slot of the last page."""
    spec = make_spec(max_model_len=20)
    # The table is wider than max_model_len needs, so only the position check can refuse the store.
    out = run(device, [Request(15, 3, state=1)], spec, page_tables([8], 1), [8])
    assert out.positions[:4].tolist() == [18, 19, 19, 19]
    assert (out.slots[0, 2:4] == PAD_SLOT).all()
    assert (out.slots[0, :2] >= 0).all()
    assert out.seq_lens[0] == 20
    assert out.sample_positions[:3].tolist() == [18, 19, 20]


def test_table_columns_bound_the_slots(device):
    """A position behind the table's last column must not read the next request's row."""
    out = run(device, [Request(13, 2, state=1), Request(0, 2)], make_spec(), [torch.tensor([[3, 4], [5, 6]]).int()], [8])
    assert out.slots[0, :4].tolist() == [4 * 8 + 7, PAD_SLOT, PAD_SLOT, PAD_SLOT]


def test_stale_columns_behind_the_allocated_pages_are_padding(device):
    """Columns behind the allocated pages keep ids of earlier batches; storing there corrupts another request."""
    num_blocks = torch.zeros(1, 16, dtype=torch.int32)
    num_blocks[0, 4] = 1
    out = run(device, [Request(3, 4, state=4)], make_spec(), page_tables([8], 1), [8], num_blocks=num_blocks)
    assert (out.slots[0, :1] >= 0).all()
    assert (out.slots[0, 1:4] == PAD_SLOT).all()


def test_null_pages_are_never_writable(device):
    """Page 0 is shared by everyone: evicted window pages map to it."""
    tables = [torch.tensor([[0, 0, 9, 10]]).int()]
    out = run(device, [Request(4, 8, state=0)], make_spec(), tables, [4])
    assert out.context_slots[0, :8].tolist() == [PAD_SLOT] * 4 + [36, 37, 38, 39]


@pytest.mark.parametrize("kv_block_sizes", [[16], [16, 784], [1, 528, 48]])
def test_mixed_batch_with_padding_in_groups_of_different_page_sizes(device, kv_block_sizes):
    """Decode, chunk, dummy and padded rows in one launch; page sizes need not be powers of two."""
    requests = [
        Request(20, 4, rejected=3, state=9),
        Request(0, 33, sampled=0, state=1),
        Request(7, 1, state=0),
        Request(3, 4, rejected=1, state=-1),
        Request(30, 4, rejected=0, state=15),
    ]
    tables = page_tables(kv_block_sizes, len(requests))
    out = run(device, requests, make_spec(), tables, kv_block_sizes, padded=8, rows=60)
    assert out.query_start_loc[:9].tolist() == [0, 4, 8, 12, 16, 20, 20, 20, 20]
    assert (out.slots[:, 20:32] == PAD_SLOT).all()
    assert (out.context_slots[:, 46:60] == PAD_SLOT).all()
    assert (out.sample_req_state[15:24] == -1).all()


def test_long_chunk_is_complete_for_any_parallelism_hint(device):
    """The hint is an upper bound under adaptive verification; a wrong one must not lose rows."""
    requests = [Request(0, 300, sampled=0, state=3), Request(280, 5, rejected=2, state=2)]
    spec = make_spec(max_model_len=512)
    for hint in (1, 300, 5000):
        run(device, requests, spec, page_tables([48], 2, 512), [48], padded=3, rows=450, hint=hint)


def test_all_rows_rejected_and_empty_spans_are_inert(device):
    """Without a committed row there is no position to continue from."""
    requests = [Request(5, 3, rejected=3, state=1), Request(9, 0, state=2), Request(1, 2, state=3)]
    out = run(device, requests, make_spec(), page_tables([16], 3), [16])
    assert out.seq_lens[:3].tolist() == [0, 0, 7]
    assert (out.context_slots[0, :3] == PAD_SLOT).all()


def test_batch_of_padding_only(device):
    """A data-parallel rank without work still replays: everything it reads must be inert."""
    out = run(device, [], make_spec(), page_tables([16], 2), [16], padded=2, rows=8)
    assert out.query_start_loc[:3].tolist() == [0, 0, 0]
    assert (out.slots[0, :8] == PAD_SLOT).all()


@pytest.mark.parametrize("k", [1, 7, 15, 16])
def test_anchor_that_predicts_itself(device, k):
    """Under sample_from_anchor the block has K rows and every row predicts the token after it."""
    spec = QueryBlockSpec(k, k, MASK, 64, sample_from_anchor=True)
    out = run(device, [Request(5, 2, state=1)], spec, page_tables([16], 1), [16])
    assert spec.sample_offset == 0
    assert out.sample_positions[:k].tolist() == [7 + i for i in range(k)]


def test_int32_state_indices_are_accepted(device):
    """Older engines map requests with int32."""
    spec, tables = make_spec(), page_tables([16], 1)
    step = make_step([Request(5, 2, state=3)])
    step = replace(step, idx_mapping=step.idx_mapping.to(torch.int32))
    out = poisoned(1, spec, 2, 1, device)
    built = DraftBlockTables.build([table.to(device) for table in tables], [16])
    query_block(out, built, spec, on(device, step), num_reqs=1, num_reqs_padded=1, num_context_rows=2, max_query_len=2)
    assert out.input_ids.tolist() == [103, MASK, MASK, MASK]


def draw_batch(draw, st):
    """A random batch: any mix of spans, rejections, dummy requests, page sizes, null pages and padding."""
    k = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(8, 40))
    sizes = draw(st.lists(st.sampled_from([1, 3, 4, 16, 48]), min_size=1, max_size=3))
    requests = []
    for state in draw(st.lists(st.integers(0, 15), max_size=4, unique=True)):
        start = draw(st.integers(0, max_model_len - 1))
        span = draw(st.integers(0, max_model_len - start))
        real = draw(st.integers(0, 4)) > 0
        sampled = draw(st.integers(0, 2))
        requests.append(Request(start, span, draw(st.integers(0, span)), sampled, state if real else -1))
    padded = max(1, len(requests) + draw(st.integers(0, 2)))
    rows = sum(r.span for r in requests) + draw(st.integers(0, 9))
    spec = make_spec(k, max_model_len=max_model_len, draft_mid_prefill=draw(st.booleans()))
    tables = page_tables(sizes, padded, max_model_len, seed=draw(st.integers(0, 99)))
    for table in tables:
        if draw(st.booleans()):
            table[:, : draw(st.integers(0, table.shape[1]))] = 0
    return requests, spec, tables, sizes, padded, rows


def test_any_batch_matches_the_oracle(device):
    """Index arithmetic that only goes wrong for an odd combination of sizes."""
    hypothesis = pytest.importorskip("hypothesis", reason="a bare GPU machine may lack it; CI has it")

    @hypothesis.settings(max_examples=40, deadline=None)
    @hypothesis.given(hypothesis.strategies.data())
    def check(data):
        requests, spec, tables, sizes, padded, rows = draw_batch(data.draw, hypothesis.strategies)
        run(device, requests, spec, tables, sizes, padded=padded, rows=rows)

    check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compilation and synchronisation exist on a CUDA device only")
def test_serving_sizes_neither_compile_nor_synchronise(device, compile_counter):
    """A size-dependent kernel would compile while serving; a host read would stall the step."""
    spec, sizes = make_spec(max_model_len=512), [16, 784]
    tables = DraftBlockTables.build([table.to(device) for table in page_tables(sizes, 64, 512)], sizes)
    out = poisoned(64, spec, 1200, 2, device)
    batches = [[Request(7, 4, 1, 1, i % 16) for i in range(n)] for n in (1, 2, 15, 16, 33, 64)]
    batches.append([Request(0, 333, 0, 0, 0), Request(8, 4, 3, 1, 1)])
    steps = [on(device, make_step(requests)) for requests in batches]
    torch.cuda.synchronize()
    compiled = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for requests, step in zip(batches, steps, strict=True):
            span, padded = max(r.span for r in requests), len(requests)
            query_block(
                out, tables, spec, step, num_reqs=padded, num_reqs_padded=padded, num_context_rows=340, max_query_len=span
            )
            compiled.append(compile_counter())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled[-1] == compiled[0], f"compilations after each batch: {compiled}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_graph_replay_follows_the_step_tensors(device):
    """Captured, the launch must read the step from its addresses and leave no row of the earlier batch."""
    spec = make_spec()
    tables = page_tables([16], 3)
    built = DraftBlockTables.build([table.to(device) for table in tables], [16])
    sizes = {"num_reqs": 2, "num_reqs_padded": 3, "num_context_rows": 12, "max_query_len": 4}
    first, second = (make_step([Request(p, 4, r, 1, 1), Request(9, 4, 3 - r, s, 2)]) for p, r, s in ((5, 0, 1), (20, 3, 0)))
    step = on(device, first)
    out = poisoned(3, spec, 12, 1, device)
    query_block(out, built, spec, step, **sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query_block(out, built, spec, step, **sizes)
    for field in fields(step):
        if field.name != "num_blocks":
            getattr(step, field.name).copy_(getattr(second, field.name))
    graph.replay()
    expected = poisoned(3, spec, 12, 1)
    reference.query_block(expected, DraftBlockTables.build(tables, [16]), spec, second, **sizes)
    for field in fields(out):
        assert torch.equal(getattr(out, field.name).cpu(), getattr(expected, field.name)), field.name


def test_fresh_buffers_are_padding():
    """A capture before the first batch must store nothing and touch no request."""
    buffers = QueryBlockBuffers.allocate(3, 4, 3, 10, 2, "cpu")
    assert (buffers.slots == PAD_SLOT).all()
    assert (buffers.context_slots == PAD_SLOT).all()
    assert (buffers.sample_req_state == -1).all()
    assert (buffers.seq_lens == 0).all()


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"num_reqs_padded": 4}, "num_reqs_padded"),
        ({"num_reqs": 3}, "num_reqs"),
        ({"num_context_rows": 9}, "num_context_rows"),
    ],
)
def test_sizes_beyond_the_buffers_are_refused(device, sizes, field):
    """A store behind a buffer would be silent on a GPU."""
    spec = make_spec()
    out = QueryBlockBuffers.allocate(2, 4, 3, 8, 1, device)
    built = DraftBlockTables.build([table.to(device) for table in page_tables([16], 2)], [16])
    valid = {"num_reqs": 1, "num_reqs_padded": 2, "num_context_rows": 8, "max_query_len": 2}
    with pytest.raises(ValueError, match=field):
        query_block(out, built, spec, on(device, make_step([Request(0, 2)])), **(valid | sizes))


def test_more_drafts_than_rows_are_refused():
    """Breaks if sample rows may lie behind a request's block: they would be the next request's rows."""
    with pytest.raises(ValueError, match="num_query_per_req of at least 5"):
        QueryBlockSpec(4, 4, MASK, 64)
