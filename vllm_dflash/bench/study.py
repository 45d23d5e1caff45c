# SPDX-License-Identifier: Apache-2.0
"""One list of loads on engines that run: measured, written after each load, shown, drawn."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_dflash.bench.figures import Row, crowded
from vllm_dflash.bench.loads import Cell
from vllm_dflash.bench.page import write_page
from vllm_dflash.bench.plots import plot_acceptance, plot_speedup, plot_widths
from vllm_dflash.bench.prompts import label
from vllm_dflash.bench.record import save
from vllm_dflash.bench.report import print_table, repeatability
from vllm_dflash.bench.rounds import Player, Results, groups_of, pooled, rows_of_cell, run_cell
from vllm_dflash.bench.ties import complaints, judged

WARM_UP_TOKENS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Where a list of loads goes."""

    out: Path
    plots: Path | None = None
    page: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Study:
    """One list of loads.

    Attributes:
        cells: the loads.
        sets: prompts (text, or lists of token ids) by the name of their set.
        ignore_eos: answers go on behind their ends, and every batch stays full.
        runs: how often the whole list is measured.
        hold: draft widths that a planner is told to keep, an arm each.
        compare: greedy answers must be those without speculation. Synthetic acceptance takes drafts unseen.
        output: file, pictures, page.
        origin: provenance.
        deadline: no load begins after this ``time.monotonic()``.
    """

    cells: Sequence[Cell]
    sets: Mapping[str, Sequence[Any]]
    ignore_eos: bool
    runs: int
    hold: Sequence[int]
    compare: bool
    output: Output
    origin: Row
    deadline: float = math.inf


def warm_up(players: Mapping[str, Player], study: Study, done: set[tuple[str, int, bool]]) -> None:
    """Every load of every arm once, greedy and sampled: no kernel is compiled and no cache is filled in a measured run.

    ``done``: what earlier studies have warmed up; completed here.
    """
    loads = {(cell.concurrency, cell.temperature > 0): cell for cell in study.cells}
    if time.monotonic() > study.deadline:
        return
    for name, player in players.items():
        for (count, sampled), cell in sorted(loads.items(), key=lambda item: item[0]):
            if (name, count, sampled) not in done:
                prompts = groups_of(dataclasses.replace(cell, repeats=1), study.sets[cell.prompts])[0]
                player.play(prompts, dataclasses.replace(cell, max_tokens=WARM_UP_TOKENS), ignore_eos=True)
                done.add((name, count, sampled))


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What came out of a study so far: results by load, one entry per run, and the rows that follow from them."""

    study: Study
    players: Mapping[str, Player]
    runs: dict[Cell, list[Results]] = dataclasses.field(default_factory=dict)
    rows: dict[Cell, list[Row]] = dataclasses.field(default_factory=dict)

    @property
    def base(self) -> str | None:
        """The arm without speculation, which ratios are to and whose greedy answers others repeat; None where there is none."""
        return next((name for name, player in self.players.items() if player.engine.spec.arm == "none"), None)

    @property
    def all_rows(self) -> list[Row]:
        """The rows of all loads."""
        return [row for some in self.rows.values() for row in some]

    def take(self, cell: Cell, results: Results) -> None:
        """One more run of a load; the file is complete up to here."""
        self.runs.setdefault(cell, []).append(results)
        self.rows[cell] = rows_of_cell(self.runs[cell], cell, self.players, self.base, compare=self.study.compare)
        self.save()

    def save(self) -> None:
        """Write the file."""
        rows = self.all_rows
        save(self.study.output.out, rows, self.study.origin, repeatability(rows))


def measure(done: Measured, console: Console) -> None:
    """One more run over all loads, unless the time is over."""
    study, players = done.study, done.players
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    begun = len(done.runs.get(study.cells[0], []))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=sum(cell.repeats for cell in study.cells) * len(players))
        for number, cell in enumerate(study.cells):
            if time.monotonic() > study.deadline:
                left = len(study.cells) - number
                console.print(
                    f"{study.output.out}: {left} loads left out, as --stop-after wants", style="yellow", highlight=False
                )
                return
            bar.update(task, description=f"{label(cell.prompts)}, {cell.concurrency} at a time, T {cell.temperature:g}")
            found: Results = {name: [] for name in players}
            prompts = study.sets[cell.prompts]
            for name, result in run_cell(players, cell, prompts, ignore_eos=study.ignore_eos, first=number + begun):
                found[name].append(result)
                bar.advance(task)
            done.take(cell, found)
            for sentence in crowded(done.rows[cell]):
                console.print(f"✗ {sentence}", style="bold red", highlight=False)


def judge(done: Measured, console: Console) -> None:
    """Look at where greedy answers differ; when everything is measured, as log probabilities take another path in vLLM."""
    if done.base is None or not done.study.compare:
        return
    engine = done.players[done.base].engine
    for cell, rows in done.rows.items():
        if cell.temperature == 0:
            runs = done.runs[cell]
            judged(rows, groups_of(cell, done.study.sets[cell.prompts]) * len(runs), pooled(runs), done.base, engine)
    done.save()
    for complaint in complaints(done.all_rows):
        console.print(f"✗ {complaint}", style="bold red", highlight=False)


def show(rows: list[Row], origin: Row, output: Output, console: Console) -> None:
    """Table, pictures (named after the result file) and page."""
    print_table(console, rows)
    if output.plots is not None:
        output.plots.mkdir(parents=True, exist_ok=True)
        for name, draw in (("speedup", plot_speedup), ("acceptance", plot_acceptance), ("widths", plot_widths)):
            draw(rows, output.plots / f"{output.out.stem}_{name}.png")
    if output.page is not None:
        write_page(output.page, rows, origin)
