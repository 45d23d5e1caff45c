# SPDX-License-Identifier: Apache-2.0
"""Aux hidden states on Model Runner V2: through hooks where the target has no interface, in place where it can store them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from tiny_models import Draft, Target
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check

STABLELM = Target(model_type="stablelm", hidden=128, heads=4, kv_heads=4, head_dim=32)


def test_hooked_target_drafts_as_the_reference(tmp_path, engine_of, prompts):
    """Breaks if the hooks are installed after the runner has looked for the interface, or read another value."""
    from reference_check import Reference

    draft = Draft(layer_ids=(2, 0), heads=4, kv_heads=4, block=4)
    folders = (
        tiny_models.write_target(tmp_path / "target", STABLELM),
        tiny_models.write_draft(tmp_path / "draft", draft, STABLELM),
    )
    engine = engine_of(*map(str, folders), max_num_batched_tokens=32)
    assert "collects them its own way" in engine.speculator._aux_fact
    proposals = engine.watch(prompts)
    outputs = engine.generate(prompts, 14)
    reference = Reference(*folders)
    assert outputs == reference.answers(prompts, 14)
    texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
    log = [(number, anchor + 1, drafts) for (number, anchor), drafts in proposals.items()]
    assert reference.wrong_drafts(texts, log) == []
    assert len(log) > 20


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, hidden_states, residual):
        residual = hidden_states if residual is None else hidden_states + residual
        return self.mix(nn.functional.rms_norm(residual, (16,))), residual


@pytest.fixture
def native():
    """A target as vLLM's classes are built: a decoder that collects by the method of ``EagleModelMixin``. Captures 0, 2 and 4."""
    from vllm.model_executor.models.interfaces import EagleModelMixin

    class Decoder(nn.Module, EagleModelMixin):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self._set_aux_hidden_state_layers((4, 0, 2))

        def forward(self, hidden_states):
            residual = None
            states = self._maybe_add_hidden_state([], 0, hidden_states, residual)
            for i, layer in enumerate(self.layers):
                hidden_states, residual = layer(hidden_states, residual)
                self._maybe_add_hidden_state(states, i + 1, hidden_states, residual)
            hidden_states = hidden_states + residual
            return (hidden_states, states) if states else hidden_states

    class Target(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Decoder()

        def forward(self, hidden_states):
            return self.model(hidden_states)

    torch.manual_seed(0)
    return Target().requires_grad_(False)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_target_stores_where_the_draft_reads(native, backend):
    """Breaks if a layer lands in other columns, rows of no token are touched, or a compiled forward loses the store."""
    from torch._dynamo.testing import CompileCounterWithBackend

    from vllm_dflash.engine.aux_buffer import store_in_place

    inputs = [torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows)) for rows in (20, 5, 9)]
    expected = [(hidden, torch.cat(states, dim=-1)) for hidden, states in map(native, inputs)]
    buffer = torch.empty(20, 48)
    store_in_place(native, SimpleNamespace(additional_config={}), buffer)
    counter = CompileCounterWithBackend("aot_eager")
    if backend is not None:
        native.model.forward = torch.compile(native.model.forward, backend=counter, fullgraph=True)
    for given, (hidden, states) in zip(inputs, expected, strict=True):
        buffer.fill_(7.0)
        torch._dynamo.mark_dynamic(given, 0)
        found, left = native(given)
        assert left == []
        torch.testing.assert_close(found, hidden, rtol=0, atol=0)
        torch.testing.assert_close(buffer[: len(given)], states, rtol=0, atol=0)
        assert (buffer[len(given) :] == 7.0).all()
    assert counter.frame_count == (0 if backend is None else 1)


def test_inductor_writes_nothing_but_the_rows_of_the_step(native, monkeypatch):
    """Breaks if several stores in one graph make Inductor compute the whole buffer anew, 335 MB at 8,192 rows of an 8B model."""
    from torch._inductor import compile_fx

    from vllm_dflash.engine.aux_buffer import store_in_place

    buffer, graphs = torch.zeros(20, 48), []
    store_in_place(native, SimpleNamespace(additional_config={}), buffer)
    passes = compile_fx._recursive_post_grad_passes

    def record(module, *args, **kwargs):
        passes(module, *args, **kwargs)
        graphs.append(module.graph)
        raise InterruptedError  # code would need a compiler

    monkeypatch.setattr(compile_fx, "_recursive_post_grad_passes", record)
    given = torch.randn(9, 16)
    torch._dynamo.mark_dynamic(given, 0)
    with pytest.raises(Exception, match="InterruptedError"), torch.no_grad():
        torch.compile(native.model.forward, fullgraph=True)(given)
    whole = [n for n in graphs[0].nodes if getattr(n.meta.get("val"), "shape", None) == buffer.shape and n.op != "placeholder"]
    assert all(n.target is torch.ops.aten.copy_.default and n.args[0] is n.args[1] for n in whole), graphs[0]
    stores = [n for n in graphs[0].nodes if n.target is torch.ops.aten.copy_.default and n not in whole]
    assert len(stores) == 3


def test_compiled_graphs_with_and_without_the_store_are_kept_apart(native):
    """Breaks if vLLM's compile cache hands a graph without the store to a target that needs it."""
    from vllm.config import VllmConfig

    from vllm_dflash.engine.aux_buffer import store_in_place

    config = VllmConfig()
    before = config.compute_hash()
    store_in_place(native, config, torch.zeros(20, 48))
    assert config.compute_hash() != before


def test_targets_that_collect_otherwise_keep_their_list(native):
    """Breaks if a target whose states never pass the method is taken for one that stores them: drafts would read zeros."""
    from vllm_dflash.engine import aux_buffer

    assert aux_buffer._collects_by_method(native.model)
    type(native.model).forward = lambda _, hidden_states: (hidden_states, [hidden_states])
    assert not aux_buffer._collects_by_method(native.model)
