# SPDX-License-Identifier: Apache-2.0
"""The mask token of a draft whose ``config.json`` does not state it: speculators writes null, and means its tokenizer's.

Two files of the checkpoint may tell: ``mask_embedding.pt``, whose embedding was trained for one id, and the tokenizer's. Standard
library only; nothing is unpickled, the id is read from the pickle's opcodes.
"""

import itertools
import json
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Load = Callable[[str], Any]
"""File name -> its JSON content, or None where there is no such file."""


def find_mask_token(folder: str | Path, load: Load | None = None) -> tuple[int, str] | None:
    """(id, where it was found), or None.

    Args:
        folder: of the checkpoint; a hub name is a folder that does not exist.
        load: reads JSON files of the checkpoint; from ``folder`` when None.
    """
    trained = of_embedding_file(Path(folder) / "mask_embedding.pt")
    if trained is not None:
        return trained, "mask_embedding.pt"
    return of_tokenizer(load or (lambda name: _read_json(Path(folder) / name)))


def of_tokenizer(load: Load) -> tuple[int, str] | None:
    """The tokenizer's own mask token; None where it has none, or where its id cannot be told."""
    config = _mapping(load("tokenizer_config.json"))
    text = _content(config.get("mask_token")) or _content(_mapping(load("special_tokens_map.json")).get("mask_token"))
    if text is None:
        return None
    named = [(key, _content(token)) for key, token in _mapping(config.get("added_tokens_decoder")).items()]
    found = next((int(key) for key, content in named if content == text and str(key).isdecimal()), None)
    if found is None:
        found = _mapping(load("added_tokens.json")).get(text)
    if found is None:
        tokenizer = _mapping(load("tokenizer.json"))
        added = tokenizer.get("added_tokens")
        entries = [_mapping(entry) for entry in added] if isinstance(added, list) else []
        ids = [entry.get("id") for entry in entries if entry.get("content") == text]
        found = ids[0] if ids else _mapping(_mapping(tokenizer.get("model")).get("vocab")).get(text)
    if not isinstance(found, int) or isinstance(found, bool):
        return None
    return found, f"the tokenizer's mask token {text!r}"


def of_embedding_file(path: Path) -> int | None:
    """``mask_token_id`` of a ``torch.save`` file; None where it holds a bare tensor, or is no such file."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        pickle = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
        if pickle is None:
            return None
        opcodes = pickletools.genops(archive.read(pickle))
        values = [value for opcode, value, _ in opcodes if "PUT" not in opcode.name and opcode.name != "MEMOIZE"]
    pairs = itertools.pairwise(values)
    return next((value for key, value in pairs if key == "mask_token_id" and isinstance(value, int)), None)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _content(token: Any) -> str | None:
    """A token as text: plain, or as the object that transformers writes."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None
