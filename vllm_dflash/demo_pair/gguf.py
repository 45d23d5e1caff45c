# SPDX-License-Identifier: Apache-2.0
"""Read a llama-architecture GGUF file and write it as a Hugging Face folder.

Only what the demo target needs: GGUF version 3, the tensor types F32, Q4_1 and Q8_0, one architecture.
It is not a general GGUF library.

Invariant: the weights are bit-identical to transformers' own GGUF import (272 of 272 tensors); `weights_digest` pins that.
The tokenizer is rebuilt in `tokenizer.py`, because transformers' import of it is not right.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from vllm_dflash.demo_pair.tokenizer import build_tokenizer, tokenizer_config

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_F32, _Q4_1, _Q8_0 = 0, 3, 8
# type -> (elements per block, bytes per block); a Q4_1 block is scale f16, minimum f16, 32 nibbles; Q8_0: scale f16, 32 int8
_BLOCKS = {_F32: (1, 4), _Q4_1: (32, 20), _Q8_0: (32, 34)}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file: shape outermost dimension first, ggml type number, byte offset."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        per_block, block_bytes = _BLOCKS[self.ggml_type]
        return self.num_elements // per_block * block_bytes


class _Cursor:
    """Sequential little-endian reads with an error that names the file when it ends too early."""

    def __init__(self, data: Bytes, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def take(self, count: int) -> Bytes:
        if self.position + count > len(self.data):
            raise ValueError(
                f"{self.path} ends in the middle of its header ({len(self.data)} bytes): the file is incomplete; "
                "delete it and download it again."
            )
        start, self.position = self.position, self.position + count
        return self.data[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)).tobytes())[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).tobytes().decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, count = self.scalar("<I"), self.scalar("<Q")
        if item_kind not in _SCALARS:
            return [self.value(item_kind) for _ in range(count)]
        item_dtype = np.dtype(_SCALARS[item_kind])
        return self.take(count * item_dtype.itemsize).view(item_dtype).tolist()


class GgufFile:
    """Metadata and tensors of one GGUF file; the data stays memory-mapped until it is asked for.

    Attributes:
        metadata: key -> value (numbers, strings, lists), as stored.
        tensors: name -> `TensorInfo`.

    Raises:
        ValueError: not a GGUF file, another version, a tensor type that is not read here, or a file cut short.
    """

    def __init__(self, path: Path) -> None:
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty; expected a GGUF file. Delete it and download it again.")
        self._path = path
        self._data: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
        cursor = _Cursor(self._data, path)
        magic, version = cursor.take(4).tobytes(), cursor.scalar("<I")
        if magic != b"GGUF" or version != 3:
            raise ValueError(f"{path} starts with {magic!r}, version {version}; expected b'GGUF', version 3.")
        num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata = {cursor.string(): cursor.value(cursor.scalar("<I")) for _ in range(num_keys)}
        headers = [self._read_tensor_header(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        data_start = math.ceil(cursor.position / alignment) * alignment
        self.tensors = {name: TensorInfo(shape, ggml_type, data_start + offset) for name, shape, ggml_type, offset in headers}
        self._check_tensors()

    @staticmethod
    def _read_tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        innermost_first = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
        return name, tuple(reversed(innermost_first)), cursor.scalar("<I"), cursor.scalar("<Q")

    def _check_tensors(self) -> None:
        for name, info in self.tensors.items():
            if info.ggml_type not in _BLOCKS:
                raise ValueError(
                    f"{self._path}: tensor {name} has ggml type {info.ggml_type}; "
                    f"this reader knows {sorted(_BLOCKS)} (F32, Q4_1, Q8_0)."
                )
            if info.offset + info.num_bytes > len(self._data):
                raise ValueError(
                    f"{self._path} has {len(self._data)} bytes, but tensor {name} ends at byte "
                    f"{info.offset + info.num_bytes}: the file is incomplete; delete it and download it again."
                )

    def tensor(self, name: str) -> Float32:
        """Dequantise one tensor to float32, in the shape of its `TensorInfo`.

        The order of operations (product first, then sum, both in float32) is ggml's; another order loses bit-identity.
        """
        info = self.tensors[name]
        raw = np.array(self._data[info.offset : info.offset + info.num_bytes])
        if info.ggml_type == _F32:
            return raw.view("<f4").reshape(info.shape)
        blocks = raw.reshape(-1, _BLOCKS[info.ggml_type][1])
        scale = _half_column(blocks, 0)
        if info.ggml_type == _Q8_0:
            integers = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
            return (integers * scale).reshape(info.shape)
        packed = blocks[:, 4:]
        nibbles = np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
        values: Float32 = scale * nibbles + _half_column(blocks, 2)
        return values.reshape(info.shape)


def _half_column(blocks: Bytes, start: int) -> Float32:
    """Float16 at byte `start` of every block, as float32 [num_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _rows_for_half_rotation(weight: Float32, num_heads: int) -> Float32:
    """Undo llama.cpp's row order of q and k (pairs side by side) for Hugging Face's (first half, second half).

    Args:
        weight: [num_heads * head_dim, in_features].
        num_heads: query heads for q, key/value heads for k.
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


# Hugging Face name in a layer -> (GGUF name in a block, metadata key of the head count when rows are permuted)
_LAYER_NAMES = {
    "input_layernorm": ("attn_norm", None),
    "self_attn.q_proj": ("attn_q", "llama.attention.head_count"),
    "self_attn.k_proj": ("attn_k", "llama.attention.head_count_kv"),
    "self_attn.v_proj": ("attn_v", None),
    "self_attn.o_proj": ("attn_output", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "mlp.gate_proj": ("ffn_gate", None),
    "mlp.up_proj": ("ffn_up", None),
    "mlp.down_proj": ("ffn_down", None),
}
_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def llama_weights(source: GgufFile) -> dict[str, torch.Tensor]:
    """All weights under Hugging Face's names, bfloat16; `lm_head.weight` is absent when it is tied."""
    architecture = source.metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"GGUF general.architecture is {architecture!r}; only 'llama' can be converted.")

    def weight(gguf_name: str, heads_key: str | None = None) -> torch.Tensor:
        values = source.tensor(gguf_name)
        if heads_key:
            values = _rows_for_half_rotation(values, source.metadata[heads_key])
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)

    weights = {name: weight(old) for name, old in _OUTER_NAMES.items() if old in source.tensors}
    for layer in range(source.metadata["llama.block_count"]):
        for name, (old, heads_key) in _LAYER_NAMES.items():
            weights[f"model.layers.{layer}.{name}.weight"] = weight(f"blk.{layer}.{old}.weight", heads_key)
    return weights


