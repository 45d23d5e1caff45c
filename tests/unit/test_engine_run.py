# SPDX-License-Identifier: Apache-2.0
"""A child process and all that it has started end together, however that comes; what ends well is given the time for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_dflash.cli import engine_run
from vllm_dflash.cli.engine_run import Child
from vllm_dflash.cli.failure import UserError

# As vLLM does: the engine core is forked, and holds what it inherited. `end`: how the child goes on.
MODULE = """
import json, os, signal, sys, time
from vllm_dflash.cli.engine_child import claim_stdout, emit, follow_parent
follow_parent()
channel = claim_stdout()
order = json.loads(sys.stdin.readline())
core = os.fork()
if core == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if order.get("tidy"):
        while not os.path.exists(order["tidy"]):
            time.sleep(0.05)
        time.sleep(0.3)
        open(order["tidy"] + ".core", "w").close()
        os._exit(0)
    time.sleep(120)
    os._exit(0)
emit(channel, "ready", pids=[os.getpid(), core])
match order["end"]:
    case "crash":
        os._exit(3)
    case "error":
        emit(channel, "error", message="no such thing", unexpected=False)
        os._exit(1)
    case "hang":
        time.sleep(120)
    case "gently":
        assert sys.stdin.readline() == ""
        time.sleep(0.5)
        open(order["tidy"], "w").close()
"""
PARENT = """
import signal, sys
from vllm_dflash.cli.engine_run import Child
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what runs in their background ignore it
sys.path.insert(0, {folder!r})
from test_engine_run import start
with start({place!r}, end="hang") as one, start({place!r}, end="hang") as two:
    print(*one.receive()["pids"], *two.receive()["pids"], flush=True)
    one.receive()
"""


def start(place, **order):
    """A child that runs `MODULE`, whose source lies in this folder."""
    Path(place, "a_child.py").write_text(MODULE)
    path = os.pathsep.join([str(place), *sys.path])
    return Child("a_child", order, os.environ | {"PYTHONPATH": path})


def running(pid):
    """Whether a process runs; one that nobody has asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids, seconds=10.0):
    """Whether all have ended within this time."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, UserError])
def test_an_exception_ends_the_child_and_what_it_started(tmp_path, error):
    """Breaks if vLLM's engine core outlives a benchmark that failed or was interrupted, and keeps the GPU's memory."""
    pids = []

    def fail():
        with start(tmp_path, end="hang") as child:
            pids.extend(child.receive()["pids"])
            assert all(map(running, pids))
            raise error

    with pytest.raises(error):
        fail()
    assert gone(pids)


def test_an_interrupt_while_closing_ends_all_the_same(tmp_path, monkeypatch):
    """Breaks if an impatient Ctrl-C leaves behind the engine that was being closed."""
    child = start(tmp_path, end="hang")
    pids = child.receive()["pids"]
    wait = child._process.wait

    def interrupted(timeout=None):
        monkeypatch.setattr(child._process, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(child._process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), child:
        pass
    assert gone(pids)


def test_a_child_that_hangs_is_not_waited_for_any_longer(tmp_path, monkeypatch):
    """Breaks if closing kills the child alone."""
    monkeypatch.setattr(engine_run, "SHUTDOWN_S", 0.2)
    with start(tmp_path, end="hang") as child:
        pids = child.receive()["pids"]
    assert gone(pids)


def test_the_obituary_of_a_child_clears_up_behind_it(tmp_path):
    """Breaks if a forked engine core keeps the channel open, so that its parent's death is never noticed, or outlives it."""
    child = start(tmp_path, end="crash")
    pids = child.receive()["pids"]
    began = time.monotonic()
    with pytest.raises(UserError, match=r"ended unexpectedly \(exit status 3\)"):
        child.receive()
    assert gone(pids)
    with pytest.raises(UserError, match="exit status 3"):
        child.send({})
    child.close()
    assert time.monotonic() - began < 10


def test_a_child_that_never_listened_is_cleared_up(tmp_path, monkeypatch):
    """Breaks if a child whose first line cannot be sent is left running: nobody has it, to close it."""
    pids = []

    def send(self, message):
        pids.append(self._process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(Child, "send", send)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, end="hang")
    assert gone(pids, 0)


def test_what_ends_by_itself_leaves_nothing_behind(tmp_path, monkeypatch):
    """Breaks if a child that closed well, or with an error of its own, leaves its engine core behind."""
    monkeypatch.setattr(engine_run, "_LAST_WORDS_S", 0.2)
    for end in ("error", "at once"):
        with start(tmp_path, end=end) as child:
            pids = child.receive()["pids"]
            if end == "error":
                with pytest.raises(UserError, match="no such thing"):
                    child.receive()
        assert gone(pids)


def test_closing_is_gentle(tmp_path):
    """Breaks if a child, or what it started, is killed while it tidies up; a log without a complaint is not kept."""
    done = tmp_path / "done"
    with start(tmp_path, end="gently", tidy=str(done)) as child:
        pids = child.receive()["pids"]
    assert done.exists()
    assert done.with_name("done.core").exists()
    assert not child._log.exists()
    assert gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_their_parent(tmp_path, number):
    """Breaks if children, which have a session of their own, outlive a parent that got Ctrl-C, or was killed with its group."""
    code = PARENT.format(folder=str(Path(__file__).parent), place=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 4
    assert all(map(running, pids))
    os.killpg(parent.pid, number)
    parent.wait(30)
    assert gone(pids)
