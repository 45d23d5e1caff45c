# SPDX-License-Identifier: Apache-2.0
"""What is compared: no speculation, vLLM's built-in DFlash, ours, and any of them with further settings."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from vllm_dflash.cli.engine_run import ARM_NAMES, Arm
from vllm_dflash.cli.failure import UserError

_FORM = 'NAME=KIND:{"speculative": {...}, "engine": {...}}'


@dataclasses.dataclass(frozen=True, slots=True)
class BenchArm:
    """One engine of a benchmark."""

    name: str
    kind: Arm
    speculative: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further keys of vLLM's speculative config."""
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further engine arguments, ``additional_config`` for the plugin's own options among them."""


def parse_arms(names: str, further: Sequence[str]) -> list[BenchArm]:
    """Arms from ``--arms none,builtin,ours`` and from ``--arm NAME=KIND:{json}``.

    Raises:
        UserError: an unknown kind, a name given twice, or text that is not such an object.
    """
    arms = [BenchArm(name, _kind(name)) for name in filter(None, (part.strip() for part in names.split(",")))]
    arms += [_parse(text) for text in further]
    seen = [arm.name for arm in arms]
    twice = sorted({name for name in seen if seen.count(name) > 1})
    if twice:
        raise UserError(f"--arm: {', '.join(twice)} given twice; expected a name of its own for each arm.")
    if not arms:
        raise UserError(f"--arms: found {names!r}; expected some of {', '.join(ARM_NAMES)}, separated by commas.")
    return arms


def _parse(text: str) -> BenchArm:
    name, _, rest = text.partition("=")
    kind, _, settings = rest.partition(":")
    if not (name and kind):
        raise UserError(f"--arm: found {text!r}; expected {_FORM}.")
    try:
        found = json.loads(settings or "{}")
    except ValueError as error:
        raise UserError(f"--arm {name}: {settings!r} is not JSON ({error}); expected {_FORM}.") from error
    if not isinstance(found, dict) or not found.keys() <= {"speculative", "engine"}:
        raise UserError(f'--arm {name}: expected an object with "speculative" and "engine" at most; found {settings}.')
    return BenchArm(name, _kind(kind), found.get("speculative", {}), found.get("engine", {}))


def _kind(name: str) -> Arm:
    for known in ARM_NAMES:
        if name == known:
            return known
    raise UserError(f"--arms: found {name!r}; expected one of {', '.join(ARM_NAMES)}.")
