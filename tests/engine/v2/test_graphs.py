# SPDX-License-Identifier: Apache-2.0
"""The request grid, and the draft step as a graph sees it: padded to a captured size, over buffers of earlier steps."""

import itertools

import pytest
import torch
from vllm.config import CUDAGraphMode

K = 3


@pytest.fixture
def manager_of(engine, monkeypatch):
    """A manager that believes its graphs to be captured; there is no device to capture on."""
    from vllm.platforms import current_platform

    from vllm_dflash.engine.graphs import DraftGraphManager

    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda *_: None)

    def make(grid):
        manager = DraftGraphManager(engine.speculator.vllm_config, torch.device("cpu"), K + 1, grid)
        manager._graphs_captured = True
        return manager

    return make


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 31, 64, 100, 512, 1000, 4096])
def test_grid_reaches_every_request_count(limit):
    """Breaks if the largest batch has no graph, or the grid grows out of bounds."""
    from vllm_dflash.engine.graphs import request_grid

    grid = request_grid(limit)
    assert list(grid) == sorted(set(grid))
    assert grid[-1] == limit
    assert grid[0] == 1
    assert len(grid) <= 140
    assert all(b - a <= max(1, 0.12 * b) for a, b in itertools.pairwise(grid))


@pytest.mark.parametrize(("num_query", "widest"), [(1, 8), (2, 8), (4, 8), (2, 16), (4, 16), (8, 16)])
def test_narrow_blocks_fill_whole_tiles(num_query, widest):
    """Breaks if a usual batch size runs the graph of one request more: 33 requests of 4 rows are 132, a GEMM tile above 128.

    Or if a graph holds many more rows than are asked for, or the last batch size has none.
    """
    from vllm_dflash.engine.graphs import narrow_grid, request_grid

    for limit in (100, 128, 256):
        kept = narrow_grid(request_grid(limit), num_query, widest)
        assert (kept[0], kept[-1]) == (1, limit)
        assert all(requests in kept for requests in (16, 32, 64, 128, 256) if requests <= limit)
        assert all((b - a) * num_query <= max(2 * widest, 16 * num_query) for a, b in itertools.pairwise(kept))


def test_no_request_count_is_refused_in_words():
    """Breaks if a step without room for one request ends in an index error that names no option."""
    from vllm_dflash.engine.graphs import request_grid

    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        request_grid(0)


def test_dispatch_never_misses(manager_of):
    """Breaks if a batch size finds no graph, or one that is too small."""
    manager = manager_of((1, 2, 4, 8, 12, 13))
    for num_reqs in range(1, 14):
        desc = manager.dispatch(num_reqs, num_reqs * (K + 1), K + 1, 0)
        assert desc.cg_mode == CUDAGraphMode.FULL
        assert desc.num_reqs == min(size for size in manager.grid if size >= num_reqs)
        assert desc.num_tokens == desc.num_reqs * (K + 1)


def test_missing_graphs_refuse_to_start(manager_of, monkeypatch):
    """Breaks if an engine starts although a decode step would leave the graphs."""
    manager = manager_of((1, 2))
    monkeypatch.setattr(type(manager).__mro__[1], "capture", lambda *_: None)
    with pytest.raises(RuntimeError, match="enforce_eager"):
        manager.capture_steps(lambda *_: lambda: None)


def test_padded_steps_propose_what_eager_steps_do(engine, manager_of, prompts, baseline):
    """Every step runs as four requests, as a replay would, over whatever earlier steps left behind.

    Breaks if padding reaches a real request, or a row is read that this step did not write.
    """
    speculator = engine.speculator
    eager = engine.watch(prompts)
    engine.generate(prompts, 13)
    expected = baseline(prompts, 13)
    manager = manager_of((4,))

    def replay(desc):
        bound = torch.full((desc.num_reqs,), speculator.max_model_len, dtype=torch.int32)
        metadata = speculator.attention.build(desc.num_reqs, speculator.max_model_len, bound, capture=False)
        rows = speculator.buffers.shape.graph_context_rows(desc.num_reqs)
        speculator.draft_pass.run(desc.num_reqs, rows, metadata)

    manager.run_fullgraph = replay
    speculator.graphs, before = manager, speculator.graphs
    try:
        steps = speculator.counters.graph
        padded = engine.watch(prompts)
        assert engine.generate(prompts, 13) == expected
        assert padded == eager
        for count in (3, 1):  # rows of the larger batch before are still in the buffers
            found = engine.watch(prompts[:count])
            assert engine.generate(prompts[:count], 13) == expected[:count]
            assert found == {(n, anchor): drafts for (n, anchor), drafts in eager.items() if n < count}
        engine.watch(prompts[:3], replay=expected)
        drafted, accepted, outputs = engine.acceptance_of(lambda: engine.generate(prompts[:3], 13))
        assert outputs == expected[:3]
        assert drafted == accepted
        assert speculator.counters.graph > steps
    finally:
        speculator.graphs = before


@pytest.mark.parametrize(("active", "rows"), [(3, 3), (None, 8)])
def test_logit_cache_rows_follow_active_requests(active, rows):
    """Low request states are handed out first where the scheduler bounds active requests; breaks if a state has no row."""
    from types import SimpleNamespace

    from vllm_dflash.engine.compat import compact_request_states

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    states = SimpleNamespace(free_indices=list(range(8)))
    assert compact_request_states(config, states, active or 8) == rows
    taken = [states.free_indices.pop() for _ in range(active or 8)]
    states.free_indices.append(taken.pop(0))
    assert max([*taken, states.free_indices.pop()]) < rows
