# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench` with real engines, as a user runs it, on a few tokens."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]


def bench(*args):
    """The command with captured output."""
    command = [sys.executable, "-m", "vllm_dflash.cli.app", "bench", "--dtype", "float32", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=580)


def test_two_arms_side_by_side(tmp_path):
    """Breaks if an arm runs something else than its name, time is not measured, or a lossy answer is not noticed."""
    out = tmp_path / "bench.json"
    done = bench(
        "--arms", "none,ours", "--concurrency", "1,2", "--prompts", "code", "--max-tokens", 24, "--repeats", 1, "--out", out
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    rows = {(row["arm"], row["concurrency"]): row for row in data["rows"]}
    assert set(rows) == {(arm, count) for arm in ("none", "ours") for count in (1, 2)}
    for (arm, count), row in rows.items():
        assert row["tokens"] == 24 * count
        assert row["tok_s_wall"] > 0
        assert row["ttft_ms"] > 0
        if arm == "ours":
            assert row["acceptance_length"] > 1.5
            assert row["draft_ms"] > 0
            assert (row["same_tokens"], row["answers"]) == (count, count)
    assert data["provenance"]["versions"]["vllm"]
    assert "vs none" in done.stdout


def test_the_gate_closes(tmp_path):
    """Breaks if a pair that misses its limits passes: the exit code is what a pipeline sees."""
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "What is 2 + 2?", "answer": "4"}) + "\n")
    done = bench("--gate", file, "--min-accuracy", 0, "--min-acceptance", 9, "--max-tokens", 16)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 questions: accuracy" in done.stdout
    assert "expected at least 9" in done.stdout
    assert "accuracy is" not in done.stdout
