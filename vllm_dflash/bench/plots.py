# SPDX-License-Identifier: Apache-2.0
"""Pictures of a benchmark: speed-up over the number of requests, acceptance per position, draft widths over time."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_dflash.bench.figures import Row
from vllm_dflash.bench.report import load_of, speedups
from vllm_dflash.cli.failure import UserError


def plot_speedup(rows: Iterable[Row], path: Path) -> None:
    """Tokens per second relative to no speculation, one panel per prompt set and temperature, one line per arm.

    Raises:
        UserError: matplotlib is missing.
    """
    rows = list(rows)
    panels = list(dict.fromkeys((row["prompts"], row["temperature"]) for row in rows))
    found = {(load_of(row), row["arm"]): speedup for row, speedup in zip(rows, speedups(rows), strict=True)}
    figure, axes = _figure(len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        here = [row for row in rows if (row["prompts"], row["temperature"]) == panel]
        for arm in dict.fromkeys(row["arm"] for row in here):
            of_arm = [(row["concurrency"], found[load_of(row), arm]) for row in here if row["arm"] == arm]
            points = sorted((requests, speedup) for requests, speedup in of_arm if speedup is not None)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=arm)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set(title=f"{panel[0]}, temperature {panel[1]:g}", xlabel="requests at the same time", ylabel="speed-up")
    _save(figure, axes, path)


def plot_acceptance(rows: Iterable[Row], path: Path) -> None:
    """Share of drafts accepted up to each position, at the smallest load.

    Raises:
        UserError: matplotlib is missing.
    """
    rows = [row for row in rows if row.get("acceptance_per_position")]
    panels = list(dict.fromkeys((row["prompts"], row["temperature"]) for row in rows))
    figure, axes = _figure(max(1, len(panels)))
    for axis, panel in zip(axes, panels, strict=False):
        here = [row for row in rows if (row["prompts"], row["temperature"]) == panel]
        least = min(row["concurrency"] for row in here)
        for row in here:
            if row["concurrency"] == least:
                rates = row["acceptance_per_position"]
                axis.plot(range(1, len(rates) + 1), rates, marker="o", label=row["arm"])
        axis.set(title=f"{panel[0]}, temperature {panel[1]:g}", xlabel="position", ylabel="accepted", ylim=(0, 1))
    _save(figure, axes, path)


def plot_widths(rows: Iterable[Row], path: Path) -> bool:
    """Draft width over the steps of a repetition, one line per load; whether there is a planner's choice to draw.

    Raises:
        UserError: matplotlib is missing.
    """
    rows = [row for row in rows if row.get("timeline")]
    panels = list(dict.fromkeys((row["arm"], row["prompts"], row["temperature"]) for row in rows))
    if not panels:
        return False
    figure, axes = _figure(len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        for row in rows:
            if (row["arm"], row["prompts"], row["temperature"]) == panel:
                steps, widths = zip(*((step, width) for step, _, width, _ in row["timeline"]), strict=True)
                ends = (*steps, row["timeline_steps"]), (*widths, widths[-1])
                axis.plot(*ends, drawstyle="steps-post", label=f"{row['concurrency']} requests")
        axis.set(title=f"{panel[0]}: {panel[1]}, temperature {panel[2]:g}", xlabel="step", ylabel="drafts per request")
    _save(figure, axes, path)
    return True


def need_matplotlib() -> None:
    """Told before anything is measured.

    Raises:
        UserError: it is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401  # whether it is there
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'vllm-dflash[bench]', or leave out --plots and --html.") from None


def _figure(panels: int) -> tuple[Any, list[Any]]:
    need_matplotlib()
    from matplotlib.figure import Figure

    columns = min(3, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes[:panels]


def _save(figure: Any, axes: list[Any], path: Path) -> None:
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
