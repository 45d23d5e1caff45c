# SPDX-License-Identifier: Apache-2.0
"""A target and a draft as folders without a tensor: enough for every check before weights are loaded."""

import json
from pathlib import Path
from typing import Any

from draft_configs import zlab

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
}
TOKENIZER = {
    "model": {"vocab": {"a": 0, "b": 1, "ordinary": 151668}},
    "added_tokens": [{"id": 151669, "content": "<|mask|>", "special": True}],
}


def write_folder(folder: Path, config: Any, tokenizer: dict[str, Any] | None = None) -> str:
    """Write a checkpoint folder; `config` is dumped as JSON, or written as it is when it is text. Its weights are no tensors."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def write_pair(root: Path, **draft_changes: Any) -> tuple[str, str]:
    """A target and a draft for it, with changes of the draft's config."""
    return write_folder(root / "target", TARGET, TOKENIZER), write_folder(root / "draft", zlab(**draft_changes))
