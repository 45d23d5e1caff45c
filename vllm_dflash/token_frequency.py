# SPDX-License-Identifier: Apache-2.0
"""Which tokens a small draft head keeps: an order of the vocabulary by expected or counted frequency, and its file.

Merges of a byte-pair tokenizer were learned most frequent first, so their order ranks tokens without any text. Counts of real
text or, better, of the model's own outputs rank them for one use.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LIST_FILE = "draft_head_rows.json"
"""Name of a row list beside a draft checkpoint."""
ENOUGH_TOKENS = 32768
"""Tokens counted while serving from which on they decide the rows."""


class RowListError(ValueError):
    """A row list that cannot be used; the message names the file, what was found, what was expected and the cure."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowList:
    """Tokens by falling frequency.

    Attributes:
        token_ids: distinct ids, most frequent first.
        vocab_size: of the model that they belong to.
        source: where the order comes from, in words.
        calibrated: whether tokens were counted; False for the order of a tokenizer's merges.
        coverage: share of further tokens of the same kind that its leading rows are expected to hold; None where unknown.
        num_rows: how many leading rows ``coverage`` is for.
    """

    token_ids: tuple[int, ...]
    vocab_size: int
    source: str
    calibrated: bool
    coverage: float | None = None
    num_rows: int | None = None


def merge_order(tokenizer: Mapping[str, Any]) -> list[int]:
    """Token ids of a ``tokenizer.json`` from the most to the least frequent, as far as the file tells.

    Added tokens (end of turn and the like) come first, then tokens that no merge makes (bytes), then merges in their order.
    Unigram vocabularies carry log-probabilities, which are their order; other models are ranked by id.
    """
    added = [int(token["id"]) for token in tokenizer.get("added_tokens", [])]
    model = tokenizer.get("model", {})
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [token, log-probability], the id is the place
        ranked = sorted(range(len(vocabulary)), key=lambda i: -float(vocabulary[i][1]))
        return _distinct([*added, *ranked])
    made = []
    for merge in model.get("merges", []):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        token = vocabulary.get(left + right)
        if token is not None:
            made.append(token)
    merged = set(made)
    base = sorted(token for token in vocabulary.values() if token not in merged)
    return _distinct([*added, *base, *made])


def ranked(counts: Mapping[int, int], order: Sequence[int]) -> list[int]:
    """Counted tokens, most frequent first, then the rest of ``order``; ties as in ``order``."""
    place = {token: i for i, token in enumerate(order)}
    counted = sorted((t for t in counts if counts[t] > 0), key=lambda t: (-counts[t], place.get(t, len(place)), t))
    return _distinct([*counted, *order])


def coverage(counts: Mapping[int, int], token_ids: Iterable[int]) -> float:
    """Share of the counted tokens that ``token_ids`` hold; 0 where nothing was counted."""
    total = sum(counts.values())
    return sum(counts.get(token, 0) for token in set(token_ids)) / total if total else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often each token occurs, and in how many texts (answers, pieces of a file)."""

    times: Counter[int] = dataclasses.field(default_factory=Counter)
    texts: Counter[int] = dataclasses.field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Tokens counted."""
        return self.times.total()

    def add(self, text: Sequence[int]) -> None:
        """Count one text's token ids."""
        self.times.update(text)
        self.texts.update(set(text))

    def update(self, other: "TokenCounts") -> None:
        """Add what ``other`` counted, in other texts."""
        self.times.update(other.times)
        self.texts.update(other.texts)


def expected_coverage(counts: TokenCounts, order: Sequence[int], num_rows: int) -> float:
    """Share of *further* texts' tokens that the first ``num_rows`` of ``ranked(counts.times, order)`` hold.

    By leaving one text out: each occurrence is looked up in the list that the other texts would give, so a token of one text
    counts only where ``order`` alone would have listed it. Texts repeat their own words, so the share of the counted tokens
    themselves, or of each occurrence by the others, says too much. (A token's occurrences are taken as even over its texts.)
    """
    times, texts, total = counts.times, counts.texts, counts.total
    tokens = ranked(times, order)
    if not total or num_rows >= len(tokens):
        return 1.0 if total else 0.0
    place = {token: i for i, token in enumerate(order)}

    def key(token: int, found: float) -> tuple[float, int, int]:
        return -found, place.get(token, len(place)), token

    following = tokens[num_rows]  # the one that would take the place
    limit = key(following, times.get(following, 0))
    held = (t for t in tokens[:num_rows] if times.get(t, 0) and key(t, times[t] - times[t] / max(1, texts[t])) < limit)
    return sum(times[token] for token in held) / total


def count(texts: Iterable[Sequence[int]]) -> TokenCounts:
    """Counts over ``texts``."""
    counts = TokenCounts()
    for text in texts:
        counts.add(text)
    return counts


def write_list(path: Path, rows: RowList, counts: Mapping[int, int], facts: Mapping[str, Any]) -> None:
    """Write ``rows`` with the counts of its leading tokens and further ``facts``."""
    document = {
        "vocab_size": rows.vocab_size,
        "source": rows.source,
        "calibrated": rows.calibrated,
        "rows": rows.num_rows,
        "expected_coverage": rows.coverage,
        "tokens_counted": sum(counts.values()),
        **facts,
        "token_ids": list(rows.token_ids),
    }
    path.write_text(json.dumps(document) + "\n")


def parse_list(document: Any, name: str, vocab_size: int) -> RowList:
    """A row list from its JSON ``document``; ``name`` is for messages.

    Raises:
        RowListError: no list of distinct ids inside the vocabulary, or made for another vocabulary.
    """
    ids = document.get("token_ids") if isinstance(document, Mapping) else None
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise RowListError(f'{name}: no list "token_ids" of integers; expected a file made by `vllm-dflash calibrate`.')
    if document.get("vocab_size") not in (None, vocab_size):
        raise RowListError(
            f"{name}: made for a vocabulary of {document['vocab_size']} tokens; the target has {vocab_size}. Run "
            "`vllm-dflash calibrate` for this target."
        )
    if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= vocab_size:
        raise RowListError(
            f"{name}: token_ids must be distinct and between 0 and {vocab_size - 1}; found {min(ids)} to {max(ids)}, "
            f"{len(ids) - len(set(ids))} repeated. Run `vllm-dflash calibrate` again."
        )
    share, rows = document.get("expected_coverage"), document.get("rows")
    if not (isinstance(share, float) and 0 <= share <= 1 and isinstance(rows, int)):  # a list of another hand may not say
        share = rows = None
    source, calibrated = str(document.get("source", name)), bool(document.get("calibrated", True))
    return RowList(tuple(ids), vocab_size, source, calibrated, share, rows)


def _distinct(tokens: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(tokens))
