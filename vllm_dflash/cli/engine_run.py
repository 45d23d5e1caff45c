# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: without speculation, with vLLM's own DFlash, or with ours.

The kill switch and model registrations last as long as a process, so three arms need three processes. They can live side by
side, and only the one that was asked computes:

    with Engine(EngineSpec(arm="ours", ...)) as engine:
        engine.ready()                       # waits; {"implementation": ..., "stop_token_ids": ...}
        for event in engine.run(["Hello"], max_tokens=16): ...

Wire: one JSON object per line, spec and requests on stdin, events on stdout. Events: `ready`, `step` (only when streaming),
`result`, `error`. vLLM's own output goes to a log file that an error names.

A child leads a session of its own, so that what it starts (vLLM's engine core, which holds the GPU's memory) ends with it,
however it ends. It also ends with its parent (`engine_child.follow_parent`), whose terminal and signals it no longer shares.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.machine import cpu_engine_args, engine_environment
from vllm_dflash.cli.models import Pair

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing itself only from Python 3.11 on

Arm = Literal["none", "builtin", "ours"]
ARM_NAMES: dict[Arm, str] = {"none": "no speculation", "builtin": "vLLM's built-in dflash", "ours": "vllm-dflash"}
SHUTDOWN_S = 20
_LAST_WORDS_S = 2.0
"""For what a child has started and left behind, as Python's resource tracker removes shared memory only then."""
_POLL_S = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSpec:
    """What one child starts; `engine_args` are vLLM's `EngineArgs` beyond model, dtype and speculation."""

    arm: Arm
    target: str
    draft: str | None
    k: int
    dtype: str
    engine_args: dict[str, Any]
    local: bool
    speculative: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further keys of vLLM's speculative config."""
    turns: tuple[str, int] | None = None
    """Folder and number of the engines that start with this one on the same GPU (`engine_turns`)."""
    in_process: bool = False
    """No further process for the engine core, so that its planner can be told a width."""


def engine_spec(arm: Arm, pair: Pair, dtype: str, *, speculative: dict[str, Any] | None = None, **engine_args: Any) -> EngineSpec:
    """Spec of an arm for a checked pair, with the CPU defaults filled in."""
    args = cpu_engine_args(pair.target_config, engine_args)
    draft = None if arm == "none" else pair.draft
    return EngineSpec(arm, pair.target, draft, pair.k, dtype, args, pair.local, speculative or {})


class Child:
    """A Python module of ours in a child process that speaks JSON lines."""

    def __init__(self, module: str, first_line: dict[str, Any], environment: dict[str, str]) -> None:
        with tempfile.NamedTemporaryFile(prefix="vllm-dflash-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        self._cleared = False
        try:
            self.send(first_line)
        except BaseException:  # nobody has this object yet, and could close it
            self._kill()
            raise

    def send(self, message: dict[str, Any]) -> None:
        """Write one line to the child.

        Raises:
            UserError: the child has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise UserError(self._obituary()) from None

    def receive(self) -> dict[str, Any]:
        """Read one event.

        Raises:
            UserError: the child reported an error, or has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(self._obituary())
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "error":
            if event["unexpected"]:
                raise UserError(f"{event['message']}{self._log_hint()}")
            self._log.unlink(missing_ok=True)  # the sentence says it all
            raise UserError(event["message"])
        return event

    def close(self) -> None:
        """End the child, and then what it has started; its log goes when it ended well."""
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            if self._process.wait(SHUTDOWN_S) == 0:
                self._log.unlink(missing_ok=True)
            self._await_group()
        except subprocess.TimeoutExpired:
            pass  # a child that hangs is killed like what others leave behind
        finally:
            self._kill()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is not None:
                self._kill()
        finally:
            self.close()

    def _kill(self) -> None:
        """Kill the child's group: itself if it still runs, and whatever it has started."""
        if not self._cleared:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._cleared = True  # from now on the number may be another's

    def _await_group(self) -> None:
        """Give what an ended child has left behind a moment to end by itself."""
        deadline = time.monotonic() + _LAST_WORDS_S
        with contextlib.suppress(ProcessLookupError):
            while not self._cleared and time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(_POLL_S)

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_S)
        self._kill()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no message"
        return f"the engine process ended unexpectedly (exit status {self._process.returncode}): {last}.{self._log_hint()}"

    def _log_hint(self) -> str:
        return f" vLLM's output is in {self._log}."


class Engine(Child):
    """One arm; starting is asynchronous, so that several can load at the same time."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        environment = engine_environment(plugin=spec.arm == "ours", local_models=spec.local, in_process=spec.in_process)
        self._readiness: dict[str, Any] | None = None
        super().__init__("vllm_dflash.cli.engine_child", dataclasses.asdict(spec), environment)

    def ready(self) -> dict[str, Any]:
        """Wait until the engine is loaded; its `ready` event, however often it is asked.

        Raises:
            UserError: it could not start; the sentence says why.
        """
        self._readiness = self._readiness or self.receive()
        return self._readiness

    def run(self, prompts: Sequence[str | list[int]], *, stream: bool = False, **sampling: Any) -> Iterator[dict[str, Any]]:
        """Generate for all prompts in one batch; yields `step` events when streaming, and one `result` at the end.

        `sampling` are vLLM's `SamplingParams`; a chat template is applied to text where the tokenizer has one.
        """
        self.send({"prompts": list(prompts), "sampling": sampling, "stream": stream})
        while (event := self.receive())["event"] == "step":
            yield event
        yield event

    def generate(self, prompts: Sequence[str | list[int]], **sampling: Any) -> dict[str, Any]:
        """The `result` of `run` without streaming: outputs, seconds and draft counters."""
        return next(self.run(prompts, **sampling))

    def measure(
        self, prompts: Sequence[Any], *, at_least: int | None = None, hold: int | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """The same with nothing but the engine at work, and with the time of every step (`engine_measure`).

        `at_least`: end all requests when each has as many tokens; `hold`: the draft width that the planner is told to keep.
        """
        question = {"bench": "measure", "at_least": at_least, "hold": hold}
        self.send(question | {"prompts": list(prompts), "sampling": sampling})
        return self.receive()

    def ask(self, question: str, **fields: Any) -> dict[str, Any]:
        """The answer to another question of a benchmark (`engine_measure.Bench`): `widths` or `best`."""
        self.send({"bench": question, **fields})
        return self.receive()
