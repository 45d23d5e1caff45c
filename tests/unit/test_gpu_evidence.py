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


def test_a_piece_is_done_once_and_its_tests_are_listed(tmp_path):
    """Without a device the tests of a piece are skipped, each with its reason, and that piece is done.

    Breaks if a GPU test file cannot be collected on a CPU, outcomes are lost, or a continued run does everything again.
    """
    command = [sys.executable, str(GPU / "evidence.py"), "--out", str(tmp_path), "--parts", "tests", "--only", "full decode only"]
    options = {"capture_output": True, "text": True, "env": os.environ | {"DFLASH_COMMIT": "0123456789ab"}}
    first = subprocess.run(command, **options)
    assert first.returncode == 0, first.stdout + first.stderr
    found = json.loads((tmp_path / "gpu_tests.json").read_text())
    assert found["provenance"]["commit"] == "0123456789ab"
    assert {row["outcome"] for row in found["rows"]} == {"skipped"}
    assert all("needs a CUDA device" in row["reason"] for row in found["rows"])
    state = (tmp_path / "state.json").read_text()
    again = subprocess.run(command, **options)
    assert "start" not in again.stdout
    assert (tmp_path / "state.json").read_text() == state


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
    assert evidence.without_paths("E File /opt/a/b.py, line 3; ratio 1/2") == "E File b.py, line 3; ratio 1/2"


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
