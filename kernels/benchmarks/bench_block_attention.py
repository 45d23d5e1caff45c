# SPDX-License-Identifier: Apache-2.0
"""Time of `block_attention` against torch's dense attention: Qwen3-8B's draft shape (Q = 16, 32 query heads, 8 KV heads of 128).

Bytes are the keys and values that the rows see, queries and output; torch reads keys and values from a dense copy made
beforehand, so its gather from pages is not counted against it. Floating-point work: 4 * Q * heads * keys * head_dim.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels.block_attention import AttentionWorkspace, Tuning, block_attention
from harness import Case, main

DEFAULT_TUNING = Tuning()
NUM_QUERY, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE = 16, 32, 8, 128, 16


class _Inputs(NamedTuple):
    args: tuple[torch.Tensor, ...]
    name: str
    num_bytes: int
    flops: int
    num_query: int


def make_inputs(
    num_reqs: int, num_keys: int, window: int | None, dtype: torch.dtype, capacity: int, num_query: int = NUM_QUERY
) -> _Inputs:
    """Scattered pages; the table is as wide as the engine's `max_model_len` would make it."""
    device = torch.device("cuda")
    per_req = -(-num_keys // KV_BLOCK_SIZE)
    num_pages = 1 + num_reqs * per_req
    keys, values = (
        torch.randn(num_pages, KV_BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16).to(dtype) for _ in "kv"
    )
    q = torch.randn(num_reqs * num_query, NUM_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    table = torch.zeros(num_reqs, -(-capacity // KV_BLOCK_SIZE), dtype=torch.int32, device=device)
    table[:, :per_req] = 1 + torch.randperm(num_pages - 1, device=device).view(num_reqs, per_req)
    lens = torch.full((num_reqs,), num_keys, dtype=torch.int32, device=device)
    seen = num_keys if window is None else min(num_keys, window - 1 + num_query)
    num_bytes = num_reqs * seen * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize + 2 * q.numel() * q.element_size()
    flops = 4 * num_query * NUM_HEADS * HEAD_DIM * seen * num_reqs
    name = f"Q={num_query} reqs={num_reqs} keys={num_keys} window={window} {str(dtype).removeprefix('torch.')}"
    return _Inputs((q, keys, values, table, lens), name, num_bytes, flops, num_query)


def kernel_case(inputs: _Inputs, window: int | None, capacity: int, arm: str = "kernel", tuning: Tuning = DEFAULT_TUNING) -> Case:
    """The op over `inputs` as one arm of a table."""
    q, keys = inputs.args[:2]
    workspace = AttentionWorkspace(
        max_num_reqs=q.shape[0] // inputs.num_query, num_query_per_req=inputs.num_query, num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, max_seq_len=capacity, device=q.device, tuning=tuning,
    )  # fmt: skip
    scales = {name: torch.ones(1, device=q.device) for name in ("k_scale", "v_scale")} if keys.dtype != q.dtype else {}
    options: dict[str, Any] = {
        "num_query_per_req": inputs.num_query,
        "scale": HEAD_DIM**-0.5,
        "workspace": workspace,
        "window": window,
    }
    run = functools.partial(block_attention, *inputs.args, **options, **scales, out=torch.empty_like(q))
    return Case("block_attention", inputs.name, arm, run, inputs.num_bytes, flops=inputs.flops)


def _cases(
    num_reqs: int,
    num_keys: int,
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    capacity: int = 40960,
    num_query: int = NUM_QUERY,
) -> Iterator[Case]:
    """Kernel and torch on the same lengths."""
    inputs = make_inputs(num_reqs, num_keys, window, dtype, capacity, num_query)
    yield kernel_case(inputs, window, capacity)
    if window is not None or dtype != torch.bfloat16:
        return
    q, keys, values, table, _ = inputs.args
    pages = table[:, : -(-num_keys // KV_BLOCK_SIZE)].long()
    dense = [cache[pages].flatten(1, 2)[:, :num_keys].transpose(1, 2).contiguous() for cache in (keys, values)]
    rows = q.view(num_reqs, num_query, NUM_HEADS, HEAD_DIM).transpose(1, 2)

    def torch_dense() -> None:
        torch.nn.functional.scaled_dot_product_attention(rows, *dense, enable_gqa=True)

    yield Case("block_attention", inputs.name, "torch", torch_dense, inputs.num_bytes, flops=inputs.flops)


def cases(thorough: bool) -> Iterator[Case]:
    """Batches at 1k and 4k keys, long contexts for few requests, a window, an fp8 cache, blocks of few rows."""
    for num_reqs in (1, 8, 32, 64, 128) if thorough else (1, 8, 128):
        for num_keys in (1024, 4096) if thorough else (1024,):
            yield from _cases(num_reqs, num_keys)
    for num_query in (2, 4, 8):
        yield from _cases(8, 1024, num_query=num_query)
    yield from _cases(1, 32768)
    if thorough:
        yield from _cases(4, 32768)
    yield from _cases(8, 4096, window=1024)
    for num_reqs in (1, 32) if thorough else (32,):
        yield from _cases(num_reqs, 4096, dtype=torch.float8_e4m3fn)


if __name__ == "__main__":
    main(cases)
