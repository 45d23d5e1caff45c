# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of a draft, from every spelling that checkpoints use, in Hugging Face's ``rope_parameters`` form.

It is the draft's own, never the target's: converters copy keys of the target that the draft was not trained with.
"""

import math
from collections.abc import Mapping
from typing import Any

from vllm_dflash.config_reader import CheckpointError, Reader
from vllm_dflash.draft_config import RopeConfig

VL_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
ROPE_ALIASES = {"su": "longrope", "mrope": "default"}  # an old name; and one without meaning where positions have one dimension
SCALED_ROPES = ("yarn", "llama3", "longrope")  # stretched from a trained length
ROPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": (),
}
"""Known types of rotary embedding, and the numbers that each cannot do without."""


def read_rope(read: Reader, head_dim: int) -> RopeConfig:
    """Normalise ``rope_theta``, ``rope_scaling`` and ``rope_parameters`` of a draft whose heads have ``head_dim`` channels.

    Raises:
        CheckpointError: theta is missing, or a value of the embedding's type is missing or wrong.
    """
    parameters = _rope_parameters(read)
    theta = parameters.get("rope_theta", read.optional_number("rope_theta"))
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not 0 < theta < math.inf:
        raise CheckpointError(
            f"rope_theta: found {theta!r}; expected a positive number (top level, rope_parameters or rope_scaling). Add the "
            "theta that the draft was trained with."
        )
    old_name = parameters.pop("type", None)
    rope_type = old_name if parameters.get("rope_type") is None else parameters["rope_type"]
    if not isinstance(rope_type, (str, type(None))):
        raise CheckpointError(f"rope_type: found {rope_type!r}; expected text such as 'default' or 'yarn'. Fix the draft config.")
    parameters["rope_type"] = ROPE_ALIASES.get(rope_type or "default", rope_type or "default")
    parameters["rope_theta"] = float(theta)
    _check_rope_type(parameters)
    for key in VL_ROPE_KEYS:  # copied from a vision-language target; draft positions have one dimension
        if parameters.pop(key, None) is not None:
            read.note(f"{key} ignored: the draft's positions have one dimension")
    if parameters["rope_type"] in SCALED_ROPES:
        parameters["original_max_position_embeddings"] = _trained_length(read, parameters)
    _partial_rotary(read, parameters, head_dim)
    interleaved = read.boolean("rope_interleaved", "rope_interleave", default=False)
    return RopeConfig(float(theta), read.boolean("is_neox_style", default=not interleaved), parameters)


def _check_rope_type(parameters: Mapping[str, Any]) -> None:
    kind = parameters["rope_type"]
    if kind not in ROPES:
        raise CheckpointError(f"rope_type: found {kind!r}; expected one of {', '.join(ROPES)}. Fix the draft config.")
    for name in ROPES[kind]:
        value = parameters.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise CheckpointError(
                f"{name}: found {value!r}; expected a positive number, which rope type {kind!r} needs. Add it to the draft's "
                "rope_parameters."
            )
    for name in ("long_factor", "short_factor") if kind == "longrope" else ():
        if not isinstance(parameters.get(name), (list, tuple)):
            raise CheckpointError(
                f"{name}: found {parameters.get(name)!r}; expected a list of numbers, which rope type 'longrope' needs. Add it "
                "to the draft's rope_parameters."
            )


def _rope_parameters(read: Reader) -> dict[str, Any]:
    """Both spellings merged; entries per layer type are one only where all of the draft's layers share it."""
    merged = {**(read.mapping("rope_scaling") or {}), **(read.mapping("rope_parameters") or {})}
    types = read.text_list("layer_types") or ()
    nested = {key: merged.pop(key) for key in tuple(merged) if key in types or key.endswith("_attention")}
    used = [key for key in nested if key in types] or list(nested)
    if not used:
        return merged
    if not isinstance(nested[used[0]], Mapping) or any(nested[key] != nested[used[0]] for key in used):
        raise CheckpointError(
            f"rope_parameters: found other values per layer type ({', '.join(used)}); expected one rotary embedding for all "
            "draft layers. Give the draft's own rope_parameters without layer types."
        )
    return {**merged, **nested[used[0]]}


def _trained_length(read: Reader, parameters: Mapping[str, Any]) -> int:
    """``original_max_position_embeddings``, with transformers' precedence: top level, rope parameters, the maximum."""
    name = "original_max_position_embeddings"
    found = read.optional_int(name) or parameters.get(name)
    if found is None:
        found = read.optional_int("max_position_embeddings")
        read.note(f"{name} missing: assumed max_position_embeddings = {found}")
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise CheckpointError(
            f"{name}: found {found!r}; expected a positive integer, which rope type {parameters['rope_type']!r} is scaled from. "
            "Add it to the draft's rope_parameters."
        )
    return found


def _partial_rotary(read: Reader, parameters: dict[str, Any], head_dim: int) -> None:
    """Honour partial rotation only where the *draft* states it: converters copy the target's factor (speculators#613)."""
    if parameters.pop("rope_dim", None) is not None:
        read.note("rope_dim in the rope parameters ignored: drafts rotate whole heads unless dflash_config.rope_dim is set")
    copied = parameters.pop("partial_rotary_factor", read.optional_number("partial_rotary_factor", nested=False))
    stamped = read.dflash_value("partial_rotary_factor")
    rope_dim = read.dflash_value("rope_dim")
    if rope_dim is not None:
        stamped = rope_dim / head_dim
    if stamped is not None:
        if not 0 < stamped <= 1:
            raise CheckpointError(
                f"partial_rotary_factor: found {stamped}; expected a share of the head above 0, at most 1. Fix the draft config."
            )
        parameters["partial_rotary_factor"] = float(stamped)
    elif copied not in (None, 1, 1.0):
        read.note(
            f"partial_rotary_factor {copied} ignored: drafts rotate whole heads unless dflash_config.partial_rotary_factor is set"
        )
