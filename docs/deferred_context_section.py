# SPDX-License-Identifier: Apache-2.0
"""Section of docs/benchmarks.md: what it gains that the draft's context of steps without drafts waits."""

from benchmark_tables import by_arm, figure, repetitions, result, source, table, value

WAITS, AT_ONCE = "waits", "at once"


def deferred_context() -> str:
    """The section; empty while it has not been measured."""
    name = "deferred_context"
    provenance, rows = result(name)
    if not rows:
        return ""
    lines = []
    for (concurrency,), cell in sorted(by_arm(rows, "concurrency").items()):
        steps = [figure(cell, arm, "step_ms", 3) for arm in (AT_ONCE, WAITS)]
        counts = [figure(cell, WAITS, key) for key in ("deferred_rows", "catch_ups")]
        gain = value(cell, "step_ms", AT_ONCE, WAITS)
        lines.append([str(concurrency), *steps, "-" if gain is None else f"{gain:.3f}", *counts])
    model, worst = provenance["model"], max(row.get("step_ms_spread") or 0.0 for row in rows)
    text = (
        f"## Steps without drafts: context that waits\n\n{model[:1].upper()}{model[1:]}, {provenance['dtype']}; one engine, told "
        "to draft nothing. The draft's context of such steps waits, up to 32 of them or 512 rows, then it is stored in one pass; "
        "or it is stored in each step. The two take turns. Time of a step while all requests decode, medians of "
        f"{repetitions(rows)} repetitions: (max - min) / median is {worst:.1%} at worst. Counts are of all repetitions.\n\n"
    )
    head = ["requests", "step ms: at once", "waits", "at once / waits", "rows that waited", "times they were stored"]
    return text + table(head, lines) + "\n" + source(name, provenance)
