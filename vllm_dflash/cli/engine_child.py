# SPDX-License-Identifier: Apache-2.0
"""The child of :mod:`vllm_dflash.cli.engine_run`: builds one vLLM engine and answers requests line by line.

Where a token came from is read off the engine's steps: a step that emits n tokens of a request kept n - 1 drafts and added one
token of the target's own. A last step that is cut by `max_tokens` or an end token counts its last token as the target's.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from vllm_dflash.cli.engine_meter import Meter

NUM_DRAFTS = "vllm:spec_decode_num_drafts"
NUM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
Piece = tuple[str, bool]  # text, and whether it came from accepted drafts


def main() -> None:
    """Answer until stdin is closed; every error becomes an `error` event."""
    channel = claim_stdout()
    try:
        _serve(json.loads(sys.stdin.readline()), channel)
    except Exception as error:
        report_error(channel, error)
        raise SystemExit(1) from error


def claim_stdout() -> TextIO:
    """Keep stdout for events: whatever vLLM and its libraries print goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return channel


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
    engine = _build_engine(spec)
    implementation = _implementation(engine)
    if spec["arm"] == "ours" and implementation and not implementation.startswith("vllm_dflash."):
        raise ValueError(f"the plugin did not take over ({implementation} drafts instead). Run `vllm-dflash doctor`.")
    emit(channel, "ready", implementation=implementation, stop_token_ids=_stop_token_ids(engine))
    meter: Meter | None = None
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        if request.get("measure"):
            meter = meter or Meter(engine)
            _measure(engine, request, str(number), channel, meter)
        else:
            _answer(engine, request, str(number), channel)


def _build_engine(spec: dict[str, Any]) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = {"model": spec["target"], "dtype": spec["dtype"], "disable_log_stats": False, **spec["engine_args"]}
    if spec["draft"] is not None:
        speculation = {"method": "dflash", "model": spec["draft"], "num_speculative_tokens": spec["k"]}
        arguments["speculative_config"] = speculation | spec["speculative"]
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def _implementation(engine: Any) -> str | None:
    """Class that drafts, where the engine runs in this process; None where it does not, or drafts nothing."""
    try:
        runner = engine.model_executor.driver_worker.worker.model_runner
    except AttributeError:
        return None
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    return f"{type(drafter).__module__}.{type(drafter).__qualname__}" if drafter is not None else None


def _stop_token_ids(engine: Any) -> list[int]:
    ids = engine.model_config.try_get_generation_config().get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    own = getattr(_tokenizer(engine), "eos_token_id", None)
    return sorted({i for i in [*listed, own] if isinstance(i, int)})


def _tokenizer(engine: Any) -> Any:
    """The engine's tokenizer; None where it was told to go without (dummy weights)."""
    return None if engine.model_config.skip_tokenizer_init else engine.get_tokenizer()


def _answer(engine: Any, request: dict[str, Any], prefix: str, channel: TextIO) -> None:
    """Run one batch; the clock counts the engine's steps only, not our decoding and printing."""
    answers = _add_requests(engine, request, prefix)
    before, seconds = _draft_counters(), 0.0
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        seconds += time.perf_counter() - start
        steps = [answers[o.request_id].add(o) for o in outputs]
        if request["stream"]:
            emit(channel, "step", outputs=[s for s in steps if s])
    emit(channel, "result", outputs=[a.summary() for a in answers.values()], seconds=seconds, **_drafts_since(before))


def _measure(engine: Any, request: dict[str, Any], prefix: str, channel: TextIO, meter: Meter) -> None:
    """Run one batch with nothing between the engine's steps; the clock runs from the first step to the last.

    ``step_ends``: seconds at which each step with output ended; ``arrivals`` of an output: the steps that brought its tokens.
    """
    answers = _add_requests(engine, request, prefix)
    before = _draft_counters()
    meter.take()
    seen: list[tuple[int, Any]] = []
    step_ends: list[float] = []
    begin = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if outputs:
            step_ends.append(time.perf_counter() - begin)
            seen += [(len(step_ends) - 1, output) for output in outputs]
    for step, output in seen:
        answers[output.request_id].count(step, output)
    outputs = [a.measured() for a in answers.values()]
    emit(channel, "result", outputs=outputs, seconds=step_ends[-1], step_ends=step_ends, **_drafts_since(before), **meter.take())


