# SPDX-License-Identifier: Apache-2.0
"""One torch oracle per op, with the launcher's signature: what the kernels are tested against and benchmarked over."""

from dflash_kernels.reference_compute import (
    block_attention,
    combine_shards,
    draft_head,
    draft_head_local,
)
from dflash_kernels.reference_inputs import aux_capture, context_kv, query_block, query_kv

__all__ = [
    "aux_capture",
    "block_attention",
    "combine_shards",
    "context_kv",
    "draft_head",
    "draft_head_local",
    "query_block",
    "query_kv",
]
