# SPDX-License-Identifier: Apache-2.0
"""The fused context writer over a FlashAttention cache, against what the draft model hands to its layers one by one."""

from types import SimpleNamespace

import pytest
import torch

PAGE, PAGES = 16, 5


@pytest.fixture
def model(engine):
    return engine.speculator.model


def stand_in(model, backend="FLASH_ATTN", kv_cache_dtype="auto", dtype=torch.float32):
    """The draft model as ``fuse_context`` sees it on a GPU: vLLM's layout [pages, heads, tokens, K | V], pages to spare."""
    context = model.context_kv
    shape = (PAGES, context.num_kv_heads, PAGE, 2 * context.head_dim)
    layers = []
    for layer in model.model.layers:
        attn = SimpleNamespace(
            get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
            kv_cache=torch.full(shape, 7, dtype=dtype),
            kv_cache_dtype=kv_cache_dtype,
        )
        layers.append(SimpleNamespace(self_attn=SimpleNamespace(attn=attn, rotary_emb=layer.self_attn.rotary_emb)))
    return SimpleNamespace(model=SimpleNamespace(layers=layers), context_kv=context, hidden_norm=model.hidden_norm)


def test_same_keys_and_values_as_layer_by_layer(model, monkeypatch):
    """Breaks if norm, rotation, layer order or the K | V split differ, or a padding row is stored."""
    from vllm_dflash.engine.fused_context import FusedContext, fuse_context

    generator = torch.Generator().manual_seed(0)
    rows = 11
    states = torch.randn(rows, model.draft.hidden_size, generator=generator)
    positions = torch.randint(0, 100, (rows,), generator=generator)
    slots = torch.randperm(PAGE * PAGES, generator=generator)[:rows]
    slots[3] = -1
    written = []
    for layer in model.model.layers:
        monkeypatch.setattr(
            layer.self_attn.attn.impl, "do_kv_cache_update", lambda _, k, v, *__: written.append((k.clone(), v.clone()))
        )
    model.precompute_and_store_context_kv(states, positions, slots)
    fused_model = stand_in(model)
    fused = fuse_context(fused_model, [0] * len(written))
    assert isinstance(fused, FusedContext)
    fused.write(states, positions, slots.unsqueeze(0))
    for layer, (keys, values) in zip(fused_model.model.layers, written, strict=True):
        cache = layer.self_attn.attn.kv_cache.transpose(1, 2).flatten(0, 1)  # [slots, heads, K | V]
        kept = slots >= 0
        found = cache[slots[kept]]
        torch.testing.assert_close(found, torch.cat([keys, values], dim=-1)[kept], rtol=1e-4, atol=1e-5)
        untouched = torch.ones(len(cache), dtype=torch.bool).index_fill(0, slots[kept], value=False)
        assert (cache[untouched] == 7).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backend": "FLEX_ATTENTION"}, "layout of its own"),
        ({"kv_cache_dtype": "int8_per_token_head", "dtype": torch.uint8}, "int8_per_token_head"),
    ],
)
def test_other_caches_are_written_layer_by_layer(model, options, reason):
    """Breaks if a cache that the kernel does not know is written anyway."""
    from vllm_dflash.engine.fused_context import fuse_context

    assert reason in fuse_context(stand_in(model, **options), [0, 0])
