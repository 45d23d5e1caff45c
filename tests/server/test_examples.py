# SPDX-License-Identifier: Apache-2.0
"""Each example runs as its docstring says (`openai_client.py`: see test_openai_client.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*args: str) -> str:
    """Standard output of an example that must succeed."""
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_offline_llm():
    """Breaks when the plain Python API stops to draft with us, or to say what was accepted."""
    out = run(str(EXAMPLES / "offline_llm.py"))
    assert "> Name three rivers" in out
    assert float(out.rpartition("acceptance length ")[2]) > 1.3


def test_measure_cpu_writes_rows_with_provenance(tmp_path):
    """Breaks when a figure would be published without the machine, versions and command that it comes from."""
    out = tmp_path / "speed.json"
    run(str(EXAMPLES / "measure_cpu.py"), str(out), "--quick")
    found = json.loads(out.read_text())
    assert set(found["provenance"]) >= {"versions", "hardware", "command", "commit", "date"}
    assert [(row["arm"], row["batch"]) for row in found["rows"]] == [(a, b) for b in (1, 2) for a in ("none", "builtin", "ours")]
    assert all(row["tok_s"] > 0 for row in found["rows"])
    assert all((row["acceptance_length"] is None) == (row["arm"] == "none") for row in found["rows"])


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(example):
    """Breaks when an example grows beyond what a reader takes in at once."""
    assert len(example.read_text().splitlines()) <= 60
