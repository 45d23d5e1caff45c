# SPDX-License-Identifier: Apache-2.0
"""Time of `context_kv` against its oracle: 5 draft layers, 8 KV heads of 128, from one request to an 8k prefill chunk.

Bytes count stored rows only: K and V read from the projection and written to the cache, plus cosines and slots.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels import reference
from dflash_kernels.context_kv import LayerCaches, context_kv
from harness import Case, main

NUM_LAYERS, NUM_HEADS, HEAD_DIM, KV_BLOCK_SIZE, NUM_PAGES = 5, 8, 128, 16, 1024


def _cases(num_rows: int, kept_share: float, dtype: torch.dtype, is_neox: bool = True) -> Iterator[Case]:
    """Kernel and oracle on the same random rows, of which `kept_share` are stored."""
    device = torch.device("cuda")
    caches = [torch.zeros(NUM_PAGES, 2, KV_BLOCK_SIZE, NUM_HEADS, HEAD_DIM, device=device).to(dtype) for _ in range(NUM_LAYERS)]
    built = LayerCaches.build([cache[:, 0] for cache in caches], [cache[:, 1] for cache in caches], [0] * NUM_LAYERS)
    kv = torch.randn(num_rows, NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM, device=device, dtype=torch.bfloat16)
    positions = torch.arange(num_rows, device=device)
    slots = KV_BLOCK_SIZE + torch.randperm((NUM_PAGES - 1) * KV_BLOCK_SIZE, device=device)[None, :num_rows]
    # Verification keeps a prefix of each request's 16 rows.
    slots[:, torch.arange(num_rows, device=device) % 16 >= round(16 * kept_share)] = -1
    angles = torch.rand(8192, HEAD_DIM // 2, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.bfloat16)
    weight = torch.rand(NUM_LAYERS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    scales = {}
    if dtype == torch.float8_e4m3fn:
        scales = {name: torch.ones(NUM_LAYERS, device=device) for name in ("k_scale", "v_scale")}
    stored = int((slots >= 0).sum())
    elements = stored * NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM
    num_bytes = elements * (2 + dtype.itemsize) + stored * HEAD_DIM * 2 + num_rows * 8
    name = f"rows={num_rows} kept={kept_share:.0%} {str(dtype).removeprefix('torch.')}" + ("" if is_neox else " interleaved")
    for arm, function in (("kernel", context_kv), ("torch", reference.context_kv)):

        def run(function=function) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001  # bound per arm
            function(built, kv, positions, slots, cos_sin, weight, eps=1e-6, is_neox=is_neox, **scales)

        yield Case("context_kv", name, arm, run, num_bytes, graph=arm == "kernel")


def cases(thorough: bool) -> Iterator[Case]:
    """Decode batches of 1, 8, 128 (thorough: 32, 64) requests at K = 15, a prefill chunk, and the other types."""
    for num_rows in (16, 128, 512, 1024, 2048) if thorough else (16, 128, 2048):
        yield from _cases(num_rows, 0.375, torch.bfloat16)
    if thorough:
        yield from _cases(2048, 1.0, torch.bfloat16)
    yield from _cases(8192, 1.0, torch.bfloat16)
    yield from _cases(2048, 0.375, torch.float8_e4m3fn)
    yield from _cases(2048, 0.375, torch.bfloat16, is_neox=False)


if __name__ == "__main__":
    main(cases)
