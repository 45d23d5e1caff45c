# SPDX-License-Identifier: Apache-2.0
"""Proposals do not depend on what computes them: attention backends, one kernel per layer or vLLM's chain of kernels, fp8 caches.

Every engine is compared with the first of its cache type. bf16 near-ties: kernels round at other places, so 1 token in 50 may
differ, and 1 in 10 with 3 bits of mantissa.
"""

import importlib.util

import pytest
from gpu_engine import agreement, needs_gpu, prompts_for

pytestmark = needs_gpu
PROMPTS = prompts_for(9)
LEAST = {"auto": 0.98, "fp8": 0.9}
# backend of the draft, one kernel for the query rows of a layer
WAYS = [
    ("CUSTOM", True),
    ("FLASHINFER", False),
    ("FLASH_ATTN", True),
    ("FLASH_ATTN", False),
    ("TRITON_ATTN", True),
    ("CUSTOM", False),
]
CLASSES = {"CUSTOM": "BlockAttentionImpl", "FLASHINFER": "FlashInferDraftImpl"}


def proposals_of(engine, backend, *, fused):
    """Proposals for ``PROMPTS``, after checks that the engine is what was asked for and stays in its graphs."""
    layers = [layer.self_attn for layer in engine.speculator.model.model.layers]
    if backend in CLASSES:
        assert {type(layer.attn.impl).__name__ for layer in layers} == {CLASSES[backend]}
    if backend != "FLASHINFER":
        assert all(layer.fused_query_rows == fused for layer in layers)
    assert engine.speculator.attention.refreshes_in_graph
    for count in (1, 9, 16):
        engine.generate(prompts_for(count), 8)
    _, proposals = engine.drafts(PROMPTS)
    engine.stays_in_graphs()
    return proposals


@pytest.fixture(scope="module")
def first():
    """Proposals of the first engine, by cache type."""
    return {}


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(("backend", "fused"), WAYS)
def test_proposals_are_those_of_the_first(pair, engine_of, monkeypatch, first, backend, fused, cache):
    """Breaks if attention reads other keys than elsewhere, a plan is baked into a graph, or a draft leaves its graphs."""
    if backend == "FLASHINFER" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs the package flashinfer")
    if cache == "fp8" and backend == "TRITON_ATTN":
        pytest.skip("as with auto: the cache is read by vLLM's kernel")
    from vllm_dflash.engine import query_rows

    if not fused and backend != "FLASHINFER":
        # vLLM's cache of compiled graphs does not know which engines have patched layers.
        monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        monkeypatch.setattr(query_rows, "why_separate", lambda *_: "to compare")
    way = {"attention_backend": backend}
    # One more or fewer request is another configuration: the engine with the chain is not taken for the one before it.
    engine = engine_of(*pair, speculative=way, kv_cache_dtype=cache, max_num_seqs=16 if fused else 17)
    found = proposals_of(engine, backend, fused=fused)
    share = agreement(found, first.setdefault(cache, found))
    assert share >= LEAST[cache]
