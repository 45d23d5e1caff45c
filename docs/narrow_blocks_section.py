# SPDX-License-Identifier: Apache-2.0
"""Section of docs/benchmarks.md: what narrower blocks cost in acceptance."""

from benchmark_tables import data, source, table


def narrow_blocks() -> str:
    """The section; empty while it has not been measured."""
    measured = data("narrow_blocks")
    if not measured:
        return ""
    lines = []
    for width, row in measured["results"].items():
        files = [f"{sets[width]['over_full']:.2f}" for sets in measured["by_file"].values()]
        lost = [f"{lost:.2f}" for lost in row["lost_log_odds"]]
        lines.append([f"{int(width) + 1}", f"{row['over_full']:.2f}", *files, ", ".join(lost)])
    anchors = next(iter(measured["results"].values()))["anchors"]
    rows = measured["num_speculative_tokens"] + 1
    text = (
        f"## A narrower block guesses worse\n\nDemo pair, float32, greedy answers, {anchors:,} anchors; all blocks draft behind "
        "each. Drafts accepted at the positions that a block has, over those of the same positions in a full block of "
        f"{rows} rows, together and by prompt set; and the log-odds that each position loses. The planner learns such a "
        "number for each block that it runs (`planner/narrow_blocks.py`).\n\n"
    )
    heads = ["rows", "accepted / full block", *measured["by_file"], "log-odds lost, by position"]
    return text + table(heads, lines) + "\n" + source("narrow_blocks", measured["provenance"])
