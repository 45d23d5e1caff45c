# SPDX-License-Identifier: Apache-2.0
"""The draft network on vLLM layers, for both model runners.

    aux states --fc--> context states --(context_kv)--> KV cache of every layer
    [anchor, mask x K] --embed--> layers (read that cache) --norm--> LM head

Embedding and LM head are the target's own modules, handed over by :meth:`DFlashDraftModel.share` after loading; nothing is
allocated for them unless the checkpoint ships its own. Method names are vLLM's duck type of a DFlash draft, so that its
built-in V2 speculator could run this class too.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import get_draft_quant_config, maybe_prefix

from vllm_dflash.context_limits import rotary_rows
from vllm_dflash.draft_config import DraftConfig
from vllm_dflash.engine import draft_weights
from vllm_dflash.engine.context_kv import ContextKV, Slots
from vllm_dflash.engine.draft_layers import DraftLayer, DraftNorm
from vllm_dflash.engine.draft_quantization import OnlineDraftQuantization, online_quantization
from vllm_dflash.engine.pair import resolve_draft
from vllm_dflash.engine.private_head import PrivateHead, build_private_head
from vllm_dflash.engine.target_vocabulary import checked_embedding
from vllm_dflash.engine.weight_update import UpdateGuard, set_buffer

logger = init_logger("vllm.plugins.dflash")

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
OWN_VOCABULARY = {EMBEDDING: "model.embed_tokens.", HEAD: "lm_head."}
"""Tensor of the checkpoint -> prefix of the module that it fills."""


@support_torch_compile
class DraftBackbone(nn.Module):
    """Embedding, layers and final norm: the part that runs on query rows and may be compiled."""

    def __init__(self, *, vllm_config: VllmConfig, draft: DraftConfig, quant_config: Any, prefix: str = "") -> None:
        super().__init__()
        del prefix  # the decorator wants the argument
        target_layers = vllm_config.model_config.get_total_num_hidden_layers()
        max_position = rotary_rows(draft, vllm_config.speculative_config.draft_model_config.hf_config.max_position_embeddings)
        self.mask_token_id = draft.mask_token_id
        self.embed_tokens: Any = None  # a module, set by share(), or by a checkpoint with its own
        self.embedding_scale = 1.0 if draft.embedding_scale is None else draft.embedding_scale  # share() may change it
        self.mask_embedding: torch.Tensor | None
        self.register_buffer("mask_embedding", None, persistent=False)
        layers = [
            DraftLayer(draft, i, target_layers + i, max_position, vllm_config, quant_config) for i in range(draft.num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.attentions = tuple(layer.self_attn for layer in layers)
        self.norm = DraftNorm(draft.hidden_size, eps=draft.rms_norm_eps)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [n] -> [n, H], scaled; mask rows get the separately trained embedding where the checkpoint has one."""
        assert self.embed_tokens is not None, "share() runs before the first forward"
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        if self.embedding_scale != 1.0:
            embedded = embedded * self.embedding_scale
        if self.mask_embedding is not None:
            is_mask = (input_ids == self.mask_token_id).unsqueeze(-1)
            embedded = torch.where(is_mask, self.mask_embedding.to(embedded.dtype), embedded)
        return embedded

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Query rows: ``input_ids`` and ``positions`` [n] -> [n, H] after the final norm."""
        hidden_states = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        normed: torch.Tensor = self.norm(hidden_states, residual)[0]
        return normed


class DFlashDraftModel(nn.Module):
    """A DFlash draft: context side (fc, context KV) and query side (backbone, head).

    Raises:
        ValueError: draft and target do not fit (from :func:`vllm_dflash.engine.pair.resolve_draft`).
    """

    packed_modules_mapping = {  # noqa: RUF012  # vLLM reads it from the class to match quantisation rules
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self._vllm_config = vllm_config
        model_config = vllm_config.speculative_config.draft_model_config
        self.config = model_config.hf_config
        self.draft = draft = resolve_draft(vllm_config)
        self.quant_config = get_draft_quant_config(vllm_config)  # the checkpoint's; a plain one may be quantised while it loads
        quantised: Any = self.quant_config or online_quantization(vllm_config)
        self.target_vocab_size = vllm_config.model_config.get_vocab_size()
        self.has_own_embed_tokens = False
        self.has_own_lm_head = draft.draft_vocab_size != draft.vocab_size

        self.captured_layers = tuple(sorted(set(draft.target_layer_ids)))
        # Plain weights take the checkpoint's layer order into fc's columns (free at run time); packed ones cannot.
        self._fold = self.quant_config is None
        fc_layers = self.captured_layers if self._fold else draft.target_layer_ids
        self._aux_order = None if fc_layers == self.captured_layers else [self.captured_layers.index(i) for i in fc_layers]
        self.fc = ReplicatedLinear(
            draft.target_hidden_size * len(fc_layers),
            draft.hidden_size,
            bias=False,
            quant_config=quantised,
            return_bias=False,
            prefix="fc",
        )
        self.hidden_norm = DraftNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.model = DraftBackbone(
            vllm_config=vllm_config, draft=draft, quant_config=quantised, prefix=maybe_prefix(prefix, "model")
        )
        self._updates = UpdateGuard()
        self._is_shared = False
        online = quantised if isinstance(quantised, OnlineDraftQuantization) else None
        self.weights_kind = "checkpoint" if online is None else online.kind
        self.context_kv = ContextKV(self.model.attentions, self.hidden_norm, draft.hidden_size, online)
        self.private_head: PrivateHead | None = None
        self.lm_head: nn.Module
        self.draft_to_target: torch.Tensor | None
        self.register_buffer("draft_to_target", None, persistent=False)
        if self.has_own_lm_head:
            self._own_head()
        self.logits_processor = LogitsProcessor(
            draft.draft_vocab_size if self.has_own_lm_head else self.target_vocab_size, scale=draft.logit_scale
        )

    # -- loading ---------------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill every parameter from the checkpoint; return their names.

        A later load (weight update, wake-up from sleep) fills the same memory, which captured graphs hold, with the same
        tensors. It takes them all in one call: ``fc`` and the fused K/V weights are computed from whole tensors.

        Raises:
            ValueError: unexpected, missing, repeated or misshapen tensors, by name; an update of some tensors only.
        """
        tensors = {draft_weights.plain_name(name): tensor for name, tensor in weights}
        names = frozenset(tensors)
        own = [p for name, p in self.named_parameters() if not name.startswith(self._borrowed())]
        self._updates.check(names, own, packed=self.fc.weight.dtype == torch.float8_e4m3fn and self.quant_config is None)
        made = self._allocate_own_vocabulary(tensors)
        mask = tensors.pop("mask_embedding", tensors.pop("mask_embedding.weight", None))
        self._set_mask_embedding(mask)
        self._set_vocabulary_map(tensors.pop("d2t", None))
        if self._fold and "fc.weight" in tensors:
            draft_weights.check_fc(tensors["fc.weight"], self.draft)
            tensors["fc.weight"] = draft_weights.fold_columns(
                tensors["fc.weight"], self.draft.target_layer_ids, self.captured_layers
            )
        loader = draft_weights.StrictLoader(self, not_ours=self._borrowed())
        for name, tensor in tensors.items():
            if not name.endswith(draft_weights.UNUSED):
                loader.load(self._parameter_path(name), tensor)
        derived = [name for name, _ in self.named_parameters() if name.startswith("context_kv.")]
        filled = loader.finish(derived=derived, quantised=self.quant_config is not None)
        draft_weights.fill_context(self.context_kv, self.model.attentions, tensors)
        buffers = {"mask_embedding": self.model.mask_embedding, "d2t": self.draft_to_target}
        if self.private_head is not None:
            self.private_head.stale = True
        self._updates.remember(names, made | {name for name, buffer in buffers.items() if buffer is not None})
        return filled

    def share(self, embed_tokens: nn.Module | None, lm_head: nn.Module | None, embedding_scale: float = 1.0) -> None:
        """Take the target's embedding, with the target's scale, and LM head where the checkpoint has none of its own.

        A scale that the draft's config states wins over ``embedding_scale``.

        Raises:
            ValueError: the target has no module to share, or its embedding has another width.
        """
        self._is_shared = True
        if not self.has_own_embed_tokens:
            self.model.embed_tokens = checked_embedding(embed_tokens, self.draft.hidden_size)
            if self.draft.embedding_scale is None:
                self.model.embedding_scale = embedding_scale
        if not self.has_own_lm_head:
            if lm_head is None:
                raise ValueError(
                    "lm_head: the DFlash draft ships none, and the target has none on this rank to share, nor one tied to its "
                    "embedding. Use a draft checkpoint with lm_head.weight, or pipeline_parallel_size 1."
                )
            self.lm_head = lm_head
        private = build_private_head(self, self._vllm_config)
        self.private_head = None if isinstance(private, str) else private

    def drop_private_head(self, reason: str) -> None:
        """Draft from the full head after all, and free the copy."""
        if self.private_head is not None:
            logger.info_once(f"DFlash draft: drafts come from the full head: {reason}")
        self.private_head = None

    @property
    def variants(self) -> str:
        """What is smaller than in the checkpoint, for the start-up line; empty where nothing is."""
        weights = "" if self.weights_kind == "checkpoint" else f" with {self.weights_kind} weights"
        return weights if self.private_head is None else f"{weights}, {self.private_head.describe()}"

    def refresh_head(self, token_ids: torch.Tensor | None = None) -> None:
        """Before a step: the private head follows weight updates and ``token_ids`` (int [n]), the input of the target's step."""
        if self.private_head is not None:
            self.private_head.follow(token_ids)

    # -- context side ----------------------------------------------------------------------------------------------------

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``hidden_states`` [n, U * H_target]: the captured layers side by side, ascending -> context states [n, H].

        Raises:
            ValueError: another width, so other layers were captured than the draft reads.
        """
        width = self.draft.target_hidden_size * len(self.captured_layers)
        if hidden_states.shape[-1] != width:
            raise ValueError(
                f"aux hidden states: found width {hidden_states.shape[-1]}; the DFlash draft needs {width} (target layers "
                f"{list(self.captured_layers)}). Use a draft trained for this target."
            )
        if self._aux_order is not None:
            blocks = hidden_states.view(hidden_states.shape[0], len(self.captured_layers), -1)
            hidden_states = blocks[:, self._aux_order].flatten(1)
        states: torch.Tensor = self.fc(hidden_states)
        return states

    def precompute_and_store_context_kv(self, states: torch.Tensor, positions: torch.Tensor, slots: Slots = None) -> None:
        """Store K/V of ``states`` [n, H] at ``positions`` int64 [n] for every layer; ``slots`` None computes without storing."""
        self.context_kv.store(self.context_kv.project(states), positions, slots)

    # -- query side ------------------------------------------------------------------------------------------------------

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Query rows of all requests: ids and positions [n] -> [n, H]."""
        hidden_states: torch.Tensor = self.model(input_ids, positions, inputs_embeds)
        return hidden_states

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, H]."""
        return self.model.embed_input_ids(input_ids)

    def draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[m, H] -> [m, V_draft], in draft ids; all-gathered under tensor parallelism."""
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[m, H] -> [m, V] in target ids; tokens outside a reduced draft vocabulary get -inf."""
        logits = self.draft_logits(hidden_states)
        if self.draft_to_target is None:
            return logits
        full = logits.new_full((logits.shape[0], self.target_vocab_size), float("-inf"))
        full[:, self.draft_to_target] = logits
        return full

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[m, H] -> most likely target ids, int64 [m]. Under tensor parallelism only (value, index) pairs are gathered."""
        if self.private_head is None:
            return self.get_top_tokens_of_full_head(hidden_states)
        self.refresh_head()
        return self.private_head(hidden_states)

    def get_top_tokens_of_full_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As :meth:`get_top_tokens`, over every row of the head."""
        tokens: torch.Tensor = self.logits_processor.get_top_tokens(self.lm_head, hidden_states)
        return tokens if self.draft_to_target is None else self.draft_to_target[tokens]

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        """Names of the draft's KV caches, in layer order."""
        return [attention.attn.layer_name for attention in self.model.attentions]

    def get_draft_attn_causal(self) -> list[bool]:
        """Causality of every layer, aligned with :meth:`get_draft_kv_cache_layer_names`."""
        return [layer.causal for layer in self.draft.layers]

    # -- details of loading ----------------------------------------------------------------------------------------------

    def _borrowed(self) -> tuple[str, ...]:
        """Prefixes of parameters that belong to the target."""
        embedding = () if self.has_own_embed_tokens else ("model.embed_tokens.",)
        return embedding if self.has_own_lm_head else (*embedding, "lm_head.")

    def _own_head(self) -> None:
        self.has_own_lm_head = True
        self.lm_head = ParallelLMHead(
            self.draft.draft_vocab_size,
            self.draft.hidden_size,
            params_dtype=self.hidden_norm.weight.dtype,
            quant_config=self.quant_config,
            prefix="lm_head",
        )

    def _allocate_own_vocabulary(self, tensors: dict[str, torch.Tensor]) -> set[str]:
        """Make room for an embedding or head that the checkpoint ships, and return their names; the usual draft ships none."""
        made = {name for name, prefix in OWN_VOCABULARY.items() if name in tensors and prefix in self._borrowed()}
        if self._is_shared and made:
            raise ValueError(
                f"draft checkpoint: {', '.join(sorted(made))} comes after the target's module was taken in its place (load "
                "format 'dummy'?); loading would overwrite the target. Restart the engine with this checkpoint."
            )
        with set_current_vllm_config(self._vllm_config), self.hidden_norm.weight.device:
            if EMBEDDING in made:
                self.model.embed_tokens = VocabParallelEmbedding(
                    self.draft.vocab_size, self.draft.hidden_size, params_dtype=self.hidden_norm.weight.dtype
                )
                self.has_own_embed_tokens = True
            if HEAD in made:
                self._own_head()
                self.logits_processor = LogitsProcessor(self.draft.draft_vocab_size, scale=self.draft.logit_scale)
        return made

    def _set_vocabulary_map(self, offsets: torch.Tensor | None) -> None:
        draft = self.draft
        if not self.has_own_lm_head or draft.draft_vocab_size == self.target_vocab_size:
            return
        table = draft_weights.draft_to_target(draft_weights.checked_offsets(offsets, draft), self.target_vocab_size)
        set_buffer(self, "draft_to_target", table.to(self.hidden_norm.weight.device))

    def _set_mask_embedding(self, tensor: torch.Tensor | None) -> None:
        model_config = self._vllm_config.speculative_config.draft_model_config
        if tensor is None:
            tensor = draft_weights.read_mask_embedding(model_config.model, model_config.revision, self.draft.mask_token_id)
        if tensor is None:
            return
        if tensor.numel() != self.draft.hidden_size:
            raise ValueError(
                f"mask_embedding: found {tensor.numel()} values; expected hidden_size {self.draft.hidden_size}. Mask embeddings "
                "per position are not supported; use a checkpoint with one."
            )
        set_buffer(self.model, "mask_embedding", tensor.reshape(-1).to(self.hidden_norm.weight))

    @staticmethod
    def _parameter_path(name: str) -> str:
        top_level = name.startswith(("fc.", "hidden_norm.", "lm_head."))
        return name if top_level else f"model.{name}"
