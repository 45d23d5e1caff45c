# SPDX-License-Identifier: Apache-2.0
"""Times of pieces of a step on this GPU, as a captured graph runs them, side by side: others may be using the GPU too."""

import statistics
from collections.abc import Callable, Sequence

import torch
from vllm.distributed import get_tp_group

_REPLAYS = 15
_FLUSH = 128 << 20  # bytes; larger than any L2 cache


def graph_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median microseconds of each of ``calls``, replayed from CUDA graphs with the L2 cache overwritten in between.

    They take turns, so that a spell of another process's work, or of a lower clock, falls on all of them alike.
    """
    scratch = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda")
    graphs = [_captured(call) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_REPLAYS):
        for graph, found in zip(graphs, times, strict=True):
            scratch.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3)
    return [float(statistics.median(found)) for found in times]


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Without ``torch.cuda.graph``, which collects garbage every time: a third of a second in a process of vLLM."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()  # compiles, and lets cuBLAS allocate its workspace for this stream
        stream.synchronize()
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def agreed(value: float) -> float:
    """The mean of ``value`` over tensor-parallel ranks, so that all decide alike."""
    group = get_tp_group()
    if group.world_size == 1:
        return value
    total = group.all_reduce(torch.tensor([value], device="cuda"))
    return float(total.item()) / int(group.world_size)
