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

from dflash_kernels.draft_head import HeadWorkspace, Temperatures, Winner, draft_head, draft_head_local
from vllm_dflash.engine.head_choice import choose_by_time
from vllm_dflash.engine.private_head import PrivateHead, across_ranks


@dataclasses.dataclass(frozen=True, slots=True)
class FusedHead:
    """Callable in the place of the draft model's ``get_top_tokens``."""

    model: Any  # our draft model
    workspace: HeadWorkspace
    vocab_start: int
    num_valid: int

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[m, H] -> most likely target ids, int64 [m]."""
        return self.winner(hidden_states).tokens

    def winner(self, hidden_states: torch.Tensor, temperatures: Temperatures | None = None) -> Winner:
        """The same with logits, and with the odds against each token where ``temperatures`` of the rows are given."""
        weight, ids = self.model.lm_head.weight, self.model.draft_to_target
        options: dict[str, Any] = {"workspace": self.workspace, "num_valid": self.num_valid, "temperatures": temperatures}
        group = get_tp_group()
        if group.world_size == 1:
            assert self.vocab_start == 0
            return draft_head(hidden_states, weight, target_ids=ids, **options)
        local = draft_head_local(hidden_states, weight, vocab_start=self.vocab_start, **options)
        return across_ranks(local, temperatures, target_ids=ids, group=group)


def fuse_head(model: Any, max_rows: int, vllm_config: Any, *, odds: bool = False) -> FusedHead | PrivateHead | str:
    """The fused head for ``model`` (after ``share()``) and up to ``max_rows`` rows, or the reason against it.

    A private head takes the place of the target's unless the user left the choice open and it does not pay here. ``odds``: its
    ``winner`` will be called with temperatures.
    """
    private = getattr(model, "private_head", None)
    if private is None or not private.on_gpu:
        return _full_head(model, max_rows, odds)
    bound: PrivateHead = private.bind(max_rows, odds=odds)
    if not private.is_a_guess:
        return bound
    full = _full_head(model, max_rows, odds)
    chosen = choose_by_time(bound, full, model, max_rows, vllm_config)
    if chosen == "full":
        model.drop_private_head("it is no faster on this GPU")
        return full
    if chosen == "small":
        model.private_head = bound = private.shortened().bind(max_rows, odds=odds)
    return bound


def _full_head(model: Any, max_rows: int, odds: bool) -> FusedHead | str:
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
    workspace = HeadWorkspace(max_rows=max_rows, vocab_rows=weight.shape[0], dtype=weight.dtype, device=weight.device, odds=odds)
    return FusedHead(model, workspace, shard.org_vocab_start_index, shard.num_org_elements)
