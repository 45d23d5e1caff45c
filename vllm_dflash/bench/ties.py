# SPDX-License-Identifier: Apache-2.0
"""Where greedy answers differ from those without speculation: a near tie that rounding decides, or a loss.

In bfloat16 the same text in a batch of another shape has logits that differ by a step or two, so equality cannot be asked for.
The target itself is asked how far apart the two tokens are at the first difference; what follows it is another text.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_dflash.bench.figures import Row, answers_of
from vllm_dflash.cli.engine_run import Engine

NEAR_TIE = 0.25
"""Nats. bfloat16 logits of 16 to 32 are 0.125 apart, and each of the two may be off by one step; 0 and 0.125 is what the demo
pair shows on a CPU."""
NEAR_TIE_FLOAT32 = 1e-3
"""float32 logits are some 1e-5 off where sums are taken in another order; this leaves two digits."""
BATCH = 64
"""Questions that the target is asked at a time: a prefill each."""

Place = tuple[str, tuple[int, ...]]
"""A prompt and the tokens behind it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which an answer differs; ``other`` or ``plain`` is None where that answer has ended."""

    prompt: Any
    before: tuple[int, ...]
    plain: int | None
    other: int | None

    @property
    def cut_short(self) -> bool:
        """One of the answers has ended."""
        return self.plain is None or self.other is None

    @property
    def place(self) -> Place:
        """What the target is asked about."""
        return str(self.prompt), self.before


def near_tie(dtype: str) -> float:
    """Nats that rounding may be worth."""
    return NEAR_TIE_FLOAT32 if dtype == "float32" else NEAR_TIE


def first_differences(groups: Sequence[Sequence[Any]], plain: Sequence[Row], other: Sequence[Row]) -> Iterator[Difference]:
    """Of each answer that differs; ``plain`` and ``other`` are the results of two arms on the same groups of prompts."""
    prompts = [prompt for group in groups for prompt in group]
    for prompt, one, two in zip(prompts, answers_of(plain), answers_of(other), strict=True):
        for at, (a, b) in enumerate(itertools.zip_longest(one, two)):
            if a != b:
                yield Difference(prompt, tuple(one[:at]), a, b)
                break


def judged(
    rows: Sequence[Row], groups: Sequence[Sequence[Any]], results: Mapping[str, list[Row]], plain: str, engine: Engine
) -> None:
    """Add to the rows of a greedy load: ``differences_checked``, ``near_ties`` among them, and ``largest_gap`` in nats.

    A repeated prompt shows its difference again: it is counted and asked about once. An answer that ends where the other goes
    on (``cut_short``) is a difference and no near tie.
    """
    limit = near_tie(engine.spec.dtype)
    found: dict[str, list[Difference]] = {}
    for row in rows:
        if row.get("same_tokens") != row.get("answers"):
            every = first_differences(groups, results[plain], results[row["arm"]])
            found[row["arm"]] = list({(each.place, each.plain, each.other): each for each in every}.values())
    best = _best([each for some in found.values() for each in some if not each.cut_short], engine)
    for row in rows:
        if some := found.get(row["arm"], []):
            gaps = [_gap(each, best[each.place], limit) for each in some if not each.cut_short]
            row |= {"differences_checked": len(some), "near_ties": sum(gap <= limit for gap in gaps), "near_tie": limit}
            if gaps:
                row["largest_gap"] = round(max(gaps), 4)
            if len(gaps) < len(some):
                row["cut_short"] = len(some) - len(gaps)


def _best(differences: Sequence[Difference], engine: Engine) -> dict[Place, dict[int, float]]:
    """The target's best next tokens and their log probabilities, by place."""
    places = list({each.place: each for each in differences}.values())
    found: dict[Place, dict[int, float]] = {}
    for begin in range(0, len(places), BATCH):
        some = places[begin : begin + BATCH]
        answer = engine.ask("best", prompts=[{"prompt": each.prompt, "then": list(each.before)} for each in some])
        found |= {each.place: dict(best) for each, best in zip(some, answer["best"], strict=True)}
    return found


def _gap(difference: Difference, known: Mapping[int, float], limit: float) -> float:
    """How far below the best token the worse of the two is, in nats; of one that is not among the best, at least so far."""
    lowest = min(known.values()) - 2 * limit  # beyond the last one that is known: never a near tie of it
    tokens = (token for token in (difference.plain, difference.other) if token is not None)
    return max(known.values()) - min(known.get(token, lowest) for token in tokens)


def complaints(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each load whose differences are more than near ties."""
    for row in rows:
        lost, short = row.get("differences_checked", 0) - row.get("near_ties", 0), row.get("cut_short", 0)
        where = f"{row['prompts']}, {row['concurrency']} at a time: {row['arm']}"
        if lost > short:
            yield (
                f"{where} differs where the target is sure, at {lost - short} of {row['differences_checked']} places; the two "
                f"tokens are up to {row['largest_gap']:g} nats apart, near ties at most {row['near_tie']:g}"
            )
        if short:
            yield f"{where} or the arm without speculation ends {short} answers where the other goes on"
