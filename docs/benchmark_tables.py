# SPDX-License-Identifier: Apache-2.0
"""What the sections of docs/benchmarks.md are made with: results, tables, ratios, where figures come from."""

import json
import shlex
from pathlib import Path
from typing import Any

from vllm_dflash.bench.figures import over

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]
Load = tuple[Any, ...]


def data(name: str) -> Row:
    """The content of ``results/name.json``; empty when it has not been measured."""
    path = RESULTS / f"{name}.json"
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    return found


def result(name: str) -> tuple[Row, list[Row]]:
    """Provenance and rows of ``results/name.json``; empty when it has not been measured."""
    found = data(name)
    return (found["provenance"], found["rows"]) if found else ({}, [])


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def source(name: str, provenance: Row) -> str:
    """One line saying where the figures come from."""
    known = ("vllm", "torch", "triton", "driver", "compute-sanitizer")
    versions = provenance.get("versions") or {k: provenance[k] for k in known if k in provenance}
    shown = ", ".join(f"{k} {v}" for k, v in versions.items())
    where = provenance.get("gpu") or provenance.get("hardware", "")
    where = ", ".join(map(str, where.values())) if isinstance(where, dict) else where
    return (
        f"[results/{name}.json](results/{name}.json): {where}; {shown}; `{provenance['command']}`; commit "
        f"{str(provenance['commit'])[:12]}, {provenance['date'][:10]}.\n"
    )


def picture(name: str, what: str) -> str:
    """An image beside the results, where it was drawn."""
    return f"![{what}](results/{name}.png)\n\n" if (RESULTS / f"{name}.png").exists() else ""


def by_arm(rows: list[Row], *keys: str) -> dict[Load, dict[str, Row]]:
    """Rows grouped by ``keys``, then by arm."""
    cells: dict[Load, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in keys), {})[row["arm"]] = row
    return cells


def loads(rows: list[Row]) -> dict[Load, dict[str, Row]]:
    """Rows by (prompts, temperature, requests), in the order of the run, then by arm."""
    return by_arm(rows, "prompts", "temperature", "concurrency")


def ratio(cell: dict[str, Row], field: str, arm: str, base: str) -> str:
    """``arm`` over ``base``, or a dash where either was not measured."""
    found = value(cell, field, arm, base)
    return "-" if found is None else f"{found:.2f}"


def value(cell: dict[str, Row], field: str, arm: str, base: str) -> float | None:
    """The same as a number, see :func:`over`; None where either was not measured."""
    return over(cell.get(arm, {}), cell.get(base, {}), field)


def figure(cell: dict[str, Row], arm: str, field: str, digits: int = 0) -> str:
    """A figure of an arm, or a dash where it was not measured."""
    found = cell.get(arm, {}).get(field)
    return "-" if found is None else f"{found:,.{digits}f}"


def adaptive_arms(provenance: Row) -> set[str]:
    """Arms of a benchmark that verify as many drafts as pay, as its command says."""
    settings = (part.partition("=") for part in shlex.split(provenance["command"]))
    return {name for name, _, given in settings if '"enable_adaptive_verification":true' in given.replace(" ", "")}


def without_moving_lengths(provenance: Row, rows: list[Row]) -> list[Row]:
    """Rows without ``acceptance_length`` where it covers steps of several draft widths, or trimmed drafts: not comparable."""
    trimmed = adaptive_arms(provenance)
    moving = [row["arm"] in trimmed or len(row.get("widths") or {}) > 1 for row in rows]
    return [row | {"acceptance_length": None} if moves else row for row, moves in zip(rows, moving, strict=True)]


def speed_field(cell: dict[str, Row]) -> str:
    """Steady state where every arm has one, else the whole run."""
    return "tok_s" if all("tok_s" in row for row in cell.values()) else "tok_s_wall"


def name_of(load: Load) -> str:
    """A load in words."""
    prompts, temperature, requests = load
    return f"{prompts}, T {temperature:g}, {requests}"


def repetitions(rows: list[Row]) -> str:
    """How many there were of a cell, from fewest to most."""
    least, most = min(row["repeats"] for row in rows), max(row["repeats"] for row in rows)
    return str(most) if least == most else f"{least} to {most}"


def spread(rows: list[Row]) -> str:
    """How far repetitions of a cell lie apart."""
    worst = max(row.get("tok_s_spread", 0.0) for row in rows)
    typical = sorted(row.get("tok_s_spread", 0.0) for row in rows)[len(rows) // 2]
    return f"(max - min) / median is {typical:.0%} in the middle, {worst:.0%} at worst"
