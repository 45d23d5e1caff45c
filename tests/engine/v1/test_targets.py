# SPDX-License-Identifier: Apache-2.0
"""Targets of many families: with a DFlash draft they write what they write without, and every draft is the reference's.

The reference runs transformers' own model of the family, so a draft token that differs means that the hidden states were read
at the wrong place, or that embedding or head were borrowed wrongly.
"""

import importlib

import pytest
from reference_check import Reference
from safetensors.torch import load_file
from target_families import FAMILIES, write_family
from tiny_models import Draft, edit_weights, write_draft

from vllm_dflash.hooks import vllm_version

NEWER = ("Llama", "Mistral", "Gemma 3", "Qwen3-MoE", "Cohere")
"""What 0.33 runs: one for each way of capture, of windows and of embeddings; the others share their code."""
TESTED = tuple(FAMILIES) if vllm_version().startswith("0.32") else NEWER


def make_known(vllm_class):
    """Register the class itself: vLLM asks a process of its own about classes that are named only, ten seconds each."""
    from vllm import ModelRegistry

    module, _, name = vllm_class.partition(":")
    ModelRegistry.register_model(name, getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name))


@pytest.mark.parametrize("name", TESTED)
def test_texts_and_drafts_of_a_family(name, tmp_path, engine_of, prompts, monkeypatch):
    """Breaks if a family's hidden states are captured elsewhere than at the residual stream, if a full layer of the draft takes
    over the target's window (Mistral), or if scale and head of the embedding are not the target's.

    The last layer is among the captured ones: its value is the one before the final norm.
    """
    family = FAMILIES[name]
    make_known(family.vllm_class)
    folders = (
        write_family(tmp_path / "target", family),
        write_draft(tmp_path / "draft", Draft(layer_ids=(2, 0), heads=4), family.shape),
    )
    weights = load_file(folders[1] / "model.safetensors")
    # So strong that with the wrong layer captured every block of a long text changes, in each of these families.
    edit_weights(folders[1], {name: 4 * tensor for name, tensor in weights.items() if "o_proj" in name})
    engine = engine_of(*folders, speculative={"num_speculative_tokens": 7}, max_num_batched_tokens=64, **family.engine)
    assert ("forward" in vars(engine.runner.model)) is (family.capture == "hook")
    assert engine.proposer.model.model.embedding_scale == pytest.approx(family.embedding_scale)
    log = engine.record(monkeypatch)
    outputs = engine.generate(prompts, 16)
    reference = Reference(*folders)
    assert outputs == reference.answers(prompts, 16)
    assert reference.wrong_drafts([p + o for p, o in zip(prompts, outputs, strict=True)], log) == []
    assert len(log) >= 50
