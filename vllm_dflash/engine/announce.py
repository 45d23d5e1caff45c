# SPDX-License-Identifier: Apache-2.0
"""What a start-up line says about a draft, for both model runners: everything read from its config that can cost acceptance."""

from logging import Logger

from vllm_dflash.draft_config import DraftConfig


def describe(draft: DraftConfig) -> str:
    """Target layers, mask token, rotary embedding and attention windows in one phrase; 0 stands for "no window"."""
    rope = draft.rope
    kind = rope.parameters.get("rope_type", "default")
    partial = rope.parameters.get("partial_rotary_factor", 1.0)
    windows = sorted({layer.window or 0 for layer in draft.layers})
    return (
        f"target layers {list(draft.target_layer_ids)}, mask token {draft.mask_token_id}, rope {kind} with theta {rope.theta:g}"
        f"{'' if partial == 1.0 else f' over {partial:g} of each head'}{'' if rope.is_neox else ', interleaved'}, "
        f"windows {windows} (0 is full)"
    )


def log_notes(logger: Logger, draft: DraftConfig) -> None:
    """Warn once about each thing that the checkpoint left open and was assumed."""
    for note in draft.notes:
        logger.warning_once(f"DFlash draft: {note}.")  # type: ignore[attr-defined]  # vLLM's loggers have it
