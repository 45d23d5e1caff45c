# SPDX-License-Identifier: Apache-2.0
"""What docs/benchmarks.md says of results that are not complete: arms, repetitions, groups of tests that are missing."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORIGIN = {"gpu": "NVIDIA H200", "versions": {"vllm": "0.33.0"}, "commit": "y", "date": "2026-11-30", "model": "the pair"}
ORIGIN |= {
    "k": 7,
    "steps": 40,
    "dtype": "bfloat16",
    "command": """bench --arm 'trimmed=ours:{"speculative":{"enable_adaptive_verification":true}}'""",
}


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """``put(name, rows, **more)`` writes a result; ``make()`` is the module that makes the page of those."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import benchmark_tables
    import make_benchmarks

    monkeypatch.setattr(benchmark_tables, "RESULTS", tmp_path)

    def put(name, rows, **more):
        (tmp_path / f"{name}.json").write_text(json.dumps({"provenance": ORIGIN, "rows": rows} | more))

    return put, make_benchmarks


def row(arm, requests=1, speed=100.0, **more):
    common = {"prompts": "chat", "temperature": 0.0, "repeats": 1, "acceptance_length": 3.0, "draft_ms": 0.5, "step_ms": 6.0}
    return common | {"arm": arm, "concurrency": requests, "tok_s": speed} | more


@pytest.mark.parametrize("arm", ["none", "builtin", "adaptive", "ours", "fixed", "trimmed", "equal"])
@pytest.mark.parametrize("with_it", [True, False])
def test_an_arm_that_is_missing_is_a_dash(pages, arm, with_it):
    """Breaks if a result of fewer arms ends in a traceback, or says of what was not measured that it never loses."""
    put, make = pages
    arms = {"none", "builtin", "adaptive", "ours", "fixed", "planned", "trimmed", "equal"}
    rows = [row(name) for name in sorted({arm} if with_it else arms - {arm})]
    for name in ("side_by_side", "never_slower", "gpu_speculator", "gpu_demo_pair", "cheaper_drafter"):
        put(name, rows)
    put("cpu_speed", [each | {"batch": 1} for each in [row(arm, dtype="float32", k=3)]])
    page = make.page()
    assert make.summary()
    measured = {row["arm"] for row in rows} >= {"ours", "none"}
    assert ("Slower than no speculation: not measured" in page) == (not measured)


def test_what_was_measured_twice_is_counted(pages):
    """Breaks if one load that was measured twice stands for all of them."""
    put, make = pages
    again, moved = {"vs_none_by_run": [1.0, 1.1], "repeats": 6}, {"cells": 1, "median": 0.1, "max": 0.1}
    put("side_by_side", [row("none", 1), row("ours", 1, **again), row("none", 8), row("ours", 8)], repeatability=moved)
    page = make.page()
    assert "1 of 2 loads were measured twice" in page
    assert "medians of 1 to 6 repetitions" in page


def test_means_are_over_the_loads_of_a_number_of_requests(pages):
    """Breaks if 2 times and half as fast are not 1 in the mean, or the mean of a run is compared with another run's."""
    put, make = pages
    chat = [row("none", 8), row("ours", 8, 200.0, vs_none_by_run=[2.0, 1.0])]
    code = [row(arm, 8, speed, prompts="code", **more) for arm, speed, more in (("none", 100.0, {}), ("ours", 50.0, {}))]
    put("side_by_side", [*chat, *code])
    assert "| 8 | 1.00 | - | - | - | - | 100.0% |" in make.page()


def test_means_of_the_planner_leave_random_tokens_out(pages):
    """Breaks if text that nothing is accepted of drags a mean down, or the best fixed width is not the one compared with."""
    put, make = pages
    rows = []
    for prompts, ours in (("chat", 200.0), ("code", 50.0), ("random", 10.0)):
        speeds = {"none": 100.0, "ours": ours, "ours K=3": 2 * ours, "ours K=7": ours, "builtin": ours}
        rows += [row(arm, 8, speed, prompts=prompts) for arm, speed in speeds.items()]
    put("never_slower", rows)
    assert "| 8 | 1.000 | 0.500 | 1.000 | - |" in make.page()


