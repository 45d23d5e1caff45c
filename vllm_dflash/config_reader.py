# SPDX-License-Identifier: Apache-2.0
"""Typed look-ups in a draft's config dictionary, with errors that name the field, what was found and what is needed.

A DFlash field may sit in ``dflash_config``, at the top level, or in a nested ``transformer_layer_config`` / ``text_config``;
:class:`Reader` looks in that order, so that a value stamped for the draft wins over one copied from the target.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any


class CheckpointError(ValueError):
    """A draft checkpoint that cannot be served; the message is one sentence with field, value found, value needed and cure."""


class Reader:
    """Reads named fields of one draft config; collects in ``notes`` what had to be assumed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise CheckpointError(f"draft config: found {type(config).__name__}; expected an object with the draft's fields.")
        self._dflash = _section(config, "dflash_config")
        self._places = (
            self._dflash,
            config,
            _section(config, "transformer_layer_config"),
            _section(config, "text_config"),
        )
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        """Remember one assumption, to be logged when the draft is loaded."""
        self.notes.append(sentence)

    def dflash_value(self, name: str) -> float | None:
        """A number that is stamped in ``dflash_config`` itself."""
        return None if self._dflash.get(name) is None else _number(name, self._dflash[name])

    def optional_int(self, *names: str, allow_zero: bool = False) -> int | None:
        """First of ``names`` that is set, as a positive (or non-negative) integer."""
        for name, value in self._found(names):
            lowest = 0 if allow_zero else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                kind = "a non-negative integer" if allow_zero else "a positive integer"
                raise _wrong(name, value, kind)
            return value
        return None

    def positive_int(self, name: str, *, default: int | None = None) -> int:
        """A positive integer; missing without a default is an error."""
        value = self.optional_int(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(
                f"{name}: missing from the draft config; expected a positive integer. Is this a DFlash draft checkpoint?"
            )
        return default

    def optional_number(self, *names: str, nested: bool = True) -> float | None:
        """First of ``names`` that is set, as a finite float; ``nested=False`` skips ``dflash_config``."""
        for name, value in self._found(names, skip_dflash=not nested):
            return _number(name, value)
        return None

    def number(self, name: str, *, default: float) -> float:
        """A finite float."""
        value = self.optional_number(name)
        return default if value is None else value

    def optional_boolean(self, *names: str) -> bool | None:
        """First of ``names`` that is set, as a boolean (never a number or text that merely looks like one)."""
        for name, value in self._found(names):
            if not isinstance(value, bool):
                raise _wrong(name, value, "true or false")
            return value
        return None

    def boolean(self, *names: str, default: bool) -> bool:
        """A boolean."""
        value = self.optional_boolean(*names)
        return default if value is None else value

    def text(self, name: str, *, default: str) -> str:
        """A string."""
        for key, value in self._found((name,)):
            if not isinstance(value, str):
                raise _wrong(key, value, "text")
            return value
        return default

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """A nested object."""
        for key, value in self._found((name,)):
            if not isinstance(value, Mapping):
                raise _wrong(key, value, "an object")
            return value
        return None

    def int_list(self, *names: str) -> tuple[int, ...] | None:
        """First of ``names`` that is set, as a list of non-negative integers in the config's order."""
        for name, value in self._found(names):
            if not isinstance(value, (list, tuple)) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
                raise _wrong(name, value, "a list of non-negative integers")
            return tuple(value)
        return None

    def text_list(self, name: str) -> tuple[str, ...] | None:
        """A list of strings."""
        for key, value in self._found((name,)):
            if not isinstance(value, (list, tuple)) or not all(isinstance(i, str) for i in value):
                raise _wrong(key, value, "a list of strings")
            return tuple(value)
        return None

    def _found(self, names: tuple[str, ...], *, skip_dflash: bool = False) -> Iterator[tuple[str, Any]]:
        for place in self._places[1:] if skip_dflash else self._places:
            for name in names:
                if place.get(name) is not None:
                    yield name, place[name]


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _wrong(name, value, "a finite number")
    return float(value)


def _wrong(name: str, value: Any, needed: str) -> CheckpointError:
    return CheckpointError(f"{name}: found {value!r}; expected {needed}. Fix the draft's config.json.")
