# SPDX-License-Identifier: Apache-2.0
"""Time of `query_kv` for one draft layer (32 query heads, 8 KV heads of 128): kernel and oracle.

The oracle's index look-up synchronises, so its time is no measure of the 4 or 5 kernels that the op replaces in vLLM. Bytes
count Q, K and V read once and written once, plus cosines, positions and slots. Every row is stored, as in a query block.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels import reference
from dflash_kernels.query_kv import query_kv
from harness import Case, main

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, NUM_PAGES = 32, 8, 128, 16, 1024


def _cases(num_rows: int, dtype: torch.dtype = torch.bfloat16, is_neox: bool = True) -> Iterator[Case]:
    """Kernel and oracle on the same random rows and FlashAttention's cache layout (K and V of a head side by side)."""
    device = torch.device("cuda")
    cache = torch.zeros(NUM_PAGES, NUM_KV_HEADS, KV_BLOCK_SIZE, 2 * HEAD_DIM, device=device).to(dtype)
    k_cache, v_cache = cache.transpose(1, 2).split(HEAD_DIM, dim=-1)
    qkv = torch.randn(num_rows, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, device=device, dtype=torch.bfloat16)
    positions = torch.arange(num_rows, device=device)
    slots = KV_BLOCK_SIZE + torch.randperm((NUM_PAGES - 1) * KV_BLOCK_SIZE, device=device)[:num_rows]
    angles = torch.rand(8192, HEAD_DIM // 2, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.bfloat16)
    q_norm, k_norm = torch.rand(2, HEAD_DIM, device=device, dtype=torch.bfloat16)
    q_out = torch.empty(num_rows, NUM_HEADS * HEAD_DIM, device=device, dtype=torch.bfloat16)
    scales = {}
    if dtype == torch.float8_e4m3fn:
        scales = {name: torch.ones(1, device=device) for name in ("k_scale", "v_scale")}
    row_bytes = HEAD_DIM * (4 * NUM_HEADS + 2 * NUM_KV_HEADS * (2 + dtype.itemsize) + 2) + 16
    name = f"rows={num_rows} {str(dtype).removeprefix('torch.')}" + ("" if is_neox else " interleaved")
    for arm, function in (("kernel", query_kv), ("torch", reference.query_kv)):

        def run(function=function) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001  # bound per arm
            function(
                qkv, positions, slots, cos_sin, q_norm, k_norm, k_cache, v_cache, num_heads=NUM_HEADS,
                num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, eps=1e-6, is_neox=is_neox, q_out=q_out, **scales,
            )  # fmt: skip

        yield Case("query_kv", name, arm, run, num_rows * row_bytes, graph=arm == "kernel")


def cases(thorough: bool) -> Iterator[Case]:
    """Decode batches of 1, 8, 128 (thorough: 32, 64) requests at K = 15, and the other types."""
    for num_rows in (16, 128, 512, 1024, 2048) if thorough else (16, 128, 2048):
        yield from _cases(num_rows)
    yield from _cases(2048, torch.float8_e4m3fn)
    yield from _cases(2048, is_neox=False)


if __name__ == "__main__":
    main(cases)
