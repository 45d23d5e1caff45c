# SPDX-License-Identifier: Apache-2.0
"""Sections of docs/benchmarks.md on results of one GPU; each is empty while its result has not been measured."""

import math
import statistics
from collections.abc import Iterable

from benchmark_tables import (
    Load,
    Row,
    data,
    figure,
    loads,
    name_of,
    picture,
    ratio,
    repetitions,
    result,
    source,
    speed_field,
    table,
    value,
    without_moving_lengths,
)


def slower_than(ratios: Iterable[tuple[float | None, Load]], limit: float) -> str:
    """Loads below a limit, in words."""
    known = [(found, load) for found, load in ratios if found is not None]
    if not known:
        return "not measured"
    below = sorted(pair for pair in known if pair[0] < limit)
    return ", ".join(f"{name_of(load)} ({found:.2f})" for found, load in below) or "at no load"


def lowest(ratios: Iterable[tuple[float | None, Load]]) -> str:
    """The least of all, and its load."""
    known = [(found, load) for found, load in ratios if found is not None]
    return f"{min(known)[0]:.2f} ({name_of(min(known)[1])})" if known else "not measured"


def _length(cell: dict[str, Row], arm: str) -> str:
    return figure(cell, arm, "acceptance_length", 2)


def method(provenance: Row, rows: list[Row]) -> str:
    """What was run, and what its figures are."""
    model, span = provenance["model"], repetitions(rows)
    spoken = "one repetition" if span == "1" else f"medians of {span} repetitions"
    return (
        f"{model[:1].upper()}{model[1:]}, K = {provenance['k']}, {provenance['dtype']}; a load is prompts, temperature (T) and "
        f"requests at the same time. All arms in one run, taking turns; tokens per second while all requests decode, "
        f"{spoken}."
    )


def _moved(name: str) -> str:
    moved = data(name).get("repeatability")
    if not moved:
        return ""
    cells = loads(data(name)["rows"]).values()
    twice = sum(any("vs_none_by_run" in row for row in cell.values()) for cell in cells)
    return (
        f" {twice} of {len(cells)} loads were measured twice: ratios to no speculation moved by {moved['median']:.1%} in the "
        f"middle, {moved['max']:.1%} at most."
    )


def equality(rows: list[Row]) -> str:
    """How many greedy answers are those without speculation."""
    found = [row for row in rows if "answers" in row]
    if not found:
        return ""
    answers, same = (sum(row[key] for row in found) for key in ("answers", "same_tokens"))
    checked, ties = (sum(row.get(key, 0) for row in found) for key in ("differences_checked", "near_ties"))
    rest = f"; of {checked} differences that were looked at, {ties} are near ties of the target" if checked else ""
    return f" Greedy answers equal to those without speculation: {same:,} of {answers:,}{rest}."


def mean(ratios: Iterable[float | None]) -> float | None:
    """Geometric mean of those that were measured."""
    known = [math.log(found) for found in ratios if found]
    return math.exp(statistics.fmean(known)) if known else None


def _means(cells: dict[Load, tuple[dict[str, Row], str]]) -> str:
    """By number of requests: geometric means over prompts and temperatures, and how far those to no speculation moved."""
    bases, arms = ("none", "builtin", "adaptive"), ("builtin", "adaptive", "ours")
    lines = []
    for requests in sorted({load[2] for load in cells}):
        these = [entry for load, entry in cells.items() if load[2] == requests]
        means = [mean(value(cell, field, "ours", base) for cell, field in these) for base in bases]
        line = ["-" if mean is None else f"{mean:.2f}" for mean in means]
        for arm in arms:
            runs = [cell[arm]["vs_none_by_run"] for cell, _ in these if "vs_none_by_run" in cell.get(arm, {})]
            first, second = (mean(run[number] for run in runs) for number in (0, 1))
            line.append(f"{max(first, second) / min(first, second) - 1:.1%}" if first and second else "-")
        lines.append([str(requests), *line])
    head = ["requests", *(f"ours / {base}" for base in ("none", "built-in", "adaptive"))]
    head += [f"second run: {arm} / none moved by" for arm in ("built-in", "adaptive", "ours")]
    return table(head, lines) + "\n"


