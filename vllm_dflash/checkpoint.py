# SPDX-License-Identifier: Apache-2.0
"""One normalised description of a DFlash draft, read from any dialect of its ``config.json``.

Lossless verification hides a draft that was read wrongly: the output stays right and only the speed is gone. So every field
that matters is read here, once, and what cannot be read is refused in a sentence. Standard library only: the command line
and vLLM's API process parse configs without torch.

Dialects (which writer stores which fact where):

========== ============================== ================================ =====================================
dialect    layer shapes                   captured target layers           causality
========== ============================== ================================ =====================================
zlab       top level                      ``dflash_config``, 0-based       full layers no, sliding layers yes,
                                          layer outputs                    unless ``is_causal`` / ``causal``
speculators ``transformer_layer_config``  ``aux_hidden_state_layer_ids``,  ``sliding_window_non_causal``
                                          already one higher
========== ============================== ================================ =====================================

``target_hidden_size`` is ``hidden_size`` in both unless stated.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vllm_dflash.config_reader import CheckpointError, Reader
from vllm_dflash.draft_config import (
    DraftConfig,
    LayerAttention,
    RopeConfig,
    TargetFacts,
    check_itself,
    check_pair,
    check_width,
    claims_architectures,
)
from vllm_dflash.mask_token import find_mask_token
from vllm_dflash.rope_config import read_rope

__all__ = [
    "CheckpointError",
    "DraftConfig",
    "LayerAttention",
    "RopeConfig",
    "TargetFacts",
    "check_pair",
    "check_width",
    "claims_architectures",
    "parse_draft_config",
    "read_draft_config",
    "spread_layer_ids",
]

Number = TypeVar("Number", int, float)
DEFAULT_BLOCK = {"speculators": 8, "zlab": 16}
SLIDING, FULL = "sliding_attention", "full_attention"
MASK_TOKEN_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def read_draft_config(folder: str | Path) -> DraftConfig:
    """Parse ``folder/config.json``.

    Raises:
        CheckpointError: the folder or the file is missing, the file is not JSON, or a field is missing or wrong.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        where = "no such folder" if not Path(folder).is_dir() else "the folder has no config.json"
        raise CheckpointError(f"draft {str(folder)!r}: {where}. Give a folder with a DFlash draft checkpoint.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"draft config {str(path)!r} is not JSON ({error}). Download the checkpoint again.") from error
    if not isinstance(config, Mapping):
        raise CheckpointError(f"draft config {str(path)!r} holds a {type(config).__name__}; expected an object.")
    return parse_draft_config(config, lambda: find_mask_token(folder))


def parse_draft_config(config: Mapping[str, Any], mask_token: Callable[[], tuple[int, str] | None] | None = None) -> DraftConfig:
    """Normalise one draft config: raw ``config.json``, or ``to_dict()`` of what transformers or vLLM made of it.

    ``mask_token`` is asked where the config does not state it: :func:`vllm_dflash.mask_token.find_mask_token`.

    Raises:
        CheckpointError: a field is missing, of the wrong type, or contradicts another one.
    """
    read = Reader(config)
    _refuse_other_bodies(read)
    dialect = "speculators" if "transformer_layer_config" in config else "zlab"
    hidden_size = read.positive_int("hidden_size")
    num_heads = read.positive_int("num_attention_heads")
    num_layers = read.positive_int("num_hidden_layers")
    vocab_size = read.positive_int("vocab_size")
    sample_from_anchor = read.boolean("sample_from_anchor", default=False)
    head_dim = _head_dim(read, hidden_size, num_heads)
    draft = DraftConfig(
        dialect=dialect,
        architecture=_architecture(config),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=read.positive_int("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=read.positive_int("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        rms_norm_eps=_noted(read, "rms_norm_eps", read.optional_number("rms_norm_eps"), 1e-6),
        hidden_act=read.text("hidden_act", default="silu"),
        attention_bias=read.boolean("attention_bias", default=False),
        vocab_size=vocab_size,
        draft_vocab_size=read.positive_int("draft_vocab_size", default=vocab_size),
        target_hidden_size=read.positive_int("target_hidden_size", default=hidden_size),
        target_layer_ids=_target_layer_ids(read, num_layers),
        num_target_layers=read.optional_int("num_target_layers"),
        draft_block_size=_draft_block_size(read, dialect, sample_from_anchor),
        sample_from_anchor=sample_from_anchor,
        mask_token_id=_mask_token_id(read, mask_token),
        rope=read_rope(read, head_dim),
        max_position_embeddings=_noted(read, "max_position_embeddings", read.optional_int("max_position_embeddings"), 32768),
        layers=_layers(read, num_layers, dialect),
        value_scale=read.optional_number("attention_value_scale"),
        attention_sinks=read.boolean("attention_sink_bias", "add_swa_attention_sink_bias", default=False),
        logit_scale=read.number("logit_scale", default=1.0),
        embedding_scale=read.optional_number("input_embedding_scale", "noise_embedding_scale", "embedding_scale"),
        notes=tuple(read.notes),
    )
    check_itself(draft)
    return draft


def spread_layer_ids(num_ids: int, num_target_layers: int) -> tuple[int, ...]:
    """The paper's default taps: ``num_ids`` layer outputs spread evenly from 1 to ``num_target_layers - 3``."""
    if num_ids == 1:
        return (1,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_ids - 1)) for i in range(num_ids))


