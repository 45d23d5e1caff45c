# SPDX-License-Identifier: Apache-2.0
"""Write docs/benchmarks.md and the README's table from docs/results/*.json: python docs/make_benchmarks.py [--check].

Every published figure comes from a committed result; ``--check`` fails when a page is not what the results say.
"""

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "benchmarks.md"
README = DOCS.parent / "README.md"
BEGIN, END = "<!-- figures: docs/make_benchmarks.py -->\n", "<!-- end of figures -->\n"

Row = dict[str, Any]


def result(name: str) -> tuple[Row, list[Row]]:
    """Provenance and rows of ``results/name.json``; empty when it has not been measured."""
    path = DOCS / "results" / f"{name}.json"
    if not path.exists():
        return {}, []
    data = json.loads(path.read_text())
    return data["provenance"], data["rows"]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def source(name: str, provenance: Row) -> str:
    """One line saying where the figures come from."""
    versions = provenance.get("versions") or {k: provenance[k] for k in ("vllm", "torch", "triton") if k in provenance}
    shown = ", ".join(f"{k} {v}" for k, v in versions.items())
    where = provenance.get("gpu") or provenance.get("hardware", "")
    where = ", ".join(map(str, where.values())) if isinstance(where, dict) else where
    return (
        f"[results/{name}.json](results/{name}.json): {where}; {shown}; `{provenance['command']}`; commit "
        f"{str(provenance['commit'])[:12]}, {provenance['date'][:10]}.\n"
    )