def _unsteady(cells: dict[Load, tuple[dict[str, Row], str]]) -> str:
    """How far steps of the same work lie apart at the largest load: what the host adds."""
    most = max(load[2] for load in cells)
    largest = [cell for load, (cell, _) in cells.items() if load[2] == most]
    steps = {arm: [cell.get(arm, {}).get("step_ms") or 0.0 for cell in largest] for arm in ("none", "builtin")}
    if not all(map(all, steps.values())):
        return ""
    spans = {arm: f"{min(found):.1f} to {max(found):.1f} ms" for arm, found in steps.items()}
    eager = any(cell["builtin"].get("eager_steps") for cell in largest)
    return (
        f"Where the host bounds steps, its speed decides, and varies: at {most} requests a step of the same work took "
        f"{spans['none']} without speculation, and {spans['builtin']} with the built-in"
        f"{', which drafts outside CUDA graphs there' if eager else ''}.\n\n"
    )


def side_by_side() -> str:
    """Real acceptance at the cost of an 8B model, against everything vLLM offers."""
    name = "side_by_side"
    provenance, rows = result(name)
    if not rows:
        return ""
    comparable = loads(without_moving_lengths(provenance, rows))
    cells = {load: (cell, speed_field(cell)) for load, cell in comparable.items()}
    pairs = [("builtin", "none"), ("adaptive", "none"), ("ours", "none"), ("ours", "builtin"), ("ours", "adaptive")]
    lines = []
    for load, (cell, field) in cells.items():
        ratios = [ratio(cell, field, *pair) for pair in pairs]
        lines.append([name_of(load), figure(cell, "none", field), *ratios, _length(cell, "builtin"), _length(cell, "ours")])
    head = ["load", "none tok/s", "built-in / none", "adaptive / none", "ours / none", "ours / built-in", "ours / adaptive"]
    lost = [
        (base, [(value(cell, field, "ours", base), load) for load, (cell, field) in cells.items()])
        for base in ("none", "builtin")
    ]
    text = (
        f"## Side by side\n\n{method(provenance, rows)} *Adaptive*: the built-in with `enable_adaptive_verification`. "
        f"{alike(rows)}{_moved(name).strip()}{equality(rows)} Slower than no speculation: {slower_than(lost[0][1], 1.0)}; slower "
        f"than the built-in: {slower_than(lost[1][1], 1.0)}. No acceptance length where drafts had several widths.\n\n"
    )
    drawn = picture(f"{name}_speedup", "speed-up over the number of requests")
    drawn = f"{_unsteady(cells)}Geometric means of the loads below:\n\n" + _means(cells) + drawn
    return text + drawn + table([*head, "acceptance length built-in", "ours"], lines) + "\n" + source(name, provenance)


def alike(rows: list[Row]) -> str:
    """A sentence where ours verified alike, as it did by default until lengths differed by request."""
    if any("adaptive_verification" in row for row in rows if row["arm"] == "ours"):
        return ""
    return "*Ours* verified as many drafts of each request, as `verify_lengths` equal does now. "


def left_out(provenance: Row) -> str:
    """What was measured and does not stand here, and why."""
    return f" Left out: {provenance['left_out']}." if "left_out" in provenance else ""


def shares(row: Row) -> str:
    """Parts of the steps that each width had."""
    widths = row.get("widths") or {}
    total = sum(widths.values())
    ranked = sorted(widths.items(), key=lambda item: -item[1])
    return ", ".join(f"{width}: {count / total:.0%}" for width, count in ranked if count / total >= 0.01) or "-"


