# SPDX-License-Identifier: Apache-2.0
"""Our attention backend as vLLM calls it, against attention written out, and which drafts get it."""

from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("chosen", "flash", "expected"),
    [
        (None, 3, None),
        (None, None, "CUSTOM"),
        ("FLASHINFER", 3, "CUSTOM"),
        ("TRITON_ATTN", None, "TRITON_ATTN"),
        ("FLASH_ATTN", 3, "FLASH_ATTN"),
    ],
)
def test_which_backend_a_non_causal_draft_gets(monkeypatch, chosen, flash, expected):
    """Breaks if a draft lands on a backend that no CUDA graph can replay, or a user's working choice is overruled."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_dflash.engine import block_backend

    monkeypatch.setattr(block_backend.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(block_backend, "get_flash_attn_version", lambda: flash)
    found = block_backend.choose_backend(None if chosen is None else AttentionBackendEnum[chosen])
    assert (None if found is None else found.name) == expected
    if expected == "CUSTOM":
        assert found.get_class() is block_backend.BlockAttentionBackend
