# SPDX-License-Identifier: Apache-2.0
"""Section of docs/benchmarks.md: what a small draft head costs in acceptance by where its rows come from."""

from benchmark_tables import data, source, table


def head_rows() -> str:
    """The section; empty while it has not been measured."""
    measured = data("head_rows_cpu")
    if not measured:
        return ""
    found = {(row["rows"], row["list"], row["temperature"]): row for row in measured["results"]}
    lines = []
    for rows, name in dict.fromkeys(key[:2] for key in found):
        pair = [found[rows, name, heat] for heat in (0.0, 0.7)]
        expected = pair[0]["expected_coverage"]
        # Of text it says how much of such text is held, which is not the question.
        cells = ["" if expected is None or name.startswith("text") else f"{expected:.1%}"]
        cells.append(" / ".join(f"{row['target_tokens_listed']:.1%}" for row in pair))
        cells += [
            " / ".join(f"{row[field]:.1f} %" for row in pair)
            for field in ("loss_percent", "loss_percent_with_tokens_of_prompt_and_output")
        ]
        lines.append([f"{rows:,}", name, *cells])
    text = (
        "## A small draft head: where its rows come from\n\nDemo pair, draft and head in float32, K = 7, temperature 0 / 0.7: "
        f"acceptance length lost against all {measured['vocabulary']:,} rows, over {measured['answers']} answers to prompts "
        "that were not counted. 10,601 rows are the share that 32,768 have of an 8B model's vocabulary. *Held*: of the target's "
        "tokens at the places that drafts reach; what is missing there is lost. *In use*: with rows of the prompt's and the "
        "answer's own tokens besides, without a limit (`draft_head_guests` gives them some).\n\n"
    )
    heads = ["rows", "list", "expected to be held", "held", "lost", "lost, with tokens in use"]
    return text + table(heads, lines) + "\n" + source("head_rows_cpu", measured["provenance"])
