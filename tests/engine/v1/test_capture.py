# SPDX-License-Identifier: Apache-2.0
"""Targets without an aux hidden state interface of their own are captured through hooks, or refused in a sentence."""

import pytest
from reference_check import Reference
from tiny_models import Draft, Target

STABLELM = Target(model_type="stablelm", hidden=128, heads=4, kv_heads=4, head_dim=32)


@pytest.fixture(scope="module")
def folders(write_pair):
    return write_pair(Draft(layer_ids=(2, 0), heads=4, kv_heads=4), STABLELM)


def test_hooked_target_drafts_as_the_reference(folders, engine_of, prompts, monkeypatch):
    """Breaks if the hooks read another value than the residual stream: StableLM layers return a stale second tensor.

    The last layer is among the captured ones: its value is the one before the final norm.
    """
    engine = engine_of(*folders, speculative={"num_speculative_tokens": 7}, max_num_batched_tokens=64)
    log = engine.record(monkeypatch)
    outputs = engine.generate(prompts, 20)
    reference = Reference(*folders)
    assert outputs == reference.answers(prompts, 20)
    assert reference.wrong_drafts([p + o for p, o in zip(prompts, outputs, strict=True)], log) == []


def test_hooks_are_refused_under_compilation(folders):
    """Breaks if a compiled target, which never runs Python hooks, is served with wrong states instead of an error."""
    from vllm import LLM

    with pytest.raises(ValueError, match="enforce_eager: is off, and target Stable"):
        LLM(
            str(folders[0]),
            speculative_config={"method": "dflash", "model": str(folders[1]), "num_speculative_tokens": 7},
            skip_tokenizer_init=True,
            enforce_eager=False,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=16 << 20,
        )
