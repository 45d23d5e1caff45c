# SPDX-License-Identifier: Apache-2.0
"""What the log says when an engine starts."""

import pytest


@pytest.fixture
def messages(monkeypatch):
    """(level, text) of what the speculator logs. Taken at the logger: vLLM configures its levels and handlers anew on start."""
    from vllm_dflash.engine.lifecycle import logger

    found = []
    for level in ("info", "warning_once"):
        monkeypatch.setattr(logger, level, lambda text, *_, level=level: found.append((level, text)))
    return found


def test_start_names_the_draft_and_what_was_assumed(target, make_draft, engine_of, messages):
    """Breaks if a reading of the config that costs acceptance stays silent."""
    windows = (("layer_types", ["sliding_attention", "full_attention"]), ("sliding_window", 24), ("partial_rotary_factor", 0.5))
    engine_of(target, make_draft(config=windows))
    line = next((text for level, text in messages if level == "info" and "K=3 of block 4" in text), None)
    assert line is not None, messages
    for fact in ("target layers [0, 2]", "mask token 5", "rope default with theta 20000", "windows [0, 24]"):
        assert fact in line
    assert any(level == "warning_once" and "partial_rotary_factor 0.5 ignored" in text for level, text in messages)
