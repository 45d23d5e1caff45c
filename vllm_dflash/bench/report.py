# SPDX-License-Identifier: Apache-2.0
"""The table of a benchmark: speeds relative to no speculation, in one run."""

from collections.abc import Iterable

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
    plain = {_load(row): speed(row) for row in rows if row["arm"] == "none"}
    return [_cells(row, plain.get(_load(row))) for row in rows]


def _load(row: Row) -> tuple[object, ...]:
    return row["prompts"], row["concurrency"], row["temperature"]


def speed(row: Row) -> float:
    """Tokens per second of a row."""
    return float(row["tok_s"] if "tok_s" in row else row["tok_s_wall"])


def _cells(row: Row, plain: float | None) -> list[str]:
    draft = row.get("draft_ms")
    step = row.get("step_ms")
    return [
        f"{row['prompts'].rsplit('/', 1)[-1]}, T {row['temperature']:g}",
        str(row["concurrency"]),
        row["arm"],
        f"{speed(row):,.1f}",
        f"{speed(row) / plain:.2f}x" if plain else "",
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
