# SPDX-License-Identifier: Apache-2.0
"""From the ``result`` events of one cell to its row: speeds, latencies, acceptance; medians over repetitions with spreads."""

import bisect
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
_FULL = 0.95
"""Of a load, what has to run at a time; now and then a request has no token in a step."""
_COUNTS = ("tokens", "graph_steps", "eager_steps", "steady_steps", "jit_compiles")
_LONGEST_TIMELINE = 400
_MARGIN = 2  # steps left out at both ends of the steady state: the last prefill, and results that arrive a step late


def run_figures(result: Row) -> Row:
    """Figures of one repetition.

    ``tok_s_wall``: output tokens over the whole time, prefill included; of a batch that was kept full, the tokens that each
    answer had to have until the last had them, so that every arm spreads its prefill over as many. ``tok_s``, ``step_ms``:
    while every request decodes, ``at_a_time`` of them with tokens in a step (in the fullest where none is steady).
    ``ttft_ms``: median time to first token. ``tpot_ms``, ``tpot_p99_ms``: time per output token of a request behind its first.
    ``draft_ms``: median time of the draft step, unless workers were given other methods than a benchmark's.
    """
    ends, outputs = result["step_ends"], result["outputs"]
    tokens = sum(len(output["token_ids"]) for output in outputs)
    row: Row = {"tok_s_wall": _whole_run(result), "tokens": tokens}
    first = [ends[output["arrivals"][0]] for output in outputs if output["arrivals"]]
    row["ttft_ms"] = 1e3 * statistics.median(first)
    per_token = sorted(_time_per_token(output, ends) for output in outputs if len(output["token_ids"]) > output["steps"][0])
    if per_token:
        row |= {
            "tpot_ms": 1e3 * statistics.median(per_token),
            "tpot_p99_ms": 1e3 * per_token[math.ceil(0.99 * len(per_token)) - 1],
        }
    # A batch that was kept full ends for all at once: nothing to leave out there.
    row |= {"at_a_time": float(_most_at_a_time(outputs))}
    row |= _steady_state(ends, outputs, last_margin=0 if result.get("at_least") else _MARGIN)
    if result["drafts"]:
        row["acceptance_length"] = 1 + result["accepted"] / result["drafts"]
    for key in ("draft_ms", "graph_steps", "eager_steps", "jit_compiles"):
        if result.get(key) is not None:
            row[key] = result[key]
    return row


def _whole_run(result: Row) -> float:
    """Tokens per second of a whole run."""
    wanted, ends, outputs = result.get("at_least"), result["step_ends"], result["outputs"]
    if not wanted:
        return float(sum(len(output["token_ids"]) for output in outputs) / result["seconds"])
    last = 0
    for output in outputs:
        have = list(itertools.accumulate(output["steps"]))
        last = max(last, output["arrivals"][min(bisect.bisect_left(have, wanted), len(have) - 1)])
    return float(sum(min(wanted, len(output["token_ids"])) for output in outputs) / ends[last])


def _time_per_token(output: Row, ends: Sequence[float]) -> float:
    arrivals, steps = output["arrivals"], output["steps"]
    return float((ends[arrivals[-1]] - ends[arrivals[0]]) / (len(output["token_ids"]) - steps[0]))


def _steady_state(ends: Sequence[float], outputs: Sequence[Row], last_margin: int) -> Row:
    begin = max(output["arrivals"][0] for output in outputs) + _MARGIN
    end = min(output["arrivals"][-1] for output in outputs) - last_margin
    if end - begin < _MARGIN:
        return {}
    seconds, steps = ends[end] - ends[begin], end - begin
    arrived = [
        count
        for output in outputs
        for step, count in zip(output["arrivals"], output["steps"], strict=True)
        if begin < step <= end
    ]
    return {
        "tok_s": sum(arrived) / seconds,
        "step_ms": 1e3 * seconds / steps,
        "at_a_time": len(arrived) / steps,
        "steady_steps": steps,
    }


def _most_at_a_time(outputs: Sequence[Row]) -> int:
    """Requests with tokens in the fullest step, where none is steady: those that wait for others to end show there too."""
    return max(Counter(step for output in outputs for step in output["arrivals"]).values(), default=0)


