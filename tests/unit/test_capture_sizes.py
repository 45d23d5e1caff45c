# SPDX-License-Identifier: Apache-2.0
"""Which sizes of the target's CUDA graphs are added so that verification of many requests stays in them."""

import itertools
from types import SimpleNamespace

import pytest

from vllm_dflash.engine import capture_sizes
from vllm_dflash.planner.widths import widths_up_to

VLLMS = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def graphs_of(sizes, rows, max_requests):
    """Requests of the uniform graphs that vLLM makes of sizes, by its rule (``CudaGraphManager._init_candidates``)."""
    rounded = {-(-size // rows) * rows for size in sizes}
    return {size // rows for size in rounded if size <= sizes[-1] and size <= max_requests * rows}


@pytest.mark.parametrize(
    ("max_requests", "k"),
    [(128, 7), (100, 7), (150, 7), (200, 7), (256, 4), (512, 7), (1024, 7), (256, 15), (65, 15)],
)
def test_every_batch_finds_a_graph_that_is_not_much_larger(max_requests, k):
    """Breaks if the largest batches of a width leave the graphs as vLLM rounds sizes, or are padded by more than a stride."""
    widths = {1 + width for width in widths_up_to(k, max_requests)}
    sizes = capture_sizes.with_verification(VLLMS, widths, max_requests)
    assert set(sizes) > set(VLLMS)
    assert sizes == sorted(sizes)
    assert sizes[-1] <= capture_sizes.MOST_ROWS
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= capture_sizes.STRIDE
    for rows in widths:
        graphs = graphs_of(sizes, rows, max_requests)
        assert max(graphs) == min(max_requests, capture_sizes.MOST_ROWS // rows)


def test_sizes_that_suffice_stay():
    """Breaks if engines of few requests capture graphs that no verification needs."""
    assert capture_sizes.with_verification(VLLMS, {1, 8}, 64) == VLLMS


def config(sizes=None, largest=None, *, static=None, v2=True):
    compilation = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": largest, "compile_sizes": static}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(**compilation),
        scheduler_config=SimpleNamespace(max_num_seqs=128, max_num_batched_tokens=8192),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=7, num_speculative_tokens_per_batch_size=None, enable_adaptive_verification=True
        ),
        use_v2_model_runner=v2,
    )


def test_sizes_of_the_users_own_are_left_alone():
    """Breaks if what a user has set is widened."""
    assert capture_sizes.are_default(config())
    assert not capture_sizes.are_default(config(sizes=[1, 2]))
    assert not capture_sizes.are_default(config(largest=64))
    assert not capture_sizes.are_default(config(static=["cudagraph_capture_sizes"]))  # resolved before ours are added


@pytest.mark.parametrize(("cuda", "v2", "sizes"), [(False, True, VLLMS), (True, False, VLLMS), (True, True, [])])
def test_where_nothing_is_added(monkeypatch, cuda, v2, sizes):
    """Breaks if a CPU, the V1 runner or an eager engine gets sizes to capture."""
    monkeypatch.setattr(capture_sizes, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))
    found = config(list(sizes), 512, v2=v2)
    capture_sizes.cover_verification(found)
    assert found.compilation_config.cudagraph_capture_sizes == sizes


def test_the_largest_size_is_what_vllm_compares_with(monkeypatch):
    """Breaks if sizes are added and the limit above which vLLM looks for none stays."""
    monkeypatch.setattr(capture_sizes, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    found = config(list(VLLMS), 512)
    capture_sizes.cover_verification(found)
    assert found.compilation_config.cudagraph_capture_sizes[-1] == found.compilation_config.max_cudagraph_capture_size == 1024


@pytest.mark.parametrize("sizes", [None, [1, 2]])
def test_sizes_are_added_once_vllm_has_chosen_its_own(monkeypatch, sizes):
    """Breaks if sizes are added before there are any, or to a user's own, which by then look like vLLM's."""
    from vllm_dflash.config_patch import engine_config
    from vllm_dflash.engine import planned_widths

    calls = []
    monkeypatch.setattr(planned_widths, "configure", lambda _: calls.append("widths"))
    monkeypatch.setattr(capture_sizes, "cover_verification", lambda _: calls.append("sizes"))

    def post_init(found):
        calls.append("vLLM")
        found.compilation_config.cudagraph_capture_sizes = VLLMS

    found = config(sizes)
    found.additional_config = {}
    engine_config(lambda _: True, lambda: True).wrap(post_init)(found)
    assert calls == ["widths", "vLLM", *(["sizes"] if sizes is None else [])]
