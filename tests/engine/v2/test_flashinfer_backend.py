# SPDX-License-Identifier: Apache-2.0
"""FlashInfer drafts without FlashInfer: which drafts get it, and what its kernels are given.

The package needs a GPU, so a stand-in takes its place here that reads what FlashInfer's kernel reads (addresses of page lists,
never the lengths of a plan) and computes in plain torch; ``tests/gpu/test_flashinfer_gpu.py`` runs the real one.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

HEADS, KV_HEADS, SIZE, PAGE, Q = 4, 2, 64, 16, 4


class Wrapper:
    """The part of ``BatchPrefillWithPagedKVCacheWrapper`` that is used, in torch; the arguments of every plan are kept."""

    plans: ClassVar[list[dict]] = []

    def __init__(self, workspace, layout, **buffers):
        assert layout == "HND"
        assert buffers["backend"] == "fa2"
        assert buffers["use_cuda_graph"]
        self.buffers = buffers

    def reset_workspace_buffer(self, floats, integers):
        self.integers = integers

    def plan(self, qo_indptr, kv_indptr, kv_indices, last_page_len, *_, uniform_q_len=None, **options):
        assert options["disable_split_kv"]
        for name, values in (("qo_indptr", qo_indptr), ("paged_kv_indptr", kv_indptr), ("paged_kv_last_page_len", last_page_len)):
            self.buffers[f"{name}_buf"].copy_(values)  # as FlashInfer does: the inputs of this step are gone
        self.buffers["paged_kv_indices_buf"][: len(kv_indices)].copy_(kv_indices)
        self.options = options | {"uniform_q_len": uniform_q_len, "num_reqs": len(qo_indptr) - 1}
        Wrapper.plans.append(self.options)

    def run(self, query, caches, *, out, k_scale, v_scale, enable_pdl):
        assert not enable_pdl
        starts, rows = (self.buffers[name].tolist() for name in ("paged_kv_indptr_buf", "qo_indptr_buf"))
        for request, last in enumerate(self.buffers["paged_kv_last_page_len_buf"].tolist()):
            pages = self.buffers["paged_kv_indices_buf"][starts[request] : starts[request + 1]].long()
            num_keys = max(0, (len(pages) - 1) * PAGE + last)
            block = slice(rows[request], rows[request + 1])
            keys, values = (cache[pages].transpose(1, 2).flatten(0, 1)[:num_keys].float() for cache in caches)
            out[block] = self.attend(query[block].float(), keys * k_scale, values * v_scale).to(out.dtype)
        return out

    def attend(self, query, keys, values):
        if not len(keys):
            return torch.zeros_like(query)
        place, key = torch.arange(len(keys) - Q, len(keys))[:, None], torch.arange(len(keys))[None, :]
        left = self.options["window_left"]
        seen = (key <= place if self.options["causal"] else key >= 0) & (place - key <= (left if left >= 0 else len(keys)))
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.options["sm_scale"]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.fixture
def flashinfer(monkeypatch):
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    module.__spec__ = SimpleNamespace(name="flashinfer")  # find_spec asks a loaded module for it
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Wrapper, "plans", [])


def impl_for(window=None, cache="auto"):
    from vllm_dflash.engine.flashinfer_backend import FlashInferDraftImpl

    impl = object.__new__(FlashInferDraftImpl)  # vLLM's constructor asks for a GPU
    impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale = HEADS, KV_HEADS, SIZE, SIZE**-0.5
    impl.logits_soft_cap, impl.kv_cache_dtype, impl.fp8_dtype = 0, cache, torch.float8_e4m3fn
    impl.sliding_window = (-1, -1) if window is None else (window - 1, 0)
    return impl


def builder_for(max_requests=4, columns=4):
    from vllm_dflash.engine.flashinfer_backend import FlashInferDraftBuilder
    from vllm_dflash.engine.flashinfer_prefill import BlockPrefill

    builder = object.__new__(FlashInferDraftBuilder)  # vLLM's constructor wants an engine's configuration
    builder.block_size, builder.rswa_window, builder.max_seqs_64_segments = PAGE, None, 0
    builder.seq_threshold_3D = builder.num_par_softmax_segments = 1
    builder.softmax_segm_output = builder.softmax_segm_max = builder.softmax_segm_expsum = torch.zeros(0)
    builder.prefill = BlockPrefill(max_requests, columns, torch.device("cpu"))
    return builder


def common(lengths, table, causal=False):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    num_reqs = len(lengths)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * Q
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=num_reqs, num_actual_tokens=num_reqs * Q,
        max_query_len=Q, max_seq_len=64, block_table_tensor=table, slot_mapping=torch.zeros(num_reqs * Q, dtype=torch.int64),
        causal=causal,
    )  # fmt: skip


def expected(query, cache, table, lengths, **options):
    """Our oracle over the same cache, [n, heads, size]."""
    from dflash_kernels.reference import block_attention

    k_cache, v_cache = cache.transpose(1, 2).split(SIZE, dim=-1)
    found = block_attention(
        query.float(), *(x if x.element_size() == 1 else x.float() for x in (k_cache, v_cache)), table, lengths,
        num_query_per_req=Q, scale=SIZE**-0.5, **options,
    )  # fmt: skip
    return found.to(query.dtype)


@pytest.mark.parametrize(
    ("causal", "window", "cache_dtype"),
    [(False, None, "auto"), (True, 6, "auto"), (False, 6, "auto"), (False, None, "fp8")],
)
def test_every_step_follows_its_own_lengths(flashinfer, causal, window, cache_dtype):
    """Breaks if a plan's numbers stay in the inputs, a second step reads the first one's pages, or a scale is dropped."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(9, KV_HEADS, PAGE, 2 * SIZE, generator=generator).bfloat16()  # vLLM's layout
    query = torch.randn(3 * Q, HEADS, SIZE, generator=generator).bfloat16()
    table = torch.tensor([[1, 2, 3, 0], [5, 4, 0, 0], [6, 7, 8, 2]], dtype=torch.int32)
    options = {"causal": causal, "window": window}
    stored = cache
    layer = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=2.0)
    if cache_dtype == "fp8":
        cache = cache.to(torch.float8_e4m3fn)
        stored = cache.view(torch.uint8)  # as vLLM allocates it
        options |= {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    builder, impl = builder_for(), impl_for(window, cache_dtype)
    lengths = torch.tensor([37, 20, 0], dtype=torch.int32)
    metadata = builder.build(0, common(lengths, table, causal))
    for new in ([37, 20, 0], [5, 32, 64]):
        lengths.copy_(torch.tensor(new))
        builder.update_draft_decode_metadata(metadata)
        output = torch.full_like(query, float("nan"))
        impl.forward(layer, query, query, query, stored, metadata, output)
        torch.testing.assert_close(output, expected(query, cache, table, lengths, **options), rtol=2e-2, atol=2e-2)
        assert (output[2 * Q :] == 0).all() == (new[2] == 0)
    assert [plan["num_reqs"] for plan in Wrapper.plans] == [3]
    assert Wrapper.plans[0]["uniform_q_len"] == Q


def test_each_batch_size_is_planned_once(flashinfer):
    """Breaks if a smaller batch takes a larger one's plan, planning is repeated, or a full batch needs the spare columns."""
    cache = torch.randn(9, KV_HEADS, PAGE, 2 * SIZE).bfloat16()
    table = torch.tensor([[1, 2, 3, 0, 0], [5, 4, 0, 0, 0], [6, 0, 0, 0, 0], [7, 8, 2, 1, 0]], dtype=torch.int32)
    builder, impl = builder_for(), impl_for()  # made for 4 columns; the table has a spare one
    for num_reqs in (1, 4, 1, 4):
        lengths = torch.tensor([40, 9, 16, 60], dtype=torch.int32)[:num_reqs]
        query = torch.randn(num_reqs * Q, HEADS, SIZE).bfloat16()
        output = torch.empty_like(query)
        metadata = builder.build(0, common(lengths, table[:num_reqs]))
        impl.forward(SimpleNamespace(), query, query, query, cache, metadata, output)
        torch.testing.assert_close(output, expected(query, cache, table, lengths), rtol=2e-2, atol=2e-2)
    assert [plan["num_reqs"] for plan in Wrapper.plans] == [1, 4]


def test_windows_that_flashinfer_cannot_bound_are_refused(flashinfer):
    """Breaks if a window narrower than the block is served: rows would see later rows outside of it."""
    builder, impl = builder_for(), impl_for(window=Q - 1)
    metadata = builder.build(0, common(torch.tensor([9], dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)))
    query = torch.zeros(Q, HEADS, SIZE, dtype=torch.bfloat16)
    cache = torch.zeros(2, KV_HEADS, PAGE, 2 * SIZE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"window of {Q - 1} tokens, and {Q} query rows.*TRITON_ATTN"):
        impl.forward(SimpleNamespace(), query, query, query, cache, metadata, query.clone())


def test_shapes_that_the_kernel_assumes_are_checked(flashinfer):
    """Breaks if FlashInfer is given strided output, which it writes as if it were dense."""
    builder, impl = builder_for(), impl_for()
    metadata = builder.build(0, common(torch.tensor([9], dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)))
    query = torch.zeros(Q, HEADS, SIZE, dtype=torch.bfloat16)
    cache = torch.zeros(2, KV_HEADS, PAGE, 2 * SIZE, dtype=torch.bfloat16)
    wide = torch.zeros(Q, 2 * HEADS, SIZE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out must be contiguous"):
        impl.forward(SimpleNamespace(), query, query, query, cache, metadata, wide[:, :HEADS])
    with pytest.raises(ValueError, match="query must be whole blocks"):
        impl.forward(SimpleNamespace(), wide, wide, wide, cache, metadata, wide)


def needs_of(**changes):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    return AttentionSelectorConfig(128, torch.bfloat16, "auto", None, use_non_causal=True)._replace(**changes)


@pytest.fixture
def choose(monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_dflash.engine import block_backend

    monkeypatch.setattr(block_backend, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    yield lambda **changes: block_backend.choose_backend(AttentionBackendEnum.FLASHINFER, needs_of(**changes), 32)
    AttentionBackendEnum.CUSTOM.clear_override()


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "FlashInferDraftBackend"),
        ({"kv_cache_dtype": "fp8"}, "FlashInferDraftBackend"),
        ({"head_size": 96}, "BlockAttentionBackend"),
        ({"dtype": torch.float32}, "BlockAttentionBackend"),
        ({"has_sink": True}, "BlockAttentionBackend"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "BlockAttentionBackend"),
    ],
)
def test_which_drafts_get_it(flashinfer, choose, changes, backend):
    """Breaks if the user's choice is not FlashInfer where it fits, or leaves the graphs where it does not."""
    assert choose(head_size=80).get_class().__name__ == "BlockAttentionBackend"  # of an earlier engine
    assert choose(**changes).get_class().__name__ == backend


def test_a_missing_package_is_a_sentence(choose):
    """Breaks if FlashInfer is asked for, absent, and something else runs in silence or an import error reaches the user."""
    with pytest.raises(ValueError, match=r"flashinfer is not installed\. Run pip install flashinfer-python"):
        choose()


def test_plans_fit_their_memory():
    """Breaks if a large batch's plan is given less than FlashInfer's planner writes: 13 bytes per program, 4 per request."""
    from vllm_dflash.engine.flashinfer_prefill import PrefillSpec, plan_bytes

    for heads, kv_heads, rows in ((32, 8, 16), (64, 1, 17), (8, 8, 2)):
        spec = PrefillSpec(heads, kv_heads, 128, 16, rows, torch.bfloat16, torch.bfloat16, 1.0)
        for num_reqs in (1, 7, 1024):
            programs = max(2 * 132 // kv_heads, -(-num_reqs * rows * heads // kv_heads // 16) + num_reqs)
            assert plan_bytes(num_reqs, spec, 132) >= 13 * programs + 4 * num_reqs + 7 * 16
