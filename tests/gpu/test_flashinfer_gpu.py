# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's kernels under our fixed plans: eager and replayed with new lengths against the oracle.

Engines with it: ``test_draft_backends_gpu.py``.

The first use of a kernel compiles it (minutes without a cache); each build prints its time.
"""

import importlib.util
import time

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs the package flashinfer")

HEADS, KV_HEADS, SIZE, PAGE, Q, COLUMNS = 32, 8, 128, 16, 16, 24
LENGTHS = ([129, 16, 0, 384, 17], [16, 384, 200, 0, 33], [0, 0, 0, 0, 31])


class Case:
    """One geometry: caches as vLLM allocates them, K and V of a head side by side, and this step's lengths and pages."""

    def __init__(self, num_reqs, cache_dtype=torch.bfloat16, dtype=torch.bfloat16, page=PAGE, **options):
        from vllm_dflash.engine.flashinfer_prefill import BlockPrefill, PrefillSpec

        generator = torch.Generator("cuda").manual_seed(num_reqs)
        num_pages = 1 + num_reqs * COLUMNS
        cache = torch.randn(num_pages, KV_HEADS, page, 2 * SIZE, device="cuda", generator=generator).to(dtype)
        self.cache = cache if cache_dtype == dtype else cache.to(cache_dtype)
        self.clean = self.cache.clone()
        self.k_cache, self.v_cache = self.cache.split(SIZE, dim=-1)
        self.query = torch.randn(num_reqs * Q, HEADS, SIZE, device="cuda", generator=generator).to(dtype)
        self.out = torch.full_like(self.query, float("nan"))
        self.table = torch.zeros(num_reqs, COLUMNS, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(num_reqs, dtype=torch.int32, device="cuda")
        self.options = {
            "causal": options.get("causal", False),
            "window": options.get("window"),
            "softcap": options.get("softcap", 0.0),
        }
        self.scales = {"k_scale": 0.5, "v_scale": 1.75} if cache_dtype != dtype else {}
        self.spec = PrefillSpec(HEADS, KV_HEADS, SIZE, page, Q, dtype, cache_dtype, SIZE**-0.5, **self.options)
        self.prefill = BlockPrefill(8, COLUMNS, torch.device("cuda"))

    def renew(self, lengths):
        """Other lengths and other pages, at the same addresses; slots behind a request's keys hold NaN, as freed pages may."""
        num_reqs, page = len(self.lengths), self.spec.kv_block_size
        self.lengths.copy_(torch.tensor(lengths[:num_reqs]))
        self.table.copy_(1 + torch.randperm(num_reqs * COLUMNS, device="cuda").view(num_reqs, COLUMNS))
        self.cache.copy_(self.clean)
        for row, length in zip(self.table.tolist(), lengths, strict=False):
            if length % page and not self.scales:
                self.cache[row[length // page], :, length % page :] = float("nan")

    def step(self):
        """What a draft layer does in a step; recorded in a graph below."""
        self.prefill.refresh(self.table, self.lengths, self.spec.kv_block_size)
        return self.prefill.run(self.query, self.k_cache, self.v_cache, self.spec, self.out, **self.scales)

    def check(self):
        """Error against fp64 at most twice that of plain torch in the same dtype; padded requests are zeros."""
        from dflash_kernels.reference import block_attention

        scales = {name: torch.tensor([value], device="cuda") for name, value in self.scales.items()}
        options = {"num_query_per_req": Q, "scale": self.spec.scale, **self.options, **scales}
        caches = [cache.transpose(1, 2) for cache in (self.k_cache, self.v_cache)]
        wide = [cache if self.scales else cache.double() for cache in caches]
        truth = block_attention(self.query.double(), *wide, self.table, self.lengths, **options)
        plain = block_attention(self.query, *caches, self.table, self.lengths, **options)
        error, allowed = ((x.double() - truth).norm().item() for x in (self.out, plain))
        assert self.out.isfinite().all()
        assert error <= 2 * allowed, f"error {error:.3e}, plain torch {allowed:.3e}"
        for request, length in enumerate(self.lengths.tolist()):
            assert length or (self.out[request * Q : (request + 1) * Q] == 0).all()


KINDS = {
    "capped": {"softcap": 5.0},
    "pages of 64": {"page": 64},
    "bf16": {},
    "fp16": {"dtype": torch.float16, "cache_dtype": torch.float16},
    "fp8": {"cache_dtype": torch.float8_e4m3fn},
    "windowed": {"window": 40},
    "window as wide as the block": {"window": Q},
    "causal": {"causal": True},
    "causal, windowed": {"causal": True, "window": 7},
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_plan_serves_all_lengths(kind):
    """Breaks if anything of a plan or of a captured graph depends on the lengths it was made with."""
    case = Case(5, **KINDS[kind])
    case.renew(LENGTHS[0])
    start = time.perf_counter()
    case.step()
    torch.cuda.synchronize()
    print(f"\nFlashInfer, {kind}: first step, with compiling, {time.perf_counter() - start:.1f} s")  # noqa: T201  # what a first user waits
    case.check()
    for lengths in LENGTHS:
        case.renew(lengths)
        case.step()
        case.check()
    graph = torch.cuda.CUDAGraph()
    case.renew(LENGTHS[0])
    with torch.cuda.graph(graph):
        case.step()
    for lengths in LENGTHS[1:] + LENGTHS[:1]:
        case.renew(lengths)
        case.out.fill_(float("nan"))
        graph.replay()
        case.check()


def test_batch_sizes_share_inputs_and_graphs_stay_apart():
    """Breaks if planning one batch size spoils the inputs or the plan of another that is captured already."""
    cases = [Case(num_reqs) for num_reqs in (1, 3, 5)]
    graphs = []
    for case in cases:
        case.prefill = cases[0].prefill
        case.renew(LENGTHS[0])
        case.step()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            case.step()
    for lengths in LENGTHS[:2]:
        for case, graph in zip(cases, graphs, strict=True):
            case.renew(lengths)
            case.out.fill_(float("nan"))
            graph.replay()
            case.check()


def test_a_step_does_not_synchronise():
    """Breaks if a planned step reads the device or copies lengths to the host."""
    case = Case(3)
    case.renew(LENGTHS[0])
    case.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    case.check()


def test_planning_inside_a_capture_is_refused():
    """Breaks if a graph is recorded with a plan whose copies run at capture only."""
    case = Case(2)
    case.renew(LENGTHS[0])
    case.prefill.refresh(case.table, case.lengths, PAGE)  # compiles what is not to be compiled in a capture
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="no plan for 2 requests"), torch.cuda.graph(graph):
        case.step()
