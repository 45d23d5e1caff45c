# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench` with real engines, as a user runs it, on a few tokens."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_dflash.cli.app import app

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]


def bench(*args):
    """The command with captured output."""
    command = [sys.executable, "-m", "vllm_dflash.cli.app", "bench", "--dtype", "float32", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=580)


def rows_of(file):
    data = json.loads(file.read_text())
    return data, {(row["arm"], row["prompts"], row["concurrency"]): row for row in data["rows"]}


def test_arms_side_by_side(tmp_path):
    """Breaks if an arm runs something else than its name, time is not measured, a slow request ends a batch early; if a held
    width is not kept, or stays; if --also is forgotten."""
    out, other = tmp_path / "bench.json", tmp_path / "other.json"
    also = {"out": str(other), "prompts": "random", "concurrency": 1, "max_tokens": 8, "repeat_run": 1, "hold": None}
    done = bench(
        "--arms", "none", "--arm", 'ours=ours:{"engine": {"additional_config": {"vllm_dflash": {"planner": "on"}}}}',
        "--hold", "3,4", "--concurrency", "1,2", "--prompts", "code", "--max-tokens", "16,8", "--repeats", 1, "--repeat-run", 2,
        "--also", json.dumps(also), "--prompt-tokens", 9, "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data, rows = rows_of(out)
    assert set(rows) == {(arm, "code", count) for arm in ("none", "ours", "ours K=3") for count in (1, 2)}
    for (arm, _, count), row in rows.items():
        assert row["tokens"] >= 2 * count * row["max_tokens"]
        assert min(row["tok_s_wall"], row["ttft_ms"]) > 0
        assert len(row["vs_none_by_run"]) == row["repeats"] == 2
        if arm != "none":
            assert row["acceptance_length"] > 1.5
            assert row["draft_ms"] > 0
            assert (row["same_tokens"], row["answers"]) == (2 * count, 2 * count)
            assert (set(row["widths"]) == {"3"}) == (arm == "ours K=3")
    assert data["provenance"]["versions"]["vllm"]
    assert data["repeatability"]["cells"] == 4
    for text in ("vs none", "found 4; expected one of 0, 1, 2, 3, 5, 7"):
        assert text in " ".join(done.stdout.split())
    _, rows = rows_of(other)
    assert set(rows) == {(arm, "random", 1) for arm in ("none", "ours")}
    assert rows["ours", "random", 1]["temperature"] == 2
    assert rows["ours", "random", 1]["acceptance_length"] < 1.3  # greedy answers to random ids reach 4


@pytest.mark.slow
def test_a_lossy_arm_is_named_on_a_data_set_of_vllms(tmp_path):
    """Breaks if a difference that is no near tie passes as one, or vLLM's own reader of a data set is not used."""
    out, chats = tmp_path / "bench.json", tmp_path / "chats.json"
    turns = [{"value": "Name three colours of the rainbow, please."}, {"value": "Red, green and blue are three of them."}]
    chats.write_text(json.dumps([{"conversations": turns}]))
    done = bench(
        "--arms", "none", "--arm", 'lossy=none:{"engine": {"hf_overrides": {"rms_norm_eps": 0.3}}}', "--concurrency", 1,
        "--prompts", f"vllm:sharegpt:{chats},vllm:random", "--prompt-tokens", 9, "--max-tokens", 16, "--repeats", 1, "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, rows = rows_of(out)
    assert {prompts for _, prompts, _ in rows} == {"vllm:sharegpt", "vllm:random"}
    row = rows["lossy", "vllm:sharegpt", 1]
    assert row["near_ties"] < row["differences_checked"]
    assert "lossy differs where the target is sure" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--prompts", "vllm:sharegpt:/nowhere.json"], "no such file"),
        (["--prompts", "vllm:sharegpt"], "expected vllm:sharegpt:PATH"),
        (["--also", '{"prompts": "chat"}'], 'expected an object with "out"'),
        (["--hold", "9"], "found 9; expected at most K = 7"),
        (["--show", "/nowhere.json"], "not a result of `vllm-dflash bench`"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(options, sentence):
    """Breaks if a mistake is found after engines were started, or ends in a traceback."""
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 1
    assert sentence in " ".join(done.stderr.split())


def test_the_gate_closes(tmp_path):
    """Breaks if a pair that misses its limits passes: the exit code is what a pipeline sees."""
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "What is 2 + 2?", "answer": "4"}) + "\n")
    done = bench("--gate", file, "--min-accuracy", 0, "--min-acceptance", 9, "--max-tokens", 16)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 questions: accuracy" in done.stdout
    assert "expected at least 9" in done.stdout
    assert "accuracy is" not in done.stdout
