# SPDX-License-Identifier: Apache-2.0
"""README and docs say what is there: links lead somewhere, commands exist, versions are the supported ones."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_dflash.cli.app import app
from vllm_dflash.hooks import SUPPORTED_VLLM

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Breaks when a file is moved and a page still points to its old place."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_commands_exist(page):
    """Breaks when a page names a command of `vllm-dflash` or a make target that is gone."""
    text = page.read_text()
    commands = {command.name for command in app.registered_commands}
    assert (
        set(re.findall(r"`vllm-dflash ([a-z]+)", text)) | set(re.findall(r"^vllm-dflash ([a-z]+)", text, re.MULTILINE))
        <= commands
    )
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_the_supported_versions_are_named():
    """Breaks when a vLLM is added to the code and not to README and changelog."""
    for name in ("README.md", "CHANGELOG.md"):
        assert ", ".join(SUPPORTED_VLLM) in (ROOT / name).read_text()


def test_the_benchmark_page_is_what_the_results_say():
    """Breaks when a figure is edited by hand, or a new result is committed without its page."""
    assert subprocess.run([sys.executable, ROOT / "docs" / "make_benchmarks.py", "--check"]).returncode == 0


ORIGIN = {
    "gpu": "NVIDIA H200",
    "versions": {"vllm": "0.33.0"},
    "command": "x",
    "commit": "y",
    "date": "2026-11-30",
    "model": "the pair",
}
ORIGIN |= {"k": 7, "dtype": "bfloat16"}


def bench_rows(speeds, **more):
    """Rows of invented results: tokens per second by (prompts, requests) and arm."""
    common = {"temperature": 0.0, "repeats": 2, "acceptance_length": 3.0, "draft_ms": 0.5, "step_ms": 6.0}
    where = {(p, c): {"prompts": p, "concurrency": c} | common | more for p, c in speeds}
    return [where[load] | {"arm": arm, "tok_s": speed} for load, arms in speeds.items() for arm, speed in arms.items()]


def test_results_that_are_yet_to_be_measured_get_their_sections(tmp_path, monkeypatch):
    """Breaks when a section divides by the wrong arm, hides where ours loses, or the README outgrows its screen."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import benchmark_tables
    import make_benchmarks

    (tmp_path / "cpu_speed.json").write_text((ROOT / "docs" / "results" / "cpu_speed.json").read_text())
    monkeypatch.setattr(benchmark_tables, "RESULTS", tmp_path)
    assert "Side by side" not in make_benchmarks.page()
    arms = {"none": 100.0, "builtin": 200.0, "adaptive": 250.0, "ours": 300.0}
    sides = bench_rows({("chat", 1): arms, ("code", 1): arms | {"ours": 90.0}, ("chat", 128): arms})
    held = {"ours K=3": 310.0, "ours K=7": 280.0}
    slower = bench_rows({("random", 256): arms | held}, widths={"3": 97, "7": 3}, probes=2)
    slower += bench_rows({("chat", 1): arms, ("code", 1): arms | {"ours": 90.0}})
    kernel = {"op": "head", "case": "1 row", "us": 10.0, "of_copy_ceiling": 0.9}
    results = {
        "side_by_side": sides,
        "never_slower": slower,
        "cheaper_drafter": bench_rows({("chat", 1): {"builtin": 100.0, "checkpoint": 104.0, "fp8": 110.0}}),
        "kernels": [kernel | {"arm": "kernel"}, kernel | {"arm": "torch", "us": 25.0}, {"op": "other", "error": "exit code 1"}],
        "soak": [{"steps": 9, "requests": 4, "concurrency": 96, "acceptance_length_by_tenth": [2.5, 2.51], "worst_sigmas": 1.23}],
        "sanitizer": [{"tool": "memcheck", "launches": 40, "errors": 0, "kernels": ["a", "b"]}, {"tool": "x", "errors": None}],
        "gpu_tests": [{"group": "kernels", "test": name, "outcome": "passed"} for name in "ab"],
    }
    for name, rows in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"provenance": ORIGIN, "rows": rows}))
    (tmp_path / "side_by_side_speedup.png").touch()
    page = make_benchmarks.page()
    for line in (
        "| chat, T 0, 128 | 100 | 2.00 | 2.50 | 3.00 | 1.50 | 1.20 | 3.00 | 3.00 |",
        "Slower than no speculation: code, T 0, 1 (0.90)",
        "](results/side_by_side_speedup.png)",
        "| random, T 0, 256 | 3: 3.10 | 3.00 | 0.97 | 1.50 | 1.20 | - | 6.0 | 6.0 | - | 6.0 | 3: 97%, 7: 3% | 2 |",
        "| chat, T 0, 1 | fp8 | 0.50 | 1.00 | 1.00 | 1.10 | 3.00 | +0.0 % |",
        "| head, 1 row | 10.0 | torch 2.50 | 90% | - |",
        "| 96 at a time | 9 | 4 | - | 2.50 2.51 | 1.2 |",
        "| memcheck | 2 | 40 | 0 | done |",
        "| kernels | 2 | 0 | 0 |",
    ):
        assert line in page
    line = "| H200, demo pair widened to 8B, K = 7, requests: 1 | 0.90 to 3.00 | 0.45 to 1.50 | 0.36 to 1.20 |"
    assert line in make_benchmarks.summary()
    (tmp_path / "never_slower.json").write_text(
        json.dumps({"provenance": ORIGIN, "rows": bench_rows({("chat", c): arms for c in (1, 8, 32, 64, 128, 256)})})
    )
    assert len(make_benchmarks.readme().splitlines()) <= 70


def test_the_options_page_is_what_the_code_says():
    """Breaks when an option is added or reworded and the page is not made again."""
    assert subprocess.run([sys.executable, ROOT / "docs" / "make_options.py", "--check"]).returncode == 0


def test_the_options_page_knows_vllms_fields():
    """Breaks when a vLLM with another speculative config is supported: its fields are given a meaning here, or left to others."""
    spec = importlib.util.find_spec("vllm")  # does not import it
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "config" / "speculative.py").read_text())
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig")
    fields = {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)}
    others = ("prompt_lookup", "suffix_", "dspark_", "xpress_", "index_share", "target_", "draft_model_config", "draft_parallel")
    meant = {field for field in fields if not field.startswith(others)}
    meant -= {"tensor_parallel_size", "use_heterogeneous_vocab", "disable_lookahead_block_hashes"}
    named = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE))
    assert meant <= named


def test_the_readme_fits_one_screen():
    """Breaks when it grows into a manual."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 70