def by_arm(rows: list[Row], *keys: str) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows grouped by ``keys``, then by arm."""
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in keys), {})[row["arm"]] = row
    return cells


def ratio(cell: dict[str, Row], field: str, arm: str, base: str) -> str:
    """``arm`` over ``base``, or a dash where either was not measured."""
    if field not in cell.get(arm, {}) or field not in cell.get(base, {}):
        return "-"
    return f"{cell[arm][field] / cell[base][field]:.2f}"


def spread(rows: list[Row]) -> str:
    """How far repetitions of a cell lie apart."""
    worst = max(row.get("tok_s_spread", 0.0) for row in rows)
    typical = sorted(row.get("tok_s_spread", 0.0) for row in rows)[len(rows) // 2]
    return f"(max - min) / median is {typical:.0%} in the middle, {worst:.0%} at worst"


def speculator() -> str:
    """The draft step and the whole engine on the shape of an 8B model."""
    provenance, rows = result("gpu_speculator")
    if not rows:
        return ""
    head = ["requests", "none tok/s", "built-in", "K fixed", "ours"]
    head += ["ours / none", "ours / built-in", "K fixed / built-in", "draft step, K fixed / built-in"]
    head += ["whole run: ours / none", "ours / built-in", "draft steps without a graph: built-in", "K fixed"]
    lines = []
    for (concurrency,), cell in sorted(by_arm(rows, "concurrency").items()):
        speeds = [f"{cell[arm]['tok_s']:,.0f}" for arm in ("none", "builtin", "ours", "planned")]
        eager = [str(cell[arm]["eager_steps"]) for arm in ("builtin", "ours")]
        pairs = [("planned", "none"), ("planned", "builtin"), ("ours", "builtin")]
        ratios = [ratio(cell, "tok_s", *pair) for pair in pairs]
        whole = [ratio(cell, "tok_s_wall", "planned", base) for base in ("none", "builtin")]
        lines.append([str(concurrency), *speeds, *ratios, ratio(cell, "draft_ms", "ours", "builtin"), *whole, *eager])
    text = "## One GPU, shape of an 8B model\n\n"
    text += (
        f"{provenance.get('model', '')}, K = {provenance['k']}; ours with its defaults (fp8 draft weights and head, as they "
        "time faster at start-up). Time is real, draft quality is not judged. *K fixed* is ours with `planner` off. Steady "
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
        lengths = [f"{cell[arm]['acceptance_length']:.2f}" if arm in cell else "-" for arm in ("builtin", "ours")]
        pairs = (("builtin", "none"), ("ours", "none"), ("ours", "builtin"), ("planned", "none"))
        ratios = [ratio(cell, "tok_s", a, b) for a, b in pairs]
        whole = [ratio(cell, "tok_s_wall", "ours", base) for base in ("none", "builtin")]
        lines.append([str(concurrency), *ratios, *whole, *lengths])
    head = ["requests", "built-in / none", "ours / none", "ours / built-in", "planner on / none"]
    head += ["whole run: ours / none", "ours / built-in", "acceptance length built-in", "ours"]
    text = (
        f"## One GPU, the demo pair\n\n135M target, K = {provenance['k']}, bfloat16, real acceptance; its steps are bound by "
        "the host. Steady state, arms taking turns. With so small a target the planner is off unless asked for: here is why. "
        f"Medians of {rows[0]['repeats']}; {spread(rows)}. At the commit below `auto` planned for every target; today that arm "
        'needs `"planner": "on"`.\n\n'
    )
    return text + table(head, lines) + "\n" + source("gpu_demo_pair", provenance)


def cpu() -> str:
    """The demo pair on a CPU."""
    provenance, rows = result("cpu_speed")
    if not rows:
        return ""
    lines = []
    for (dtype, batch, k), cell in sorted(by_arm(rows, "dtype", "batch", "k").items()):
        lengths = [f"{cell[arm]['acceptance_length']:.2f}" for arm in ("builtin", "ours")]
        ratios = [ratio(cell, "tok_s", a, b) for a, b in (("builtin", "none"), ("ours", "none"), ("ours", "builtin"))]
        lines.append([f"{dtype}, {batch} at a time, K = {k}", *ratios, *lengths])
    head = ["", "built-in / none", "ours / none", "ours / built-in", "acceptance length built-in", "ours"]
    return (
        "## CPU, the demo pair\n\nTokens per second, arms taking turns.\n\n"
        + table(head, lines)
        + "\n"
        + source("cpu_speed", provenance)
    )


def cheaper_draft() -> str:
    """What smaller weights and a smaller head cost in acceptance."""
    path = DOCS / "results" / "cheaper_drafter_cpu.json"
    if not path.exists():
        return ""
    data = json.loads(path.read_text())
    found = data["results"]
    heats = list(found)
    lines = [
        [name, *(f"{found[heat][name]['acceptance_length']:.2f} ({-found[heat][name]['loss_percent']:+.1f} %)" for heat in heats)]
        for name in found[heats[0]]
    ]
    head = data["head"]
    text = (
        f"## A cheaper draft: acceptance length\n\nDemo pair, {data['prompts']} prompts, the small head has {head['rows']:,} of "
        f"{head['of']:,} rows. By default a small head is used only where a calibrated list lies beside the draft.\n\n"
    )
    return text + table(["draft", *heats], lines) + "\n" + source("cheaper_drafter_cpu", data["provenance"])


def page() -> str:
    """The whole page."""
    parts = [speculator(), demo_pair(), cheaper_draft(), cpu()]
    head = "# Benchmarks\n\nMade by `docs/make_benchmarks.py` from `docs/results/`; ratios are within one run.\n"
    return "\n".join([head, *filter(None, parts)])


def summary() -> str:
    """The README's table: how much faster, on a GPU and on a CPU."""
    lines = []
    gpu = [row for row in result("gpu_speculator")[1] if row["concurrency"] in (1, 8, 32, 128)]
    for (concurrency,), cell in sorted(by_arm(gpu, "concurrency").items()):
        ratios = [ratio(cell, "tok_s", "planned", base) for base in ("none", "builtin")]
        lines.append([f"H200, 8B shape, K = 15, requests: {concurrency}", *ratios])
    small = [row for row in result("gpu_demo_pair")[1] if row["concurrency"] == 128]
    for (concurrency,), cell in sorted(by_arm(small, "concurrency").items()):
        ratios = [ratio(cell, "tok_s", "ours", base) for base in ("none", "builtin")]
        lines.append([f"H200, demo pair (135M), K = 7, requests: {concurrency}", *ratios])
    cells = by_arm(result("cpu_speed")[1], "dtype", "batch", "k")
    ordered = sorted(cells, key=lambda at: cells[at]["ours"]["tok_s"] / cells[at]["none"]["tok_s"])
    for dtype, batch, k in (ordered[-1], ordered[0]):  # the best and the worst
        ratios = [ratio(cells[dtype, batch, k], "tok_s", "ours", base) for base in ("none", "builtin")]
        lines.append([f"CPU, demo pair, {dtype}, K = {k}, requests: {batch}", *ratios])
    head = "tokens per second of ours (GPU: while all requests decode; CPU: whole run), over"
    return table([head, "no speculation", "vLLM's own DFlash"], lines)


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