def test_loads_of_the_planner_that_were_run_apart_stand_in_one_table(pages):
    """Breaks if loads of the second run are left out, or lose to the first run's arms, or say not where they come from; or
    if a run again of some arms counts in their means alone."""
    put, make = pages
    put("never_slower_random", [row("none", 256, prompts="random"), row("ours", 256, 90.0, prompts="random")])
    assert "| random, T 0, 256 | - | 0.90 |" in make.page()
    put("never_slower", [row("none", 8), row("ours", 8, 200.0), row("equal", 8, 160.0)])
    put("never_slower_256", [row("none", 256, 400.0), row("ours", 256, 500.0)])
    put("never_slower_few", [row("none", 8, 50.0), row("ours", 8, 25.0)])  # of another machine's speed, say
    page = make.page()
    for line in (
        "| 8 | 2.000 | - | - | - | 1.250 |",
        "| 256 | 1.250 |",
        "random, T 0, 256 (0.90)",
        "| chat, T 0, 8, again | - | 0.50 |",
    ):
        assert line in page
    names = ("never_slower", "never_slower_few", "never_slower_256", "never_slower_random")
    assert all(f"[results/{name}.json]" in page for name in names)


def test_lengths_of_several_widths_are_not_compared(pages):
    """Breaks if an arm that drafts where it pays looks as if its drafts were worse."""
    put, make = pages
    put("cheaper_drafter", [row("builtin"), row("checkpoint"), row("trimmed"), row("planned", widths={"3": 1, "7": 9})])
    page = make.page()
    for line in ("| checkpoint | 0.50 | 1.00 | 1.00 | 1.00 | 3.00 | +0.0 % |", "| trimmed | 0.50 | 1.00 | 1.00 | 1.00 | - | - |"):
        assert line in page
    assert "| planned | 0.50 | 1.00 | 1.00 | 1.00 | - | - |" in page


def test_a_step_whose_context_waits_is_compared_with_its_own_load(pages):
    """Breaks if a gain is that of another load, is upside down, or a load of one arm ends in a traceback."""
    put, make = pages
    steps = {1: (5.0, 5.5), 32: (8.0, 8.04), 8: (6.0, None)}
    rows = [
        row(arm, requests, step_ms=taken, step_ms_spread=0.004, repeats=4, deferred_rows=640 * waits, catch_ups=20 * waits)
        for requests, pair in steps.items()
        for arm, taken, waits in zip(("waits", "at once"), pair, (requests, 0), strict=True)
    ]
    assert "context that waits" not in make.page()
    put("deferred_context", rows[:-1])
    page = make.page()
    for line in (
        "| 1 | 5.500 | 5.000 | 1.100 | 640 | 20 |",
        "| 8 | - | 6.000 | - | 5,120 | 160 |",
        "| 32 | 8.040 | 8.000 | 1.005 | 20,480 | 640 |",
        "medians of 4 repetitions",
        "0.4% at worst",
    ):
        assert line in page


def test_failed_tests_are_named_and_groups_that_did_not_run_too(pages):
    """Breaks if a group that never ran is left out, or a failure is a number."""
    put, make = pages
    rows = [{"group": "kernels", "test": f"a.py::{name}", "outcome": name, "reason": "so it is"} for name in ("passed", "failed")]
    put("gpu_tests", rows)
    page = make.page()
    for line in ("| kernels | 1 | 1 | 0 | - | y |", "| speculator | - | - | - | not run | - |", "* `a.py::failed`: so it is\n"):
        assert line in page
    assert "a.py::passed" not in page


def test_a_step_shows_the_kernels_that_make_the_difference(pages):
    """Breaks if the profile of a step lists what every arm runs before what only one does, or needs a GPU's kernels."""
    put, make = pages
    same = {f"gemm_{number}": [900.0 + number, 1.0] for number in range(20)}
    kernels = {"none": same, "ours": same | {"context": [77.0, 2.0]}}
    rows = [
        {"arm": arm, "concurrency": 256, "width": 0, "step_ms": 9.1, "busy_ms": 8.6, "idle_ms": 0.4, "kernels": kernels[arm]}
        for arm in kernels
    ]
    bare = {"arm": "none", "concurrency": 8, "width": 7, "step_ms": 4.9}
    put("step_profile", [*rows, bare])
    page = make.page()
    assert page.index("| `context` | - | 77 |") < page.index("| `gemm_")
    assert "| 8, 7 | none | 4.90 | - | - |" in page