def crowded(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each arm that did not serve the whole load at once: its figures are those of another load."""
    for row in rows:
        at_a_time = row["at_a_time"]
        if at_a_time < _FULL * row["concurrency"]:
            yield (
                f"{row['prompts']}, {row['concurrency']} at a time: {row['arm']} served {at_a_time:.0f} in a step; expected at "
                f"least {_FULL:.0%} of them. Others wait for KV cache or for room in the batch: raise kv_cache_memory_bytes, "
                "gpu_memory_utilization or max_num_seqs (--engine-args), or lower --max-tokens"
            )


def cell_row(results: Sequence[Row], plain: Sequence[Row] | None) -> Row:
    """One row from all repetitions of a cell; ``plain`` are the results without speculation on the same prompts, if there are."""
    runs = [run_figures(result) for result in results]
    row: Row = {"repeats": len(runs)}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if key in run]
        if len(values) < len(runs) and key in ("tok_s", "step_ms", "steady_steps"):
            continue  # not every repetition had a steady state: a median over the others is another figure
        if key in _COUNTS:
            row[key] = sum(values)
            continue
        if key == "tok_s":
            row["tok_s_each"] = values  # of different prompts, in the same order for every arm
        row[key] = statistics.median(values)
        row[f"{key}_spread"] = (max(values) - min(values)) / row[key] if row[key] else 0.0
    drafts = sum(result["drafts"] for result in results)
    if drafts:
        row["acceptance_length"] = 1 + sum(result["accepted"] for result in results) / drafts
        columns = zip(*(result["accepted_per_position"] for result in results), strict=True)
        row["acceptance_per_position"] = [round(sum(column) / drafts, 4) for column in columns]
    row |= _planned([result["planner"] for result in results if result.get("planner")])
    if plain is not None:
        pairs = list(zip(answers_of(results), answers_of(plain), strict=True))
        row |= {"same_tokens": sum(a == b for a, b in pairs), "answers": len(pairs)}
    return row


def over(row: Row, base: Row, field: str) -> float | None:
    """``field`` of a row over that of another arm at the same load; None where either was not measured.

    Of ``tok_s`` the median of the repetitions' quotients, where both rows have them one by one; of an even number the geometric
    mean of the middle two, so that it is the inverse of what the other arm has over this one. Repetitions have other prompts
    each, as far as there are any, whose answers may differ threefold in speed, and all arms have the same: a quotient of medians
    would often be one of different prompts.
    """
    if row.get(field) is None or not base.get(field):
        return None
    ours, others = (one.get("tok_s_each") or () for one in (row, base))
    if field == "tok_s" and len(ours) == len(others) and ours and all(ours) and all(others):
        return math.exp(statistics.median(math.log(mine / other) for mine, other in zip(ours, others, strict=True)))
    return float(row[field] / base[field])


def answers_of(results: Sequence[Row]) -> list[list[int]]:
    """All answers, as far as every arm has to have them."""
    return [output["token_ids"][: result.get("at_least")] for result in results for output in result["outputs"]]


def _planned(reports: Sequence[Row]) -> Row:
    """What the planner decided: ``widths`` (steps by draft width), ``probes``, ``planning_ms`` per step, ``timeline``.

    And what came of it: ``verified_per_step``, drafts of all requests; ``expected_tok_s``, what the plans promised over all their
    time, prompts included; ``kept``, by width the part of a promise that they reckon with in the end, where drafts are cut.
    The timeline is that of the last repetition: [step, requests, width, whether it was a probe] of each change of width.
    """
    if not reports:
        return {}
    widths: dict[str, int] = {}
    for report in reports:
        for width, count in report["widths"].items():
            widths[str(width)] = widths.get(str(width), 0) + count
    steps, timeline = sum(widths.values()), reports[-1]["timeline"][:_LONGEST_TIMELINE]
    kept = {"kept": {str(width): share for width, share in reports[-1]["kept"].items()}} if "kept" in reports[-1] else {}
    return kept | {
        "widths": widths,
        "probes": sum(report["probes"] for report in reports),
        "verified_per_step": sum(report["verified"] for report in reports) / max(1, steps),
        "expected_tok_s": statistics.mean([report["expected_rate"] for report in reports if report["expected_rate"]] or [0.0]),
        "planning_ms": 1e3 * sum(report["seconds"] for report in reports) / max(1, steps),
        "timeline": [[step - timeline[0][0], *rest] for step, *rest in timeline],
        "timeline_steps": sum(reports[-1]["widths"].values()),
    }
