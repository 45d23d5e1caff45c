# SPDX-License-Identifier: Apache-2.0
"""Sizes of the target's CUDA graphs: verification stays in a graph at more requests than with vLLM's default.

On Hopper vLLM captures up to 512 rows. A verification of 128 requests with 7 drafts each has 1,024; launched kernel by kernel,
it keeps the host busy for longer than the GPU where the target is small.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.platforms import current_platform

MOST_ROWS = 1024
"""vLLM's own limit on Blackwell. FlashAttention keeps room for 32 partial outputs of every row: 0.5 GB for 32 heads of 128."""
STRIDE = 64
"""Rows between two sizes above vLLM's: 8 sizes more, each captured once per width of the draft and once piecewise."""


def are_default(vllm_config: Any) -> bool:
    """Whether the user has left all sizes to vLLM; before ``VllmConfig.__post_init__`` chooses them."""
    compilation = vllm_config.compilation_config
    named = (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size, compilation.compile_sizes)
    return all(sizes is None for sizes in named)


def with_verification(
    sizes: Sequence[int], rows_of_request: Iterable[int], max_requests: int, most: int = MOST_ROWS
) -> list[int]:
    """Ascending ``sizes`` and further ones, for batches of up to ``max_requests`` that all have one of ``rows_of_request`` rows.

    vLLM rounds a size up to a multiple of the rows per request, and drops it where that is more than the largest size or than
    ``max_requests``; so the largest batch of each kind that fits into ``most`` rows is a size itself.
    """
    widths = sorted(rows_of_request)
    largest = {rows * min(max_requests, most // rows) for rows in widths}
    last = max(largest)
    if last <= sizes[-1]:
        return list(sizes)
    return sorted({*sizes, *range((sizes[-1] // STRIDE + 1) * STRIDE, last, STRIDE), *(size for size in largest if size > 0)})


def cover_verification(vllm_config: Any) -> None:
    """Add sizes for verifications of up to ``max_num_seqs`` requests, after vLLM has chosen its own (Model Runner V2)."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    if not (current_platform.is_cuda() and vllm_config.use_v2_model_runner and compilation.cudagraph_capture_sizes):
        return
    speculative = vllm_config.speculative_config
    table = speculative.num_speculative_tokens_per_batch_size or ()
    rows = {1 + speculative.num_speculative_tokens, *(1 + width for _, _, width in table)}
    most = min(MOST_ROWS, scheduler.max_num_batched_tokens)
    sizes = with_verification(compilation.cudagraph_capture_sizes, rows, scheduler.max_num_seqs, most)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, sizes[-1]
