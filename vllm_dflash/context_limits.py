# SPDX-License-Identifier: Apache-2.0
"""How far a draft looks back, and up to which context it drafts at all: plain arithmetic on its config and the options.

Beyond the length that a draft was trained for its drafts are noise, and a scaled rotary table has no further rows. Such requests
are decoded without drafts; the target's own length is never cut.
"""

import dataclasses

from vllm_dflash.draft_config import DraftConfig
from vllm_dflash.options import PluginOptions

# vLLM's rotary embeddings of these types grow their table with the target's max_model_len and keep their frequencies.
_GROWING = ("default", "llama3", "linear")
_MAX_TARGET_GROUPS = 2


def windowed(draft: DraftConfig, options: PluginOptions, num_target_layers: int) -> DraftConfig:
    """``draft`` with every full-attention layer narrowed to ``options.draft_window``; windows of the checkpoint stay."""
    window, frees = options.draft_window, options.draft_window_frees_memory
    if window is None:
        return draft
    if frees is None:
        frees = frees_memory(num_target_layers, sum(layer.window is None for layer in draft.layers))
    layers = tuple(
        layer if layer.window is not None else dataclasses.replace(layer, window=window, frees=frees) for layer in draft.layers
    )
    return dataclasses.replace(draft, layers=layers)


def trained_length(draft: DraftConfig) -> int:
    """Positions that the draft's rotary embedding was made for: ``max_position_embeddings``, stretched where it is scaled."""
    kind = draft.rope.parameters.get("rope_type", "default")
    factor = float(draft.rope.parameters.get("factor", 1.0))
    if kind == "yarn":
        return int(draft.rope.parameters["original_max_position_embeddings"] * factor)
    return int(draft.max_position_embeddings * factor) if kind in ("linear", "dynamic") else draft.max_position_embeddings


def grows(draft: DraftConfig) -> bool:
    """Whether the rotary table can be made longer than :func:`trained_length` without changing what it says."""
    return draft.rope.parameters.get("rope_type", "default") in _GROWING


def rotary_rows(draft: DraftConfig, raised: int) -> int:
    """Rows of the rotary table; ``raised`` is the draft's maximum after vLLM has lifted it to the target's length.

    vLLM 0.32 lifts it for every type, which would change the frequencies of the scaled ones.
    """
    return raised if grows(draft) else draft.max_position_embeddings


def longest_context(
    draft: DraftConfig, num_speculative_tokens: int, max_model_len: int, draft_max_context: int | None
) -> int | None:
    """Most tokens of context with which a request is drafted for; None where no request can have more.

    Args:
        draft: its trained length counts the query block too.
        num_speculative_tokens: K.
        max_model_len: of the target.
        draft_max_context: the user's own limit; it may exceed the trained length only where the rotary table can grow.
    """
    width = num_speculative_tokens if draft.sample_from_anchor else num_speculative_tokens + 1
    trained = trained_length(draft)
    # A draft as long as its target needs no limit: what a block has beyond the end is padding in any case.
    limit = max_model_len if trained >= max_model_len else max(0, trained - width)
    if draft_max_context is not None:
        limit = draft_max_context if grows(draft) else min(draft_max_context, limit)
    return limit if limit < max_model_len else None


def frees_memory(num_target_layers: int, num_draft_layers: int) -> bool:
    """Whether KV blocks behind a draft window are worth freeing beside a target of full-attention layers.

    vLLM frees blocks per KV-cache group, and groups have equally many layers: the target's are cut into groups of the draft's
    layer count. Every group costs host time in each step (46 groups instead of 10 halved the speed at batch 1 on an H200,
    vllm-project/vllm#51742), so more than two for the target are not worth the draft's share.
    """
    if num_draft_layers < 1:
        return False
    small, large = sorted((num_target_layers, num_draft_layers))
    group_size = large if large < 1.5 * small else small  # vLLM's rule, v1/core: kv_cache_utils or kv_cache_planning
    num_groups = -(-num_target_layers // group_size)
    return num_groups <= _MAX_TARGET_GROUPS and num_groups * group_size < num_target_layers + num_draft_layers
