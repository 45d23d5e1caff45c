# SPDX-License-Identifier: Apache-2.0
"""What a DFlash draft is, whatever dialect its checkpoint was written in, and what it must agree with.

Parsing is in :mod:`vllm_dflash.checkpoint`; this module holds the result and the checks that need no file.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from vllm_dflash.config_reader import CheckpointError

OUR_ARCHITECTURES = frozenset({"DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashQwen3DFlashDraftModel"})
"""Plain DFlash bodies, before and after vLLM's renaming (``config/speculative.py``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one draft layer attends: ``window`` in tokens (None: everything) and whether rows see only earlier rows.

    ``frees`` says whether KV blocks behind the window are given back; False where only an option narrows the layer.
    """

    window: int | None
    causal: bool
    frees: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the draft (never the target's). ``parameters`` is in Hugging Face's ``rope_parameters`` form."""

    theta: float
    is_neox: bool
    parameters: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a draft must agree with: the target's hidden size, decoder layers and vocabulary size."""

    hidden_size: int
    num_layers: int
    vocab_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft, whatever its dialect. ``target_layer_ids`` are 0-based layer *outputs* in the order of ``fc``'s input blocks.

    ``embedding_scale`` multiplies the embeddings of the query rows; None leaves it to the module that they come from.
    """

    dialect: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    draft_block_size: int
    sample_from_anchor: bool
    mask_token_id: int
    rope: RopeConfig
    max_position_embeddings: int
    layers: tuple[LayerAttention, ...]
    value_scale: float | None
    attention_sinks: bool
    logit_scale: float
    embedding_scale: float | None
    notes: tuple[str, ...]

    @property
    def max_num_speculative_tokens(self) -> int:
        """K that the draft was trained for: every row of the block but the anchor, or every row if the anchor row drafts too."""
        return self.draft_block_size if self.sample_from_anchor else self.draft_block_size - 1

    @property
    def num_aux_layers(self) -> int:
        """Number of captured hidden states that ``fc`` reads, repetitions included."""
        return len(self.target_layer_ids)

    @property
    def fc_input_size(self) -> int:
        """Input width of ``fc``: the captured states side by side."""
        return self.target_hidden_size * self.num_aux_layers

    @property
    def is_causal(self) -> bool:
        """True when no layer looks at later rows of the block, so that no non-causal attention backend is needed."""
        return all(layer.causal for layer in self.layers)


def claims_architectures(architectures: Iterable[str] | None) -> bool:
    """Whether every named architecture is a plain DFlash body of ours (DFlash2, LiLiCorr, XPress, ... are not)."""
    names = list(architectures or ())
    return bool(names) and all(name in OUR_ARCHITECTURES for name in names)


def check_pair(draft: DraftConfig, target: TargetFacts) -> None:
    """Refuse a draft that was made for another target.

    Raises:
        CheckpointError: hidden size, vocabulary or layer ids do not fit.
    """
    cure = "Use a draft trained for this target."
    if draft.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"target_hidden_size: the DFlash draft expects a target with hidden size {draft.target_hidden_size}; this target "
            f"has {target.hidden_size}. {cure}"
        )
    if draft.num_target_layers not in (None, target.num_layers):
        raise CheckpointError(
            f"num_target_layers: the DFlash draft was trained on a target with {draft.num_target_layers} layers; this target "
            f"has {target.num_layers}. {cure}"
        )
    too_high = [i for i in draft.target_layer_ids if i >= target.num_layers]
    if too_high:
        raise CheckpointError(
            f"target_layer_ids: the DFlash draft reads the output of target layers {too_high}; this target has layers "
            f"0 to {target.num_layers - 1}. {cure}"
        )
    if draft.vocab_size > target.vocab_size:
        raise CheckpointError(
            f"vocab_size: the DFlash draft has {draft.vocab_size} tokens; this target has {target.vocab_size}. {cure}"
        )
    if draft.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"mask_token_id: {draft.mask_token_id} is outside this target's vocabulary of {target.vocab_size}. {cure}"
        )


def check_width(draft: DraftConfig, num_speculative_tokens: int) -> None:
    """Refuse a K above the trained block: all positions collapse, not only the extra ones (vllm-project/vllm#41834).

    Raises:
        CheckpointError: ``num_speculative_tokens`` is larger than ``draft.max_num_speculative_tokens``.
    """
    limit = draft.max_num_speculative_tokens
    if num_speculative_tokens > limit:
        raise CheckpointError(
            f"num_speculative_tokens: {num_speculative_tokens} is more than this DFlash draft was trained for (blocks of "
            f"{draft.draft_block_size}). Set it to {limit} or less."
        )


def check_itself(draft: DraftConfig) -> None:
    """Refuse a config whose fields contradict each other.

    Raises:
        CheckpointError: heads, mask token or draft vocabulary do not fit together.
    """
    if draft.num_heads % draft.num_kv_heads:
        raise CheckpointError(
            f"num_key_value_heads: {draft.num_kv_heads} does not divide num_attention_heads = {draft.num_heads}. Fix the config."
        )
    if draft.mask_token_id >= draft.vocab_size:
        raise CheckpointError(
            f"mask_token_id: {draft.mask_token_id} is outside the draft's vocabulary of {draft.vocab_size}. Fix the config."
        )
    if draft.draft_vocab_size > draft.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size: {draft.draft_vocab_size} is more than vocab_size = {draft.vocab_size}. Fix the config."
        )
