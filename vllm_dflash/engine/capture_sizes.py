# SPDX-License-Identifier: Apache-2.0
"""Sizes of the target's CUDA graphs: verification stays in a graph at more requests than with vLLM's default.

On Hopper vLLM captures up to 512 rows. A verification of 128 requests with 7 drafts each has 1,024: kernel by kernel a step of a
135M target takes the host 46 ms on an H200, and 14 from a graph (``docs/results/gpu_demo_pair.json``).
"""

from collections.abc import Sequence
from typing import Any

from vllm.platforms import current_platform

MOST_ROWS = 1024
"""vLLM's own limit on Blackwell. FlashAttention keeps room for 32 partial outputs of every row: 0.5 GB for 32 heads of 128."""
STRIDE = 64
"""Rows between two sizes above vLLM's: 8 sizes more, each captured once per width of the draft and once piecewise."""


def are_default(vllm_config: Any) -> bool:
    """Whether the user has left the choice to vLLM; before ``VllmConfig.__post_init__`` makes it."""
    compilation = vllm_config.compilation_config
    return compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None


def with_verification(sizes: Sequence[int], rows: int) -> list[int]:
    """Ascending ``sizes`` and further ones up to ``rows``, which is the last, or up to ``MOST_ROWS``."""
    most = min(rows, MOST_ROWS)
    if most <= sizes[-1]:
        return list(sizes)
    return [*sizes, *range((sizes[-1] // STRIDE + 1) * STRIDE, most, STRIDE), most]


def cover_verification(vllm_config: Any) -> None:
    """Add sizes for verifications of up to ``max_num_seqs`` requests, after vLLM has chosen its own (Model Runner V2)."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    if not (current_platform.is_cuda() and vllm_config.use_v2_model_runner and compilation.cudagraph_capture_sizes):
        return
    rows = scheduler.max_num_seqs * (1 + vllm_config.speculative_config.num_speculative_tokens)
    sizes = with_verification(compilation.cudagraph_capture_sizes, min(rows, scheduler.max_num_batched_tokens))
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, sizes[-1]
