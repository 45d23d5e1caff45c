# SPDX-License-Identifier: Apache-2.0
"""Packing a draft into int8 loses little, whatever the scales of its columns, and the shipped draft is one of ours."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_dflash.checkpoint import read_draft_config
from vllm_dflash.demo_pair.compact import COLUMN_SCALE, ROW_SCALE, main, pack, unpack, unpack_folder
from vllm_dflash.demo_pair.prepare import PACKED_DRAFT

PACKAGE_LIMIT = 20_000_000  # bytes, for the whole draft folder


def matrix(rows, columns, column_spread):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(0, -column_spread, columns)


@pytest.mark.parametrize("column_spread", [0, 3], ids=["even columns", "columns differ by 1000"])
def test_no_weight_is_off_by_more_than_half_a_step(column_spread):
    """Breaks when the scales are wrong, or when small columns drown in the scale of large ones (as row scales alone do)."""
    weight = matrix(48, 200, column_spread)
    packed = pack({"w": weight})
    step = packed["w" + ROW_SCALE][:, None] * packed["w" + COLUMN_SCALE]
    error = (unpack(packed, torch.float32)["w"] - weight).abs()
    assert (error <= step * 0.5001).all()
    assert (error.norm(dim=0) / weight.norm(dim=0)).max() < 0.015  # per column, so that small ones count


def test_vectors_and_odd_matrices_survive():
    """Breaks when norms are quantised or a zero row gives NaN."""
    weight = matrix(4, 8, 0)
    weight[2], weight[:, 5] = 0, 0
    norm = torch.randn(8).bfloat16()
    restored = unpack(pack({"w": weight, "norm": norm}))
    assert torch.equal(restored["norm"], norm)
    assert restored["w"].dtype == torch.bfloat16
    assert torch.equal(restored["w"][2], torch.zeros(8).bfloat16())
    assert torch.equal(restored["w"][:, 5], torch.zeros(4).bfloat16())


def test_packing_twice_changes_nothing_more():
    """Breaks when a packed and unpacked draft drifts each time it is packed again."""
    once = unpack(pack({"w": matrix(16, 64, 2)}), torch.float32)
    twice = unpack(pack(once), torch.float32)
    torch.testing.assert_close(twice["w"], once["w"], rtol=0.01, atol=float(once["w"].abs().max()) / 127)


def test_the_pack_command_writes_a_folder_that_unpacks(tmp_path):
    """Breaks when the documented command or the file names change."""
    source, packed, restored = tmp_path / "src", tmp_path / "packed", tmp_path / "restored"
    source.mkdir()
    restored.mkdir()
    save_file({"fc.weight": matrix(8, 16, 1).bfloat16()}, source / "model.safetensors")
    (source / "config.json").write_text('{"a": 1}')
    main([str(source), str(packed)])
    assert load_file(packed / "model.safetensors")["fc.weight"].dtype == torch.int8
    unpack_folder(packed, restored)
    assert json.loads((restored / "config.json").read_text()) == {"a": 1}
    assert list(load_file(restored / "model.safetensors")) == ["fc.weight"]


def test_the_shipped_draft_is_small_and_complete():
    """Breaks when the package outgrows its limit or the draft in it is not the one that config.json describes."""
    assert sum(file.stat().st_size for file in PACKED_DRAFT.iterdir()) < PACKAGE_LIMIT
    config = read_draft_config(PACKED_DRAFT)
    weights = unpack(load_file(PACKED_DRAFT / "model.safetensors"))
    assert weights["fc.weight"].shape == (config.hidden_size, config.fc_input_size)
    assert len(weights) == 3 + 11 * config.num_layers
    assert all(weight.dtype == torch.bfloat16 and weight.isfinite().all() for weight in weights.values())
