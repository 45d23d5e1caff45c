# SPDX-License-Identifier: Apache-2.0
"""What the log says when an engine starts."""

import pytest


class Recorder:
    """A logger that keeps (level, text). vLLM's own is set up anew by each module that asks for it, which undoes patches."""

    def __init__(self):
        self.found = []

    def __getattr__(self, level):
        return lambda text, *_: self.found.append((level, text))


@pytest.fixture
def messages(monkeypatch):
    """(level, text) of what the speculator logs."""
    from vllm_dflash.engine import lifecycle

    recorder = Recorder()
    monkeypatch.setattr(lifecycle, "logger", recorder)
    return recorder.found


def test_start_names_the_draft_and_what_was_assumed(target, make_draft, engine_of, messages):
    """Breaks if a reading of the config that costs acceptance stays silent."""
    windows = (("layer_types", ["sliding_attention", "full_attention"]), ("sliding_window", 24), ("partial_rotary_factor", 0.5))
    engine_of(target, make_draft(config=windows))
    line = next((text for level, text in messages if level == "info" and "K=3 of block 4" in text), None)
    assert line is not None, messages
    for fact in ("target layers [0, 2]", "mask token 5", "rope default with theta 20000", "windows [0, 24]", "stored in place"):
        assert fact in line
    assert any(level == "warning_once" and "partial_rotary_factor 0.5 ignored" in text for level, text in messages)
