# SPDX-License-Identifier: Apache-2.0
"""Prompt sets: the kinds that ship with the package, files with one JSON object per line, vLLM's data sets, random ids."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_dflash.bench.vllm_sets import PREFIX, vllm_set
from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.models import Pair, hub_file, locate

RANDOM = "random"
RANDOM_HEAT = 2.0
"""Temperature of answers to random ids: greedy ones soon repeat themselves and are guessed well, these are not."""
_KEYS = ("prompt", "text", "question", "turns")


def split_name(text: str) -> tuple[str, float | None]:
    """Name of a set, and the one temperature that it is answered at: ``chat@1`` is chat at 1, ``random`` is at 2 unless told."""
    name, at, heat = text.strip().rpartition("@")
    try:
        if at and float(heat) >= 0:
            return name, float(heat)
    except ValueError:
        pass  # a path with an @ in it
    return text.strip(), RANDOM_HEAT if text.strip() == RANDOM else None


def label(name: str) -> str:
    """What a set is called in results: no folders, no endings."""
    if not name.startswith(PREFIX):
        return Path(name).stem
    kind, _, path = name.removeprefix(PREFIX).partition(":")
    return path.rsplit("/", 1)[-1] if kind == "hf" else f"{PREFIX}{kind}"


def load_set(name: str, pair: Pair, *, tokens: int, count: int) -> Sequence[Any]:
    """Prompts of a set, text or token ids: at least ``count`` where they are made up, of ``tokens`` tokens.

    Raises:
        UserError: the set cannot be had.
    """
    if name == RANDOM:
        return random_prompts(_known_ids(pair), tokens, count)
    if name.startswith(PREFIX):
        return vllm_set(name.removeprefix(PREFIX), pair, tokens=tokens, count=count)
    return prompt_set(name)


def _known_ids(pair: Pair) -> int:
    """Token ids that mean something: a target's vocabulary may be padded beyond its tokenizer's."""
    size = int(pair.target_config["vocab_size"])
    file = hub_file(locate(pair.target, "target"), pair.target, "tokenizer.json")
    if file is None:
        return size
    from tokenizers import Tokenizer

    return min(size, int(Tokenizer.from_file(str(file)).get_vocab_size()))


def prompt_set(name: str) -> list[str]:
    """Prompts of a kind (``chat``, ``code``, ``maths``, ``list``, ``copy``, ``all``), or of ``.jsonl`` files.

    A line is an object with ``prompt``, ``text``, ``question``, or ``turns`` (the first is used). The files of a folder are
    interleaved, so that any beginning is a mixture.

    Raises:
        UserError: no such kind or file, or a line that holds no prompt.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        sets = [_lines(file) for file in sorted(path.glob("*.jsonl"))]
        found = [prompts[i] for i in range(max(map(len, sets), default=0)) for prompts in sets if i < len(prompts)]
    elif path.is_file():
        found = _lines(path)
    else:
        found = _shipped(name)
    if not found:
        raise UserError(f"--prompts {name!r}: no prompts in it; expected JSON lines with one of {', '.join(_KEYS)}.")
    return found


def _shipped(name: str) -> list[str]:
    from vllm_dflash.demo_pair.prompts import PROMPTS

    kinds = list(dict.fromkeys(prompt.kind for prompt in PROMPTS))
    if name != "all" and name not in kinds:
        raise UserError(
            f"--prompts: found {name!r}; expected a file, a folder, {PREFIX}NAME, {RANDOM}, all, or one of {', '.join(kinds)}."
        )
    return [prompt.text for prompt in PROMPTS if name in ("all", prompt.kind)]


def _lines(path: Path) -> list[str]:
    return [
        _text(line, f"{path}:{number}")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.strip()
    ]


def _text(line: str, where: str) -> str:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"--prompts {where}: not JSON ({error}).") from error
    for key in _KEYS:
        value = found.get(key) if isinstance(found, dict) else None
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value.strip():
            return value
    raise UserError(f"--prompts {where}: expected an object with text in one of {', '.join(_KEYS)}; found {line[:60]!r}.")


def random_prompts(vocab_size: int, length: int, count: int) -> list[list[int]]:
    """``count`` prompts of ``length`` random token ids: nothing in them can be guessed."""
    choose = random.Random(0)  # noqa: S311  # prompts, not secrets
    return [[choose.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def groups(prompts: list[Any], size: int, count: int) -> list[list[Any]]:
    """``count`` groups of ``size`` prompts, taken in turn; the set is repeated where it is too small."""
    return [[prompts[(number * size + i) % len(prompts)] for i in range(size)] for number in range(count)]
