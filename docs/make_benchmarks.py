# SPDX-License-Identifier: Apache-2.0
"""Write docs/benchmarks.md and the README's table from docs/results/*.json: python docs/make_benchmarks.py [--check].

Every published figure comes from a committed result; ``--check`` fails when a page is not what the results say.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from benchmark_sections import (
    cheaper_drafter,
    kernels,
    sanitizer,
    side_by_side,
    soak,
)
from benchmark_tables import (
    by_arm,
    data,
    figure,
    loads,
    name_of,
    ratio,
    repetitions,
    result,
    source,
    speed_field,
    spread,
    table,
    value,
)
from deferred_context_section import deferred_context
from gpu_tests_section import gpu_tests
from head_rows_section import head_rows
from narrow_blocks_section import narrow_blocks
from never_slower_section import TEXT_RUNS, never_slower
from step_profile_section import step_profile

DOCS = Path(__file__).parent
PAGE = DOCS / "benchmarks.md"
README = DOCS.parent / "README.md"
BEGIN, END = "<!-- figures: docs/make_benchmarks.py -->\n", "<!-- end of figures -->\n"


def speculator() -> str:
    """The draft step and the whole engine on the shape of an 8B model."""
    provenance, rows = result("gpu_speculator")
    if not rows:
        return ""
    head = ["requests", "none tok/s", "built-in", "K fixed", "ours"]
    head += ["ours / none", "ours / built-in", "K fixed / built-in", "draft step, K fixed / built-in", "small head / built-in"]
    head += ["whole run: ours / none", "ours / built-in", "draft steps without a graph: built-in", "K fixed"]
    lines = []
    for (concurrency,), cell in sorted(by_arm(rows, "concurrency").items()):
        speeds = [figure(cell, arm, "tok_s") for arm in ("none", "builtin", "fixed", "planned")]
        eager = [figure(cell, arm, "eager_steps") for arm in ("builtin", "fixed")]
        pairs = [("planned", "none"), ("planned", "builtin"), ("fixed", "builtin")]
        ratios = [ratio(cell, "tok_s", *pair) for pair in pairs]
        drafts = [ratio(cell, "draft_ms", arm, "builtin") for arm in ("fixed", "small")]
        whole = [ratio(cell, "tok_s_wall", "planned", base) for base in ("none", "builtin")]
        lines.append([str(concurrency), *speeds, *ratios, *drafts, *whole, *eager])
    text = "## One GPU, shape of an 8B model\n\n"
    text += (
        f"{provenance.get('model', '')}, K = {provenance['k']}; ours with its defaults (fp8 draft weights and head, as they "
        "time faster at start-up). Time is real, draft quality is not judged. *K fixed* is ours with `planner` off; *small head* "
        "besides has 32,768 rows and 2,048 for tokens in use. Steady "
        f"state, arms taking turns, medians of {rows[0]['repeats']}; {spread(rows)}.\n\n"
    )
    return text + table(head, lines) + "\n" + source("gpu_speculator", provenance)


def demo_pair() -> str:
    """Real acceptance on a GPU, small model."""
    provenance, rows = result("gpu_demo_pair")
    if not rows:
        return ""
    lines = []
    for (concurrency,), cell in sorted(by_arm(rows, "concurrency").items()):
        lengths = [figure(cell, arm, "acceptance_length", 2) for arm in ("builtin", "fixed")]
        pairs = (("builtin", "none"), ("fixed", "none"), ("fixed", "builtin"), ("planned", "none"), ("planned", "fixed"))
        ratios = [ratio(cell, "tok_s", a, b) for a, b in pairs]
        steps = [figure(cell, arm, "step_ms", 1) for arm in ("none", "builtin", "fixed")]
        eager = [figure(cell, arm, "eager_steps") for arm in ("builtin", "fixed")]
        lines.append([str(concurrency), *ratios, *steps, *eager, *lengths])
    head = ["requests", "built-in / none", "ours / none", "ours / built-in", "planner on / none", "planner on / ours"]
    head += ["step ms: none", "built-in", "ours", "draft steps without a graph: built-in", "ours"]
    head += ["acceptance length built-in", "ours"]
    text = (
        f"## One GPU, the demo pair\n\n135M target, K = {provenance['k']}, bfloat16, real acceptance; its steps are bound by "
        "the host. Steady state, arms taking turns. With so small a target the planner is off unless asked for: K stays. Ours "
        "captures graphs for verifications of up to 1,024 rows. "
        f"Medians of {min(row['repeats'] for row in rows)} to {max(row['repeats'] for row in rows)}; {spread(rows)}.\n\n"
    )
    return text + table(head, lines) + "\n" + source("gpu_demo_pair", provenance)


def cpu() -> str:
    """The demo pair on a CPU."""
    provenance, rows = result("cpu_speed")
    if not rows:
        return ""
    lines = []
    for (dtype, batch, k), cell in sorted(by_arm(rows, "dtype", "batch", "k").items()):
        lengths = [figure(cell, arm, "acceptance_length", 2) for arm in ("builtin", "ours")]
        ratios = [ratio(cell, "tok_s", a, b) for a, b in (("builtin", "none"), ("ours", "none"), ("ours", "builtin"))]
        lines.append([f"{dtype}, {batch} at a time, K = {k}", *ratios, *lengths])
    head = ["", "built-in / none", "ours / none", "ours / built-in", "acceptance length built-in", "ours"]
    return (
        "## CPU, the demo pair, K fixed\n\nTokens per second, arms taking turns.\n\n"
        + table(head, lines)
        + "\n"
        + source("cpu_speed", provenance)
    )


def planner_cpu() -> str:
    """The planner on a CPU, where every row costs."""
    provenance, rows = result("planner_cpu")
    if not rows:
        return ""
    pairs = (("builtin", "none"), ("fixed", "none"), ("ours", "none"), ("ours", "fixed"))
    lines = []
    for load, cell in loads(rows).items():
        ratios = [ratio(cell, speed_field(cell), *pair) for pair in pairs]
        whole = [ratio(cell, "tok_s_wall", arm, "none") for arm in ("ours", "fixed")]
        lines.append([name_of(load), *ratios, *whole])
    head = ["load", "built-in / none", "K fixed / none", "planner / none", "planner / K fixed"]
    head += ["whole run: planner / none", "K fixed / none"]
    text = (
        f"## CPU, the demo pair and the planner\n\nK = {provenance['k']}, {provenance['dtype']}, while all requests decode; a "
        "whole run ends with its slowest answer. Arm *ours* has the planner on, which is the default of CPUs. "
        f"Medians of {repetitions(rows)}; {spread(rows)}.\n\n"
    )
    return text + table(head, lines) + "\n" + source("planner_cpu", provenance) + _planner_told_nothing()


def _planner_told_nothing() -> str:
    """The largest load once more, beside a planner that may not draft."""
    provenance, rows = result("planner_cpu_16")
    if not rows:
        return ""
    lines = []
    for load, cell in loads(rows).items():
        lines.append([name_of(load), *(ratio(cell, speed_field(cell), arm, "none") for arm in ("ours", "ours K=0"))])
    text = f"\nOnce more, beside a planner that may not draft; medians of {repetitions(rows)}, {spread(rows)}.\n\n"
    head = ["load", "planner / none", "planner that may not draft / none"]
    return text + table(head, lines) + "\n" + source("planner_cpu_16", provenance)


def cheaper_draft() -> str:
    """What smaller weights and a smaller head cost in acceptance."""
    measured = data("cheaper_drafter_cpu")
    if not measured:
        return ""
    found = measured["results"]
    heats = list(found)
    lines = [
        [name, *(f"{found[heat][name]['acceptance_length']:.2f} ({-found[heat][name]['loss_percent']:+.1f} %)" for heat in heats)]
        for name in found[heats[0]]
    ]
    head = measured["head"]
    text = (
        f"## A cheaper draft: acceptance length\n\nDemo pair, {measured['prompts']} prompts, the small head has {head['rows']:,} "
        f"of {head['of']:,} rows. By default a small head is used only where a list of counted answers promises to pay.\n\n"
    )
    return text + table(["draft", *heats], lines) + "\n" + source("cheaper_drafter_cpu", measured["provenance"])


def page() -> str:
    """The whole page."""
    parts = [
        side_by_side(),
        never_slower(),
        step_profile(),
        speculator(),
        demo_pair(),
        cheaper_drafter(),
        cheaper_draft(),
        head_rows(),
    ]
    parts += [narrow_blocks(), deferred_context(), kernels(), soak(), sanitizer(), gpu_tests()]
    parts += [planner_cpu(), cpu()]
    head = (
        "# Benchmarks\n\nMade by `docs/make_benchmarks.py` from `docs/results/`; ratios are within one run. A ratio of speeds is "
        "the median of the quotients of the two arms' repetitions, which have other prompts each as far as there are any (where "
        "a file does not keep repetitions one by one, the quotient of medians).\n"
    )
    return "\n".join([head, *filter(None, parts)])


def summary() -> str:
    """The README's table and what it means: how much faster, on a GPU and on a CPU."""
    runs = [result(name) for name in TEXT_RUNS]
    provenance = runs[0][0]
    gpu, bases, lines = provenance["gpu"].removeprefix("NVIDIA "), ("none", "builtin", "adaptive"), []
    every = [(load, cell) for _, rows in runs for load, cell in loads(rows).items()]
    for requests in sorted({load[2] for load, _ in every}):
        cells = [cell for load, cell in every if load[2] == requests]
        ranges = [_range(value(cell, speed_field(cell), "ours", base) for cell in cells) for base in bases]
        lines.append([f"{gpu}, demo pair widened to 8B, K = {provenance['k']}, requests: {requests}", *ranges])
    lines += [[*line, "-"] for line in _cpu_lines()]
    head = ["tokens per second of ours, over", "no speculation", "vLLM's own DFlash", "with adaptive verification"]
    sets = ", ".join(dict.fromkeys(load[0] for load, _ in every))
    text = f"Temperature 0, lowest and highest of {sets}, on CPUs of three kinds. [All figures](docs/benchmarks.md).\n"
    return table(head, lines) + "\n" + text


