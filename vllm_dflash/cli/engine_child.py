# SPDX-License-Identifier: Apache-2.0
"""The child of :mod:`vllm_dflash.cli.engine_run`: builds one vLLM engine and answers requests line by line.

Where a token came from is read off the engine's steps: a step that emits n tokens of a request kept n - 1 drafts and added one
token of the target's own. A last step that is cut by `max_tokens` or an end token counts its last token as the target's.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any, TextIO

from vllm_dflash.cli.engine_answers import add_requests, draft_counters, drafts_since, tokenizer_of
from vllm_dflash.cli.engine_measure import WORKER_EXTENSION, Bench, implementation_of
from vllm_dflash.cli.engine_turns import arrive, capture_in_turn, takes_turn

_POLL_S = 0.2


def main() -> None:
    """Answer until stdin is closed; every error becomes an `error` event."""
    follow_parent()
    channel = claim_stdout()
    try:
        _serve(json.loads(sys.stdin.readline()), channel)
    except Exception as error:
        report_error(channel, error)
        raise SystemExit(1) from error


def claim_stdout() -> TextIO:
    """Keep stdout for events: whatever vLLM and its libraries print goes to stderr.

    Processes that this one forks (vLLM's engine core) do not keep it open: else our reader would wait for words of the dead.
    """
    copy = os.dup(1)
    channel = os.fdopen(copy, "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=lambda: os.dup2(2, copy, inheritable=False))
    return channel


def follow_parent() -> None:
    """End when the parent has gone without closing this process, whatever is computed then, with all that was started here.

    Signals of the parent's terminal do not come here (`engine_run.Child`); a parent that is killed says nothing at all.
    """
    if os.getpgrp() == os.getpid():  # else the group is somebody else's
        threading.Thread(target=_outlive, args=(os.getppid(),), daemon=True).start()


def _outlive(parent: int) -> None:
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # POLLHUP alone: its writer has closed it, or has gone
    poll.poll()
    while os.getppid() == parent:  # it waits for us to end
        time.sleep(_POLL_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def emit(channel: TextIO, event: str, **fields: Any) -> None:
    """Write one event."""
    channel.write(json.dumps({"event": event, **fields}) + "\n")
    channel.flush()


def report_error(channel: TextIO, error: Exception) -> None:
    """Write an `error` event: the bare sentence of a ValueError, the type besides for anything unexpected."""
    unexpected = not isinstance(error, ValueError)
    emit(channel, "error", message=_sentence(error, unexpected=unexpected), unexpected=unexpected)


def _sentence(error: Exception, *, unexpected: bool) -> str:
    details = getattr(error, "errors", None)
    if callable(details):  # pydantic wraps the sentences of vLLM's config checks, and tells every alternative of a type
        by_field = {found["loc"][:1]: found for found in reversed(details())}
        return "; ".join(_field_sentence(field, found) for field, found in reversed(by_field.items()))
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if unexpected else str(error)


def _field_sentence(field: tuple[Any, ...], found: dict[str, Any]) -> str:
    message = str(found["msg"]).removeprefix("Value error, ").rstrip(".")
    return f"{field[0]}: found {found['input']!r}. {message}." if field else f"{message}."


def _serve(spec: dict[str, Any], channel: TextIO) -> None:
    engine, in_turn = _build_in_turn(spec) if spec["turns"] else (_build_engine(spec), True)
    implementation = implementation_of(engine)
    if spec["arm"] == "ours" and implementation and not implementation.startswith("vllm_dflash."):
        raise ValueError(f"the plugin did not take over ({implementation} drafts instead). Run `vllm-dflash doctor`.")
    adaptive = bool(getattr(engine.vllm_config.speculative_config, "enable_adaptive_verification", False))
    facts = {"implementation": implementation, "adaptive": adaptive, "in_turn": in_turn}
    emit(channel, "ready", stop_token_ids=_stop_token_ids(engine), **facts)
    bench = Bench(engine, ours=spec["arm"] == "ours")
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        measured = bench.answer(request, str(number))
        if measured is None:
            _answer(engine, request, str(number), channel)
        else:
            emit(channel, "result", **measured)


def _build_in_turn(spec: dict[str, Any]) -> tuple[Any, bool]:
    """The engine, and whether it timed its passes in its turn, if it had to: a core that was not forked knows nothing of that."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    folder, engines = spec["turns"]
    capture_in_turn(folder, engines)
    try:
        engine = _build_engine(spec)
    except BaseException:
        arrive(folder)
        raise
    came = arrive(folder)
    return engine, came or not takes_turn(engine.vllm_config)


def _build_engine(spec: dict[str, Any]) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = {"model": spec["target"], "dtype": spec["dtype"], "disable_log_stats": False}
    arguments |= {"worker_extension_cls": WORKER_EXTENSION, **spec["engine_args"]}
    if spec["draft"] is not None:
        speculation = {"method": "dflash", "model": spec["draft"], "num_speculative_tokens": spec["k"]}
        arguments["speculative_config"] = speculation | spec["speculative"]
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def _stop_token_ids(engine: Any) -> list[int]:
    ids = engine.model_config.try_get_generation_config().get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    own = getattr(tokenizer_of(engine), "eos_token_id", None)
    return sorted({i for i in [*listed, own] if isinstance(i, int)})


def _answer(engine: Any, request: dict[str, Any], prefix: str, channel: TextIO) -> None:
    """Run one batch; the clock counts the engine's steps only, not our decoding and printing."""
    answers = add_requests(engine, request, prefix)
    before, seconds = draft_counters(), 0.0
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        seconds += time.perf_counter() - start
        steps = [answers[o.request_id].add(o) for o in outputs]
        if request["stream"]:
            emit(channel, "step", outputs=[s for s in steps if s])
    emit(channel, "result", outputs=[a.summary() for a in answers.values()], seconds=seconds, **drafts_since(before))


if __name__ == "__main__":
    main()
