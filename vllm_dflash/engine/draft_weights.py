# SPDX-License-Identifier: Apache-2.0
"""Strict loading of draft checkpoints: every tensor has a place, and every parameter is filled exactly once.

A tensor that is ignored silently (an extra trained head) or a parameter that stays random costs acceptance and raises no
error later, so both are refused by name here.
"""

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.transformers_utils.repo_utils import get_hf_file_bytes

from vllm_dflash.draft_config import DraftConfig

MASK_EMBEDDING_FILE = "mask_embedding.pt"
STACKED: Mapping[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Checkpoint module -> (vLLM's fused module, shard)."""
SHARDS: Mapping[str, frozenset[str | int]] = {
    "qkv_proj": frozenset({"q", "k", "v"}),
    "gate_up_proj": frozenset({0, 1}),
}
UNUSED = ("t2d", "rotary_emb.inv_freq")
"""Tensors that carry nothing new: the inverse of d2t, and a table computed from the config."""
OPTIONAL_IN_QUANTISED = re.compile(r"(^|_)(scales?|zero_points?|q?zeros|g_idx|shape)(_|$)")
"""Parameters that quantised checkpoints may leave out, because they are computed or neutral: never a weight, bias or norm."""


class StrictLoader:
    """Fills the parameters of one module from named tensors and remembers which shard of which was filled.

    Args:
        module: to fill.
        not_ours: prefixes of parameters that another model owns and loads.
    """

    def __init__(self, module: nn.Module, not_ours: tuple[str, ...] = ()) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if not name.startswith(not_ours)}
        self._filled: dict[str, set[str | int | None]] = defaultdict(set)
        self._unexpected: list[str] = []

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy ``tensor``, named as in the checkpoint, to its parameter.

        Raises:
            ValueError: the tensor comes a second time, or its shape does not fit.
        """
        path, shard = fused_name(name)
        parameter = self._parameters.get(path)
        if parameter is None:
            self._unexpected.append(name)
            return
        if shard in self._filled[path]:
            raise ValueError(
                f"draft checkpoint: tensor {name!r} comes twice; each tensor is expected once. Download the checkpoint again."
            )
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        try:
            loader(parameter, tensor) if shard is None else loader(parameter, tensor, shard)
        except (AssertionError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"draft checkpoint: tensor {name!r} has shape {list(tensor.shape)}, which does not fit parameter {path!r} "
                f"of shape {list(parameter.shape)}. config.json and weights must come from the same checkpoint."
            ) from error
        self._filled[path].add(shard)

    def finish(self, *, derived: Iterable[str] = (), quantised: bool = False) -> set[str]:
        """Check the account; return the names of all parameters that hold weights now.

        Args:
            derived: parameters that are computed from others, not loaded.
            quantised: scales, zero points and index tables may be missing; everything else must be there all the same.

        Raises:
            ValueError: tensors without a place, or parameters without a tensor.
        """
        if self._unexpected:
            raise ValueError(
                f"draft checkpoint: unexpected tensors {shorten(self._unexpected)}. A plain DFlash draft has none of these, "
                "and ignoring trained weights would lose acceptance silently. Use a plain DFlash checkpoint, or set "
                "VLLM_DFLASH=0 to try vLLM's own implementation."
            )
        derived = set(derived)
        missing = [p for p in self._parameters if p not in derived and not self._complete(p)]
        needed = [p for p in missing if not (quantised and OPTIONAL_IN_QUANTISED.search(p.rpartition(".")[2]))]
        if needed:
            raise ValueError(
                f"draft checkpoint: no tensors for {shorten(needed)}; every parameter must be filled. Is config.json of "
                "the same checkpoint (num_hidden_layers, attention_bias, draft_vocab_size)? Download the checkpoint again."
            )
        return set(self._parameters) - set(missing)

    def _complete(self, path: str) -> bool:
        filled = self._filled.get(path, set())
        module = path.rsplit(".", 2)[-2] if path.count(".") else ""
        return None in filled or (bool(filled) and filled >= SHARDS.get(module, frozenset()))


def plain_name(name: str) -> str:
    """Checkpoint name without the prefixes that some writers put in front."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def fused_name(name: str) -> tuple[str, str | int | None]:
    """``layers.0.self_attn.k_proj.weight`` -> (``layers.0.self_attn.qkv_proj.weight``, ``"k"``); others unchanged, None."""
    parts = name.split(".")
    if len(parts) >= 2 and parts[-2] in STACKED:
        parts[-2], shard = STACKED[parts[-2]]
        return ".".join(parts), shard
    return name, None


def fold_columns(weight: torch.Tensor, layer_ids: Sequence[int], captured: Sequence[int]) -> torch.Tensor:
    """Rearrange ``fc``'s column blocks from the checkpoint's layer order to the captured order; add repeated blocks.

    vLLM captures every wanted layer once, in ascending order, whatever the checkpoint says. Since ``fc`` is linear, summing
    the blocks of a repeated layer is exact.

    Args:
        weight: [H, A * H_target], one block per entry of ``layer_ids``.
        layer_ids: A layer ids in the checkpoint's order, possibly repeated.
        captured: the U distinct ids, ascending.

    Returns:
        [H, U * H_target].
    """
    blocks = weight.float().chunk(len(layer_ids), dim=1)
    folded = [sum(b for b, i in zip(blocks, layer_ids, strict=True) if i == layer) for layer in captured]
    return torch.cat([torch.as_tensor(f) for f in folded], dim=1).to(weight.dtype)


def check_fc(weight: torch.Tensor, draft: DraftConfig) -> None:
    """Refuse an ``fc`` weight of another shape than ``draft`` states, before its columns are rearranged.

    Raises:
        ValueError: config.json and weights do not belong together.
    """
    expected = [draft.hidden_size, draft.fc_input_size]
    if list(weight.shape) != expected:
        raise ValueError(
            f"fc.weight: found shape {list(weight.shape)}; config.json asks for {expected} ({draft.num_aux_layers} "
            f"target layers of {draft.target_hidden_size}). config.json and weights must come from the same checkpoint."
        )


def fill_context(context_kv: Any, attentions: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Compute the fused weights of ``ContextKV`` from checkpoint tensors, in place.

    Not from the layers' parameters: some platforms have packed those by now. Through weight loaders, because vLLM's layer by
    layer reload has put stand-ins without memory in the place of the tensors, and restores the old values of what was not
    loaded.
    """

    def rows(index: int, projection: str, kind: str) -> torch.Tensor:
        full = tensors[f"layers.{index}.self_attn.{projection}.{kind}"]
        heads = full.shape[0] // context_kv.head_dim
        first = get_tensor_model_parallel_rank() * heads // get_tensor_model_parallel_world_size()  # fewer heads than ranks too
        return full[first * context_kv.head_dim :][: attentions[index].kv_size]

    layers = range(len(attentions))
    if context_kv.projection is not None:
        for kind, parameter in list(context_kv.projection.named_parameters()):  # a reload replaces them meanwhile
            _fill(parameter, torch.cat([rows(i, name, kind) for i in layers for name in ("k_proj", "v_proj")]))
    _fill(context_kv.k_norm_weight, torch.stack([tensors[f"layers.{i}.self_attn.k_norm.weight"] for i in layers]))
    _fill(context_kv.unit_weight, torch.ones(context_kv.head_dim))


def _fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    getattr(tensor, "weight_loader", default_weight_loader)(tensor, value)


def checked_offsets(offsets: torch.Tensor | None, draft: DraftConfig) -> torch.Tensor:
    """The checkpoint's ``d2t``; zeros where a head over the first ids of a larger target vocabulary needs none.

    Raises:
        ValueError: it is missing, and ``draft``'s vocabulary is a reduced one.
    """
    if offsets is None and draft.draft_vocab_size != draft.vocab_size:
        raise ValueError(
            f"d2t: missing from the draft checkpoint; draft_vocab_size {draft.draft_vocab_size} differs from vocab_size "
            f"{draft.vocab_size}, so draft ids need a map to target ids. Download the checkpoint again."
        )
    return torch.zeros(draft.draft_vocab_size, dtype=torch.int64) if offsets is None else offsets


def draft_to_target(offsets: torch.Tensor, target_vocab_size: int) -> torch.Tensor:
    """Target id of every draft id, int64 [V_draft], from the stored offsets ``d2t`` (target id minus draft id).

    Raises:
        ValueError: an id falls outside the target's vocabulary.
    """
    table = offsets.to(torch.int64).cpu() + torch.arange(offsets.shape[0], device="cpu")
    if int(table.min()) < 0 or int(table.max()) >= target_vocab_size:
        raise ValueError(
            f"d2t: maps draft tokens to target ids {int(table.min())} to {int(table.max())}; the target's vocabulary has "
            f"{target_vocab_size}. Use a draft trained for this target."
        )
    return table


def read_mask_embedding(model: str, revision: str | None, mask_token_id: int) -> torch.Tensor | None:
    """The separately trained embedding of the mask token, [H], from ``mask_embedding.pt``; None where there is no such file.

    Raises:
        ValueError: the file was made for another mask token.
    """
    data = get_hf_file_bytes(MASK_EMBEDDING_FILE, model, revision)
    if data is None:
        return None
    state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    if isinstance(state, Mapping):
        stored = state.get("mask_token_id", mask_token_id)
        if stored != mask_token_id:
            raise ValueError(
                f"{MASK_EMBEDDING_FILE}: made for mask_token_id {stored}; config.json says {mask_token_id}. Both must come "
                "from the same checkpoint."
            )
        state = state["embedding"]
    return torch.as_tensor(state).reshape(-1)


def shorten(names: Sequence[str], limit: int = 6) -> str:
    """The first ``limit`` names, quoted."""
    shown = ", ".join(repr(n) for n in sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
