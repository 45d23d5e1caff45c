# SPDX-License-Identifier: Apache-2.0
"""The DFlash draft network in plain PyTorch: one sequence, dense masks, no paging, no fused kernels.

Source: DFlash (arXiv 2602.06036) and the public checkpoints. It is the truth that the engine is tested against, so it is
written to be read, not to be fast.

What a draft does: target hidden states of accepted tokens are combined (`fc`), normed, and become K/V of every draft layer,
the *context*. A *query block* `[anchor, mask x K]` attends to the context and to itself, and its mask rows are the drafts.

Symbols in shapes: n context tokens, r query rows, K drafts, H draft hidden size, A captured target layers, H_t target hidden
size, N / N_kv query / key-value heads, D head size, V target vocabulary, V_d draft vocabulary.

Invariant: the context cache holds positions 0 .. n-1 of accepted tokens only; query rows never enter it.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_dflash.checkpoint import DraftConfig, LayerAttention, check_width, read_draft_config


class ContextCache:
    """K and V of every draft layer for the accepted tokens so far; rotated K [n, N_kv, D], V [n, N_kv, D]."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self.layers = layers

    @property
    def num_tokens(self) -> int:
        """n: the next token to enter has this position."""
        return self.layers[0][0].shape[0]

    def append(self, new: list[tuple[Tensor, Tensor]]) -> None:
        """Add rows of the next positions, one (K, V) per layer."""
        self.layers = [
            (torch.cat([k, more_k]), torch.cat([v, more_v])) for (k, v), (more_k, more_v) in zip(self.layers, new, strict=True)
        ]

    def prefix(self, num_tokens: int) -> "ContextCache":
        """The same context cut to its first `num_tokens` tokens; shares memory."""
        return ContextCache([(k[:num_tokens], v[:num_tokens]) for k, v in self.layers])


