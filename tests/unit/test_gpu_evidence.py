# SPDX-License-Identifier: Apache-2.0
"""The scripts that gather evidence on a GPU, as far as a machine without one can tell: files, states, verdicts."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[1] / "gpu"


def load(name):
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def evidence():
    return load("evidence")


@pytest.fixture(scope="module")
def soak():
    return load("soak_demo_pair")


def test_without_a_device_a_piece_is_skipped(tmp_path):
    """Breaks if a GPU test file cannot be collected on a CPU, or a piece counts as done though no test of it ran."""
    command = [sys.executable, str(GPU / "evidence.py"), "--out", str(tmp_path), "--parts", "tests", "--only", "full decode only"]
    environment = os.environ | {"DFLASH_COMMIT": "0123456789ab", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTEST_ADDOPTS"] = "-W error::pytest.PytestUnknownMarkWarning"
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_tests.json").read_text())
    assert {row["outcome"] for row in found["rows"]} == {"skipped"}
    assert all("needs a CUDA device" in row["reason"] for row in found["rows"])
    assert found["provenance"]["states"] == {"aux, full decode only": "skipped"}


def test_a_piece_is_done_once_at_a_commit(tmp_path, evidence, monkeypatch, capsys):
    """Breaks if a continued run does everything again, or publishes (or trusts) what ran at another commit, or at none."""
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second less for each piece
    monkeypatch.setattr(evidence, "GROUPS", {name: [str(tmp_path / "test_it.py")] for name in ("first", "second")})

    def published(commit, only):
        arguments = ["evidence.py", "--out", str(tmp_path / "out"), "--parts", "tests", "--only", only, "--time-limit", "300"]
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setenv("DFLASH_COMMIT", commit)
        assert evidence.main() == 0
        groups = [row["group"] for row in json.loads((tmp_path / "out" / "gpu_tests.json").read_text())["rows"]]
        return capsys.readouterr().out.count("start "), groups

    assert published("a1", "first") == (1, ["first"])
    assert published("a1", "first") == (0, ["first"])
    assert published("b2", "second") == (1, ["second"])
    assert published("b2-dirty", "second") == (1, ["second"])
    assert published("b2-dirty", "second") == (1, ["second"])


def test_the_end_of_a_log_is_the_traceback(evidence, tmp_path):
    """Breaks if what compilers log pushes the reason of a failure out of the part of the log that is kept."""
    test = tmp_path / "test_that_fails.py"
    test.write_text(
        "import logging\n\ndef test_it():\n    log = logging.getLogger('torch.__trace')\n    log.setLevel('DEBUG')\n"
        "    for number in range(500):\n        log.debug('compiled')\n        print('a line')\n    assert 1 == 2, 'because'\n"
    )
    variables = {"PYTHONPATH": str(GPU), "DFLASH_OUTCOMES": str(tmp_path / "outcomes"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, *evidence.PYTEST, str(test)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables).stdout
    assert "AssertionError: because" in said
    assert "test_that_fails.py:9" in said
    assert "compiled" not in said
    assert "a line" not in said


def test_every_gpu_test_belongs_to_a_piece(evidence):
    """Breaks if a new test file is never run by the one command."""
    named = {argument for group in evidence.GROUPS.values() for argument in group}
    assert {f"tests/gpu/{path.name}" for path in GPU.glob("test_*.py")} <= named


def test_the_sanitizer_is_read(evidence):
    """Breaks if an error or a hazard counts as none."""
    text = "kernels: _a_kernel, _b_kernel\n44 launches of 2 kernels\n========= ERROR SUMMARY: 3 errors\n"
    assert evidence.sanitizer_figures(text) == {"errors": 3, "launches": 44, "kernels": ["_a_kernel", "_b_kernel"]}
    hazards = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    assert evidence.sanitizer_figures(hazards)["errors"] == 2
    assert evidence.sanitizer_figures("Device not supported\n")["errors"] is None


def test_no_folder_of_a_machine_is_published(evidence):
    """Breaks if a reason or a log names where files lay."""
    assert evidence.without_paths("E File /some/folder/b.py, line 3; ratio 1/2") == "E File b.py, line 3; ratio 1/2"


def blocks_of(chance):
    """(drafts, accepted) of 200 parts of 1,200 drafts of 7 tokens each; ``chance(i)`` that a token is accepted."""
    choose, tokens = random.Random(3), 1200 * 7
    return [(1200, round(tokens * p + choose.gauss(0, (tokens * p * (1 - p)) ** 0.5))) for p in map(chance, range(200))]


def test_level_acceptance_passes_and_a_drift_does_not(soak):
    """Breaks if the soak's verdict is blind to acceptance that sinks by 9 %, or finds fault with chance."""
    enough = {"steps": 15_000, "steps_wanted": 15_000}
    assert list(soak.complaints(enough | soak.level(blocks_of(lambda _: 0.2)))) == []
    sinking = soak.level(blocks_of(lambda i: 0.2 * (1 - 0.15 * i / 200)))
    assert any("not level" in complaint for complaint in soak.complaints(enough | sinking))
    early = enough | soak.level(blocks_of(lambda _: 0.2)) | {"steps": 800}
    assert list(soak.complaints(early)) == ["800 of 15000 steps in the given time"]


def test_a_test_that_ran_again_has_its_latest_outcome():
    """Breaks if a failure stands beside the success that followed it, or a row does not say which commit it is of."""
    rows = [{"group": "g", "test": name, "outcome": "failed"} for name in ("a", "b")]
    older = {"provenance": {"commit": "old", "states": {"g": "failed"}}, "rows": rows}
    newer = {"provenance": {"commit": "new", "states": {"g": "done"}}, "rows": [rows[0] | {"outcome": "passed"}]}
    found = load("merge_tests").merged(older, newer)
    assert [(row["test"], row["outcome"], row["commit"]) for row in found["rows"]] == [
        ("a", "passed", "new"),
        ("b", "failed", "old"),
    ]
    assert found["provenance"]["states"] == {"g": "done"}
    assert found["provenance"]["older"]["commit"] == "old"


def test_kernels_that_overlap_are_busy_once():
    """Breaks if time on two streams counts twice as busy, a gap as work, or rare short kernels fill the list."""
    profile = load("profile_child")
    events = [("gemm", 0.0, 100.0), ("copy", 50.0, 130.0), ("copy", 60.0, 70.0), ("gemm", 120.0, 200.0)]
    events += [("gemm", 250.0, 300.0), ("tiny", 299.0, 300.5)]
    found = profile.of_events(events, steps=2)
    assert found["busy_ms"] == pytest.approx(0.12525, abs=1e-4)  # 200 and 50.5 microseconds
    assert found["idle_ms"] == pytest.approx(0.025)
    assert found["kernels"] == {"gemm": [115.0, 1.5], "copy": [45.0, 1.0]}
