# SPDX-License-Identifier: Apache-2.0
"""Query rows in one kernel per layer: the op against the chain of kernels it replaces, and whole drafts drawn through it."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check

PAGE, PAGES, LAYER = 16, 4, "layer"


@pytest.fixture(scope="module")
def attention(target, draft, engine_of):
    """Self-attention of a draft layer of a real engine."""
    return engine_of(target, draft).speculator.model.model.layers[1].self_attn


def rows_of(attention, value_scale):
    from vllm_dflash.engine.query_rows import QueryRows

    return QueryRows(
        attention.q_norm,
        attention.k_norm,
        attention.rotary_emb,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        value_scale,
    )


@contextlib.contextmanager
def context_of(layer, slots):
    """A forward context with ``slots`` for the layer; None: memory profiling."""
    from vllm.forward_context import override_forward_context

    context = SimpleNamespace(no_compile_layers={LAYER: layer}, slot_mapping={} if slots is None else {LAYER: slots})
    with override_forward_context(context):
        yield


def op_of(attention):
    """The op as a layer called ``LAYER`` calls it."""
    from vllm_dflash.engine.query_rows import query_rows

    stub = SimpleNamespace(attn=SimpleNamespace(layer_name=LAYER), q_size=attention.q_size)
    return lambda qkv, positions: query_rows(stub, qkv, positions)


def call_op(attention, layer, qkv, positions, slots):
    with context_of(layer, slots):
        return op_of(attention)(qkv, positions)


def chain(attention, qkv, positions, value_scale):
    """Q [n, heads * size], K and V [n, kv heads, size] as vLLM's modules make them."""
    q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    size = attention.head_dim
    q = attention.q_norm.forward_native(q.unflatten(-1, (-1, size))).flatten(-2)
    k = attention.k_norm.forward_native(k.unflatten(-1, (-1, size))).flatten(-2)
    q, k = attention.rotary_emb.forward_native(positions, q.clone(), k.clone())
    return q, k.unflatten(-1, (-1, size)), (v * (value_scale or 1.0)).unflatten(-1, (-1, size))


def inputs(attention, rows=9):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(rows, attention.q_size + 2 * attention.kv_size, generator=generator)
    positions = torch.randint(0, 100, (rows,), generator=generator)
    slots = torch.randperm(PAGE * PAGES, generator=generator)[:rows]
    slots[[2, rows - 1]] = -1
    return qkv, positions, slots


@pytest.mark.parametrize("value_scale", [None, 0.7])
@pytest.mark.parametrize("num_slots", [9, 7])
def test_op_equals_the_chain(attention, value_scale, num_slots):
    """Breaks if a norm, the rotation, the value scale or the K | V split differ, or a row of padding is stored."""
    qkv, positions, slots = inputs(attention)
    cache = torch.full((PAGES, attention.num_kv_heads, PAGE, 2 * attention.head_dim), 7.0)
    layer = SimpleNamespace(query_rows=rows_of(attention, value_scale), kv_cache=cache)
    queries = call_op(attention, layer, qkv, positions, slots[:num_slots])
    q, k, v = chain(attention, qkv, positions, value_scale)
    torch.testing.assert_close(queries, q, rtol=1e-4, atol=1e-5)
    kept = slots >= 0
    kept[num_slots:] = False  # rows of padding may come without slots
    flat = cache.transpose(1, 2).flatten(0, 1)  # [slots, heads, K | V]
    torch.testing.assert_close(flat[slots[kept]], torch.cat([k, v], dim=-1)[kept], rtol=1e-4, atol=1e-5)
    untouched = torch.ones(len(flat), dtype=torch.bool).index_fill(0, slots[kept], value=False)
    assert (flat[untouched] == 7).all()


