# SPDX-License-Identifier: Apache-2.0
"""Which sizes of the target's CUDA graphs are added so that verification of many requests stays in them."""

import itertools
from types import SimpleNamespace

import pytest

from vllm_dflash.engine import capture_sizes

VLLMS = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


@pytest.mark.parametrize(
    ("rows", "last"),
    [(128 * 8, 1024), (100 * 8, 800), (256 * 8, 1024), (64 * 8, 512), (4 * 8, 512)],
)
def test_every_batch_finds_a_graph_that_is_not_much_larger(rows, last):
    """Breaks if full verifications of the largest batch leave the graphs, or are padded by more than a stride."""
    sizes = capture_sizes.with_verification(VLLMS, rows)
    assert sizes[: len(VLLMS)] == VLLMS
    assert sizes[-1] == last
    assert sizes == sorted(set(sizes))
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= capture_sizes.STRIDE


def config(sizes=None, largest=None, *, v2=True):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=largest),
        scheduler_config=SimpleNamespace(max_num_seqs=128, max_num_batched_tokens=8192),
        speculative_config=SimpleNamespace(num_speculative_tokens=7),
        use_v2_model_runner=v2,
    )


def test_sizes_of_the_users_own_are_left_alone():
    """Breaks if what a user has set is widened."""
    assert capture_sizes.are_default(config())
    assert not capture_sizes.are_default(config(sizes=[1, 2]))
    assert not capture_sizes.are_default(config(largest=64))


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
