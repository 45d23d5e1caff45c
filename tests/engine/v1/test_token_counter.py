# SPDX-License-Identifier: Apache-2.0
"""When tokens counted while serving reach their file, without an engine."""

import pytest

from vllm_dflash.engine import served_tokens
from vllm_dflash.engine.served_tokens import TokenCounter
from vllm_dflash.served_counts import read_counts

VOCAB = 100


@pytest.fixture
def counter(tmp_path, monkeypatch):
    """A counter, its file, and a clock to set."""
    clock = [0.0]
    monkeypatch.setattr(served_tokens.time, "monotonic", lambda: clock[0])
    return TokenCounter(tmp_path / "counts.json", VOCAB, 0), tmp_path / "counts.json", clock


def test_answers_are_counted_whole_and_saved_every_minute(counter):
    """Breaks if a token counts as many texts as it has occurrences, or a process that is killed loses more than a minute."""
    counting, path, clock = counter
    counting.step([], [("a", [5, 5], False), ("b", [6], False)])
    counting.step([], [("b", [5, 200], False), ("a", [5, 7], True)])
    counting.step(["a"], [("b", [], False)])
    assert not path.exists()
    clock[0] = 61.0
    counting.step([], [("b", [8], False)])
    found = read_counts(path, VOCAB)
    assert dict(found.times) == {5: 3, 7: 1}
    assert dict(found.texts) == {5: 1, 7: 1}
    counting.save_at_end()  # with what is not finished, without what is no token
    assert dict(read_counts(path, VOCAB).times) == {5: 4, 6: 1, 7: 1, 8: 1}
    assert read_counts(path, VOCAB).texts[5] == 2


def test_a_file_is_written_the_more_rarely_the_larger_it_is(counter, monkeypatch):
    """Breaks if a busy engine writes its file every few steps."""
    counting, path, _ = counter
    saves = []
    monkeypatch.setattr(served_tokens, "add_counts", lambda *_, **__: saves.append(1) or 80_000)
    for number in range(30):
        counting.step([], [(str(number), [1] * 1000, True)])
    assert len(saves) == 3  # after 9 thousand tokens, then every 10 thousand: an eighth of 80 thousand
    assert not path.exists()
