# SPDX-License-Identifier: Apache-2.0
"""How often the target wrote each token while it served, kept in a file that several engines add to and the next start reads.

{"vocab_size": 151936, "tokens_counted": 8123, "counts": {"198": 411, ...}}
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_dflash.token_frequency import RowListError, TokenCounts


def counts_file(target: str, draft: str) -> Path:
    """Where counts of this pair are kept: in the cache folder, since model folders are often read-only and shared."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "vllm-dflash" / "served-tokens"
    names = [str(Path(name).resolve()) if Path(name).exists() else name for name in (target, draft)]
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(names[1]).name)
    return folder / f"{readable}-{hashlib.sha256('|'.join(names).encode()).hexdigest()[:12]}.json"


def read_counts(path: Path, vocab_size: int) -> TokenCounts:
    """The counts in ``path``; none where the file is not there yet.

    Raises:
        RowListError: a file that is not of this kind, or of another vocabulary.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return TokenCounts()
    except (OSError, ValueError) as error:
        raise RowListError(f"{path}: cannot be read ({error}); expected token counts. Delete it to count anew.") from error
    return _parse(document, path, vocab_size)


def _parse(document: Any, path: Path, vocab_size: int) -> TokenCounts:
    found = document.get("vocab_size") if isinstance(document, Mapping) else None
    if found != vocab_size:
        raise RowListError(
            f"{path}: counts of a vocabulary of {found} tokens; the target has {vocab_size}. Delete it to count anew."
        )
    try:
        entries = {int(token): (int(times), int(texts)) for token, (times, texts) in document["counts"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RowListError(f"{path}: found no token counts ({error!r}). Delete it to count anew.") from error
    if not all(0 <= token < vocab_size and 0 < texts <= times for token, (times, texts) in entries.items()):
        raise RowListError(f"{path}: found a token id or a count out of range. Delete it to count anew.")
    return TokenCounts(Counter({t: e[0] for t, e in entries.items()}), Counter({t: e[1] for t, e in entries.items()}))


def add_counts(path: Path, counts: TokenCounts, vocab_size: int, *, wait: bool = True) -> int:
    """Add ``counts`` to the file and return how many tokens it then holds.

    Engines that save at the same time ``wait`` for each other, and a reader sees the old file or the new one.

    Raises:
        RowListError: the file is of another kind or vocabulary; it is left as it is.
        OSError: the folder cannot be written; BlockingIOError: another engine is saving, and this one should not wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, wait=wait):
        known = read_counts(path, vocab_size)
        known.update(counts)
        entries = {token: [times, known.texts[token]] for token, times in sorted(known.times.items())}
        document = {"vocab_size": vocab_size, "tokens_counted": known.total, "counts": entries}
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps(document), encoding="utf-8")
        fresh.replace(path)
    return known.total


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when a process dies."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