def _refuse_other_bodies(read: Reader) -> None:
    """Keys that change what the layers compute, without changing the name or shape of any tensor."""
    if read.boolean("use_gemma_norm", default=False):
        raise CheckpointError(
            "use_gemma_norm: found True; the layers of a DFlash draft have plain RMSNorm here, and would be scaled wrongly. "
            "Convert the norm weights (add 1) and remove the key."
        )
    for key in ("final_logit_softcapping", "output_softcap"):
        if read.optional_number(key) is not None:
            read.note(f"{key} ignored: a soft cap never changes which token is the likeliest")


def _noted(read: Reader, name: str, found: Number | None, default: Number) -> Number:
    if found is None:
        read.note(f"{name} missing: assumed {default}")
        return default
    return found


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, (list, tuple)) and names else "DFlashDraftModel"


def _head_dim(read: Reader, hidden_size: int, num_heads: int) -> int:
    found = read.optional_int("head_dim")
    if found is not None:
        return found
    if hidden_size % num_heads:
        raise CheckpointError(
            f"head_dim: missing, and hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}. Add head_dim."
        )
    read.note(f"head_dim missing: assumed hidden_size / num_attention_heads = {hidden_size // num_heads}")
    return hidden_size // num_heads


def _draft_block_size(read: Reader, dialect: str, sample_from_anchor: bool) -> int:
    found = read.optional_int("block_size", "dspark_block_size")
    if found is None:
        found = DEFAULT_BLOCK[dialect]
        read.note(f"block_size missing: assumed {found}, the {dialect} default")
    if read.optional_boolean("sample_from_anchor") is None:
        _check_layout(read, found)
    minimum = 1 if sample_from_anchor else 2
    if found < minimum:
        raise CheckpointError(f"block_size: {found} leaves no token to draft; expected at least {minimum}. Fix the draft config.")
    return found


def _check_layout(read: Reader, block: int) -> None:
    """Without ``sample_from_anchor`` the anchor's row drafts nothing. A draft of the other kind would be one position off."""
    if read.optional_int("block_size") is None and read.optional_int("dspark_block_size") is not None:
        raise CheckpointError(
            f"sample_from_anchor: missing, and the block of {block} is called dspark_block_size; DSpark drafts sample from the "
            "anchor's row, DFlash drafts do not. Set sample_from_anchor to true or false."
        )
    if block % 2:
        read.note(f"sample_from_anchor missing: assumed false, so that blocks of {block} draft {block - 1} tokens")


def _mask_token_id(read: Reader, elsewhere: Callable[[], tuple[int, str] | None] | None) -> int:
    stated = read.optional_int(*MASK_TOKEN_KEYS, allow_zero=True)
    if stated is not None:
        return stated
    found = elsewhere() if elsewhere is not None else None
    if found is None:
        raise CheckpointError(
            "mask_token_id: missing from the draft config (looked in dflash_config and at the top level), and the checkpoint's "
            "tokenizer has no mask token. A guessed one ruins acceptance silently: add the id that the draft was trained with as "
            "dflash_config.mask_token_id."
        )
    read.note(f"mask_token_id missing: assumed {found[0]}, {found[1]}")
    return found[0]


