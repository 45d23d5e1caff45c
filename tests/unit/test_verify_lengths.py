# SPDX-License-Identifier: Apache-2.0
"""Where the planner switches vLLM's adaptive verification on: only where it is known to run, as engines must start by default."""

from types import SimpleNamespace

import pytest
import torch

from vllm_dflash.engine import verify_lengths

OPTIONS = "vllm_dflash"


def config(**changes):
    """A complete configuration of a dense 8B target on a Hopper GPU; ``changes`` by dotted path, with __ for the dot."""
    found = SimpleNamespace(
        additional_config={},
        use_v2_model_runner=True,
        lora_config=None,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(world_size=1, distributed_executor_backend="uni"),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(backend=None, flash_attn_version=None),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True)),
        model_config=SimpleNamespace(is_moe=False, use_mla=False, get_head_size=lambda: 128, dtype=torch.bfloat16),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=7,
            rejection_sample_method="standard",
            enable_adaptive_verification=False,
            use_local_argmax_reduction=False,
        ),
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = found
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, name, value)
    return found


@pytest.fixture
def hopper(monkeypatch):
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: (9, 0))
    monkeypatch.setattr(verify_lengths, "current_platform", platform)
    monkeypatch.setattr(verify_lengths, "why_fixed", lambda _: None)
    monkeypatch.setattr(verify_lengths, "_has_version_3", lambda: True)
    return platform


def chosen(found):
    verify_lengths.choose(found)
    return found.speculative_config.enable_adaptive_verification


@pytest.mark.usefixtures("hopper")
def test_lengths_differ_where_that_is_known_to_run():
    """Breaks if per-request lengths have to be asked for, or a backend that was named is taken for another."""
    assert chosen(config())
    assert chosen(config(attention_config__backend=SimpleNamespace(name="FLASH_ATTN")))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"additional_config": {OPTIONS: {"verify_lengths": "equal"}}}, "verify_lengths"),
        ({"use_v2_model_runner": False}, "V1"),
        ({"attention_config__backend": SimpleNamespace(name="FLASHINFER")}, "FlashAttention"),
        ({"model_config__use_mla": True}, "FlashAttention"),
        ({"attention_config__flash_attn_version": 2}, "FlashAttention 3"),
        ({"model_config__dtype": torch.float32}, "FlashAttention"),
        ({"speculative_config__use_local_argmax_reduction": True}, "logits"),
        ({"model_config__is_submodel_config": True}, "part"),
        ({"model_config__get_head_size": lambda: 512}, "FlashAttention"),
        ({"model_config__is_moe": True}, "dense"),
        ({"lora_config": object()}, "adapters"),
        ({"parallel_config__world_size": 2}, "workers"),
        ({"parallel_config__distributed_executor_backend": "mp"}, "workers"),
        ({"kv_transfer_config": object()}, "elsewhere"),
        ({"compilation_config__cudagraph_mode": SimpleNamespace(has_full_cudagraphs=lambda: False)}, "CUDA graphs"),
        ({"cache_config__cache_dtype": "fp8"}, "quantised"),
        ({"speculative_config__rejection_sample_method": "synthetic"}, "acceptance"),
        ({"model_config__return_sampling_mask": True}, "masks"),
        ({"scheduler_config__max_num_seqs": 16}, "free"),
    ],
)
def test_all_verify_alike_where_vllm_would_refuse_or_nothing_is_gained(change, reason):
    """Breaks if an engine that vLLM's adaptive verification cannot serve no longer starts by default."""
    found = config(**change)
    assert reason in verify_lengths.why_equal(found)
    assert not chosen(found)


@pytest.mark.parametrize(("cuda", "capability"), [(False, (9, 0)), (True, (8, 0)), (True, (10, 0))])
def test_other_machines_verify_alike(hopper, cuda, capability):
    """Breaks if a machine gets by default what was never tried on its kind."""
    hopper.is_cuda, hopper.get_device_capability = (lambda: cuda), (lambda: capability)
    assert "Hopper" in verify_lengths.why_equal(config())


@pytest.mark.usefixtures("hopper")
def test_a_build_without_version_3_verifies_alike(monkeypatch):
    """Breaks if an engine asks for graphs of varying lengths that FlashAttention 2 has not: it would not start."""
    monkeypatch.setattr(verify_lengths, "_has_version_3", lambda: False)
    assert not chosen(config())


@pytest.mark.usefixtures("hopper")
def test_a_reason_that_comes_with_it_takes_it_back(monkeypatch):
    """Breaks if lengths differ while the planner that they are for has gone: vLLM's own, unasked for."""
    asked = lambda config: "a reason" if config.speculative_config.enable_adaptive_verification else None  # noqa: E731
    monkeypatch.setattr(verify_lengths, "why_fixed", asked)
    assert not chosen(config())


def test_every_field_that_is_read_is_vllms():
    """Breaks if a field has another name in vLLM than in the fake above."""
    import dataclasses

    from vllm.config import AttentionConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig

    read = {
        VllmConfig: {"attention_config", "cache_config", "compilation_config", "kv_transfer_config", "lora_config"},
        AttentionConfig: {"backend", "flash_attn_version"},
        ParallelConfig: {"distributed_executor_backend", "world_size"},
        ModelConfig: {"dtype", "is_submodel_config", "return_sampling_mask"},
        SpeculativeConfig: {"rejection_sample_method", "use_local_argmax_reduction", "enable_adaptive_verification"},
    }
    for kind, names in read.items():
        assert names <= {field.name for field in dataclasses.fields(kind)}
    assert all(hasattr(ModelConfig, name) for name in ("is_moe", "use_mla", "get_head_size"))


def test_a_planner_that_is_off_decides_no_lengths(hopper, monkeypatch):
    """Breaks if K fixed no longer means that K drafts are verified."""
    del hopper
    monkeypatch.setattr(verify_lengths, "why_fixed", lambda _: "a reason")
    assert not chosen(config())


def test_vllms_own_switch_stays_on():
    """Breaks if the plugin overrules who asked for adaptive verification."""
    assert chosen(config(speculative_config__enable_adaptive_verification=True, use_v2_model_runner=False))
