# SPDX-License-Identifier: Apache-2.0
"""A loaded draft takes a second checkpoint whole and in place, or says why not."""

import copy

import pytest
import torch
from reference_check import Reference
from safetensors.torch import load_file
from tiny_models import Draft, Target, write_draft

RICH = Draft(layer_ids=(2, 0), draft_vocab=90, mask_file=True, biases=True)  # every derived weight and buffer there is


@pytest.fixture
def successor(tmp_path):
    """(Draft, seed) -> tensors of another draft of that shape, and its folder."""

    def write(draft, seed):
        folder = write_draft(tmp_path / f"draft{seed}", draft, Target(), seed=seed)
        return load_file(folder / "model.safetensors"), folder

    return write


@pytest.fixture(scope="module")
def engine(write_pair, engine_of):
    return engine_of(*write_pair(Draft()), speculative={"num_speculative_tokens": 7})


def build(engine, folder):
    """A draft network as the loader has it before platforms pack its weights."""
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy.copy(engine.proposer.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}  # the engine's own draft has the same layer names
    config.speculative_config = copy.copy(config.speculative_config)
    config.speculative_config.draft_model_config = copy.copy(config.speculative_config.draft_model_config)
    config.speculative_config.draft_model_config.model = str(folder)
    return initialize_model(config, model_config=config.speculative_config.draft_model_config)


def tensors_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_a_second_load_equals_a_first_one_and_moves_nothing(engine, successor):
    """Breaks if modules of the target count as missing, a derived weight stays old, or a buffer is rebound."""
    first, folder = successor(RICH, 11)
    second, other_folder = successor(RICH, 12)
    model, expected = build(engine, folder), build(engine, other_folder)
    model.load_weights(first.items())
    target_embedding = torch.nn.Embedding(Target.vocab, Target.hidden)
    model.share(target_embedding, None)
    before = target_embedding.weight.clone()
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(model).items()}
    model._vllm_config = expected._vllm_config  # the mask embedding's file is read from the draft's folder
    model.load_weights(second.items())
    expected.load_weights(second.items())
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(model).items()} == addresses
    assert torch.equal(target_embedding.weight, before)
    found = tensors_of(model)
    assert {"context_kv.projection.weight", "context_kv.k_norm_weight", "draft_to_target", "model.mask_embedding"} <= set(found)
    for name, tensor in tensors_of(expected).items():
        assert torch.equal(found[name], tensor), name


def test_drafts_follow_the_new_weights_after_vllms_reload(write_pair, engine, successor, prompts, monkeypatch):
    """Breaks if the layer by layer reload leaves the fused K/V weights or K norms of the first checkpoint in place."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    tensors, folder = successor(Draft(), 13)
    reload_weights(engine.proposer.vllm_config, engine.proposer.model, tensors.items(), None, is_checkpoint_format=True)
    log = engine.record(monkeypatch)
    outputs = engine.generate(prompts, 12)
    first = min(number for number, _, _ in log)
    reference = Reference(write_pair(Draft())[0], folder)
    texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
    assert reference.wrong_drafts(texts, [(number - first, known, drafts) for number, known, drafts in log]) == []


def test_an_update_in_parts_is_refused_before_it_changes_anything(engine, successor):
    """Breaks if a chunk is applied although fc and the fused weights need whole tensors."""
    tensors, folder = successor(Draft(), 14)
    model = build(engine, folder)
    model.load_weights(tensors.items())
    before = model.model.norm.weight.clone()
    with pytest.raises(ValueError, match=r"draft weight update: found 1 tensors .* Send the whole draft at once"):
        model.load_weights([("norm.weight", before + 1)])
    assert torch.equal(model.model.norm.weight, before)


def test_what_vllms_reload_would_lose_is_refused(engine, successor):
    """Breaks if a buffer that came with the first load silently keeps its old values."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    tensors, folder = successor(RICH, 15)
    model = build(engine, folder)
    model.load_weights(tensors.items())
    with pytest.raises(ValueError, match="d2t, mask_embedding came with the first load"):
        reload_weights(engine.proposer.vllm_config, model, tensors.items(), None, is_checkpoint_format=True)


def test_packed_weights_need_vllms_reload(engine, successor):
    """Breaks if the engine's own draft, packed by the CPU backend, answers an update with a shape error."""
    with pytest.raises(ValueError, match="vLLM packed the weights"):
        engine.proposer.model.load_weights(successor(Draft(), 16)[0].items())
