# SPDX-License-Identifier: Apache-2.0
"""Pack a bfloat16 draft into int8 so that it fits into the package, and unpack it again.

    python -m vllm_dflash.demo_pair.compact SRC OUT        # two draft folders; OUT holds the packed one

A matrix W [out, in] is stored as W ~ rows[:, None] * Q * columns[None, :] with Q int8 in -127 .. 127. Vectors stay bfloat16.
`columns` is the root mean square of each input column. It is there for `fc`: its columns differ by a factor of 800 (they
undo the scale of the target's hidden states), and with row scales alone the small ones lose 7 % of their size to rounding;
with both it is 0.8 % in every matrix.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROW_SCALE, COLUMN_SCALE = ".row_scale", ".column_scale"
_LARGEST = 127  # symmetric: -128 is not used


def pack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantise every matrix: its own name holds Q int8 [out, in]; two more tensors hold the scales, float32 [out] and [in].

    Other tensors are copied unchanged.
    """
    packed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            packed[name] = weight
            continue
        values = weight.float()
        tiniest = torch.finfo(torch.float32).tiny  # an all-zero row or column must not divide by zero
        columns = values.square().mean(dim=0).sqrt().clamp(min=tiniest)
        rows = ((values / columns).abs().amax(dim=1) / _LARGEST).clamp(min=tiniest)
        packed[name] = (values / columns / rows[:, None]).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
        packed[name + ROW_SCALE], packed[name + COLUMN_SCALE] = rows, columns
    return packed


def unpack(packed: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Undo `pack` up to rounding: matrices in `dtype`, other tensors unchanged, scales gone."""
    weights: dict[str, Tensor] = {}
    for name, tensor in packed.items():
        if name.endswith((ROW_SCALE, COLUMN_SCALE)):
            continue
        if tensor.dtype == torch.int8:
            rows, columns = packed[name + ROW_SCALE], packed[name + COLUMN_SCALE]
            weights[name] = (tensor.float() * rows[:, None] * columns).to(dtype)
        else:
            weights[name] = tensor
    return weights


def pack_folder(source: Path, out: Path) -> None:
    """Write a packed copy of the draft in `source` (model.safetensors, config.json) into folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(pack(load_file(source / "model.safetensors")), out / "model.safetensors", metadata={"packing": "int8"})
    shutil.copyfile(source / "config.json", out / "config.json")


def unpack_folder(source: Path, out: Path) -> None:
    """Write the packed draft in `source` as an ordinary bfloat16 checkpoint into the existing folder `out`."""
    save_file(unpack(load_file(source / "model.safetensors")), out / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "config.json", out / "config.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module: SRC OUT."""
    parser = argparse.ArgumentParser(description="Pack a bfloat16 DFlash draft into int8.")
    parser.add_argument("source", type=Path, help="folder with model.safetensors and config.json")
    parser.add_argument("out", type=Path, help="folder to write")
    options = parser.parse_args(arguments)
    pack_folder(options.source, options.out)


if __name__ == "__main__":
    main()
