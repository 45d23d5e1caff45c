# SPDX-License-Identifier: Apache-2.0
"""Greedy drafts straight from the LM head: ``draft_head`` fuses the argmax with the product, or reads logits once.

Under tensor parallelism each rank finds the winner of its vocabulary shard, and ranks exchange 8 bytes per row instead of
logits. Used where the head is a plain matrix; :func:`fuse_head` says why not otherwise.
"""

import dataclasses
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from dflash_kernels.draft_head import HeadWorkspace, combine_shards, draft_head, draft_head_local
from vllm_dflash.engine.private_head import PrivateHead
from vllm_dflash.engine.variant_choice import faster_than_full


@dataclasses.dataclass(frozen=True, slots=True)
class FusedHead:
    """Callable in the place of the draft model's ``get_top_tokens``."""

    model: Any  # our draft model
    workspace: HeadWorkspace
    vocab_start: int
    num_valid: int

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[m, H] -> most likely target ids, int64 [m]."""
        weight, ids = self.model.lm_head.weight, self.model.draft_to_target
        group = get_tp_group()
        if group.world_size == 1:
            assert self.vocab_start == 0
            winner = draft_head(hidden_states, weight, workspace=self.workspace, num_valid=self.num_valid, target_ids=ids)
            return winner.tokens
        winner = draft_head_local(
            hidden_states, weight, workspace=self.workspace, vocab_start=self.vocab_start, num_valid=self.num_valid
        )
        # One collective of int32 pairs: the bits of the value, and the token, which fits.
        pair = torch.stack([winner.values.view(torch.int32), winner.tokens.to(torch.int32)])
        gathered = group.all_gather(pair, dim=0).view(group.world_size, 2, -1)
        values, tokens = gathered[:, 0].contiguous().view(torch.float32), gathered[:, 1].to(torch.int64)
        return combine_shards(values, tokens.contiguous(), target_ids=ids).tokens


def fuse_head(model: Any, max_rows: int) -> FusedHead | PrivateHead | str:
    """The fused head for ``model`` (after ``share()``) and up to ``max_rows`` rows, or the reason against it.

    A private head takes the place of the target's unless the user left the choice open and it is no faster here.
    """
    private = getattr(model, "private_head", None)
    if private is None or not private.on_gpu:
        return _full_head(model, max_rows)
    if private.is_a_guess and not faster_than_full(private.bind(max_rows), _full_head(model, max_rows), model, max_rows):
        model.drop_private_head("it is no faster on this GPU")
        return _full_head(model, max_rows)
    bound: PrivateHead = private.bind(max_rows)
    return bound


def _full_head(model: Any, max_rows: int) -> FusedHead | str:
    head = model.lm_head
    if not isinstance(head.quant_method, UnquantizedEmbeddingMethod):
        return f"LM head is quantised ({type(head.quant_method).__name__})"
    if getattr(head, "bias", None) is not None:
        return "LM head has a bias"
    if model.logits_processor.scale <= 0:  # a negative scale would turn the order around
        return f"logit_scale {model.logits_processor.scale} is not positive"
    weight = head.weight
    if weight.device.type != "cuda":
        return "no CUDA device"
    if weight.dtype != model.hidden_norm.weight.dtype:
        return f"LM head is {weight.dtype}, hidden states are {model.hidden_norm.weight.dtype}"
    shard = head.shard_indices
    workspace = HeadWorkspace(max_rows=max_rows, vocab_rows=weight.shape[0], dtype=weight.dtype, device=weight.device)
    return FusedHead(model, workspace, shard.org_vocab_start_index, shard.num_org_elements)