class Rope:
    """Rotary embedding with the draft's own theta, layout, scaling and rotated share of the head."""

    def __init__(self, config: DraftConfig) -> None:
        self._is_neox = config.rope.is_neox
        parameters = config.rope.parameters
        if parameters.get("rope_type", "default") == "default":
            rotated = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
            self._frequencies, self._scale = 1.0 / config.rope.theta**exponents, 1.0
            return
        hf_config = PretrainedConfig(
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=parameters,
        )
        self._frequencies, self._scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf_config, torch.device("cpu"))

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` [r, heads, D] by `positions` int64 [r]; the dtype stays, angles are float32."""
        angles = positions[:, None, None].float() * self._frequencies.to(x.device)
        cos, sin = (angles.cos() * self._scale).to(x.dtype), (angles.sin() * self._scale).to(x.dtype)
        rotated, kept = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
        if self._is_neox:
            a, b = rotated.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin, kept], dim=-1)
        a, b = rotated[..., ::2], rotated[..., 1::2]
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([pairs.flatten(-2), kept], dim=-1)


def visible(query_positions: Tensor, key_positions: Tensor, attention: LayerAttention) -> Tensor:
    """Which keys a query row sees, bool [r, keys].

    Context keys lie before every query row, so causality only matters inside the block. A window of w tokens counts the row
    itself: distance 0 .. w-1 backwards, and forwards too when the layer is not causal.
    """
    distance = query_positions[:, None] - key_positions[None, :]
    seen = distance >= 0 if attention.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if attention.window is None else seen & (distance.abs() < attention.window)


class DraftAttention(nn.Module):
    """Grouped-query attention with per-head q/k norms over context and query block."""

    def __init__(self, config: DraftConfig, attention: LayerAttention) -> None:
        super().__init__()
        self.config, self.attention = config, attention
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        if config.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_heads))

    def keys_and_values(self, states: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Project states [r, H] at `positions` [r] to rotated K and V, each [r, N_kv, D]."""
        heads = (self.config.num_kv_heads, self.config.head_dim)
        keys = rope(self.k_norm(self.k_proj(states).unflatten(-1, heads)), positions)
        values = self.v_proj(states).unflatten(-1, heads)
        return keys, values if self.config.value_scale is None else values * self.config.value_scale

    def forward(self, states: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], rope: Rope) -> Tensor:
        """Attend from query rows [r, H] to context (K, V) [n, N_kv, D] and to each other -> [r, H]."""
        heads = (self.config.num_heads, self.config.head_dim)
        queries = rope(self.q_norm(self.q_proj(states).unflatten(-1, heads)), positions)
        own_keys, own_values = self.keys_and_values(states, positions, rope)
        keys, values = torch.cat([context[0], own_keys]), torch.cat([context[1], own_values])
        key_positions = torch.cat([torch.arange(context[0].shape[0], device=positions.device), positions])
        group = self.config.num_heads // self.config.num_kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("rhd,khd->hrk", queries, keys).float() * self.config.head_dim**-0.5
        scores = scores.masked_fill(~visible(positions, key_positions, self.attention), float("-inf"))
        weights = self._softmax(scores).to(values.dtype)
        output: Tensor = self.o_proj(torch.einsum("hrk,khd->rhd", weights, values).flatten(1))
        return output

    def _softmax(self, scores: Tensor) -> Tensor:
        """Softmax of [N, r, keys]; a sink is one more logit per head that takes weight and gives no value."""
        if not self.config.attention_sinks:
            return scores.softmax(dim=-1)
        sink = self.attention_sink_bias.float()[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


class DraftMLP(nn.Module):
    """Gated MLP, [r, H] -> [r, H]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        """Down(activation(gate) * up)."""
        output: Tensor = self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))
        return output


class DraftLayer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: DraftConfig, attention: LayerAttention) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, attention)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], rope: Rope) -> Tensor:
        """Query rows [r, H] -> [r, H]."""
        states = states + self.self_attn(self.input_layernorm(states), positions, context, rope)
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class DFlashDraft(nn.Module):
    """The draft network; parameter names are those of the checkpoint.

    Args:
        config: the normalised description of the checkpoint.
        embedding: [V, H], the draft's own table or the target's.
        head: [V_d, H], the draft's own head or the target's.
    """

    embedding: Tensor
    head: Tensor
    mask_embedding: Tensor | None  # [H], only some checkpoints bring one
    d2t: Tensor | None  # int64 [V_d]: target id minus draft id; None where the two vocabularies are one

    def __init__(self, config: DraftConfig, embedding: Tensor, head: Tensor) -> None:
        super().__init__()
        self.config, self.rope = config, Rope(config)
        self.fc = nn.Linear(config.fc_input_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._layers = [DraftLayer(config, attention) for attention in config.layers]
        self.layers = nn.ModuleList(self._layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.embedding_scale = 1.0
        self.register_buffer("mask_embedding", None, persistent=False)
        self.register_buffer("d2t", None, persistent=False)

    def new_context(self) -> ContextCache:
        """An empty context."""
        shape = (0, self.config.num_kv_heads, self.config.head_dim)
        empty = self.fc.weight.new_empty(shape)
        return ContextCache([(empty, empty)] * self.config.num_layers)

    @torch.inference_mode()
    def extend_context(self, context: ContextCache, aux: Tensor) -> None:
        """Add accepted tokens to the context.

        Args:
            context: grows by n tokens at positions `context.num_tokens` and up.
            aux: [n, A * H_t], outputs of the target layers `config.target_layer_ids`, side by side in that order.
        """
        states = self.hidden_norm(self.fc(aux))
        positions = torch.arange(context.num_tokens, context.num_tokens + aux.shape[0], device=aux.device)
        context.append([layer.self_attn.keys_and_values(states, positions, self.rope) for layer in self._layers])

    @torch.inference_mode()
    def block_logits(self, context: ContextCache, anchor: int, num_speculative_tokens: int) -> Tensor:
        """Draft one block: logits over the *draft* vocabulary, [K, V_d], in the weights' dtype.

        Args:
            context: the accepted tokens before the anchor.
            anchor: id of the last accepted token, whose target hidden state is not known yet; position `num_tokens`.
            num_speculative_tokens: K, at most `config.max_num_speculative_tokens`.

        Raises:
            CheckpointError: K is larger than the block that the draft was trained for.
        """
        check_width(self.config, num_speculative_tokens)
        num_rows = num_speculative_tokens if self.config.sample_from_anchor else num_speculative_tokens + 1
        ids = torch.full((num_rows,), self.config.mask_token_id, device=self.embedding.device)
        ids[0] = anchor
        positions = context.num_tokens + torch.arange(num_rows, device=ids.device)
        states = self.embed(ids)
        for layer, layer_context in zip(self._layers, context.layers, strict=True):
            states = layer(states, positions, layer_context, self.rope)
        drafting_rows = self.norm(states)[-num_speculative_tokens:]
        return nn.functional.linear(drafting_rows, self.head) * self.config.logit_scale

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of ids int64 [r] -> [r, H], scaled; mask rows take the checkpoint's own mask embedding where it has one."""
        states = nn.functional.embedding(ids, self.embedding) * self.embedding_scale
        if self.mask_embedding is None:
            return states
        return torch.where((ids == self.config.mask_token_id)[:, None], self.mask_embedding, states)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft-vocabulary ids, any shape: `id + d2t[id]`, or unchanged where the vocabularies are one."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def load_draft(folder: Path, target: Any, dtype: torch.dtype = torch.float32) -> DFlashDraft:
    """Load a draft checkpoint; embedding and head come from the target unless the checkpoint has its own.

    Args:
        folder: config.json, model.safetensors (any number of *.safetensors), and possibly mask_embedding.pt.
        target: the Hugging Face causal LM that the draft was trained for.
        dtype: of all draft weights, the borrowed ones included.

    Raises:
        CheckpointError: config.json cannot be read as a DFlash draft.
        ValueError: no weights, tensors missing or left over, shapes that do not fit, or a reduced vocabulary without d2t.
    """
    config = read_draft_config(folder)
    tensors = {
        name.removeprefix("model."): tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    if not tensors:
        raise ValueError(f"{folder} has no *.safetensors file; expected the weights of a DFlash draft.")
    tensors.pop("t2d", None)  # the inverse of d2t
    d2t = tensors.pop("d2t", None)
    scale = 1.0 if "embed_tokens.weight" in tensors else _embedding_scale(target, dtype)
    embedding = tensors.pop("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    head = tensors.pop("lm_head.weight", target.get_output_embeddings().weight.detach())
    _check_tables(config, embedding, head, d2t)
    draft = DFlashDraft(config, embedding[: config.vocab_size], head[: config.draft_vocab_size])
    try:
        draft.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights do not fit config.json. {error}") from error
    draft.embedding_scale = scale if config.embedding_scale is None else config.embedding_scale
    draft.mask_embedding = _read_mask_embedding(folder, config)
    draft = draft.to(target.device, dtype).requires_grad_(requires_grad=False).eval()
    draft.d2t = None if d2t is None else d2t.to(target.device, torch.int64)
    return draft


def _embedding_scale(target: Any, dtype: torch.dtype) -> float:
    """What the target multiplies its table with: in Gemma's embedding module (in the weights' dtype), or by Granite's config."""
    scale = getattr(target.get_input_embeddings(), "embed_scale", None)
    if isinstance(scale, Tensor):
        return float(scale.to(dtype))
    return float(getattr(target.config.get_text_config(), "embedding_multiplier", 1.0))


def _check_tables(config: DraftConfig, embedding: Tensor, head: Tensor, d2t: Tensor | None) -> None:
    for name, table, rows in (
        ("embed_tokens", embedding, config.vocab_size),
        ("lm_head", head, config.draft_vocab_size),
    ):
        if table.shape[0] < rows or table.shape[1] != config.hidden_size:
            raise ValueError(
                f"{name}: found {list(table.shape)}, needed at least {rows} rows of hidden_size {config.hidden_size}. "
                "Use the target that the draft was trained for, or a checkpoint with its own table."
            )
    expected = (config.draft_vocab_size,)
    if config.draft_vocab_size != config.vocab_size and (d2t is None or d2t.shape != expected):
        found = "no such tensor" if d2t is None else f"shape {list(d2t.shape)}"
        raise ValueError(
            f"d2t: {found}; needed {list(expected)}, because draft_vocab_size differs from vocab_size. Export it again."
        )


def _read_mask_embedding(folder: Path, config: DraftConfig) -> Tensor | None:
    """[H] from `mask_embedding.pt` (a tensor, or {"embedding", "mask_token_id"}), or None without that file."""
    path = folder / "mask_embedding.pt"
    if not path.exists():
        return None
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, Tensor):
        return content.reshape(config.hidden_size)
    if content.get("mask_token_id", config.mask_token_id) != config.mask_token_id:
        raise ValueError(
            f"{path}: made for mask_token_id {content['mask_token_id']}, but config.json has {config.mask_token_id}. "
            "Use the two files of one export."
        )
    embedding: Tensor = content["embedding"]
    return embedding.reshape(config.hidden_size)
