# SPDX-License-Identifier: Apache-2.0
"""The commands `demo` and `generate` with real engines, as a user runs them, on a few tokens."""

import json
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A command line with captured output."""
    command = [sys.executable, "-m", "vllm_dflash.cli.app", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=580)


def test_the_demo_is_lossless_and_as_good_as_the_reference():
    """Breaks when a token differs, acceptance is off the reference loop's, or a key of the object is missing."""
    done = run("demo", "--json", "--prompts", "4", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lossless"] is True
    assert (found["prompts"], found["k"], found["dtype"]) == (4, 7, "float32")
    assert found["acceptance_length"] == pytest.approx(found["reference_acceptance_length"], rel=0.005)
    assert found["acceptance_length"] > 1.5
    assert found["builtin_acceptance_length"] > 1
    assert set(found["tokens_per_second"]) == {"none", "builtin", "ours"}
    assert all(speed > 0 for speed in found["tokens_per_second"].values())
    assert len(found["acceptance_per_position"]) == 7


def test_generate_streams_marked_text_and_compares():
    """Breaks when marks cover the wrong tokens, the text depends on marks, or the comparison misses a difference."""
    done = run("generate", "--compare", "--dtype", "float32", "--max-tokens", "32", "--k", "5", stdin="Count from one to ten.")
    assert done.returncode == 0, done.stderr
    assert "tokens identical: all 32" in done.stderr or re.search(r"tokens identical: all \d+", done.stderr)
    assert "[" in done.stdout
    figures = re.search(r"acceptance length (\d+\.\d+) \(K = 5: (\d+) drafts, (\d+) tokens accepted\)", done.stderr)
    assert figures, done.stderr
    assert float(figures[1]) == pytest.approx(1 + int(figures[3]) / int(figures[2]), abs=0.006)


def test_an_error_of_the_engine_is_a_sentence():
    """Breaks when what vLLM refuses ends in its traceback, or the child process is left behind."""
    done = run("generate", "Hello", "--dtype", "float33")
    assert done.returncode == 1
    assert done.stdout == ""
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("vllm-dflash: ")
    assert "float33" in line
    assert "Traceback" not in done.stderr
