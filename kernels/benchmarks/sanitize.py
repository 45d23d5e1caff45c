# SPDX-License-Identifier: Apache-2.0
"""Launch every kernel of `dflash_kernels` once or a few times on small odd shapes, compiled, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck  python kernels/benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python kernels/benchmarks/sanitize.py
    compute-sanitizer --tool initcheck python kernels/benchmarks/sanitize.py

Run it once without the tool first: Triton's cache then holds the kernels, and each tool takes well under a minute. Every
tensor is an allocation of its own, as large as the op asks for, so an access behind it is seen. Fails when a kernel of the
package was not launched.
"""

import importlib
import os
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
import dflash_kernels
from dflash_kernels.block_attention import AttentionWorkspace, block_attention
from dflash_kernels.context_kv import LayerCaches, context_kv
from dflash_kernels.draft_budget import Admission, draft_budget
from dflash_kernels.draft_head import HeadWorkspace, combine_shards, draft_head, draft_head_local
from dflash_kernels.draft_head_fp8 import draft_head_fp8, winner_of_logits
from dflash_kernels.draft_head_winner import Temperatures
from dflash_kernels.fp8_linear import Fp8Workspace, fp8_linear, quantise_rows
from dflash_kernels.guest_rows import admit_guests
from dflash_kernels.page_list import PageList, page_list
from dflash_kernels.query_block import DraftBlockTables, QueryBlockBuffers, QueryBlockSpec, TargetStep, query_block
from dflash_kernels.query_kv import query_kv

Q, HEADS, KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, NUM_PAGES = 7, 6, 2, 80, 16, 23
K = Q - 1
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Numbers made on the host: no kernel of torch stands between the tool and ours."""
    return torch.randn(*shape).to(dtype).to("cuda")


def integers(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A small integer tensor on the device."""
    return torch.tensor(values, dtype=dtype).to("cuda")