def _cpu_lines() -> list[list[str]]:
    """The largest load, and all others together."""
    provenance, rows = result("planner_cpu")
    counts, lines = sorted({row["concurrency"] for row in rows}), []
    for part in filter(None, (counts[:-1], counts[-1:])):
        cells = [cell for load, cell in loads(rows).items() if load[2] in part]
        ranges = [_range(value(cell, speed_field(cell), "ours", base) for cell in cells) for base in ("none", "builtin")]
        named = f"CPU, demo pair, {provenance['dtype']}, K = {provenance['k']}, requests: {', '.join(map(str, part))}"
        lines.append([named, *ranges])
    return lines


def _range(ratios: Iterable[float | None]) -> str:
    known = [one for one in ratios if one is not None]
    return f"{min(known):.2f} to {max(known):.2f}" if known else "-"


def readme() -> str:
    """The README with its table renewed."""
    text = README.read_text()
    return text[: text.index(BEGIN) + len(BEGIN)] + summary() + text[text.index(END) :]


if __name__ == "__main__":
    pages = {PAGE: page(), README: readme()}
    if "--check" in sys.argv:
        stale = [path.name for path, text in pages.items() if path.read_text() != text]
        sys.exit(f"{', '.join(stale)}: not what docs/results says; run docs/make_benchmarks.py" if stale else None)
    for path, text in pages.items():
        path.write_text(text)
