# SPDX-License-Identifier: Apache-2.0
"""One torch oracle per op, with the launcher's signature: what the kernels are tested against and benchmarked over."""

from dflash_kernels.reference_compute import (
    block_attention,
    combine_shards,
    draft_head,
    draft_head_local,
)
from dflash_kernels.reference_fp8 import admit_guests, draft_head_fp8, fp8_linear, winner_of_logits
from dflash_kernels.reference_inputs import context_kv, draft_budget, page_list, query_block, query_kv

__all__ = [
    "admit_guests",
    "block_attention",
    "combine_shards",
    "context_kv",
    "draft_budget",
    "draft_head",
    "draft_head_fp8",
    "draft_head_local",
    "fp8_linear",
    "page_list",
    "query_block",
    "query_kv",
    "winner_of_logits",
]
