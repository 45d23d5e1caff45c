# SPDX-License-Identifier: Apache-2.0
"""Engines that start at the same time on one GPU time their passes one after the other.

vLLM's adaptive verification and our planner time passes when graphs have been captured. While others load and capture on the same
GPU these come out longer, and by another factor for each row count, so every engine waits until all have come that far, and then
takes its turn.
"""

import contextlib
import fcntl
import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_POLL_S = 0.05
_PATIENCE_S = 300.0
"""An engine that ended without a word, or one much larger than the others, is not waited for any longer."""


def takes_turn(vllm_config: Any) -> bool:
    """Whether an engine of this configuration captures graphs, and times them, in its turn.

    Model Runner V1 and eager engines have none that are timed; ranks of several workers capture together.
    """
    graphs = vllm_config.compilation_config.cudagraph_mode.name != "NONE" and not vllm_config.model_config.enforce_eager
    return bool(graphs and vllm_config.use_v2_model_runner and vllm_config.parallel_config.world_size == 1)


def capture_in_turn(folder: str, engines: int) -> None:
    """Make this process's Model Runner V2 wait before it captures graphs; call it once plugins are loaded.

    Engines of several workers do not wait: their ranks capture together. Where vLLM computes in another process it forks that
    one, as long as nobody has touched CUDA here.

    Args:
        folder: shared by all, empty at first.
        engines: how many will come.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    original = GPUModelRunner.capture_model

    @functools.wraps(original)
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("profile_only") or self.vllm_config.parallel_config.world_size > 1:
            return original(self, *args, **kwargs)
        with turn(Path(folder), engines):
            return original(self, *args, **kwargs)

    GPUModelRunner.capture_model = capture_model  # this process is a benchmark's


def arrive(folder: str) -> bool:
    """Nobody has to wait for this engine (any longer). Returns whether it had arrived before.

    What stands for an engine is the group of its processes (``engine_run.Child``): the one that asks, and vLLM's that computes.
    """
    place = Path(folder, str(os.getpgrp()))
    known = place.exists()
    place.touch()
    return known


@contextlib.contextmanager
def turn(folder: Path, engines: int) -> Iterator[None]:
    """Wait until ``engines`` processes have come here, then be the only one."""
    arrive(str(folder))
    deadline = time.monotonic() + _PATIENCE_S
    with (folder / "lock").open("w") as lock:
        while sum(entry.name != "lock" for entry in folder.iterdir()) < engines and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if time.monotonic() >= deadline:
            sys.stderr.write(
                f"not all of {engines} engines came within {_PATIENCE_S:.0f} s: passes are timed beside others' work\n"
            )
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
