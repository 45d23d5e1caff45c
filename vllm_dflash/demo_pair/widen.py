# SPDX-License-Identifier: Apache-2.0
"""The demo pair at production cost: target and draft embedded exactly in wide ones that write the same tokens.

Speed needs an 8B model, acceptance needs a *trained* pair, and a machine without a network has neither. So the small pair is
placed inside wide weights: same function, cost of the wide shape. ``c`` below is the small hidden size, ``C`` the wide one.

* Residual stream ``x' = [x, m, 0 ...]``: every row >= c of ``o_proj`` and ``down_proj`` is zero, so the rest stays as the
  embedding made it. ``m`` is the marker below.
* RMSNorm: weight times sqrt(c / C) and epsilon times c / C give the small norm's output.
* Heads: group g keeps its KV head, its query heads come first in the wide group; ``o_proj`` columns of the others are zero.
* Rotary: pair j of a small head becomes pair r * j of a head r times as wide, which turns at the same speed.
* Softmax scale: query rows times sqrt(r). Per-head norms of the draft: ``k_norm`` times sqrt(1 / r), ``q_norm`` unchanged. Their
  exact epsilon would be another one than the config's: logits of the draft move by some 1e-4.
* Layers behind the last add nothing. MLP rows behind the last meet zero columns of ``down_proj``.
* Vocabulary: wide rows behind the last would have logit 0, which is probability above temperature 0. So every embedding holds
  the marker 2^-10 in channel c; only the final norm reads it (weight 2^20), and the head's spare rows have -1 there: their
  logits are below -50. The marker changes a mean square by less than 1e-6 of itself.

Entries that meet only zeros are random, so that power and clocks are those of a real model.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_dflash.token_frequency import LIST_FILE

MARKER, MARKER_GAIN = 2.0**-10, 2.0**20
_NOISE = 0.02
_SHARD_LAYERS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class WideShape:
    """Sizes of a wide target; its draft has the same width."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    @property
    def num_params(self) -> int:
        """Parameters of the target, embedding and head included."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + 2 * self.vocab * self.hidden


PRESETS = {
    "1b": WideShape(hidden=1536, layers=30, heads=24, kv_heads=6, head_dim=64, mlp=4608, vocab=49_152),
    "8b": WideShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14_336, vocab=128_256),
    "30b": WideShape(hidden=6144, layers=60, heads=48, kv_heads=8, head_dim=128, mlp=20_480, vocab=128_256),
}
"""Classes of dense models; ``8b`` is the shape of Llama-3.1-8B."""


class WidenError(ValueError):
    """A pair that does not fit into the wide shape; the message says which size is too small."""


def widen(
    target: Path, draft: Path, out: Path, shape: WideShape, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> tuple[Path, Path]:
    """Write ``out/target`` and ``out/draft``; returns both folders.

    Args:
        target: a Llama target with tied embeddings (the demo target).
        draft: its DFlash draft.
        out: folder to create.
        shape: sizes of the wide pair.
        dtype: of the stored weights; the factors above are rounded to it once.
        device: where the random entries are made.

    Raises:
        WidenError: the small pair does not fit.
    """
    made = []
    for folder, name in ((target, "target"), (draft, "draft")):
        config = json.loads((folder / "config.json").read_text())
        body = _Body(config, shape, dtype, device)
        staging = out / f".{name}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for file in folder.iterdir():  # tokenizer, generation config, template
            if file.suffix in (".json", ".jinja", ".txt", ".model") and file.name != "model.safetensors.index.json":
                shutil.copy(file, staging)
        listed = staging / LIST_FILE  # the same tokens, in a larger vocabulary
        if listed.exists():
            listed.write_text(json.dumps(json.loads(listed.read_text()) | {"vocab_size": shape.vocab}))
        with safe_open(folder / "model.safetensors", "pt") as small:
            tensors = body.target(small) if name == "target" else body.draft(small)
            _write_shards(staging, tensors)
        (staging / "config.json").write_text(json.dumps(body.config(is_draft=name == "draft"), indent=1))
        shutil.rmtree(out / name, ignore_errors=True)
        staging.rename(out / name)
        made.append(out / name)
    return made[0], made[1]


def _write_shards(folder: Path, tensors: Iterator[dict[str, torch.Tensor]]) -> None:
    where: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(tensors):
        file = f"model-{number:05}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in shard.items()}, folder / file)
        where |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class _Body:
    """Places the weights of one small model; layer ``None`` is one that adds nothing."""

    def __init__(self, config: dict[str, Any], shape: WideShape, dtype: torch.dtype, device: str) -> None:
        self._config, self.shape, self._dtype, self._device = config, shape, dtype, device
        self._hidden, self._mlp, self._layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        self._heads, self._kv_heads, self._head_dim = (
            config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self._check()
        self._scale = math.sqrt(self._hidden / shape.hidden)
        self._head_ratio = shape.head_dim // self._head_dim
        # One block of noise serves all entries that meet zeros: making 8e9 random numbers would take minutes.
        generator = torch.Generator(device).manual_seed(0)
        self._noise = (torch.randn(1 << 22, generator=generator, device=device) * _NOISE).to(dtype)

    def _check(self) -> None:
        shape, group = self.shape, self._heads // self._kv_heads
        sizes = {
            "hidden": (shape.hidden, self._hidden + 1),  # one channel holds the marker
            "mlp": (shape.mlp, self._mlp),
            "layers": (shape.layers, self._layers),
            "vocab": (shape.vocab, self._config["vocab_size"]),
            "kv_heads": (shape.kv_heads, self._kv_heads),
            "heads / kv_heads": (shape.heads // shape.kv_heads, group),
            "head_dim": (shape.head_dim, self._head_dim),
        }
        for name, (wide, small) in sizes.items():
            if wide < small:
                raise WidenError(f"{name}: found {wide}; expected at least {small}, the small model's. Choose a wider shape.")
        if shape.head_dim % self._head_dim or shape.heads % shape.kv_heads or shape.hidden % shape.heads:
            raise WidenError(
                f"head_dim {shape.head_dim}, heads {shape.heads}, hidden {shape.hidden}: expected multiples of {self._head_dim}, "
                "kv_heads and heads."
            )

    def config(self, *, is_draft: bool) -> dict[str, Any]:
        """config.json of the wide model."""
        shape = self.shape
        config = self._config | {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.mlp,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab,
            "rms_norm_eps": self._config["rms_norm_eps"] * self._hidden / shape.hidden,
            "tie_word_embeddings": False,
        }
        return config | ({"num_target_layers": shape.layers} if is_draft else {"num_hidden_layers": shape.layers})

    def target(self, small: Any) -> Iterator[dict[str, torch.Tensor]]:
        """Tensors of the wide target, a few layers at a time."""
        embedding = small.get_tensor("model.embed_tokens.weight")
        wide, head = (self._empty(self.shape.vocab, self.shape.hidden) for _ in range(2))
        for matrix in (wide, head):
            matrix[: embedding.shape[0], : self._hidden] = embedding.to(matrix)
        wide[:, self._hidden] = MARKER
        head[embedding.shape[0] :, self._hidden] = -1.0
        final = self._final_norm(small.get_tensor("model.norm.weight"))
        yield {"model.embed_tokens.weight": wide, "lm_head.weight": head, "model.norm.weight": final}
        yield from self._stack(small, "model.layers", self.shape.layers)

    def draft(self, small: Any) -> Iterator[dict[str, torch.Tensor]]:
        """Tensors of the wide draft; embedding and head are the target's."""
        fc = small.get_tensor("fc.weight")
        wide = self._empty(self.shape.hidden, self.shape.hidden * (fc.shape[1] // self._hidden))
        for block in range(fc.shape[1] // self._hidden):
            column, source = block * self.shape.hidden, block * self._hidden
            wide[: self._hidden, column : column + self._hidden] = fc[:, source : source + self._hidden].to(wide)
        norms = {"hidden_norm.weight": self._norm, "norm.weight": self._final_norm}
        yield {"fc.weight": wide} | {name: place(small.get_tensor(name)) for name, place in norms.items()}
        yield from self._stack(small, "layers", self._layers)

    def _stack(self, small: Any, prefix: str, count: int) -> Iterator[dict[str, torch.Tensor]]:
        names = set(small.keys())
        for first in range(0, count, _SHARD_LAYERS):
            shard: dict[str, torch.Tensor] = {}
            for index in range(first, min(first + _SHARD_LAYERS, count)):
                name = f"{prefix}.{index}."
                source = {n.removeprefix(name): small.get_tensor(n) for n in names if n.startswith(name)}
                shard |= {name + suffix: tensor for suffix, tensor in self._layer(source).items()}
            yield shard

    def _layer(self, small: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One wide layer from a small one, or one that adds nothing from an empty dictionary."""
        shape = self.shape
        wide = {
            "self_attn.q_proj.weight": self._random(shape.heads * shape.head_dim, shape.hidden),
            "self_attn.k_proj.weight": self._random(shape.kv_heads * shape.head_dim, shape.hidden),
            "self_attn.v_proj.weight": self._random(shape.kv_heads * shape.head_dim, shape.hidden),
            "self_attn.o_proj.weight": self._empty(shape.hidden, shape.heads * shape.head_dim),
            "mlp.gate_proj.weight": self._random(shape.mlp, shape.hidden),
            "mlp.up_proj.weight": self._random(shape.mlp, shape.hidden),
            "mlp.down_proj.weight": self._empty(shape.hidden, shape.mlp),
        }
        wide |= {f"{norm}.weight": self._norm(None) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, tensor in small.items():
            if name.endswith("layernorm.weight"):
                wide[name] = self._norm(tensor)
            elif name.startswith("mlp."):
                real = wide[name][: tensor.shape[0]]
                real.zero_()[:, : tensor.shape[1]] = tensor.to(real)  # noise would share the scale of a quantised row
            elif name.startswith("self_attn."):
                self._place_attention(wide, name, tensor)
        return wide

    def _place_attention(self, wide: dict[str, torch.Tensor], name: str, small: torch.Tensor) -> None:
        part = name.split(".")[1]
        root = math.sqrt(self._head_ratio)
        if part in ("q_norm", "k_norm"):
            wide[name] = self._empty(self.shape.head_dim)
            wide[name][self._rotary_rows()] = (small.float() / (root if part == "k_norm" else 1.0)).to(wide[name])
            return
        matrix = wide[name]
        plain, turned = torch.arange(self._head_dim), self._rotary_rows()
        if part == "o_proj":
            for head, place in enumerate(self._query_heads()):
                source = small[:, head * self._head_dim : (head + 1) * self._head_dim]
                matrix[: self._hidden, place * self.shape.head_dim + plain] = source.to(matrix)
            return
        rows = plain if part == "v_proj" else turned
        # The draft norms its queries and keys per head, so that a factor on its rows would be lost.
        factor = root if part == "q_proj" and not self._normed_heads else 1.0
        places = self._query_heads() if part == "q_proj" else list(range(self._kv_heads))
        for head, place in enumerate(places):
            first = place * self.shape.head_dim
            matrix[first : first + self.shape.head_dim] = 0
            source = small[head * self._head_dim : (head + 1) * self._head_dim].float() * factor
            matrix[first + rows, : self._hidden] = source.to(matrix)

    @property
    def _normed_heads(self) -> bool:
        return "dflash_config" in self._config

    def _query_heads(self) -> list[int]:
        """Wide query head of each small one."""
        group, wide_group = self._heads // self._kv_heads, self.shape.heads // self.shape.kv_heads
        return [wide_group * (head // group) + head % group for head in range(self._heads)]

    def _rotary_rows(self) -> torch.Tensor:
        """Row within a wide head of each row of a small one, [head_dim]."""
        pairs = torch.arange(self._head_dim // 2) * self._head_ratio
        return torch.cat([pairs, pairs + self.shape.head_dim // 2])

    def _norm(self, small: torch.Tensor | None) -> torch.Tensor:
        wide = self._random(self.shape.hidden)
        wide[self._hidden] = 0  # the marker ends here
        if small is not None:
            wide[: self._hidden] = (small.float() * self._scale).to(wide)
        return wide

    def _final_norm(self, small: torch.Tensor) -> torch.Tensor:
        wide = self._norm(small)
        wide[self._hidden] = MARKER_GAIN
        return wide

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=self._dtype, device=self._device)

    def _random(self, *size: int) -> torch.Tensor:
        """Noise [size]; its input columns behind the small model's meet zeros and the marker, whose norm weight is zero."""
        count = math.prod(size)
        repeats = -(-count // self._noise.numel())
        return self._noise.repeat(repeats)[:count].view(*size).clone()
