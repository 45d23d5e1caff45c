# SPDX-License-Identifier: Apache-2.0
"""Uniform verifications of every width and batch stay in the target's CUDA graphs, by vLLM's own tables and dispatch."""

from types import SimpleNamespace

import pytest

from vllm_dflash.engine.capture_sizes import with_verification
from vllm_dflash.engine.target_graphs import offer_uniform_graphs
from vllm_dflash.planner.widths import schedule_of, widths_up_to
from vllm_dflash.planner_patches import _offer_graphs

VLLMS = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def manager_of(k, max_requests):
    """vLLM's tables for an engine whose planner may choose widths up to K, as they are behind the capture."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    widths = {1 + width for width in widths_up_to(k, max_requests)}
    sizes = with_verification(VLLMS, widths, max_requests)
    speculation = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: True,
        num_speculative_tokens_per_batch_size=schedule_of(k, max_requests),
    )
    manager = CudaGraphManager.__new__(CudaGraphManager)
    vars(manager).update(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]),
        vllm_config=SimpleNamespace(
            speculative_config=speculation,
            num_speculative_tokens=k,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        ),
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_num_reqs=max_requests,
        decode_query_len=1 + k,
        varlen_decode=False,
        ubatch_runner=None,
        lora_capture_cases=[0],
        _lora_dispatch_map={},
        _max_lora_case=0,
        _candidates={},
        _capture_descs={},
        _graphs_captured=True,
    )
    manager._init_candidates()
    return manager, widths, sizes


def piecewise(manager, widths, sizes, max_requests):
    """(requests, rows each) of batches that fit into the largest graph and run piecewise."""
    found = []
    for rows in widths:
        for requests in range(1, min(max_requests, sizes[-1] // rows) + 1):
            desc = manager.dispatch(requests, requests * rows, rows, 0, max_query_len=rows)
            if desc.cg_mode.name != "FULL":
                found.append((requests, rows))
            else:
                assert desc.num_reqs >= requests
                assert desc.uniform_token_count in (None, rows)
    return found


@pytest.mark.parametrize(("k", "max_requests"), [(7, 256), (15, 128), (5, 64), (4, 200)])
def test_every_width_finds_a_graph_for_every_batch(k, max_requests):
    """Breaks if batches whose rows lie below a graph of other widths run piecewise: 85 requests of 3 rows in the first case."""
    manager, widths, sizes = manager_of(k, max_requests)
    assert piecewise(manager, widths, sizes, max_requests)  # vLLM's tables alone
    _offer_graphs(SimpleNamespace(cudagraph_manager=manager))
    assert piecewise(manager, widths, sizes, max_requests) == []


def test_batches_that_had_a_graph_keep_it():
    """Breaks if a larger graph is tried before the one that vLLM found, or mixed batches no longer run piecewise."""
    from vllm.config import CUDAGraphMode

    manager, widths, sizes = manager_of(7, 256)
    asked = [(requests, requests * rows, rows) for rows in widths for requests in range(1, 256)]
    mixed = [(8, 40, None), (100, 700, None)]
    before = {load: manager.dispatch(*load, 0) for load in asked + mixed}
    offer_uniform_graphs(manager._candidates, manager._capture_descs[CUDAGraphMode.FULL])
    for load, desc in before.items():
        if desc.cg_mode.name == "FULL" or load in mixed:
            assert manager.dispatch(*load, 0) == desc
    again = {key: list(value) for key, value in manager._candidates.items()}
    offer_uniform_graphs(manager._candidates, manager._capture_descs[CUDAGraphMode.FULL])
    assert manager._candidates == again
    assert sizes[-1] == 1024