def test_fp8_cache_is_scaled(attention):
    """Breaks if a cache that vLLM holds as bytes is written as numbers, or without its scales."""
    qkv, positions, slots = inputs(attention)
    shape = (PAGES, attention.num_kv_heads, PAGE, 2 * attention.head_dim)
    scales = {"_k_scale": torch.tensor(0.5), "_v_scale": torch.tensor(0.25)}
    cache = torch.zeros(shape, dtype=torch.uint8)
    layer = SimpleNamespace(query_rows=rows_of(attention, None), kv_cache=cache, kv_cache_dtype="fp8", **scales)
    call_op(attention, layer, qkv, positions, slots)
    _, k, v = chain(attention, qkv, positions, None)
    found = cache.view(torch.float8_e4m3fn).float().transpose(1, 2).flatten(0, 1)[slots[slots >= 0]]
    expected = torch.cat([k / 0.5, v / 0.25], dim=-1)[slots >= 0]
    # 3 bits of mantissa; the interpreter rounds up across a power of two wrongly, 1 value in 50.
    assert torch.isclose(found, expected, rtol=0.07, atol=0.01).float().mean() > 0.95


def test_queries_without_a_cache(attention):
    """Breaks if memory profiling, which comes before the KV cache, needs one."""
    qkv, positions, _ = inputs(attention)
    layer = SimpleNamespace(query_rows=rows_of(attention, None), kv_cache=torch.tensor([]))
    queries = call_op(attention, layer, qkv, positions, None)
    torch.testing.assert_close(queries, chain(attention, qkv, positions, None)[0], rtol=1e-4, atol=1e-5)


def test_op_is_traced_without_a_cache_for_any_number_of_rows(attention):
    """Breaks if torch.compile looks into the op, or makes a graph per row count."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    layer = SimpleNamespace(query_rows=rows_of(attention, None), kv_cache=torch.tensor([]))
    op = op_of(attention)
    compiled = torch.compile(lambda qkv, positions: op(qkv * 2.0, positions) + 1.0, backend=counter, fullgraph=True, dynamic=True)
    for rows in (9, 5, 12):
        qkv, positions, _ = inputs(attention, rows)
        with context_of(layer, None):
            found = compiled(qkv, positions)
        expected = chain(attention, qkv * 2.0, positions, None)[0] + 1.0
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def gpu_layer(**changes):
    """A draft layer as it is built on a GPU for FlashAttention."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    settings = {"backend": "FLASH_ATTN", "writes_itself": False, "kv_cache_dtype": "auto", "rope": RotaryEmbedding, "dcp": 1}
    settings |= changes
    backend = SimpleNamespace(get_name=lambda: settings["backend"], forward_includes_kv_cache_update=settings["writes_itself"])
    attn = SimpleNamespace(
        get_attn_backend=lambda: backend,
        kv_cache_dtype=settings["kv_cache_dtype"],
        impl=SimpleNamespace(dcp_world_size=settings["dcp"]),
        **({"k_scale": settings["k_scale"]} if "k_scale" in settings else {}),
    )
    return SimpleNamespace(attn=attn, rotary_emb=object.__new__(settings["rope"]))


def other_rope():
    from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding

    return MRotaryEmbedding


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"backend": "TRITON_ATTN"}, None),
        ({"backend": "CUSTOM"}, None),
        ({"kv_cache_dtype": "fp8"}, None),
        ({"kv_cache_dtype": "fp8", "k_scale": torch.ones(2)}, "per head"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        ({"backend": "FLASHINFER"}, "layout of its own"),
        ({"writes_itself": True}, "writes its cache itself"),
        ({"rope": other_rope}, "MRotaryEmbedding"),
        ({"dcp": 2}, "context parallelism"),
    ],
)
def test_which_layers_keep_the_chain(monkeypatch, changes, reason):
    """Breaks if a layer whose cache or attention the op does not fit is fused, or one that it fits is not."""
    from vllm_dflash.engine import query_rows

    monkeypatch.setattr(query_rows.current_platform, "is_cuda", lambda: True)
    if "rope" in changes:
        changes = {**changes, "rope": changes["rope"]()}
    found = query_rows.why_separate(gpu_layer(**changes), SimpleNamespace(use_v2_model_runner=True))
    assert found is None if reason is None else reason in found
    assert query_rows.why_separate(gpu_layer(), SimpleNamespace(use_v2_model_runner=False)) == "V1 model runner"


