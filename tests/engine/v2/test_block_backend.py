# SPDX-License-Identifier: Apache-2.0
"""Our attention backend as vLLM calls it, against attention written out, and which drafts get it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

HEADS, KV_HEADS, SIZE, PAGE, Q = 4, 2, 32, 16, 4


def impl_for(window):
    from dflash_kernels.block_attention import AttentionWorkspace
    from vllm_dflash.engine.block_backend import BlockAttentionImpl

    impl = object.__new__(BlockAttentionImpl)  # vLLM's constructor asks for a GPU
    impl.head_size, impl.scale, impl.logits_soft_cap, impl.sinks = SIZE, SIZE**-0.5, 0.0, None
    impl.kv_cache_dtype, impl.sliding_window = "auto", (-1, -1) if window is None else (window - 1, 0)
    impl.workspace = AttentionWorkspace(
        max_num_reqs=2, num_query_per_req=Q, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, max_seq_len=64, device="cpu"
    )
    return impl


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 6), (True, 6)])
def test_forward_equals_dense_attention(causal, window):
    """Breaks if the cache is split wrongly, or causality and window do not reach the kernel as FlashAttention reads them."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(6, KV_HEADS, PAGE, 2 * SIZE, generator=generator)  # vLLM's layout
    query = torch.randn(2 * Q, HEADS, SIZE, generator=generator)
    table, lengths = torch.tensor([[1, 2, 3], [5, 4, 0]], dtype=torch.int32), torch.tensor([37, 20], dtype=torch.int32)
    metadata = SimpleNamespace(num_actual_tokens=2 * Q, max_query_len=Q, block_table=table, seq_lens=lengths, causal=causal)
    output = torch.empty_like(query)
    impl_for(window).forward(SimpleNamespace(), query, query, query, cache, metadata, output)
    for request, length in enumerate(lengths.tolist()):
        rows = cache[table[request].long()].transpose(1, 2).flatten(0, 1)[:length]
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in rows.split(SIZE, dim=-1))
        place, key = torch.arange(length - Q, length)[:, None], torch.arange(length)[None, :]
        seen = key <= place if causal else torch.ones(Q, length, dtype=torch.bool)
        if window is not None:
            seen &= (place - key).abs() < window
        scores = torch.einsum("qhd,khd->hqk", query[request * Q : (request + 1) * Q], keys) * SIZE**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(output[request * Q : (request + 1) * Q], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_fp8_cache_that_vllm_has_written(dtype, hopper, monkeypatch):
    """Breaks if queries come in fp8, which the kernel does not take, or bytes are read as another type or without scales."""
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash

    block_backend = hopper(None)
    for module in (triton_attn, triton_reshape_and_cache_flash):
        monkeypatch.setattr(module, "current_platform", block_backend.current_platform)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # the writer asks for its tile size
    impl = block_backend.BlockAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, dtype)
    assert not impl.supports_quant_query_input
    impl.workspace = impl_for(None).workspace
    generator = torch.Generator().manual_seed(1)
    length, table = 21, torch.tensor([[2, 1]], dtype=torch.int32)
    # Multiples of the scales that e4m3 holds exactly: no rounding between what is stored and what the oracle reads.
    k_scale, v_scale = torch.tensor(0.25), torch.tensor(0.5)
    keys, values = (torch.randint(-15, 16, (length, KV_HEADS, SIZE), generator=generator).float() * s for s in (k_scale, v_scale))
    cache = torch.zeros(3, KV_HEADS, PAGE, 2 * SIZE, dtype=torch.uint8)
    layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
    slots = table[0].long().repeat_interleave(PAGE)[:length] * PAGE + torch.arange(length) % PAGE
    impl.do_kv_cache_update(layer, keys, values, cache, slots)
    query = torch.randn(Q, HEADS, SIZE, generator=generator)
    lengths = torch.tensor([length], dtype=torch.int32)
    metadata = SimpleNamespace(num_actual_tokens=Q, max_query_len=Q, block_table=table, seq_lens=lengths, causal=False)
    output = impl.forward(layer, query, query, query, cache, metadata, torch.empty_like(query))
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    weights = (torch.einsum("qhd,khd->hqk", query, keys) * SIZE**-0.5).softmax(dim=-1)
    torch.testing.assert_close(output, torch.einsum("hqk,khd->qhd", weights, values), rtol=1e-4, atol=1e-5)


def needs_of(**changes):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    needs = AttentionSelectorConfig(128, torch.bfloat16, "auto", None, use_non_causal=True)
    return needs._replace(**changes)


