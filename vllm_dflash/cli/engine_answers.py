# SPDX-License-Identifier: Apache-2.0
"""Requests of one engine and what comes back: ids, tokens by step, text, and vLLM's counters of drafts."""

import functools
from collections.abc import Iterator
from typing import Any

NUM_DRAFTS = "vllm:spec_decode_num_drafts"
NUM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
Piece = tuple[str, bool]  # text, and whether it came from accepted drafts


def tokenizer_of(engine: Any) -> Any:
    """The engine's tokenizer; None where it was told to go without (dummy weights)."""
    return None if engine.model_config.skip_tokenizer_init else engine.get_tokenizer()


def drafts_since(before: tuple[int, int, list[int]]) -> dict[str, Any]:
    """Drafts, accepted tokens, and accepted tokens per position since ``before``, an answer of :func:`draft_counters`."""
    after = draft_counters()
    return {
        "drafts": after[0] - before[0],
        "accepted": after[1] - before[1],
        "accepted_per_position": [a - b for a, b in zip(after[2], before[2] or [0] * len(after[2]), strict=True)],
    }


def add_requests(engine: Any, request: dict[str, Any], prefix: str) -> dict[str, "Answer"]:
    """Give the engine all prompts of a request, whose ``sampling`` holds fields of ``SamplingParams``; answers by name.

    Raises:
        ValueError: a prompt is empty or does not fit.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokenizer = tokenizer_of(engine)
    fields = request["sampling"] | {"output_kind": RequestOutputKind.DELTA} | ({} if tokenizer else {"detokenize": False})
    answers = {}
    for index, prompt in enumerate(request["prompts"]):
        ids = _prompt_ids(tokenizer, prompt)
        longest = engine.model_config.max_model_len
        if len(ids) >= longest:
            raise ValueError(f"the prompt has {len(ids)} tokens; expected fewer than max_model_len = {longest}. Shorten it.")
        name = f"{prefix}-{index}"
        # A seed for each: equal prompts of one batch must not get equal random numbers.
        seed = {"seed": fields["seed"] + index} if fields.get("seed") is not None else {}
        engine.add_request(name, {"prompt_token_ids": ids}, SamplingParams(**fields | seed))
        answers[name] = Answer(index, ids, tokenizer)
    return answers


def encoded(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The request with token ids in place of text."""
    tokenizer = tokenizer_of(engine)
    return request | {"prompts": [_prompt_ids(tokenizer, prompt) for prompt in request["prompts"]]}


def _prompt_ids(tokenizer: Any, prompt: str | list[int] | dict[str, Any]) -> list[int]:
    """Ids of token ids, of text, or of a prompt and what was answered so far."""
    if isinstance(prompt, dict):
        return [*_prompt_ids(tokenizer, prompt["prompt"]), *prompt["then"]]
    return list(_text_ids(tokenizer, prompt)) if isinstance(prompt, str) else prompt


@functools.lru_cache(maxsize=2048)  # a benchmark asks the same again and again
def _text_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """With the chat template, where there is one."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer.encode(chat, add_special_tokens=False))
    ids = tuple(tokenizer.encode(text))
    if not ids:
        raise ValueError("the prompt is empty; expected some text. Give one as argument or on stdin.")
    return ids


def draft_counters() -> tuple[int, int, list[int]]:
    """Drafts, accepted tokens, accepted tokens per position since the process began; vLLM's own metrics."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found = {metric.name: metric for metric in get_metrics_snapshot()}
    if NUM_DRAFTS not in found:
        return 0, 0, []
    return found[NUM_DRAFTS].value, found[NUM_ACCEPTED].value, list(found[ACCEPTED_PER_POSITION].values)


class Answer:
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