def test_cpu_engine_keeps_the_chain(attention):
    """Breaks if a CPU cache, which has another layout, is written by the op."""
    assert not attention.fused_query_rows


@pytest.fixture
def block_engine(target, make_draft, engine_of, monkeypatch):
    """A CPU engine whose draft runs on GPU code under the interpreter: our attention backend, its caches, all fused writes."""
    from vllm_dflash.engine import block_backend, query_rows

    class Impl(block_backend.BlockAttentionImpl):
        def __init__(self, given, window):  # vLLM's constructor asks for a GPU
            self.num_heads, self.num_kv_heads, self.head_size = given.num_heads, given.num_kv_heads, given.head_size
            self.scale, self.sinks, self.kv_cache_dtype, self.logits_soft_cap = given.scale, None, "auto", 0.0
            self.sliding_window = (-1, -1) if window is None else (window - 1, 0)
            self.written = 0

        def do_kv_cache_update(self, *_):
            self.written += 1

    def make(**options):
        engine = engine_of(target, make_draft(**options), max_num_batched_tokens=32)
        speculator = engine.speculator
        layers = []
        for layer in speculator.model.model.layers:
            attention = layer.self_attn
            attn = attention.attn
            spec = next(g.kv_cache_spec for g in speculator.kv_cache_config.kv_cache_groups if attn.layer_name in g.layer_names)
            shape = (speculator.kv_cache_config.num_blocks, attn.num_kv_heads, spec.block_size, 2 * attn.head_size)
            attn.kv_cache = torch.zeros(shape)
            attn.impl, attn.attn_backend = Impl(attn.impl, attention.window), block_backend.BlockAttentionBackend
            with monkeypatch.context() as patch:
                patch.setattr(query_rows.current_platform, "is_cuda", lambda: True)
                attention.fused_query_rows = query_rows.fuse_query_rows(attention, speculator.vllm_config)
            layers.append(attn)
        shape = speculator.buffers.shape
        block_backend.share_workspace(layers, shape.max_requests, shape.num_query_per_req, 128, torch.device("cpu"))
        speculator._caches_bound = False
        return engine, layers

    return make


SLIDING = ("use_sliding_window", True), ("sliding_window", 7)


@pytest.mark.parametrize(
    ("options", "compiled"),
    [({}, True), ({"config": (("layer_types", ["sliding_attention", "full_attention"]), *SLIDING)}, False)],
    ids=["full, compiled", "two KV groups"],
)
def test_drafts_equal_the_reference(options, compiled, block_engine, target, prompts):
    """Breaks if the op finds another layer's slots or cache, attention reads other keys, or vLLM writes K and V again."""
    from reference_check import Reference
    from torch._dynamo.testing import CompileCounterWithBackend

    engine, layers = block_engine(**options)
    backbone = engine.speculator.model.model
    assert all(layer.self_attn.fused_query_rows for layer in backbone.layers)
    counter = CompileCounterWithBackend("aot_eager")
    if compiled:
        backbone.forward = torch.compile(backbone.forward, backend=counter, fullgraph=True, dynamic=True)
    proposals = engine.watch(prompts)
    outputs = engine.generate(prompts, 10)
    folder = engine.speculator.speculative_config.draft_model_config.model
    reference = Reference(Path(target), Path(folder))
    texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
    log = [(number, anchor + 1, drafts) for (number, anchor), drafts in proposals.items()]
    assert reference.wrong_drafts(texts, log) == []
    assert len(log) > 20
    assert bool(counter.frame_count) == compiled
    assert not any(layer.impl.written for layer in layers)
