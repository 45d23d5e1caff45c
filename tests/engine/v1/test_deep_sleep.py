# SPDX-License-Identifier: Apache-2.0
"""Sleep level 2 drops all that was allocated while weights were loaded; then vLLM restores buffers and reloads the target.

A CPU engine cannot sleep. Here the memory that a GPU's would lose is overwritten instead, and vLLM's own reload does the rest.
"""

import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch
from tiny_models import Draft
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.slow  # 33 CPU seconds

K = 3
SMALL_HEAD = {"vllm_dflash": {"draft_head": "small", "draft_head_rows": 96}}


def addresses(values):
    return {v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor) and v.device.type == "cpu"}


class Allocations(TorchDispatchMode):
    """Tensors alive after a load whose memory the load allocated."""

    def __init__(self):
        super().__init__()
        self.addresses, self.alive = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # Views are no allocations: some are of a checkpoint's file.
        self.addresses |= addresses(pytree.tree_leaves(result)) - addresses(pytree.tree_leaves((args, kwargs)))
        return result

    def settle(self):
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.numel()]
        self.alive = [x for x in tensors if addresses([x]) <= self.addresses]


@pytest.fixture(scope="module")
def loaded(write_pair, engine_of):
    """(engine, what its load allocated), with every kind of plain tensor that a draft keeps beside its weights."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    made, load_model = Allocations(), CPUModelRunner.load_model

    def recorded(runner, *args, **kwargs):
        with made:
            load_model(runner, *args, **kwargs)
        made.settle()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUModelRunner, "load_model", recorded)
        folders = write_pair(Draft(block=K + 1, layer_ids=(2, 0), draft_vocab=120))
        return engine_of(*folders, additional_config=SMALL_HEAD), made


def test_nothing_but_buffers_and_weights_has_to_survive(loaded, prompts, monkeypatch):
    """Breaks if the map of a private head to target ids, or another plain tensor, is only filled while loading."""
    engine, made = loaded
    log = engine.record(monkeypatch)
    before = engine.generate(prompts, 16)
    drafts = [entry[1:] for entry in log]
    log.clear()
    models = [engine.runner.model, engine.proposer.model]
    kept = {id(t): (t, t.clone()) for m in models for t in (*m.buffers(), *m.parameters()) if t.numel()}
    head = engine.proposer.model.private_head
    on_the_host = addresses([head._mine, head._wanted])  # beside a GPU too
    lost = [tensor for tensor in made.alive if not addresses([tensor]) & on_the_host]
    assert any(tensor is head.token_ids for tensor in lost)
    for tensor in lost:
        tensor.untyped_storage().fill_(0x7F)
    with torch.no_grad():
        for tensor, value in kept.values():
            tensor.copy_(value)
    engine.runner.reload_weights()
    assert engine.generate(prompts, 16) == before
    assert [entry[1:] for entry in log] == drafts


@pytest.mark.parametrize(
    ("sleeps", "named", "kept"),
    [
        (True, ["*.engram.*"], ["*.engram.*", "draft.*"]),
        (True, ["draft.fc.weight"], ["draft.fc.weight"]),
        (False, [], []),
    ],
)
def test_vllm_is_told_to_keep_the_drafts_weights(sleeps, named, kept):
    """``reload_weights`` brings back the target's only; breaks if the draft's are dropped, or a user's choice is."""
    from vllm_dflash.engine.weight_update import keep_through_deep_sleep

    config = SimpleNamespace(enable_sleep_mode=sleeps, sleep_preserve_parameter_names=named)
    keep_through_deep_sleep(config)
    assert config.sleep_preserve_parameter_names == kept


def test_vllm_still_takes_that_pattern():
    """Breaks if vLLM renames the setting or the draft's parameters in it: ours would then do nothing, without a word."""
    from vllm.config import ModelConfig
    from vllm.v1.worker.gpu_worker import Worker

    assert "sleep_preserve_parameter_names" in {f.name for f in dataclasses.fields(ModelConfig)}
    target, draft = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    worker = SimpleNamespace(get_draft_model=lambda: draft)
    assert {"draft.weight", "draft.bias"} <= set(Worker._get_sleep_parameters(worker, target))
