# SPDX-License-Identifier: Apache-2.0
"""The turns: every group of prompts goes to each engine, one engine computes at a time, and who begins rotates."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_dflash.bench.figures import Row, cell_row
from vllm_dflash.bench.prompts import groups
from vllm_dflash.cli.engine_run import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One load: who is asked what, how many requests at once, and how tokens are drawn."""

    prompts: str
    concurrency: int
    temperature: float


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What every cell has in common."""

    sets: Mapping[str, Sequence[Any]]
    """Prompts (text, or lists of token ids) by the name of their set."""
    max_tokens: int
    repeats: int
    ignore_eos: bool

    def sampling(self, cell: Cell) -> dict[str, Any]:
        """Fields of vLLM's ``SamplingParams`` for a cell."""
        common = {"max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos, "temperature": cell.temperature}
        return common | ({"seed": 0} if cell.temperature else {})


def run_cell(engines: Mapping[str, Engine], cell: Cell, work: Workload, first: int = 0) -> Iterator[tuple[str, Row]]:
    """Yield (arm, ``result`` event) for every group and arm; ``first`` rotates who begins."""
    names = list(engines)
    for number, group in enumerate(groups(list(work.sets[cell.prompts]), cell.concurrency, work.repeats)):
        turn = (first + number) % len(names)
        for name in names[turn:] + names[:turn]:
            yield name, engines[name].measure(group, **work.sampling(cell))


def rows_of_cell(results: Mapping[str, Sequence[Row]], cell: Cell, plain: str | None) -> list[Row]:
    """One row per arm; ``plain`` names the arm without speculation, whose greedy answers the others must repeat."""
    rows = []
    for name, runs in results.items():
        compare = results[plain] if plain is not None and name != plain and cell.temperature == 0 else None
        rows.append({"arm": name, **dataclasses.asdict(cell), "prompts": Path(cell.prompts).stem} | cell_row(runs, compare))
    return rows
