# SPDX-License-Identifier: Apache-2.0
"""Where greedy answers differ from those without speculation: a near tie that rounding decides, or a loss.

In bfloat16 the same text in a batch of another shape has logits that differ by a step or two, so equality cannot be asked for.
The target itself is asked how far apart the two tokens are at the first difference; what follows it is another text.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_dflash.bench.figures import Row
from vllm_dflash.cli.engine_run import Engine

NEAR_TIE = 0.25
"""Nats. bfloat16 logits of 16 to 32 are 0.125 apart, and each of the two may be off by one step; 0 and 0.125 is what the demo
pair shows on a CPU."""
CHECKED = 6
"""Differences of an arm that are looked at in one load: a prefill each, together one short step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which an answer differs."""

    prompt: Any
    before: tuple[int, ...]
    plain: int
    other: int


def first_differences(groups: Sequence[Sequence[Any]], plain: Sequence[Row], other: Sequence[Row]) -> Iterator[Difference]:
    """Of each answer that differs; ``plain`` and ``other`` are the results of two arms on the same groups of prompts."""
    for group, *results in zip(groups, plain, other, strict=True):
        for prompt, *answers in zip(group, *(result["outputs"] for result in results), strict=True):
            ours, theirs = (answer["token_ids"] for answer in answers)
            for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
                if a != b:
                    yield Difference(prompt, tuple(ours[:at]), a, b)
                    break


def judged(
    rows: Sequence[Row], groups: Sequence[Sequence[Any]], results: Mapping[str, list[Row]], plain: str, engine: Engine
) -> None:
    """Add to the rows of a greedy load: ``differences_checked``, ``near_ties`` among them, and ``largest_gap`` in nats."""
    for row in rows:
        if row.get("same_tokens") == row.get("answers"):
            continue
        found = {_key(difference): difference for difference in first_differences(groups, results[plain], results[row["arm"]])}
        some = [difference for difference in found.values() if len(difference.before) < row["max_tokens"]][:CHECKED]
        if some:
            gaps = _gaps(some, engine)
            row |= {
                "differences_checked": len(gaps),
                "near_ties": sum(gap <= NEAR_TIE for gap in gaps),
                "largest_gap": round(max(gaps), 4),
            }


def _key(difference: Difference) -> tuple[str, tuple[int, ...], int]:
    return str(difference.prompt), difference.before, difference.other


def _gaps(differences: Sequence[Difference], engine: Engine) -> list[float]:
    """How far below the best token the worse of the two is, in nats; of one that is not among the best, at least so far."""
    prompts = [{"prompt": difference.prompt, "then": list(difference.before)} for difference in differences]
    gaps = []
    for difference, best in zip(differences, engine.ask("best", prompts=prompts)["best"], strict=True):
        known = dict(best)
        lowest = min(known.values()) - NEAR_TIE  # beyond the last one that is known: never a near tie of it
        gaps.append(max(known.values()) - min(known.get(token, lowest) for token in (difference.plain, difference.other)))
    return gaps


def complaints(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each load whose differences are more than near ties."""
    for row in rows:
        lost = row.get("differences_checked", 0) - row.get("near_ties", 0)
        if lost:
            yield (
                f"{row['prompts']}, {row['concurrency']} at a time: {row['arm']} differs where the target is sure, at {lost} of "
                f"{row['differences_checked']} places; the two tokens are up to {row['largest_gap']:g} nats apart, near ties at "
                f"most {NEAR_TIE:g}"
            )
