# SPDX-License-Identifier: Apache-2.0
"""The start-up line of both model runners: what was read from the draft's config, and what the runner made of it."""

from collections.abc import Sequence
from logging import Logger

from vllm_dflash.draft_config import DraftConfig


def announce(logger: Logger, draft: DraftConfig, num_speculative_tokens: int, facts: Sequence[str], said: str = "") -> str:
    """Log the line, and warn once about each thing that the checkpoint left open and was assumed.

    Args:
        logger: one of vLLM's.
        draft: as it was read.
        num_speculative_tokens: K.
        facts: what the runner chose, one phrase each.
        said: the line that is not repeated (vLLM builds graphs twice where it profiles their memory).

    Returns:
        The line.
    """
    line = (
        f"DFlash draft: {draft.num_layers} layers, K={num_speculative_tokens} of block {draft.draft_block_size}, "
        f"{', '.join((describe(draft), *facts))}"
    )
    if line != said:
        logger.info(line)
        for note in draft.notes:
            logger.warning_once(f"DFlash draft: {note}.")  # type: ignore[attr-defined]  # vLLM's loggers have it
    return line


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
