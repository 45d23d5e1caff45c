# SPDX-License-Identifier: Apache-2.0
"""The turns: every group of prompts goes to each arm, one engine computes at a time, and who begins rotates."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_dflash.bench.figures import Row, cell_row, over
from vllm_dflash.bench.loads import Cell
from vllm_dflash.bench.prompts import groups, label
from vllm_dflash.cli.engine_run import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class Player:
    """Who takes a turn: an engine, as it is or with the draft width that its planner is told to keep.

    ``adaptive``: it verifies as many drafts as pay, so its acceptance length is of those alone.
    """

    engine: Engine
    k: int
    hold: int | None = None
    adaptive: bool = False

    def play(self, prompts: Sequence[Any], cell: Cell, *, ignore_eos: bool) -> Row:
        """The ``result`` event of one group of prompts."""
        at_least = cell.max_tokens if ignore_eos else None
        return self.engine.measure(prompts, at_least=at_least, hold=self.hold, **cell.sampling(ignore_eos=ignore_eos))


Results = dict[str, list[Row]]
"""``result`` events by arm, one per group of prompts."""


def groups_of(cell: Cell, prompts: Sequence[Any]) -> list[list[Any]]:
    """The groups of prompts of a load."""
    return groups(list(prompts), cell.concurrency, cell.repeats)


def run_cell(
    players: Mapping[str, Player], cell: Cell, prompts: Sequence[Any], *, ignore_eos: bool, first: int = 0
) -> Iterator[tuple[str, Row]]:
    """Yield (arm, ``result`` event) for every group and arm; ``first`` rotates who begins."""
    names = list(players)
    for number, group in enumerate(groups_of(cell, prompts)):
        turn = (first + number) % len(names)
        for name in names[turn:] + names[:turn]:
            yield name, players[name].play(group, cell, ignore_eos=ignore_eos)


def pooled(runs: Sequence[Results]) -> Results:
    """The results of all runs, one run behind the other."""
    return {name: [result for run in runs for result in run[name]] for name in runs[0]}


def rows_of_cell(
    runs: Sequence[Results], cell: Cell, players: Mapping[str, Player], base: str | None, *, compare: bool = True
) -> list[Row]:
    """One row per arm over all runs; ``base``: the arm without speculation. ``compare``: greedy answers must be those of it.

    After a second run rows say how far the ratio to ``base`` moved (``vs_none_difference``, larger over smaller less 1).
    """
    together = pooled(runs)
    rows = [_row(name, together, cell, players[name], base if compare else None) for name in players]
    if base is not None and len(runs) > 1:
        # One figure for all runs: a run with a steady state beside one without would count as having moved.
        field = "tok_s" if all("tok_s" in row for row in rows) else "tok_s_wall"
        ratios = [_ratios(run, field, base) for run in runs]
        for row in rows:
            found = [ratio[row["arm"]] for ratio in ratios]
            known = [ratio for ratio in found if ratio]
            if len(known) == len(found):  # else a run has no token of it, or of the base
                row |= {"vs_none_by_run": known, "vs_none_difference": max(known) / min(known) - 1}
    return rows


def _row(name: str, results: Results, cell: Cell, player: Player, plain: str | None) -> Row:
    compare = results[plain] if plain is not None and name != plain and cell.temperature == 0 else None
    where = {"arm": name, "k": player.k} | dataclasses.asdict(cell) | {"prompts": label(cell.prompts)}
    row = where | cell_row(results[name], compare)
    if player.adaptive:
        row["adaptive_verification"] = True
    if player.hold is not None:  # what it was told to do is no decision
        for key in ("timeline", "probes", "planning_ms", "expected_tok_s"):
            row.pop(key, None)
    return row


def _ratios(run: Results, field: str, base: str) -> dict[str, float | None]:
    rows = {name: cell_row(results, None) for name, results in run.items()}
    return {name: over(row, rows[base], field) for name, row in rows.items()}
