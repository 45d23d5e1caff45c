# SPDX-License-Identifier: Apache-2.0
"""Section of docs/benchmarks.md: where the time of a decoding step goes on the GPU."""

from benchmark_tables import Row, by_arm, figure, result, source, table

SHOWN = 10
"""Kernels of a load, those whose time differs the most between arms."""


def step_profile() -> str:
    """The section; empty while it has not been measured."""
    provenance, rows = result("step_profile")
    if not rows:
        return ""
    cells = by_arm(rows, "concurrency", "width")
    lines = [
        [f"{requests}, {width}", arm, *(figure(cell, arm, key, 2) for key in ("step_ms", "busy_ms", "idle_ms"))]
        for (requests, width), cell in cells.items()
        for arm in cell
    ]
    model = provenance["model"]
    text = (
        f"## Where the time of a step goes\n\n{model[:1].upper()}{model[1:]}, {provenance['dtype']}; engines in one process, "
        "whose steps wait for the output's processing too. A load is requests and the width that the planner keeps (other arms "
        "draft K, or none). *Busy* and *idle* are under a profiler, which slows the host down; means of "
        f"{provenance['steps']} steps.\n\n"
    )
    text += table(["load", "arm", "step ms", "GPU busy ms", "GPU idle ms"], lines) + "\n"
    for (requests, width), cell in cells.items():
        if found := _differences(cell):
            arms = [arm for arm in cell if "kernels" in cell[arm]]
            text += f"{requests} requests, width {width}: microseconds a step of the kernels that differ the most.\n\n"
            text += table(["kernel", *arms], found) + "\n"
    return text + source("step_profile", provenance)


def _differences(cell: dict[str, Row]) -> list[list[str]]:
    """Lines of kernels by how far the arms lie apart."""
    kernels = [row["kernels"] for row in cell.values() if "kernels" in row]
    if len(kernels) < 2:
        return []
    times = {name: [found.get(name, (0.0, 0))[0] for found in kernels] for name in dict.fromkeys(k for of in kernels for k in of)}
    apart = sorted(times, key=lambda name: min(times[name]) - max(times[name]))
    return [[f"`{name[:60]}`", *(f"{one:.0f}" if one else "-" for one in times[name])] for name in apart[:SHOWN]]
