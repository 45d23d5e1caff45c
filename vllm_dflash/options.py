# SPDX-License-Identifier: Apache-2.0
"""What a user can set: ``--additional-config '{"vllm_dflash": {...}}'``, read once and frozen.

vLLM's speculative config forbids new keys, so the plugin's own live in vLLM's ``additional_config``. Every field carries its
documentation, from which ``docs/make_options.py`` writes the table of ``docs/options.md``. Checked when vLLM builds its
config, before weights are loaded.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

SECTION = "vllm_dflash"


class OptionsError(ValueError):
    """An option that cannot be used; the message is one sentence with field, value found, value needed and cure."""


def _option(default: Any, values: str, doc: str, *, least: float | None = None, choices: tuple[Any, ...] = ()) -> Any:
    """A field with its documentation: allowed ``values`` in words, smallest number, or the words that are allowed."""
    return dataclasses.field(default=default, metadata={"values": values, "doc": doc, "least": least, "choices": choices})


@dataclasses.dataclass(frozen=True, slots=True)
class PluginOptions:
    """All options with their defaults; see :func:`read_options`."""

    draft_window: int | None = _option(
        None,
        "tokens, or null",
        "Draft layers with full attention look back at most this far: drafting time no longer grows with the context. "
        "The target still reads everything.",
        least=1,
    )
    draft_window_frees_memory: bool | None = _option(
        None,
        "true, false, null",
        "Whether KV blocks behind `draft_window` are freed. That splits the target's KV cache into groups of the draft's layer "
        "count, which costs host time in every step; null: where there would be at most two of them.",
        choices=(True, False),
    )
    draft_max_context: int | None = _option(
        None,
        "tokens, or null",
        "Requests with more context are decoded without drafts (null: up to the length that the draft was trained for).",
        least=1,
    )
    draft_weights: str = _option(
        "auto",
        '"auto", "checkpoint", "fp8", "int8"',
        "Precision of the draft's linear layers. fp8 (GPUs) and int8 (CPUs) are made while loading from a 16- or 32-bit "
        "checkpoint; auto times fp8 at start-up and keeps it where it is faster (CPUs: checkpoint).",
        choices=("auto", "checkpoint", "fp8", "int8"),
    )
    draft_head: str = _option(
        "auto",
        '"auto", "full", "small"',
        "LM head that drafts come from. full: the target's. small: a private fp8 copy of `draft_head_rows` rows, those of the "
        "most frequent tokens. auto: on GPUs the one that promises most tokens per second of full, an fp8 copy of all rows and, "
        "where a list of counted answers tells what it would cost in acceptance, a small one (CPUs: full).",
        choices=("auto", "full", "small"),
    )
    draft_head_rows: int = _option(32768, "rows", "Rows of a small draft head, 0.13 GiB at 32768 and hidden size 4096.", least=8)
    draft_head_guests: int = _option(
        0,
        "rows",
        "Rows of a small draft head besides the listed ones, for tokens that requests have just used: the words of their own "
        "subject come again, and rows for all of them save most of what a small head costs. Measured on an H200: 2048.",
        least=0,
    )
    draft_head_list: str | None = _option(
        None, "path, or null", "Row list made by `vllm-dflash calibrate` (null: the one beside the draft, else merge order)."
    )
    draft_head_counting: bool = _option(
        False,
        "true, false",
        "Count the target's own output tokens while serving, in a file of this pair below `~/.cache/vllm-dflash/served-tokens` "
        "(`$XDG_CACHE_HOME`). A later start with this option takes its rows from there once 32768 tokens are counted, unless "
        "`draft_head_list` names a file.",
    )
    planner: str = _option(
        "auto",
        '"auto", "on", "off"',
        "on: draft width follows load and acceptance, up to `num_speculative_tokens` and down to none. off: always "
        "`num_speculative_tokens`. auto: on for CPUs, and on GPUs for targets of some 2e9 parameters or more, whose steps the "
        "GPU bounds; off for smaller ones, where it is measured to lose in places.",
        choices=("auto", "on", "off"),
    )
    verify_lengths: str = _option(
        "auto",
        '"auto", "equal"',
        "How many drafts of each request the planner has verified. auto: those that promise most, whatever requests of the batch "
        "they are of, by vLLM's adaptive verification (dense targets on one Hopper GPU with FlashAttention). equal: as many of "
        "each: the rule on other GPUs, and measured to be 2 % faster at 1 and 8 requests, less than two runs of one load differ "
        "by. CPUs always choose by request.",
        choices=("auto", "equal"),
    )
    watchdog: bool = _option(
        True, "true, false", "Watch acceptance and warn once, with figures and likely causes, when it is low."
    )
    self_check: bool = _option(
        False,
        "true, false",
        "For a suspected fault: draft some steps of the first cold request again, and again with its context's K/V computed "
        "anew; one log line says whether that changes drafts. Slows those steps down.",
    )

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {field.name: values[field.name] for field in dataclasses.fields(self) if values[field.name] != field.default}


def read_options(additional_config: Any) -> PluginOptions:
    """Options from vLLM's ``additional_config`` (a mapping, or an object of another plugin, which has none of ours).

    Raises:
        OptionsError: an unknown name, or a value out of its range.
    """
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(section, Mapping):
        raise OptionsError(
            f'additional_config["{SECTION}"]: found {type(section).__name__}; expected an object like {{"draft_window": 4096}}.'
        )
    fields = {field.name: field for field in dataclasses.fields(PluginOptions)}
    for name, value in section.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, 1)
            cure = f"Did you mean {near[0]!r}?" if near else "Remove it."
            known = ", ".join(sorted(fields))
            raise OptionsError(f'additional_config["{SECTION}"]: unknown option {name!r}; known are {known}. {cure}')
        _check(fields[name], value)
    return PluginOptions(**section)


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    if value is None and field.default is None:
        return
    least, choices = field.metadata["least"], field.metadata["choices"]
    if choices:
        fits = any(type(value) is type(choice) and value == choice for choice in choices)  # 1 is not true
    elif isinstance(field.default, bool):
        fits = isinstance(value, bool)
    elif least is not None:
        number = int if isinstance(least, int) else (int, float)
        fits = isinstance(value, number) and not isinstance(value, bool) and value >= least
    else:
        fits = isinstance(value, str) or value == field.default
    if not fits:
        raise OptionsError(
            f'additional_config["{SECTION}"].{field.name}: found {value!r}; expected {field.metadata["values"]}'
            f"{'' if least is None else f', at least {least}'}."
        )
