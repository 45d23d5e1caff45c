# SPDX-License-Identifier: Apache-2.0
"""The loads of a benchmark: which prompts, how many requests at once, how tokens are drawn, how long."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from vllm_dflash.bench.prompts import split_name
from vllm_dflash.cli.failure import UserError

SHORTEST = 4
"""Tokens per answer; fewer leave nothing between the first step and the last."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One load, answered by every arm.

    Attributes:
        prompts: name of the prompt set.
        concurrency: requests at the same time.
        temperature: 0 for greedy answers.
        max_tokens: tokens per answer, at least: see :meth:`sampling`.
        repeats: groups of prompts.
    """

    prompts: str
    concurrency: int
    temperature: float
    max_tokens: int
    repeats: int

    def sampling(self, *, ignore_eos: bool) -> dict[str, Any]:
        """Fields of vLLM's ``SamplingParams``.

        Answers that ignore their ends go on until the last has its tokens, so that the batch stays full; the lucky ones get
        four times as many at most.
        """
        common = {
            "max_tokens": 4 * self.max_tokens if ignore_eos else self.max_tokens,
            "ignore_eos": ignore_eos,
            "temperature": self.temperature,
        }
        return common | ({"seed": 0} if self.temperature else {})


def parse_cells(names: Iterable[str], *, temperature: str, concurrency: str, max_tokens: str, repeats: str) -> list[Cell]:
    """All loads in the order of the prompt sets; ``max_tokens`` and ``repeats`` are one number, or one per concurrency.

    Raises:
        UserError: text that is not such a list.
    """
    counts = numbers("--concurrency", concurrency, int)
    lengths, groups = (per_load(*option, counts) for option in (("--max-tokens", max_tokens), ("--repeats", repeats)))
    if min(lengths) < SHORTEST:
        raise UserError(f"--max-tokens: found {min(lengths)}; expected at least {SHORTEST}.")
    heats = numbers("--temperature", temperature, float)
    return [
        Cell(name, *load)
        for name, own in map(split_name, names)
        for heat in (heats if own is None else [own])
        for load in ((count, heat, length, repeat) for count, length, repeat in zip(counts, lengths, groups, strict=True))
    ]


def per_load(option: str, text: str, counts: list[int]) -> list[int]:
    """One number for each concurrency.

    Raises:
        UserError: neither one number nor one for each.
    """
    found: list[int] = numbers(option, text, int)
    if len(found) not in (1, len(counts)):
        raise UserError(f"{option}: found {len(found)} numbers; expected one, or {len(counts)}: one for each --concurrency.")
    return found * len(counts) if len(found) == 1 else found


def numbers(option: str, text: str, kind: type, least: int | None = None) -> list[Any]:
    """Numbers separated by commas, integers from 1 on unless ``least`` says otherwise, fractions from 0 on.

    Raises:
        UserError: anything else.
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if least is None:
        least = 1 if kind is int else 0
    if not found or min(found) < least:
        raise UserError(f"{option}: found {text!r}; expected numbers from {least} on, separated by commas, for example 1,8.")
    return found