def _target_layer_ids(read: Reader, num_layers: int) -> tuple[int, ...]:
    ids = read.int_list("target_layer_ids", "layer_ids")
    shift = 0
    if ids is None:  # these two spellings count the embedding as layer 0: output of layer i is stored as i + 1
        ids = read.int_list("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
        shift = -1
    if ids is not None:
        if not ids:
            raise CheckpointError("target_layer_ids: the list is empty; expected at least one layer. Fix the draft config.")
        shifted = tuple(i + shift for i in ids)
        if min(shifted) < 0:
            raise CheckpointError(
                f"target_layer_ids: {list(ids)} names a layer below the first decoder layer. Use 0-based layer outputs."
            )
        return shifted
    num_target_layers = read.optional_int("num_target_layers")
    if num_target_layers is None or num_target_layers < 4:
        raise CheckpointError(
            "target_layer_ids: missing from the draft config, and num_target_layers does not tell either. Add "
            "dflash_config.target_layer_ids, the 0-based target layers whose outputs feed the draft."
        )
    spread = spread_layer_ids(num_layers, num_target_layers)
    read.note(f"target_layer_ids missing: assumed {list(spread)}, spread from 1 to num_target_layers - 3")
    return spread


def _layers(read: Reader, num_layers: int, dialect: str) -> tuple[LayerAttention, ...]:
    types = _layer_types(read, num_layers)
    all_sliding = read.boolean("use_swa", default=False) and SLIDING not in (types or ())
    named = [types is not None and types[i] == SLIDING for i in range(num_layers)]
    sliding = [all_sliding or is_named for is_named in named]
    window = read.optional_int("swa_window_size", "sliding_window") if any(sliding) else None
    if any(sliding) and window is None:
        raise CheckpointError(
            "sliding_window: missing, although some draft layers slide. Set sliding_window (or dflash_config.swa_window_size)."
        )
    flags = ("sliding_window_non_causal", "is_causal", "causal")
    if dialect == "speculators" and any(sliding) and all(read.optional_boolean(flag) is None for flag in flags):
        read.note("sliding_window_non_causal missing: assumed false, the speculators default")
    return tuple(LayerAttention(window if s else None, _causal(read, s, named=n)) for s, n in zip(sliding, named, strict=True))


def _layer_types(read: Reader, num_layers: int) -> tuple[str, ...] | None:
    """Type of each layer: as listed, or from the older ``max_window_layers`` (layers from that one on slide)."""
    types = read.text_list("layer_types")
    if types is not None:
        if len(types) != num_layers:
            raise CheckpointError(
                f"layer_types: {len(types)} entries for num_hidden_layers = {num_layers}. Give one entry per draft layer."
            )
        other = sorted(set(types) - {SLIDING, FULL})
        if other:
            raise CheckpointError(
                f"layer_types: found {', '.join(map(repr, other))}; expected '{FULL}' or '{SLIDING}', which is all that a DFlash "
                "draft is made of. Fix the draft config."
            )
        return types
    slides, window = read.optional_boolean("use_sliding_window"), read.optional_int("sliding_window")
    first = read.optional_int("max_window_layers", allow_zero=True)
    if slides and window is not None and first is not None:
        read.note(f"layer_types missing: assumed that layers from max_window_layers = {first} on slide")
        return tuple(SLIDING if i >= first else FULL for i in range(num_layers))
    if window is not None and slides is not False and not read.boolean("use_swa", default=False):
        read.note(f"sliding_window {window} ignored: neither layer_types nor use_swa says which layers slide")
    return None


def _causal(read: Reader, sliding: bool, *, named: bool) -> bool:
    non_causal_windows = read.optional_boolean("sliding_window_non_causal")
    if non_causal_windows is not None and sliding:
        return not non_causal_windows
    stated = read.optional_boolean("is_causal", "causal")
    if stated is not None:
        return stated
    return named  # z-lab's reference model: a layer that layer_types calls sliding is causal; use_swa alone says nothing of it
