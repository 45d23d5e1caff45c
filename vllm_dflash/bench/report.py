# SPDX-License-Identifier: Apache-2.0
"""The table of a benchmark: speeds relative to no speculation, in one run."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_dflash.bench.figures import Row, over

HEADINGS = (
    "", "requests", "arm", "tok/s", "vs none", "ms/token", "p99", "first ms", "step ms", "draft", "AL", "same", "ties",
    "width of drafts",
)  # fmt: skip
"""``vs none``: see :func:`over`; ``draft``: share of the step; AL: acceptance length, "-" where drafts had several widths or
were trimmed, so that it compares with no other; same: answers without a difference to none, and ties: differences, of those
looked at, where the target had two tokens nearly alike; width of drafts: how often the planner chose it."""
_TEXTS = ("", "arm", HEADINGS[-1])
_SHOWN = 0.01  # share of the steps from which on a width is listed


def print_table(console: Console, rows: Iterable[Row]) -> None:
    """One line per arm and load; ``tok/s`` is the steady state where there is one, else the whole run."""
    rows = list(rows)
    moved = repeatability(rows)
    caption = None
    if moved:
        caption = f"second run: ratios to none moved by {moved['median']:.1%} in the middle, {moved['max']:.1%} at most"
    table = Table(
        title="tokens per second while all requests decode; vs none: the middle of the repetitions",
        title_justify="left",
        caption=caption,
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in _TEXTS else "right", no_wrap=True)
    for line in lines(rows):
        table.add_row(*line)
    console.print(table)


def repeatability(rows: Iterable[Row]) -> Row:
    """Over all loads and arms with a second run: ``cells``, and the median and largest difference of the ratios to none."""
    found = [row["vs_none_difference"] for row in rows if "vs_none_difference" in row and row["arm"] != "none"]
    return {"cells": len(found), "median": statistics.median(found), "max": max(found)} if found else {}


def width_shares(row: Row) -> str:
    """Which part of the steps drafted how many tokens, the most frequent first; empty without a planner."""
    widths = row.get("widths") or {}
    total = sum(widths.values())
    shares = sorted(((count / total, width) for width, count in widths.items()), reverse=True)
    return ", ".join(f"{width}: {share:.0%}".replace("%", " %") for share, width in shares if share >= _SHOWN)


def lines(rows: Iterable[Row]) -> list[list[str]]:
    """The cells of the table, a list per row, as many as there are headings."""
    rows = list(rows)
    return [_cells(row, speed, gain) for row, speed, gain in zip(rows, speeds(rows), speedups(rows), strict=True)]


def load_of(row: Row) -> tuple[Any, ...]:
    """What a row shares with the other arms."""
    return row["prompts"], row["concurrency"], row["temperature"]


def speeds(rows: Sequence[Row]) -> list[float]:
    """Tokens per second of each row: the steady state where every arm of its load has one, else the whole run."""
    return [float(row[field]) for row, field in zip(rows, _fields(rows), strict=True)]


def speedups(rows: Sequence[Row]) -> list[float | None]:
    """The same over those of the arm "none" (see :func:`over`); None where there is no such arm at the load."""
    plain = {load_of(row): row for row in rows if row["arm"] == "none"}
    return [over(row, plain.get(load_of(row), {}), field) for row, field in zip(rows, _fields(rows), strict=True)]


def _fields(rows: Sequence[Row]) -> list[str]:
    whole = {load_of(row) for row in rows if "tok_s" not in row}
    return ["tok_s_wall" if load_of(row) in whole else "tok_s" for row in rows]


def _cells(row: Row, speed: float, speedup: float | None) -> list[str]:
    draft = row.get("draft_ms")
    step = row.get("step_ms")
    return [
        f"{row['prompts'].rsplit('/', 1)[-1]}, T {row['temperature']:g}",
        str(row["concurrency"]),
        row["arm"],
        f"{speed:,.1f}",
        f"{speedup:.2f}x" if speedup else "",
        _number(row.get("tpot_ms")),
        _number(row.get("tpot_p99_ms")),
        _number(row.get("ttft_ms"), 1),
        _number(step),
        f"{draft / step:.0%}" if draft and step else "",
        "-" if _moves(row) else _number(row.get("acceptance_length")),
        f"{row['same_tokens']} of {row['answers']}" if "answers" in row else "",
        f"{row['near_ties']} of {row['differences_checked']}" if "near_ties" in row else "",
        width_shares(row),
    ]


def _moves(row: Row) -> bool:
    return "adaptive_verification" in row or len(row.get("widths") or {}) > 1


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
