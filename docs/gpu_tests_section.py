# SPDX-License-Identifier: Apache-2.0
"""Section of docs/benchmarks.md on the tests that need a GPU."""

import ast
from pathlib import Path

from benchmark_tables import result, source, table

EVIDENCE = Path(__file__).parents[1] / "tests" / "gpu" / "evidence.py"


def gpu_tests() -> str:
    """Outcomes of the tests that need a GPU: each group, and what failed by name."""
    name = "gpu_tests"
    provenance, rows = result(name)
    if not rows:
        return ""
    outcomes = ("passed", "failed", "skipped")
    lines, states = [], provenance.get("states", {})
    for group in dict.fromkeys([*_groups(), *(row["group"] for row in rows)]):
        found = [row["outcome"] for row in rows if row["group"] == group]
        counts = [str(found.count(outcome)) if found else "-" for outcome in outcomes]
        commits = dict.fromkeys(row.get("commit", provenance["commit"])[:7] for row in rows if row["group"] == group)
        lines.append([group, *counts, states.get(group, "-" if found else "not run"), ", ".join(commits) or "-"])
    failed = [
        f"* `{row['test']}`: {' '.join(row.get('reason', '').split())[:160]}\n" for row in rows if row["outcome"] == "failed"
    ]
    told = "\nFailed:\n\n" + "".join(failed) if failed else ""
    return (
        "## Tests on a GPU\n\n" + table(["tests", *outcomes, "state", "commit"], lines) + told + "\n" + source(name, provenance)
    )


def _groups() -> list[str]:
    """Groups that tests/gpu/evidence.py knows."""
    nodes = ast.parse(EVIDENCE.read_text()).body
    found = next(node.value for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GROUPS")
    return list(ast.literal_eval(found))
