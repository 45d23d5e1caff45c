# SPDX-License-Identifier: Apache-2.0
"""Whether the weight files of a checkpoint are all there and whole, told from their headers: no tensor is read."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint import DraftConfig
from vllm_dflash.cli.probes import Finding

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20  # the format's own
_LFS_POINTER = b"version https://git-lfs"


def weights(folder: Path, role: str, draft: DraftConfig | None = None) -> Iterable[Finding]:
    """Files named by the index, or any safetensors file, complete; with ``draft``, also the shape of its ``fc``."""
    names = _named_files(folder)
    missing = [name for name in names if not (folder / name).exists()]
    files = [folder / name for name in names if name not in missing] or sorted(folder.glob("*.safetensors"))
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        yield Finding("weights", "fail", f"{role}: {shown} missing, which {INDEX} names. Download the checkpoint again.")
        return
    if not files and not list(folder.glob("*.bin")):
        yield Finding("weights", "fail", f"{role}: no weights (*.safetensors) in {str(folder)!r}. Download the checkpoint again.")
        return
    tensors: dict[str, Any] = {}
    for file in files:
        found = header(file)
        if isinstance(found, str):
            yield Finding("weights", "fail", f"{role}: {file.name} {found}")
            return
        tensors |= found
    yield _combiner(draft, tensors) or Finding("weights", "ok", f"{role}: {len(files)} file(s), complete", {"files": len(files)})


def header(file: Path) -> dict[str, Any] | str:
    """Tensor descriptions of a safetensors file, or what is wrong with it and the cure."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(max(8, len(_LFS_POINTER)))
        if start == _LFS_POINTER:
            return "is a Git LFS pointer, not weights. Run `git lfs pull` in the checkpoint."
        length = int.from_bytes(start[:8], "little")
        stream.seek(8)
        text = stream.read(length) if length <= min(size, _HEADER_LIMIT) else b""
    broken = "is cut off or no safetensors file. Download it again."
    try:
        tensors = {name: tensor for name, tensor in json.loads(text).items() if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        return broken
    return tensors if size == 8 + length + end else broken


def weight_bytes(folder: Path) -> int | None:
    """Bytes of the safetensors files, or what their index says; None where neither is on this machine."""
    files = list(folder.glob("*.safetensors"))
    if files:
        return sum(file.stat().st_size for file in files)
    index = folder / INDEX
    if index.is_file():
        size = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
        return int(size) if isinstance(size, (int, float)) else None
    return None


def _named_files(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return []
    found = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
    return sorted(set(map(str, found.values())))


def _combiner(draft: DraftConfig | None, tensors: dict[str, Any]) -> Finding | None:
    """``fc`` reads all captured layers side by side: its shape gives a wrong number of layers away."""
    name = next((name for name in tensors if name.removeprefix("model.") == "fc.weight"), None)
    if draft is None or name is None:
        return None
    shape, wanted = tensors[name].get("shape"), [draft.hidden_size, draft.fc_input_size]
    if not isinstance(shape, list) or math.prod(shape) == math.prod(wanted):
        return None
    text = (
        f"draft: {name} has shape {shape}; target_layer_ids {list(draft.target_layer_ids)} ask for {wanted}. Correct "
        "target_layer_ids (or target_hidden_size) in the draft's config.json."
    )
    return Finding("weights", "fail", text)
