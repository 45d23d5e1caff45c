# SPDX-License-Identifier: Apache-2.0
"""Time of `query_block`: decode batches at K = 15 and 7, with one and two KV groups, and a mixed prefill batch.

There is no torch arm: the oracle walks lists. What counts is the device time in front of the draft and the host time of
the launch; vLLM's own kernel takes 20 us at batch 1 on an H200 (one group).
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels.query_block import DraftBlockTables, QueryBlockBuffers, QueryBlockSpec, TargetStep, query_block
from harness import Case, main

MAX_NUM_REQS, MAX_MODEL_LEN, MAX_TOKENS = 512, 8192, 16384


def _case(name: str, spans: list[int], k: int, kv_block_sizes: list[int], padded: int) -> Case:
    """One batch; every request sits 512 tokens deep or starts its prompt, and rejects two thirds of its drafts."""
    device, q = torch.device("cuda"), k + 1
    starts = torch.tensor([0, *spans]).cumsum(0)
    prefill = torch.tensor([span > q for span in spans])
    positions = torch.cat([torch.arange(span) + (0 if span > q else 512) for span in spans])
    num_reqs, num_tokens = len(spans), sum(spans)
    step = TargetStep(
        query_start_loc=starts.to(device, torch.int32),
        positions=positions.to(device),
        idx_mapping=torch.randperm(MAX_NUM_REQS)[:num_reqs].to(device),
        num_sampled=torch.where(prefill, 0, 1).to(device, torch.int32),
        num_rejected=torch.where(prefill, 0, 2 * k // 3).to(device, torch.int32),
        last_sampled=torch.randint(0, 150_000, (MAX_NUM_REQS, 1), device=device),
        next_prefill_tokens=torch.randint(0, 150_000, (1, MAX_NUM_REQS), device=device, dtype=torch.int32),
    )
    tables = [
        torch.randint(1, 100_000, (MAX_NUM_REQS, -(-MAX_MODEL_LEN // size)), device=device, dtype=torch.int32)
        for size in kv_block_sizes
    ]
    built = DraftBlockTables.build(tables, kv_block_sizes)
    out = QueryBlockBuffers.allocate(MAX_NUM_REQS, q, k, MAX_TOKENS, len(tables), device)
    spec, rows = QueryBlockSpec(q, k, 0, MAX_MODEL_LEN), max(num_tokens, padded * q)

    def run() -> None:
        query_block(
            out,
            built,
            spec,
            step,
            num_reqs=num_reqs,
            num_reqs_padded=padded,
            num_context_rows=rows,
            max_query_len=max(spans),
        )

    num_groups = len(tables)
    written = padded * (q * (12 + 8 * num_groups) + 24 * k + 8) + rows * (8 + 8 * num_groups)
    return Case("query_block", name, "kernel", run, written + num_tokens * (8 + 4 * num_groups))


def cases(thorough: bool) -> Iterator[Case]:
    """Batch sizes on both sides of the built-in's graph ceiling."""
    for batch in (1, 8, 32, 33, 64, 128, 256) if thorough else (1, 33, 128):
        yield _case(f"decode b={batch} K=15 groups=1", [16] * batch, 15, [16], -(-batch // 8) * 8)
    for batch in (1, 128):
        yield _case(f"decode b={batch} K=15 groups=2", [16] * batch, 15, [16, 784], -(-batch // 8) * 8)
        yield _case(f"decode b={batch} K=7 groups=1", [8] * batch, 7, [16], -(-batch // 8) * 8)
    yield _case("31 decodes + 8k chunk K=15 groups=2", [16] * 31 + [7680], 15, [16, 64], 32)


if __name__ == "__main__":
    main(cases)
