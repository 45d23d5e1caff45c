# SPDX-License-Identifier: Apache-2.0
"""The data sets of `vllm bench`, by their names there: read by vLLM's own code, in a process of its own."""

from pathlib import Path
from typing import Any

from vllm_dflash.cli.engine_run import Child
from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.machine import engine_environment
from vllm_dflash.cli.models import Pair

PREFIX = "vllm:"
_WITHOUT_PATH = ("random", "prefix_repetition")


def vllm_set(name: str, pair: Pair, *, tokens: int, count: int) -> list[Any]:
    """Up to ``count`` prompts of ``NAME`` or ``NAME:PATH``; ``tokens``: length of those that are made up.

    Answers keep the length that the benchmark asks for, not that of the data set. Chat sets get the target's template.

    Raises:
        UserError: no such set, its file or the hub is not to be had, or it is not text.
    """
    kind, _, path = name.partition(":")
    if not path and kind not in _WITHOUT_PATH:
        raise UserError(f"--prompts {PREFIX}{name}: expected {PREFIX}{kind}:PATH, or {PREFIX}hf:OWNER/NAME of a set on the hub.")
    if kind != "hf" and path and not Path(path).expanduser().exists():
        raise UserError(f"--prompts {PREFIX}{name}: no such file. Give the path of a file of vLLM's data set {kind!r}.")
    question = {"target": pair.target, "name": kind, "path": path or None, "tokens": tokens, "count": count}
    environment = engine_environment(plugin=False, local_models=False)
    with Child("vllm_dflash.bench.dataset_child", question, environment) as child:
        found: list[Any] = child.receive()["prompts"]
    if not found:
        raise UserError(f"--prompts {PREFIX}{name}: vLLM finds no prompts in it that are short enough for it.")
    return found
