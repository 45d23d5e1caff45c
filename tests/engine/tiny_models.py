# SPDX-License-Identifier: Apache-2.0
"""Tiny random targets and DFlash drafts of odd shapes, and "Markov" pairs with known acceptance, as real checkpoint folders.

Random weights are drawn large, and norm weights differ per layer and channel: every part of a draft changes its tokens, so
a test that compares draft tokens sees a part that is wrong.
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 160
MASK = 5
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "granite": "GraniteForCausalLM",
}
SPECIAL: dict[str, dict[str, Any]] = {
    "gemma2": {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 30.0,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
}
"""Config of the families that scale their embeddings."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A random decoder. Hidden is no multiple of heads x head_dim on purpose."""

    model_type: str = "qwen3"
    layers: int = 3
    hidden: int = 80
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 112
    vocab: int = VOCAB


@dataclasses.dataclass(frozen=True)
class Draft:
    """A random draft for ``Target``; ``config`` is merged into config.json, ``dflash`` into its dflash_config."""

    layers: int = 2
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 96
    block: int = 8
    layer_ids: tuple[int, ...] = (0, 2)
    draft_vocab: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    mask_file: bool = False
    biases: bool = False
    sinks: bool = False
    config: tuple[tuple[str, Any], ...] = ()
    dflash: tuple[tuple[str, Any], ...] = ()


def write_target(folder: Path, target: Target, seed: int = 0) -> Path:
    """Write config.json and model.safetensors; return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [ARCHITECTURES[target.model_type]],
        "model_type": target.model_type,
        "hidden_size": target.hidden,
        "intermediate_size": target.mlp,
        "num_hidden_layers": target.layers,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    } | SPECIAL.get(target.model_type, {})
    if target.model_type == "gemma2":
        config |= {"layer_types": ["full_attention"] * target.layers, "query_pre_attn_scalar": target.head_dim}
    _write_json(folder, config)
    draw = _Draw(seed)
    tensors = {"model.embed_tokens.weight": draw(target.vocab, target.hidden, scale=1.0)}
    for i in range(target.layers):
        tensors |= _layer(draw, f"model.layers.{i}", target.hidden, target.mlp, target.heads, target.kv_heads, target.head_dim)
    tensors |= {"model.norm.weight": draw.norm(target.hidden), "lm_head.weight": draw(target.vocab, target.hidden)}
    if target.model_type != "qwen3":
        tensors = {name: t for name, t in tensors.items() if "q_norm" not in name and "k_norm" not in name}
    if target.model_type == "gemma2":
        del tensors["lm_head.weight"]
        for i, name in itertools.product(range(target.layers), ("pre_feedforward_layernorm", "post_feedforward_layernorm")):
            tensors[f"model.layers.{i}.{name}.weight"] = draw.norm(target.hidden)
        tensors = {name: t - 1 if "norm" in name else t for name, t in tensors.items()}  # Gemma adds the 1
    if target.model_type == "stablelm":
        norms = [name for name in tensors if "norm.weight" in name]
        tensors |= {name.replace("weight", "bias"): 0.1 * torch.ones_like(tensors[name]) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_draft(folder: Path, draft: Draft, target: Target, seed: int = 1) -> Path:
    """Write a z-lab style draft checkpoint; return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, taps = target.hidden, len(draft.layer_ids)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": draft.mlp,
        "num_hidden_layers": draft.layers,
        "num_attention_heads": draft.heads,
        "num_key_value_heads": draft.kv_heads,
        "head_dim": draft.head_dim,
        "vocab_size": target.vocab,
        "num_target_layers": target.layers,
        "block_size": draft.block,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 20000.0,
        "attention_bias": draft.biases,
        "layer_types": ["full_attention"] * draft.layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(draft.layer_ids)} | dict(draft.dflash),
        "torch_dtype": "float32",
    } | dict(draft.config)
    if draft.draft_vocab is not None:
        config["draft_vocab_size"] = draft.draft_vocab
    _write_json(folder, config)
    draw = _Draw(seed)
    tensors = {
        "fc.weight": draw(hidden, taps * hidden),
        "hidden_norm.weight": draw.norm(hidden),
        "norm.weight": draw.norm(hidden),
    }
    for i in range(draft.layers):
        tensors |= _layer(
            draw, f"layers.{i}", hidden, draft.mlp, draft.heads, draft.kv_heads, draft.head_dim, biases=draft.biases
        )
        if draft.sinks:
            tensors[f"layers.{i}.self_attn.attention_sink_bias"] = draw.norm(draft.heads)
    if draft.own_embedding:
        tensors["embed_tokens.weight"] = draw(target.vocab, hidden, scale=1.0)
    if draft.own_head or draft.draft_vocab is not None:
        tensors["lm_head.weight"] = draw(draft.draft_vocab or target.vocab, hidden)
    if draft.draft_vocab is not None:
        kept = torch.randperm(target.vocab, generator=draw.generator)[: draft.draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft.draft_vocab)
        tensors["t2d"] = torch.zeros(target.vocab, dtype=torch.bool).index_fill(0, kept, value=True)
    if draft.mask_file:
        torch.save({"mask_token_id": MASK, "embedding": draw(hidden, 1, scale=1.0)}, folder / "mask_embedding.pt")
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_markov_pair(folder: Path, *, half: bool) -> tuple[Path, Path]:
    """A target that is an exact map token -> f(token), and a draft that always proposes token C (10).

    Attention and MLP outputs are zero, so the target's final hidden state is its normalised embedding. f(20..29) = t + 1, all
    other tokens -> C; ``half``: C -> A (11) -> C, else C -> C. The draft predicts f(mask) = C in every row.
    """
    target = Target(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=64, vocab=512)
    mapping = [10] * target.vocab
    mapping[20:30] = range(21, 31)
    if half:
        mapping[10] = 11
    constant = torch.nn.functional.normalize(torch.randn(target.hidden, generator=torch.Generator().manual_seed(9)), dim=0)
    embedding = torch.nn.functional.normalize(
        torch.randn(target.vocab, target.hidden, generator=torch.Generator().manual_seed(8)), dim=1
    )
    embedding -= (embedding @ constant).unsqueeze(1) * constant
    head = torch.zeros(target.vocab, target.hidden)
    for token, successor in enumerate(mapping):
        if successor != 10:
            head[successor] += embedding[token]
    head[10] = constant
    to_constant = torch.tensor([successor == 10 for successor in mapping])
    embedding[to_constant] = 0.3 * embedding[to_constant] + constant
    write_target(folder / "target", target)
    edit_weights(
        folder / "target",
        {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(target.hidden), "lm_head.weight": 10 * head},
        zero=("o_proj", "down_proj"),
    )
    write_draft(folder / "draft", Draft(heads=4, layer_ids=(1, 2)), target)
    edit_weights(folder / "draft", {"norm.weight": torch.ones(target.hidden)}, zero=("o_proj", "down_proj"))
    return folder / "target", folder / "draft"


