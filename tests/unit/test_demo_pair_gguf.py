# SPDX-License-Identifier: Apache-2.0
"""The GGUF reader and the conversion, on a file written by hand here from the format's description."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from vllm_dflash.demo_pair.gguf import GgufFile, convert_to_hf, llama_weights
from vllm_dflash.demo_pair.tokenizer import build_tokenizer

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS = 32, 4, 2, 64, 24, 2
F32, Q4_1, Q8_0 = 0, 3, 8
UINT32, FLOAT32, STRING, ARRAY, INT32 = 4, 6, 8, 9, 5


def pack_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def pack_value(value):
    if isinstance(value, str):
        return struct.pack("<I", STRING) + pack_string(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, list) and isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(pack_string, value))
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, INT32, len(value)) + struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<II", UINT32, value)


def encode(values, kind):
    """Bytes of a float array in one ggml type, and the float32 values that they stand for."""
    if kind == F32:
        return values.astype("<f4").tobytes(), values.astype(np.float32)
    stored, decoded = b"", []
    for block in values.reshape(-1, 32):
        if kind == Q8_0:
            scale = np.float16(np.abs(block).max() / 127)
            q = np.clip(np.round(block / np.float32(scale)), -127, 127).astype(np.int8)
            stored += scale.tobytes() + q.tobytes()
            decoded.append([np.float32(scale) * np.float32(x) for x in q])
        else:
            low, scale = np.float16(block.min()), np.float16((block.max() - block.min()) / 15)
            q = np.clip(np.round((block - np.float32(low)) / np.float32(scale)), 0, 15).astype(np.uint8)
            # element i of the first half shares a byte with element i + 16: low nibble, high nibble
            stored += scale.tobytes() + low.tobytes() + (q[:16] | (q[16:] << 4)).astype(np.uint8).tobytes()
            decoded.append([np.float32(scale) * np.float32(x) + np.float32(low) for x in q])
    return stored, np.array(decoded, dtype=np.float32).reshape(values.shape)


def write_gguf(path, metadata, tensors):
    """tensors: name -> (array, ggml type). Returns the decoded arrays."""
    header, body, decoded = b"", b"", {}
    for name, (values, kind) in tensors.items():
        data, decoded[name] = encode(values, kind)
        dims = values.shape[::-1]
        header += pack_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(body))
        body += data + bytes(-len(data) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    start += b"".join(pack_string(key) + pack_value(value) for key, value in metadata.items()) + header
    path.write_bytes(start + bytes(-len(start) % 32) + body)
    return decoded


def tiny_metadata():
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "12", "a", "b", "ab", "Ġ"]
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "llama.rope.freq_base": 1e4,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + [f"<{i}>" for i in range(VOCAB - len(tokens))],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (VOCAB - 3),
        "tokenizer.ggml.merges": ["1 2", "a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    }


def interleave_rows(weight, heads):
    """llama.cpp's order of q and k rows: (first half, second half) of each head become pairs side by side."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def tiny_tensors():
    random = np.random.default_rng(0)

    def values(*shape):
        return random.normal(size=shape).astype(np.float32)

    tensors = {"token_embd.weight": (values(VOCAB, HIDDEN), Q8_0), "output_norm.weight": (values(HIDDEN), F32)}
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
    shapes |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{name}.weight"] = (values(HIDDEN), F32)
        for name, shape in shapes.items():
            tensors[f"blk.{i}.{name}.weight"] = (values(*shape), Q4_1)
    return tensors


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    return path, write_gguf(path, tiny_metadata(), tiny_tensors())


def test_every_tensor_type_decodes_to_the_bit(gguf):
    """Breaks when nibbles, scales, minima or the order of operations are read differently from ggml."""
    path, decoded = gguf
    source = GgufFile(path)
    assert source.metadata == tiny_metadata()
    assert set(source.tensors) == set(decoded)
    for name, values in decoded.items():
        np.testing.assert_array_equal(source.tensor(name), values, err_msg=name)


def test_query_and_key_rows_return_to_the_half_rotation_order(gguf):
    """Breaks when q or k keep llama.cpp's row order (the model then talks nonsense) or v is permuted too."""
    path, decoded = gguf
    weights = llama_weights(GgufFile(path))
    for name, old, heads in (("q", "attn_q", HEADS), ("k", "attn_k", KV_HEADS)):
        ours = weights[f"model.layers.1.self_attn.{name}_proj.weight"].float().numpy()
        stored = torch.from_numpy(decoded[f"blk.1.{old}.weight"]).bfloat16().float().numpy()
        np.testing.assert_array_equal(interleave_rows(ours, heads), stored)
    v = torch.from_numpy(decoded["blk.1.attn_v.weight"]).bfloat16()
    assert torch.equal(weights["model.layers.1.self_attn.v_proj.weight"], v)


def test_converted_folder_loads_in_transformers(gguf, tmp_path):
    """Breaks when a weight name, a shape or a config field is wrong: transformers would leave weights random."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "hf"
    out.mkdir()
    digest = convert_to_hf(gguf[0], out)
    assert len(digest) == 64
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 1e-5
    assert model.config.tie_word_embeddings
    assert len(load_file(out / "model.safetensors")) == 2 + 9 * LAYERS
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False) == [1, 8, 2]


def test_digits_never_merge():
    """Breaks when the individual-digits step is lost, as in transformers' own GGUF import: "12" would become one token."""
    tokenizer: Tokenizer = build_tokenizer(tiny_metadata())
    assert tokenizer.encode("ab12").ids == [8, 3, 4]
    assert tokenizer.decode([8, 3, 4]) == "ab12"


def test_other_tokenizers_are_refused():
    """Breaks when a file with another pre-tokenizer is converted into something that splits text wrongly."""
    with pytest.raises(ValueError, match=r"'llama-bpe'.*only .*smollm"):
        build_tokenizer(tiny_metadata() | {"tokenizer.ggml.pre": "llama-bpe"})


@pytest.mark.parametrize("keep", [0, 10, 400, -100])
def test_a_file_cut_short_is_explained(gguf, keep):
    """Breaks when half a download gives a struct error or, worse, weights."""
    path = gguf[0]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"(incomplete|empty).*download it again"):
        GgufFile(path)


def test_other_files_are_refused(gguf, tmp_path):
    """Breaks when something that is not GGUF, or a tensor type that we cannot read, gets through."""
    path = gguf[0]
    path.write_bytes(b"PK" + path.read_bytes()[2:])
    with pytest.raises(ValueError, match=r"starts with b'PKUF'.*expected b'GGUF'"):
        GgufFile(path)
    write_gguf(path, tiny_metadata(), {"x": (np.zeros((1, 32), np.float32), F32)})
    path.write_bytes(path.read_bytes().replace(struct.pack("<QQI", 32, 1, F32), struct.pack("<QQI", 32, 1, 12)))
    with pytest.raises(ValueError, match=r"tensor x has ggml type 12; this reader knows"):
        GgufFile(path)
    write_gguf(path, tiny_metadata() | {"general.architecture": "gemma"}, tiny_tensors())
    with pytest.raises(ValueError, match=r"'gemma'; only 'llama'"):
        llama_weights(GgufFile(path))
