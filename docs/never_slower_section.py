# SPDX-License-Identifier: Apache-2.0
"""Section of docs/benchmarks.md: the planner and lengths by request, against no speculation, fixed widths and the built-in."""

from collections.abc import Callable

from benchmark_sections import equality, left_out, lowest, mean, method, shares, slower_than
from benchmark_tables import Load, Row, figure, loads, name_of, picture, ratio, result, source, speed_field, table, value

RESULTS = ("never_slower", "never_slower_few", "never_slower_256", "never_slower_random")
"""Loads of all arms; and of fewer arms in other runs few requests again, 256 requests, random tokens. Ratios are within a run."""
TEXT_RUNS = RESULTS[:3]
"""Those of them whose prompts are text."""
HELD = " K="
"""In the name of an arm: the planner of the arm before it keeps this draft width."""
_SPOKEN = {"none": "none", "best": "best fixed K", "builtin": "built-in", "adaptive": "adaptive", "equal": "equal"}
Found = dict[str, list[tuple[float | None, Load]]]


def never_slower() -> str:
    """The section; empty while nothing of it has been measured."""
    measured = {name: result(name) for name in RESULTS}
    measured = {name: found for name, found in measured.items() if found[1]}
    if not measured:
        return ""
    rows = [row for _, some in measured.values() for row in some]
    lines, ratios = _lines([some for _, some in measured.values()])
    how = method(next(iter(measured.values()))[0], rows)
    text = (
        f"## The planner, fixed widths and no speculation\n\n{how} *Ours*: as it comes; "
        "those drafts of the batch are verified that promise most; *equal*: as many of each request; *best fixed K*: equal, with "
        f"its planner told to keep a width, the best of them, and its ratio to none.{equality(rows)}"
        f"{''.join(left_out(origin) for origin, _ in measured.values())} Slower than no speculation: "
        f"{slower_than(ratios['none'], 1.0)}. Lowest of ours over the best fixed K {lowest(_text(ratios['best']))}; at 32 to 128 "
        f"requests over the built-in {lowest(_busy(ratios['builtin']))}, over its adaptive verification "
        f"{lowest(_busy(ratios['adaptive']))}. Random tokens are sampled at T 2, and next to none is guessed.\n\n"
        "Geometric means by number of requests, without random tokens and loads that were run again:\n\n"
    )
    drawn = picture("never_slower_speedup", "speed-up over the number of requests")
    drawn += picture("never_slower_widths", "chosen draft widths")
    head = ["load", "best fixed K", *(f"ours / {spoken}" for spoken in _SPOKEN.values())]
    head += [f"step ms: {arm}" for arm in ("none", "built-in", "equal", "ours")] + ["widths", "probes"]
    sources = "\n".join(source(name, origin) for name, (origin, _) in measured.items())
    return text + _means(ratios) + drawn + table(head, lines) + "\n" + sources


def _lines(runs: list[list[Row]]) -> tuple[list[list[str]], Found]:
    """Lines of the table by load, and the ratios of ours to each base."""
    lines: list[list[str]] = []
    ratios: Found = {key: [] for key in _SPOKEN}
    seen: set[Load] = set()
    for load, cell in (entry for rows in runs for entry in loads(rows).items()):
        field = speed_field(cell)
        held = {arm: value(cell, field, arm, "none") or 0.0 for arm in cell if HELD in arm}
        best = max(held, key=lambda arm: held[arm], default="")
        bases = {key: best if key == "best" else key for key in _SPOKEN}
        for key, base in bases.items():
            ratios[key].append((value(cell, field, "ours", base), load))
        fixed = f"{best.rpartition(HELD)[2]}: {held[best]:.2f}" if best else "-"
        steps = [figure(cell, arm, "step_ms", 1) for arm in ("none", "builtin", "equal", "ours")]
        chosen = cell.get("ours", {})
        again = ", again" if load in seen else ""
        seen.add(load)
        line = [name_of(load) + again, fixed, *(ratio(cell, field, "ours", base) for base in bases.values()), *steps]
        lines.append([*line, shares(chosen), str(chosen.get("probes", "-"))])
    return lines, ratios


def _only(wanted: Callable[[Load], bool]) -> Callable[[list[tuple[float | None, Load]]], list[tuple[float | None, Load]]]:
    return lambda entries: [entry for entry in entries if wanted(entry[1])]


_text = _only(lambda load: load[0] != "random")
_busy = _only(lambda load: load[0] != "random" and load[2] in (32, 64, 128))


def _means(ratios: Found) -> str:
    """Of a load that was run again with fewer arms, its first run: all means of a number of requests are of the same loads."""
    lines = []
    first = [dict(reversed([(load, one) for one, load in _text(entries)])) for entries in ratios.values()]
    for requests in sorted({load[2] for entries in ratios.values() for _, load in entries}):
        means = [mean(one for load, one in of.items() if load[2] == requests) for of in first]
        lines.append([str(requests), *("-" if found is None else f"{found:.3f}" for found in means)])
    return table(["requests", *(f"ours / {spoken}" for spoken in _SPOKEN.values())], lines) + "\n"