def attention_steps() -> None:
    """Split and whole, windowed, causal, capped, with sinks, fp8; a padded request and a length of one key."""
    table = torch.randperm(NUM_PAGES)[:21].view(3, 7).int().to("cuda")
    lens, q = integers(101, 0, 7), random(3 * Q, HEADS, HEAD_DIM)
    geometry = {"num_query_per_req": Q, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    for sms in (1, 132):
        workspace = AttentionWorkspace(max_num_reqs=3, max_seq_len=112, device="cuda", num_sms=sms, **geometry)
        common: dict[str, Any] = {"workspace": workspace, "num_query_per_req": Q, "scale": 0.1}
        for dtype in (BF16, E4M3):
            caches = [random(NUM_PAGES, KV_BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in "kv"]
            scales = {} if dtype == BF16 else {name: random(1, dtype=torch.float32) for name in ("k_scale", "v_scale")}
            block_attention(q, *caches, table, lens, **common, **scales)
            if dtype == BF16:
                block_attention(q, *caches, table, lens, **common, causal=True, window=9)
                block_attention(q, *caches, table, lens, **common, softcap=3.0, sinks=random(HEADS, dtype=torch.float32))


def head_steps() -> None:
    """Fused with the product, over logits, a shard, shards combined, and the private fp8 head."""
    weight, maps = random(301, 96), torch.arange(301).to("cuda")
    for rows, method in ((5, "fused"), (33, "fused"), (67, "matmul")):
        workspace = HeadWorkspace(max_rows=67, vocab_rows=301, dtype=BF16, device="cuda")
        workspace.logits.zero_()  # the argmax loads whole 16-byte words, and drops what is behind the vocabulary
        hidden = random(rows, 96)
        draft_head(hidden, weight, workspace=workspace, num_valid=290, method=method, target_ids=maps)
        shard = draft_head_local(hidden, weight, workspace=workspace, vocab_start=7, num_valid=290, method=method)
        pair = [torch.stack([part.cpu(), part.cpu()]).to("cuda") for part in (shard.values, shard.tokens % 301)]
        combine_shards(*pair, d2t=maps)
    numbers, scales = (part.to("cuda") for part in quantise_rows(torch.randn(301, 96)))
    workspace = HeadWorkspace(max_rows=67, vocab_rows=301, dtype=BF16, device="cuda")
    draft_head_fp8(random(5, 96), numbers, scales, maps, workspace=workspace, num_valid=290)
    winner_of_logits(random(67, 304), maps, workspace=workspace, num_valid=290)


def odds_steps() -> None:
    """Heads that also tell the odds against their winner, at temperatures by request; a row without a request."""
    weight, numbers_scales = random(301, 96), quantise_rows(torch.randn(301, 96))
    numbers, scales = (part.to("cuda") for part in numbers_scales)
    for rows, method in ((5, "fused"), (67, "matmul")):
        workspace = HeadWorkspace(max_rows=67, vocab_rows=301, dtype=BF16, device="cuda", odds=True)
        workspace.logits.zero_()
        states = (torch.arange(rows) % 3 - 1).to("cuda")
        temperatures, hidden = Temperatures(states, torch.tensor([0.0, 0.7]).to("cuda")), random(rows, 96)
        draft_head(hidden, weight, workspace=workspace, num_valid=290, method=method, temperatures=temperatures)
        if rows <= 64:
            draft_head_fp8(hidden, numbers, scales, None, workspace=workspace, num_valid=290, temperatures=temperatures)


def guest_steps() -> None:
    """Guest rows of a private head: a token twice, one outside the map, one that may not be a guest, more than fit."""
    numbers, scales = (part.to("cuda") for part in quantise_rows(torch.randn(301, 96)))
    home = torch.arange(301).int()
    home[:50] = -1
    none = [torch.full((size,), -1, dtype=torch.int32).to("cuda") for size in (301, 4)]
    offsets = torch.zeros(301, dtype=torch.int64).to("cuda")
    for ids in ((77, 77, 3, 400, 90), (91, 92, 93, 94, 95, 96)):
        admit_guests(
            integers(*ids), random(301, 96), home.to("cuda"), *none, integers(0), numbers, scales, offsets, first_row=297
        )


def linear_steps() -> None:
    """fp8 weights with a bias, few rows and many."""
    numbers, scales = (part.to("cuda") for part in quantise_rows(torch.randn(257, 400)))
    workspace, bias = Fp8Workspace("cuda"), random(257)
    for rows in (1, 19, 64):
        fp8_linear(random(rows, 400), numbers, scales, workspace=workspace, bias=bias)


def cache_steps() -> None:
    """Context and query K and V into interleaved caches of 16 and 8 bits; every third row is padding."""
    rows, layers = 19, 3
    positions, slots = torch.arange(rows).to("cuda"), torch.arange(rows) * 3 + KV_BLOCK_SIZE
    slots[::3] = -1
    slots = slots.to("cuda")
    angles = torch.rand(64, HEAD_DIM // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(BF16).to("cuda")
    for dtype in (BF16, E4M3):
        caches = [random(NUM_PAGES, KV_HEADS, KV_BLOCK_SIZE, 2 * HEAD_DIM, dtype=dtype) for _ in range(layers)]
        keys, values = zip(*(cache.transpose(1, 2).split(HEAD_DIM, dim=-1) for cache in caches), strict=True)
        built = LayerCaches.build(keys, values, [0] * layers)
        kv, weight = random(rows, layers * 2 * KV_HEADS * HEAD_DIM), random(layers, HEAD_DIM)
        scales = {} if dtype == BF16 else {name: torch.ones(layers).to("cuda") for name in ("k_scale", "v_scale")}
        one = {name: scale[:1].clone() for name, scale in scales.items()}
        qkv = random(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        norms, geometry = (random(HEAD_DIM), random(HEAD_DIM)), {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
        for is_neox in (True, False):
            context_kv(built, kv, positions, slots[None], cos_sin, weight, eps=1e-6, is_neox=is_neox, **scales)
            query_kv(
                qkv, positions, slots, cos_sin, *norms, keys[0], values[0], **geometry, head_dim=HEAD_DIM, eps=1e-6,
                is_neox=is_neox, **one,
            )  # fmt: skip


def input_steps() -> None:
    """Query block over two KV groups with a prefill and a padded request, the page list, one captured layer."""
    tables = [torch.randint(1, NUM_PAGES, (5, columns)).int().to("cuda") for columns in (7, 2)]
    step = TargetStep(
        query_start_loc=integers(0, 7, 40, 47),
        positions=torch.cat([torch.arange(30, 37), torch.arange(33), torch.arange(90, 97)]).to("cuda"),
        idx_mapping=integers(2, 0, 4, dtype=torch.int64),
        num_sampled=integers(1, 0, 1),
        num_rejected=integers(3, 0, 6),
        last_sampled=torch.arange(5)[:, None].to("cuda"),
        next_prefill_tokens=torch.arange(5).int()[None].to("cuda"),
        num_blocks=torch.full((2, 5), 2).int().to("cuda"),
    )
    out = QueryBlockBuffers.allocate(4, Q, K, 64, 2, torch.device("cuda"))
    built, spec = DraftBlockTables.build(tables, [16, 64]), QueryBlockSpec(Q, K, 5, 100)
    query_block(out, built, spec, step, num_reqs=3, num_reqs_padded=4, num_context_rows=47, max_query_len=33)
    page_list(tables[0], integers(101, 0, 16, 1), 16, PageList.empty(5, 7, "cuda"))


def budget_steps() -> None:
    """A cut of one request, of a batch with ties, NaN and a request without drafts, of none and of all."""
    confidences = torch.rand(5, K).to("cuda")
    confidences[2:] = torch.tensor([1.0, 1.0, float("nan")])[:, None].to("cuda")
    for states, budget in (((3,), 1), ((2, 0, 4, 1), 7), ((0, 2), 0), ((1, 3), 2 * K)):
        scheduled = integers([K] * (len(states) - 1) + [0 if len(states) == 4 else K], [1] * len(states))
        mapping = integers(*states, dtype=torch.int64)
        draft_budget(confidences, mapping, scheduled, budget, 1, Admission.empty(5, "cuda"))


def watch() -> dict[str, int]:
    """Launches by kernel name, counted from now on, of all kernels that a launcher of the package starts."""
    launched: dict[str, int] = {}
    for module in pkgutil.iter_modules(dflash_kernels.__path__):
        for name, value in vars(importlib.import_module(f"dflash_kernels.{module.name}")).items():
            if name.endswith("_kernel") and isinstance(value, triton.JITFunction) and name not in launched:
                launched[name] = 0

                def count(*_: Any, name: str = name, **__: Any) -> None:
                    launched[name] += 1

                value.add_pre_run_hook(count)
    return launched


def main() -> int:
    """Exit code 1 if a kernel was not launched."""
    if not torch.cuda.is_available():
        print("This script launches compiled kernels; torch sees no CUDA device here, so nothing was run.")
        return 0
    torch.manual_seed(0)
    launched, start = watch(), time.perf_counter()
    every = (input_steps, budget_steps, cache_steps, attention_steps, head_steps, odds_steps, guest_steps, linear_steps)
    for steps in every:
        steps()
        torch.cuda.synchronize()
        print(f"{steps.__name__:16} done after {time.perf_counter() - start:5.1f} s", flush=True)
    print(f"kernels: {', '.join(sorted(launched))}")
    missing = sorted(name for name, count in launched.items() if not count)
    print(f"{sum(launched.values())} launches of {len(launched)} kernels" + (f"; never: {', '.join(missing)}" if missing else ""))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
