# SPDX-License-Identifier: Apache-2.0
"""The V2 speculator under CUDA graphs: same proposals as eager, perfect drafts accepted at every batch size, no sync."""

import pytest
import torch

K = 7


def prompts_for(count, length=24):
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(10, 2000, (length + i % 9,), generator=generator).tolist() for i in range(count)]


@pytest.fixture(scope="module")
def engine(pair, engine_of):
    return engine_of(*pair)


def test_no_kernel_of_ours_is_compiled_while_serving(engine, monkeypatch):
    """Breaks if a step meets a specialisation that neither capture nor vLLM's warm-up has met; first traffic of the engine."""
    import triton

    compiled = []
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def hook(*args, **kwargs):
        compiled.append((str(kwargs["fn"].module), kwargs["fn"].name))
        return None if before is None else before(*args, **kwargs)

    monkeypatch.setattr(runtime, "jit_post_compile_hook", hook)
    for count in (1, 2, 16, 17, 80):
        for length in (1, 16, 150):
            engine.generate(prompts_for(count, length), 10)
    engine.generate(prompts_for(5), 10, temperature=0.7, seed=1)
    assert [name for module, name in compiled if "dflash_kernels" in module] == []


def test_every_batch_size_replays_a_graph(engine):
    """Breaks if the grid has a hole: a decode step of the draft would run eagerly."""
    counters = engine.speculator.counters
    for count in (1, 2, 3, 5, 17, 31, 32, 33, 47, 64, 79, 80):
        engine.generate(prompts_for(count), 8)
    assert counters.graph > 0
    assert counters.eager == 0


@pytest.mark.parametrize("count", [1, 3, 8, 33, 64])
def test_graph_proposals_equal_eager_ones(engine, count):
    """Breaks if a captured tensor is not refreshed on replay, or padding reaches a request.

    bf16 near-ties: kernels may choose other splits in and out of a graph, so 1 token in 100 may differ.
    """
    from vllm_dflash.engine.graphs import DraftGraphManager

    speculator = engine.speculator
    prompts = prompts_for(count)
    in_graph = engine.watch(prompts)
    engine.generate(prompts)
    graphs = speculator.graphs
    speculator.graphs = DraftGraphManager(speculator.vllm_config, speculator.device, speculator.num_query_per_req, ())
    try:
        eager = engine.watch(prompts)
        engine.generate(prompts)
    finally:
        speculator.graphs = graphs
    common = in_graph.keys() & eager.keys()
    assert len(common) > 0.5 * len(in_graph)  # a near-tie of the target ends the comparison of one request
    pairs = [(a, b) for key in common for a, b in zip(in_graph[key], eager[key], strict=True)]
    assert sum(a == b for a, b in pairs) >= 0.98 * len(pairs)


@pytest.mark.parametrize("count", [1, 5, 40, 80])
def test_perfect_drafts_are_accepted(engine, count):
    """Breaks on any slip in anchors, positions or slots under replay; near-ties of the target cost a few."""
    prompts = prompts_for(count)
    engine.watch(prompts)
    expected = engine.generate(prompts, 49)
    drafted, accepted = engine.counters()
    engine.watch(prompts, replay=expected)
    engine.generate(prompts, 49)
    after = engine.counters()
    assert after[1] - accepted >= 0.9 * (after[0] - drafted)


def test_propose_does_not_synchronise(engine):
    """Breaks if a step reads the device: the sync would cost the whole target step of asynchronous scheduling."""
    speculator = engine.speculator
    original = type(speculator).propose.__get__(speculator)

    def propose(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    speculator.propose = propose
    engine.generate(prompts_for(4, length=150), 32)  # a prefill beyond the graph's rows included
    speculator.propose = original


def test_graph_memory_does_not_grow_while_serving(engine):
    """Breaks if a step allocates persistent tensors."""
    prompts = prompts_for(16)
    engine.generate(prompts, 16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        engine.generate(prompts, 16)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.mark.parametrize(("method", "temperature"), [("greedy", 0.7), ("probabilistic", 0.0), ("probabilistic", 0.7)])
def test_sampling_modes_run_in_graphs(pair, engine_of, method, temperature):
    """Random draws and the logit cache inside the graph; breaks if sampling falls back to eager steps."""
    engine = engine_of(*pair, speculative={"draft_sample_method": method})
    outputs = engine.generate(prompts_for(9), 32, temperature=temperature, seed=1)
    assert all(len(tokens) == 32 for tokens in outputs)
    assert engine.speculator.counters.graph > 0
    assert engine.speculator.counters.eager == 0


@pytest.mark.parametrize(
    ("backend", "cache"), [("FLASH_ATTN", "auto"), ("TRITON_ATTN", "auto"), ("CUSTOM", "auto"), ("FLASH_ATTN", "fp8")]
)
def test_proposals_equal_those_of_separate_kernels(pair, engine_of, monkeypatch, backend, cache):
    """One kernel per layer for the query rows; breaks if attention reads other keys than with vLLM's own chain of kernels.

    bf16 near-ties: the chain rounds after each kernel, so 1 token in 50 may differ, 1 in 10 with 3 bits of mantissa.
    """
    from vllm_dflash.engine import query_rows

    # vLLM's cache of compiled graphs does not know that the second engine's layers are patched.
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    prompts = prompts_for(9)
    proposals = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(query_rows, "why_separate", lambda *_: "to compare")
        engine = engine_of(*pair, speculative={"attention_backend": backend}, kv_cache_dtype=cache)
        assert all(layer.self_attn.fused_query_rows == fused for layer in engine.speculator.model.model.layers)
        proposals.append(engine.watch(prompts))
        engine.generate(prompts)
        assert engine.speculator.counters.eager == 0
    one, chain = proposals
    common = one.keys() & chain.keys()
    assert len(common) > 0.5 * len(one)  # a near-tie of the target ends the comparison of one request
    pairs = [(a, b) for key in common for a, b in zip(one[key], chain[key], strict=True)]
    assert sum(a == b for a, b in pairs) >= (0.9 if cache == "fp8" else 0.98) * len(pairs)


def test_tokens_equal_the_built_in(pair, engine_of, monkeypatch):
    """Greedy output of both implementations, and of neither; near-ties in bf16 may part a few requests."""
    prompts = prompts_for(24)
    plain = engine_of(pair[0]).generate(prompts)
    ours = engine_of(*pair).generate(prompts)
    monkeypatch.setenv("VLLM_DFLASH", "0")
    from vllm import ModelRegistry

    # Our engine registered our model class in this process; vLLM's speculator gets its own back.
    ModelRegistry.register_model("DFlashDraftModel", "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM")
    engine = engine_of(*pair)
    assert type(engine.speculator).__module__.startswith("vllm.")
    built_in = engine.generate(prompts)
    for other in (plain, built_in):
        same = sum(a == b for a, b in zip(ours, other, strict=True))
        assert same >= 0.7 * len(prompts)