def llama_config(source: GgufFile) -> dict[str, Any]:
    """`config.json` of the converted model (`LlamaForCausalLM`)."""
    meta = source.metadata
    num_heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "head_dim": meta["llama.embedding_length"] // num_heads,
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # the shortest decimal of the stored float32: 1e-05, not 9.999999747378752e-06
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, shapes and bytes in name order: equal digests mean equal weights, bit by bit."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        values = weights[name].detach().cpu().contiguous()
        digest.update(name.encode())
        digest.update(str(tuple(values.shape)).encode())
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def convert_to_hf(gguf_path: Path, out_dir: Path) -> str:
    """Write weights (bfloat16), configuration and tokenizer of a GGUF file as a Hugging Face folder.

    Args:
        gguf_path: the GGUF file.
        out_dir: an existing folder; files of the same names are replaced.

    Returns:
        `weights_digest` of what was written.
    """
    source = GgufFile(gguf_path)
    config, weights = llama_config(source), llama_weights(source)
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    build_tokenizer(source.metadata).save(str(out_dir / "tokenizer.json"))
    tokenizer_settings = tokenizer_config(source.metadata, model_max_length=config["max_position_embeddings"])
    for name, content in (
        ("config.json", config),
        ("generation_config.json", token_ids),
        ("tokenizer_config.json", tokenizer_settings),
    ):
        (out_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return weights_digest(weights)