def edit_weights(folder: Path, changes: dict[str, torch.Tensor | None], zero: tuple[str, ...] = ()) -> Path:
    """Replace (or, with None, remove) tensors of a checkpoint, and zero those whose name contains an entry of ``zero``."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor | None] = load_file(folder / "model.safetensors") | changes
    kept = {name: torch.zeros_like(t) if any(z in name for z in zero) else t for name, t in tensors.items() if t is not None}
    save_file({name: t.contiguous() for name, t in kept.items()}, folder / "model.safetensors")
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json; None removes a key, ``dflash_config`` is merged."""
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"] = config.get("dflash_config", {}) | changes.pop("dflash_config", {})
    _write_json(folder, {k: v for k, v in (config | changes).items() if v is not None})
    return folder


class _Draw:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        scale = columns**-0.5 * 1.4 if scale is None else scale
        return scale * torch.randn(rows, columns, generator=self.generator)

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.4 * torch.randn(size, generator=self.generator)


def _layer(
    draw: _Draw, prefix: str, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, *, biases: bool = False
) -> dict[str, torch.Tensor]:
    widths = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    tensors = {f"{prefix}.self_attn.{name}.weight": draw(width, hidden) for name, width in widths.items()}
    tensors[f"{prefix}.self_attn.o_proj.weight"] = draw(hidden, heads * head_dim)
    if biases:
        sizes = widths | {"o_proj": hidden}
        tensors |= {f"{prefix}.self_attn.{name}.bias": draw(size, 1, scale=0.3).squeeze(1) for name, size in sizes.items()}
    tensors |= {f"{prefix}.self_attn.{name}.weight": draw.norm(head_dim) for name in ("q_norm", "k_norm")}
    tensors |= {f"{prefix}.{name}.weight": draw.norm(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {f"{prefix}.mlp.{name}.weight": draw(mlp, hidden) for name in ("gate_proj", "up_proj")}
    tensors[f"{prefix}.mlp.down_proj.weight"] = draw(hidden, mlp)
    return tensors


def _write_json(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1))
