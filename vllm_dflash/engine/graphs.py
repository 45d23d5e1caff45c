# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the draft step, captured on grids of *request counts* of their own, one grid per width.

The draft step is always uniform: R requests of Q rows. So its graphs need no token sizes from the target: vLLM's
``cudagraph_capture_sizes`` end at 512 tokens by default, which is 32 requests at K = 15, and the built-in drafts eagerly
above that. Here every request count up to the engine's limit finds a graph.

Where K changes from step to step, narrower blocks have graphs too, so that drafting less costs less, and so have steps that draft
nothing and only keep the context. Their grids are coarser: rows that pad a narrow block are few.
"""

import dataclasses
from collections.abc import Callable, Collection

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

# (up to this many requests, in steps of). Draft GEMMs are bound by compute above some 12 requests, so padding costs what it adds:
# nothing up to 40 requests, at most 6 % up to 512. An H200 captures about 80 graphs a second.
_GRID = ((40, 1), (64, 2), (128, 4), (256, 8), (512, 16), (2048, 64))


CONTEXT_ONLY = 1
"""Rows per request that stand for a step that drafts nothing. As narrow is only the block of K = 1 sampled from the anchor, which
then has no graph for such steps."""
_TIMED_REQUESTS = (1, 8, 16, 32, 64, 128, 256)
_REPLAYS = 4


def request_grid(max_requests: int) -> tuple[int, ...]:
    """Request counts to capture, ascending; the last is ``max_requests`` itself, so that dispatch never misses.

    100 graphs for 512 requests. Graphs share one memory pool and the largest is captured first, so a further one
    costs only its node list (1-2 MiB of driver memory).
    """
    if max_requests < 1:
        raise ValueError(f"the draft step needs room for at least 1 request; got {max_requests}: raise max_num_batched_tokens")
    grid: list[int] = []
    for limit, step in _GRID:
        start = grid[-1] + step if grid else step
        grid += range(start, min(limit, max_requests) + 1, step)
    last = _GRID[-1][0]
    grid += range(last + 256, max_requests + 1, 256) if max_requests > last else ()
    if grid[-1] != max_requests:
        grid.append(max_requests)
    return tuple(grid)


def narrow_grid(grid: tuple[int, ...], num_query: int, widest: int) -> tuple[int, ...]:
    """Entries of ``grid`` for a block of ``num_query`` rows: about ``widest`` rows apart, from its first to its last.

    Whole multiples of ``widest`` rows where the grid has them: 32 requests of 4 rows are 128 rows, and a graph of 33 costs a GEMM
    the next tile (on an H200 the draft of an 8B target took 1.17 instead of 0.83 ms).
    """
    kept = list(grid[:1])
    for requests in grid[1:]:
        distance = (requests - kept[-1]) * num_query
        if requests * num_query % widest == 0 or distance >= 2 * widest or requests == grid[-1]:
            kept.append(requests)
    return tuple(kept)


@dataclasses.dataclass(slots=True)
class StepCounters:
    """How draft steps ran since the graphs were captured; dummy and profile runs are not counted."""

    graph: int = 0
    """Whole draft step replayed."""
    eager: int = 0
    """Whole draft step launched kernel by kernel."""
    context_only: int = 0
    """No drafts were wanted (K = 0): context KV stored, or left to wait, no query pass."""
    deferred_rows: int = 0
    """Context rows of such steps that were left to wait."""
    catch_ups: int = 0
    """Times that waiting rows were stored, all of them."""
    eager_context_rows: int = 0
    """Context rows of prefills that lie behind the rows of the graph and were stored eagerly before it."""


class DraftGraphManager(CudaGraphManager):
    """One FULL graph per entry of a request grid, for each number of rows per request; nothing is captured for an empty grid.

    A plain attribute of the speculator: vLLM's memory profiling finds it by type, drops it, and has it made again.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        num_query_per_req: int,
        grid: tuple[int, ...],
        narrower: Collection[int] = (),
    ) -> None:
        self.grid = grid
        narrow = {rows: narrow_grid(grid, rows, num_query_per_req) for rows in sorted(narrower)} if grid else {}
        self.grids = narrow | ({num_query_per_req: grid} if grid else {})
        """Request counts by rows per request."""
        mode = CUDAGraphMode.FULL_DECODE_ONLY if grid else CUDAGraphMode.NONE
        super().__init__(vllm_config, device, mode, decode_query_len=num_query_per_req)

    def _init_candidates(self) -> None:
        """Fill the tables of ``dispatch``: each token count of a width maps to the smallest graph that holds it."""
        for width, grid in self.grids.items():
            first = 0
            for requests in grid:
                desc = BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.FULL, num_tokens=requests * width, num_reqs=requests, uniform_token_count=width
                )
                self._capture_descs.setdefault(CUDAGraphMode.FULL, []).append(desc)
                for num_tokens in range(first, desc.num_tokens + 1):
                    self._candidates.setdefault((num_tokens, 0), []).append(desc)
                first = desc.num_tokens + 1
        # Largest first: the smaller graphs then fit into the pool that exists already.
        if self.grids:
            self._capture_descs[CUDAGraphMode.FULL].sort(key=lambda desc: -desc.num_tokens)

    def capture_steps(self, prepare: Callable[[int, int], Callable[[], None]]) -> None:
        """Capture every entry of the grids, or refuse to start.

        ``prepare(num_requests, rows per request)`` sets the inputs outside the graph and returns the draft step to record. vLLM
        calls it once for a warm-up and once for the capture.

        Raises:
            RuntimeError: a graph of the grid is missing afterwards, so a decode step would leave the graphs.
        """

        def create_forward(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:  # noqa: ARG001  # vLLM's protocol
            assert desc.num_reqs is not None
            assert desc.uniform_token_count is not None
            step = prepare(desc.num_reqs, desc.uniform_token_count)
            return lambda _mode: step()

        self.capture(create_forward, "Capturing DFlash draft CUDA graphs")
        captured = {(desc.uniform_token_count, desc.num_reqs) for desc in self.graphs}
        wanted = {(rows, requests) for rows, grid in self.grids.items() for requests in grid}
        missing = sorted(requests for _, requests in wanted - captured)
        if missing:
            raise RuntimeError(
                f"DFlash draft graphs for {missing} requests were not captured, {len(captured)} of {len(wanted)} were; "
                "the draft would leave its CUDA graphs while serving. Use enforce_eager=True to run without graphs."
            )

    def time_drafts(self) -> list[tuple[int, float]]:
        """(query rows, seconds) of captured draft steps on a coarse grid, where the width may change; some 50 ms in all.

        Inputs are those of the last capture, its smallest: one short context, no slot to write. So attention of more requests is
        not in it; what contexts cost shows in whole steps.
        """
        timed: list[tuple[int, float]] = []
        for desc, graph in self.graphs.items() if len(self.grids) > 1 else ():
            if desc.num_reqs not in _TIMED_REQUESTS or desc.uniform_token_count == CONTEXT_ONLY:
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
            graph.replay()
            begin.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            timed.append((desc.num_tokens, begin.elapsed_time(end) / 1e3 / _REPLAYS))
        return timed
