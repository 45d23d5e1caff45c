# SPDX-License-Identifier: Apache-2.0
"""The table of a benchmark: speeds relative to no speculation, in one run."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_dflash.bench.figures import Row

HEADINGS = ("", "requests", "arm", "tok/s", "vs none", "ms/token", "p99", "first token ms", "step ms", "draft", "AL", "same")


def print_table(console: Console, rows: Iterable[Row]) -> None:
    """One line per arm and load; ``tok/s`` is the steady state where there is one, else the whole run."""
    table = Table(title="tokens per second while all requests decode", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("", "arm") else "right")
    for line in lines(rows):
        table.add_row(*line)
    console.print(table)


def lines(rows: Iterable[Row]) -> list[list[str]]:
    """The cells of the table, a list per row, as many as there are headings."""
    rows = list(rows)
    found = speeds(rows)
    plain = {load_of(row): speed for row, speed in zip(rows, found, strict=True) if row["arm"] == "none"}
    return [_cells(row, speed, plain.get(load_of(row))) for row, speed in zip(rows, found, strict=True)]


def load_of(row: Row) -> tuple[Any, ...]:
    """What a row shares with the other arms."""
    return row["prompts"], row["concurrency"], row["temperature"]


def speeds(rows: Sequence[Row]) -> list[float]:
    """Tokens per second of each row: the steady state where every arm of its load has one, else the whole run."""
    whole = {load_of(row) for row in rows if "tok_s" not in row}
    return [float(row["tok_s_wall"] if load_of(row) in whole else row["tok_s"]) for row in rows]


def _cells(row: Row, speed: float, plain: float | None) -> list[str]:
    draft = row.get("draft_ms")
    step = row.get("step_ms")
    return [
        f"{row['prompts'].rsplit('/', 1)[-1]}, T {row['temperature']:g}",
        str(row["concurrency"]),
        row["arm"],
        f"{speed:,.1f}",
        f"{speed / plain:.2f}x" if plain else "",
        _number(row.get("tpot_ms")),
        _number(row.get("tpot_p99_ms")),
        _number(row.get("ttft_ms"), 1),
        _number(step),
        f"{draft / step:.0%}" if draft and step else "",
        _number(row.get("acceptance_length")),
        f"{row['same_tokens']} of {row['answers']}" if "answers" in row else "",
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