def cheaper_drafter() -> str:
    """What fp8 weights and a private head cost and save on a GPU; the arm ``checkpoint`` drafts with unchanged weights."""
    name = "cheaper_drafter"
    provenance, rows = result(name)
    if not rows:
        return ""
    lines = []
    for load, cell in loads(without_moving_lengths(provenance, rows)).items():
        base = "checkpoint" if "checkpoint" in cell else "builtin"
        for arm in cell:
            if arm == "none":
                continue
            change = value(cell, "acceptance_length", arm, base)
            ratios = [ratio(cell, field, arm, "builtin") for field in ("draft_ms", "step_ms", speed_field(cell))]
            lines.append(
                [
                    name_of(load),
                    arm,
                    figure(cell, arm, "draft_ms", 2),
                    *ratios,
                    _length(cell, arm),
                    "-" if change is None else f"{100 * (change - 1):+.1f} %",
                ]
            )
    head = ["load", "arm", "draft step ms", "/ built-in", "whole step / built-in", "tok/s / built-in", "acceptance length"]
    text = f"## A cheaper draft: time\n\n{method(provenance, rows)}{equality(rows)} "
    text += "No acceptance length where drafts had several widths, or were trimmed.\n\n"
    return text + table([*head, "to unchanged weights"], lines) + "\n" + source(name, provenance)


def kernels() -> str:
    """Each kernel against plain torch and against what the device reaches."""
    name = "kernels"
    provenance, rows = result(name)
    device = next((row for row in rows if row["op"] == "device"), {})
    cells: dict[Load, dict[str, Row]] = {}
    for row in rows:
        if "us" in row:
            cells.setdefault((row["op"], row["case"]), {})[row["arm"]] = row
    if not cells:
        return ""
    lines = []
    for (op, case), cell in cells.items():
        first = cell.get("kernel") or next(iter(cell.values()))
        others = ", ".join(f"{arm} {row['us'] / first['us']:.2f}" for arm, row in cell.items() if row is not first)
        product = f"{first['of_matmul_ceiling']:.0%}" if "of_matmul_ceiling" in first else "-"
        lines.append([f"{op}, {case}", f"{first['us']:,.1f}", others or "-", f"{first['of_copy_ceiling']:.0%}", product])
    ceilings = f" ({device['copy_tb_s']:.2f} TB/s, {device['matmul_tflop_s']:.0f} TFLOP/s)" if device else ""
    text = (
        f"## Kernels\n\nMicroseconds in a CUDA graph; others as multiples of that; shares of a plain copy and of a large bf16 "
        f"product on the same device{ceilings}. Small cases find their inputs in the cache.\n\n"
    )
    head = ["kernel", "us", "others", "of copy", "of product"]
    return text + table(head, lines) + "\n" + source(name, provenance)


def soak() -> str:
    """Acceptance over thousands of steps: it has to stay level."""
    name = "soak"
    provenance, rows = result(name)
    if not rows:
        return ""
    lines = []
    for row in rows:
        tenths = " ".join(f"{length:.2f}" for length in row["acceptance_length_by_tenth"])
        counts = [f"{row['concurrency']} at a time", f"{row['steps']:,}", f"{row['requests']:,}"]
        lines.append([*counts, str(row.get("eager_steps", "-")), tenths or "-", f"{row.get('worst_sigmas', 0.0):.1f}"])
    head = ["requests", "steps", "requests in all", "draft steps without a graph", "acceptance length by tenth of the run"]
    model = provenance["model"]
    text = (
        f"## Soak\n\n{model[:1].upper()}{model[1:]}, lengths mixed, requests coming and going: acceptance has to stay level. "
        "Last column: the tenth that is furthest from all, in standard errors.\n\n"
    )
    return text + table([*head, "worst"], lines) + "\n" + source(name, provenance)


def sanitizer() -> str:
    """What NVIDIA's compute-sanitizer says of the compiled kernels."""
    name = "sanitizer"
    provenance, rows = result(name)
    if not rows:
        return ""
    lines = []
    for row in rows:
        found = ["-" if row.get(key) is None else str(row[key]) for key in ("launches", "errors")]
        lines.append([row["tool"], str(len(row.get("kernels", [])) or "-"), *found, row.get("state", "done")])
    tool = provenance.get("compute_sanitizer", "").strip()
    text = f"## Sanitizer\n\nEvery kernel on small odd shapes under NVIDIA's compute-sanitizer{f' ({tool})' if tool else ''}.\n\n"
    head = ["tool", "kernels", "launches", "errors", "state"]
    return text + table(head, lines) + "\n" + source(name, provenance)