def _drafts_since(before: tuple[int, int, list[int]]) -> dict[str, Any]:
    after = _draft_counters()
    return {
        "drafts": after[0] - before[0],
        "accepted": after[1] - before[1],
        "accepted_per_position": [a - b for a, b in zip(after[2], before[2] or [0] * len(after[2]), strict=True)],
    }


def _add_requests(engine: Any, request: dict[str, Any], prefix: str) -> dict[str, "_Answer"]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokenizer = _tokenizer(engine)
    words = {} if tokenizer else {"detokenize": False}
    sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, **request["sampling"], **words)
    answers = {}
    for index, prompt in enumerate(request["prompts"]):
        ids = _prompt_ids(tokenizer, prompt)
        longest = engine.model_config.max_model_len
        if len(ids) >= longest:
            raise ValueError(f"the prompt has {len(ids)} tokens; expected fewer than max_model_len = {longest}. Shorten it.")
        name = f"{prefix}-{index}"
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        answers[name] = _Answer(index, ids, tokenizer)
    return answers


def _prompt_ids(tokenizer: Any, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))
    ids = list(tokenizer.encode(prompt))
    if not ids:
        raise ValueError("the prompt is empty; expected some text. Give one as argument or on stdin.")
    return ids


def _draft_counters() -> tuple[int, int, list[int]]:
    """Drafts, accepted tokens, accepted tokens per position since the process began; vLLM's own metrics."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found = {metric.name: metric for metric in get_metrics_snapshot()}
    if NUM_DRAFTS not in found:
        return 0, 0, []
    return found[NUM_DRAFTS].value, found[NUM_ACCEPTED].value, list(found[ACCEPTED_PER_POSITION].values)


class _Answer:
    """Tokens and text of one request as its steps arrive."""

    def __init__(self, index: int, prompt_ids: list[int], tokenizer: Any) -> None:
        self.index, self.prompt_ids = index, prompt_ids
        self.tokens: list[int] = []
        self.steps: list[int] = []
        self.arrivals: list[int] = []
        self.pieces: list[Piece] = []
        self.finish_reason: str | None = None
        self._decode = _token_decoder(tokenizer)

    def add(self, output: Any) -> dict[str, Any] | None:
        """Take one step's output; its `step` entry, or None if it brought no token."""
        completion = output.outputs[0]
        new = list(completion.token_ids)
        self.finish_reason = completion.finish_reason or self.finish_reason
        if not new:
            return None
        self.tokens += new
        self.steps.append(len(new))
        pieces = list(self._pieces(new))
        self.pieces += pieces
        return {"request": self.index, "tokens": len(new), "pieces": pieces}

    def count(self, step: int, output: Any) -> None:
        """Take the tokens of one step without decoding them."""
        new = list(output.outputs[0].token_ids)
        if new:
            self.tokens += new
            self.steps.append(len(new))
            self.arrivals.append(step)

    def measured(self) -> dict[str, Any]:
        """What the `result` event says of this request where time is measured."""
        return {"token_ids": self.tokens, "steps": self.steps, "arrivals": self.arrivals, "prompt_tokens": len(self.prompt_ids)}

    def _pieces(self, new: list[int]) -> Iterator[Piece]:
        for i, token in enumerate(new):
            text = self._decode(token)
            if text:
                yield text, i < len(new) - 1

    def summary(self) -> dict[str, Any]:
        """What the `result` event says of this request."""
        return {
            "prompt_token_ids": self.prompt_ids,
            "token_ids": self.tokens,
            "steps": self.steps,
            "pieces": self.pieces,
            "finish_reason": self.finish_reason,
        }


def _token_decoder(tokenizer: Any) -> Any:
    """Function token id -> its text ("" while a character is incomplete)."""
    if tokenizer is None:
        return lambda _token: ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer without a Rust core: single tokens may lose their leading space
        return lambda token: tokenizer.decode([token], skip_special_tokens=True)
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    return lambda token: stream.step(backend, token) or ""


if __name__ == "__main__":
    main()
