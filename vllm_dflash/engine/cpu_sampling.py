# SPDX-License-Identifier: Apache-2.0
"""Repairs of vLLM's sampling on the V1 CPU runner (0.32 and 0.33), each behind a hook of its own.

========================= ================================================================= ================================
replacement               what is wrong in vLLM                                             shows as
========================= ================================================================= ================================
:func:`expand_rows`       ``cpu_triton_utils._expand_kernel_impl`` hands the C++ op an      every speculative method samples
                          int64 *copy* of its output and never copies back, so expanded     garbage above temperature 0
                          temperature, top-k and top-p stay uninitialised memory
:func:`allow_no_rows`     ``apply_top_k_only`` takes ``k.max()`` of the draft rows, and a   engine dies in the first step of
                          prefill-only step has none                                        a request with top-k
:func:`rewind_seeds`      ``_bookkeeping_sync`` rewinds the generators of chunked prefills  engine dies on a request with a
                          by offset, which CPU generators do not have                       seed and a chunked prompt
========================= ================================================================= ================================

Remove each when ``tests/compat/test_cpu_sampling_repairs.py`` fails on the oldest supported vLLM.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def expand_rows(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803, ARG001  # the Triton kernel's constexpr, passed by name
) -> None:
    """Write ``input_val[i]`` to the rows of request i, with ``replace_from`` replaced by ``replace_to``.

    Args:
        output: [T] any dtype, filled in place.
        input_val: [B].
        cu_num_tokens: int [B] cumulative row counts; the last one is T.
        replace_from: value to replace.
        replace_to: its replacement.
        MAX_NUM_TOKENS: unused.
    """
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    output.copy_(torch.repeat_interleave(values, counts))


def allow_no_rows(apply_top_k_only: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``apply_top_k_only(logits, k)`` so that zero rows pass through."""

    @functools.wraps(apply_top_k_only)
    def wrapper(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return apply_top_k_only(logits, k) if logits.shape[0] else logits

    return wrapper


def rewind_seeds(bookkeeping_sync: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the runner's ``_bookkeeping_sync`` so that seeded requests in mid-prefill get their generator back at its start.

    Their draws of this step are discarded. A request that has answered already (resumed after preemption) keeps its generator
    as it is: starting over would repeat the draws behind its earlier tokens.
    """

    @functools.wraps(bookkeeping_sync)
    def wrapper(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        generators = batch.generators
        if not generators or runner.device.type != "cpu":
            return bookkeeping_sync(runner, *args, **kwargs)
        discarded = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        for row in discarded:
            if row in generators and not runner.requests[batch.req_ids[row]].output_token_ids:
                generators[row].manual_seed(generators[row].initial_seed())
        batch.generators = {row: generator for row, generator in generators.items() if row not in discarded}
        try:
            return bookkeeping_sync(runner, *args, **kwargs)
        finally:
            batch.generators = generators

    return wrapper