@pytest.fixture
def hopper(monkeypatch):
    """vLLM's own selection for CUDA, on a machine that has FlashAttention ``version``; no GPU is asked."""

    def make(version):
        # vLLM's CPU build lacks the compiled operators that the module of this platform loads; selection uses none.
        monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
        from vllm.platforms.cuda import CudaPlatformBase
        from vllm.platforms.interface import DeviceCapability
        from vllm.v1.attention.backends import flash_attn

        from vllm_dflash.engine import block_backend

        class Hopper(CudaPlatformBase):
            @classmethod
            def get_device_capability(cls, device_id=0):  # noqa: ARG003  # vLLM's signature
                return DeviceCapability(9, 0)

            @classmethod
            def get_device_name(cls, device_id=0):  # noqa: ARG003
                return "Hopper"

        monkeypatch.setattr(block_backend, "current_platform", Hopper())
        for module in (block_backend, flash_attn):
            monkeypatch.setattr(module, "get_flash_attn_version", lambda *_, **__: version)
        monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: version == 3)
        monkeypatch.setattr(flash_attn, "is_fa_version_supported", lambda number: number == version)
        return block_backend

    return make


@pytest.mark.parametrize(
    ("chosen", "flash", "changes", "expected"),
    [
        (None, 3, {}, None),
        (None, None, {}, "CUSTOM"),
        (None, 3, {"head_size": 512}, "CUSTOM"),
        (None, 3, {"kv_cache_dtype": "fp8"}, None),
        (None, 2, {"kv_cache_dtype": "fp8"}, "CUSTOM"),
        ("FLEX_ATTENTION", 3, {}, "CUSTOM"),
        ("TRITON_ATTN", None, {}, "TRITON_ATTN"),
        ("FLASH_ATTN", 3, {}, "FLASH_ATTN"),
    ],
)
def test_which_backend_a_non_causal_draft_gets(hopper, chosen, flash, changes, expected):
    """Breaks if a draft lands on a backend that no CUDA graph can replay, or a user's working choice is overruled."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    module = hopper(flash)
    found = module.choose_backend(None if chosen is None else AttentionBackendEnum[chosen], needs_of(**changes), 32)
    assert (None if found is None else found.name) == expected
    if expected == "CUSTOM":
        assert found.get_class() is module.BlockAttentionBackend


def test_a_backend_of_another_plugin_is_not_taken_for_ours(hopper):
    """Breaks if whatever is registered as CUSTOM runs the draft."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    custom.clear_override()
    register_backend(custom, "elsewhere.Backend")
    try:
        with pytest.raises(ValueError, match=r"elsewhere\.Backend has taken.*TRITON_ATTN"):
            hopper(None).choose_backend(None, needs_of(), 32)
    finally:
        custom.clear_override()


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_caches_with_scales_per_token_are_refused(dtype):
    """Breaks if our kernel is given a cache whose scales it does not read."""
    from vllm_dflash.engine.block_backend import BlockAttentionBackend

    assert not BlockAttentionBackend.supports_kv_cache_dtype(dtype)
    assert BlockAttentionBackend.supports_kv_cache_dtype("fp8")


def test_compiled_graphs_of_other_backends_and_caches_are_kept_apart(target, draft, hopper, monkeypatch):
    """Breaks if a draft is given the graphs of another attention backend, or of other code: they may take other inputs.

    vLLM looks for the graphs of all models by the target's configuration alone.
    """
    from vllm import EngineArgs

    from vllm_dflash.engine import loading
    from vllm_dflash.engine.pair import resolve_draft

    module = hopper(3)
    monkeypatch.setattr(module, "why_not_flashinfer", lambda *_, **__: None)
    monkeypatch.setattr(loading, "get_pp_safe_draft_load_config", lambda config: config)  # asks for a process group
    tags, targets = [], set()
    for changes in (
        {},
        *({"attention_backend": name} for name in ("TRITON_ATTN", "CUSTOM", "FLASHINFER")),
        {"kv_cache_dtype": "fp8"},
    ):
        speculation = {"method": "dflash", "model": str(draft), "num_speculative_tokens": 3} | changes
        config = EngineArgs(model=str(target), max_model_len=128, speculative_config=speculation).create_engine_config()
        tags.append(loading.compile_tag(loading.draft_layer_config(config, resolve_draft(config))))
        targets.add(config.compute_hash())
    assert len(targets) == 1
    monkeypatch.setattr(loading, "_code", lambda: "another version of this plugin")
    tags.append(loading.compile_tag(loading.draft_layer_config(config, resolve_draft(config))))
    assert len(set(tags)) == len(tags)


def test_one_name_for_two_backends_is_looked_up_again(hopper, monkeypatch):
    """Breaks if a second engine of a process runs the backend of the first, because vLLM remembers what CUSTOM was."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    module = hopper(3)
    monkeypatch.setattr(module, "why_not_flashinfer", lambda *_, **__: None)
    monkeypatch.setattr("vllm.platforms.current_platform", module.current_platform)
    found = []
    for name in ("CUSTOM", "FLASHINFER", "CUSTOM"):
        backend = module.choose_backend(AttentionBackendEnum[name], needs_of(), 32)
        found.append(selector._cached_get_attn_backend(backend, needs_of(), 32).__name__)
    assert found == ["BlockAttentionBackend", "FlashInferDraftBackend", "BlockAttentionBackend"]
