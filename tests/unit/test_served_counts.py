# SPDX-License-Identifier: Apache-2.0
"""The file of tokens counted while serving: engines add to it side by side, and nothing else is taken for it."""

import json
import multiprocessing
from collections import Counter

import pytest

from vllm_dflash.served_counts import add_counts, counts_file, read_counts
from vllm_dflash.token_frequency import RowListError, count

VOCAB = 50


def _add(path, token):
    for _ in range(20):
        add_counts(path, count([[token, 0, 0]]), VOCAB)


def test_engines_that_save_at_the_same_time_lose_nothing(tmp_path):
    """Breaks if one engine writes what it read before another one wrote, or a reader can see half a file."""
    path = tmp_path / "cache" / "counts.json"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add, args=(path, token)) for token in (1, 2, 3)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        read_counts(path, VOCAB)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    found = read_counts(path, VOCAB)
    assert found.times == Counter({0: 120, 1: 20, 2: 20, 3: 20})
    assert found.texts == Counter({0: 60, 1: 20, 2: 20, 3: 20})
    assert add_counts(path, count([[4, 4]]), VOCAB) == 182
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".json", ".lock"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"token_ids": [1]}', "counts of a vocabulary of None tokens; the target has 50"),
        ('{"vocab_size": 49, "counts": {}}', "counts of a vocabulary of 49 tokens; the target has 50"),
        ('{"vocab_size": 50, "counts": {"x": 1}}', "no token counts"),
        ('{"vocab_size": 50, "counts": {"50": [1, 1]}}', "out of range"),
    ],
)
def test_another_file_is_refused_and_left_alone(text, message, tmp_path):
    """Breaks if counts of another tokenizer choose rows, or a file that somebody else put there is overwritten."""
    path = tmp_path / "counts.json"
    path.write_text(text)
    for use in (lambda: read_counts(path, VOCAB), lambda: add_counts(path, count([[1]]), VOCAB)):
        with pytest.raises(RowListError, match=message):
            use()
    assert path.read_text() == text


def test_a_pair_has_a_file_of_its_own(tmp_path, monkeypatch):
    """Breaks if two targets of one draft, or one folder reached on two ways, are confused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "draft").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "draft")
    first = counts_file("org/a", str(tmp_path / "draft"))
    assert first == counts_file("org/a", str(tmp_path / "link"))
    assert first != counts_file("org/b", str(tmp_path / "draft"))
    assert first.parent == tmp_path / "cache" / "vllm-dflash" / "served-tokens"
    assert json.dumps(str(first.name)).startswith('"draft-')
