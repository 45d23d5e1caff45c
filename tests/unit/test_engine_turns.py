# SPDX-License-Identifier: Apache-2.0
"""Engines of a benchmark that start together time their passes one after the other."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from vllm_dflash.cli import engine_turns

CHILD = """
import os, sys, time
from pathlib import Path
from vllm_dflash.cli.engine_turns import arrive, turn
folder, log, late = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
if os.fork():  # as vLLM does for its engine core
    status = os.wait()[1]
    raise SystemExit(status or not arrive(folder))
time.sleep(late)
with log.open("a") as file:
    file.write("here\\n")
with turn(folder, 3), log.open("a") as file:
    file.write("begin\\n"); file.flush()
    time.sleep(0.1)
    file.write("end\\n")
"""


def start(tmp_path, late):
    (tmp_path / "turns").mkdir(exist_ok=True)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "turns"), str(tmp_path / "log"), str(late)]
    return subprocess.Popen(command, start_new_session=True)


def test_nobody_begins_before_all_are_there_and_one_goes_at_a_time(tmp_path):
    """Breaks if an engine times its passes while another loads weights, two do at once, or an engine counts twice, for the
    process that asks it and the one that computes."""
    children = [start(tmp_path, late) for late in (0.0, 0.0, 0.6)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert (tmp_path / "log").read_text().split() == ["here"] * 3 + ["begin", "end"] * 3


def test_an_engine_that_failed_is_not_waited_for(tmp_path, monkeypatch):
    """Breaks if the arms of a benchmark hang because one of them could not start."""
    monkeypatch.setattr(engine_turns, "_PATIENCE_S", 0.3)
    began = time.monotonic()
    with engine_turns.turn(tmp_path, 2):
        assert 0.3 <= time.monotonic() - began < 5
    (tmp_path / "another").touch()
    began = time.monotonic()
    with engine_turns.turn(tmp_path, 2):
        assert time.monotonic() - began < 0.3


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"eager": True}, False), ({"mode": "NONE"}, False), ({"v2": False}, False), ({"world_size": 2}, False)],
)
def test_only_who_captures_graphs_has_a_turn(change, expected):
    """Breaks if a benchmark of eager engines, or of several workers, complains that its engines took no turn."""
    facts = {"eager": False, "mode": "FULL", "v2": True, "world_size": 1} | change
    config = SimpleNamespace(
        use_v2_model_runner=facts["v2"],
        model_config=SimpleNamespace(enforce_eager=facts["eager"]),
        parallel_config=SimpleNamespace(world_size=facts["world_size"]),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=facts["mode"])),
    )
    assert engine_turns.takes_turn(config) == expected


def test_a_runner_captures_in_its_turn(tmp_path, monkeypatch):
    """Breaks if graphs are captured before the turn, profiling waits too, or ranks of one engine wait for each other."""
    seen = []

    class GPUModelRunner:  # vLLM's module wants a toolchain; the name and the method are in the hook table
        def capture_model(self, **_):
            seen.append(sorted(entry.name for entry in tmp_path.iterdir()))

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.model_runner", SimpleNamespace(GPUModelRunner=GPUModelRunner))
    engine_turns.capture_in_turn(str(tmp_path), 1)

    def capture(world_size, **kwargs):
        runner = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=world_size)))
        GPUModelRunner.capture_model(runner, **kwargs)

    capture(1, profile_only=True)
    capture(2)
    assert seen == [[], []]
    capture(1)
    assert seen[2] == sorted([str(os.getpgrp()), "lock"])
