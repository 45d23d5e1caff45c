# SPDX-License-Identifier: Apache-2.0
"""Drafts that are not ours, and the kill switch: with the plugin loaded, vLLM's own speculator is built."""

import json
from pathlib import Path

import pytest
import torch

K = 3


@pytest.fixture
def speculator_of(target):
    """What the runner gets from vLLM's factory, which the plugin has wrapped, for a speculative config."""

    def build(**speculative):
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker.gpu import model_runner

        from vllm_dflash.plugin import register

        register()
        arguments = EngineArgs(
            model=target,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            speculative_config={"num_speculative_tokens": K, **speculative},
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            return model_runner.init_speculator(config, torch.device("cpu"), None)

    return build


def qualified(instance):
    return f"{type(instance).__module__}.{type(instance).__qualname__}".removeprefix("vllm.v1.worker.gpu.spec_decode.")


@pytest.mark.parametrize(
    ("architecture", "width", "expected"),
    [
        ("DFlash2DraftModel", "selector_top_k", "dflash2.speculator.DFlash2Speculator"),
        ("LiLiCorrDraftModel", "lilicorr_candidate_topk", "lilicorr.speculator.LiLiCorrSpeculator"),
    ],
)
def test_relatives_of_dflash_stay_with_vllm(architecture, width, expected, make_draft, speculator_of):
    """Breaks if the plugin claims every draft of method dflash."""
    draft = make_draft(dflash=((width, 4),))
    path = Path(draft) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))
    assert qualified(speculator_of(method="dflash", model=draft)) == expected


def test_a_plain_draft_is_ours_until_switched_off(draft, speculator_of, monkeypatch):
    """Breaks if VLLM_DFLASH=0 does not give vLLM's own DFlash back."""
    assert qualified(speculator_of(method="dflash", model=draft)) == "vllm_dflash.engine.speculator.DFlashSpeculator"
    monkeypatch.setenv("VLLM_DFLASH", "0")
    assert qualified(speculator_of(method="dflash", model=draft)) == "dflash.speculator.DFlashSpeculator"


def test_other_methods_serve_as_before(target, prompts, baseline, engine_of):
    """An ngram engine beside the loaded plugin; breaks if the wrapped factory loses arguments or touches the output."""
    expected = baseline(prompts, 16)
    engine = engine_of(target, speculative_config={"method": "ngram", "num_speculative_tokens": K})
    assert qualified(engine.speculator) == "ngram.speculator.NgramGPUSpeculator"
    assert engine.generate(prompts, 16) == expected
