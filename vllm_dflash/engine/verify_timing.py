# SPDX-License-Identifier: Apache-2.0
"""What verification costs by its rows, timed once on Model Runner V2 when its CUDA graphs exist, for the planner's first plans.

Dummy steps of vLLM's own, as its adaptive verification uses them: they go through the same dispatch and graphs as serving. The
draft passes are timed on their own (``graphs.py``). Steps that serve correct both.
"""

import time
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_dflash.engine.lifecycle import DraftLifecycle
from vllm_dflash.engine.workers import share_process
from vllm_dflash.planner import measured

logger = init_logger("vllm.plugins.dflash")

_REQUESTS = (1, 8, 16, 32, 64, 128, 256)
_REPEATS = 3
_LIMIT = 1.5
"""Seconds; the next size does not start after it. Some 14 sizes of 3 steps of 5 to 30 ms each."""


def time_verification(runner: Any, requests: tuple[int, ...] = _REQUESTS) -> None:
    """Time plain decoding and full verification for some numbers of ``requests``; nothing where no planner would read it.

    Args:
        runner: vLLM's V2 ``GPUModelRunner``, captured.
        requests: numbers of requests; each is timed with one row and with 1 + K rows.
    """
    if not _is_read(runner):
        return
    began = time.perf_counter()
    wide = int(runner.decode_query_len)
    sizes = sorted({(count * rows, rows) for count in requests for rows in (1, wide) if count <= runner.max_num_reqs})
    times: list[tuple[int, float]] = []
    try:
        for num_rows, rows_per_request in sizes:
            if num_rows > runner.max_num_tokens or time.perf_counter() - began > _LIMIT:
                break
            times += [(num_rows, seconds) for seconds in _timed(runner, num_rows, uniform=rows_per_request > 1)]
    finally:  # vLLM's dummy step leaves these as they are when it fails
        runner.kv_connector.set_disabled(False)
        runner.execute_model_state = None
        torch.accelerator.empty_cache()  # as after vLLM's own dummy steps: their activations are no part of serving
    for num_rows, seconds in times:
        measured.record_verification(num_rows, seconds)
    logger.debug("DFlash planner: %d verification passes timed in %.2f s", len(times), time.perf_counter() - began)


def _is_read(runner: Any) -> bool:
    """Whether a planner of this process can choose a width."""
    speculator = runner.speculator
    if not isinstance(speculator, DraftLifecycle) or speculator.graphs is None:
        return False
    return len(speculator.graphs.grids) > 1 and share_process(runner.vllm_config.parallel_config) and speculator.dp_size == 1


@torch.inference_mode()
def _timed(runner: Any, num_rows: int, *, uniform: bool) -> list[float]:
    """Seconds of ``num_rows`` rows through target and head, several times; the first is not counted (a graph is uploaded)."""
    heads = []
    with runner.step_timing.collect() as samples:
        for _ in range(1 + _REPEATS):
            hidden_states, _ = runner._dummy_run(num_rows, uniform_decode=uniform)
            assert hidden_states is not None
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
            begin.record()
            runner.model.compute_logits(hidden_states[:num_rows])
            end.record()
            heads.append((begin, end))
    heads[-1][1].synchronize()
    return [(sample.forward_ms + begin.elapsed_time(end)) / 1e3 for sample, (begin, end) in zip(samples, heads, strict=True)][1:]
