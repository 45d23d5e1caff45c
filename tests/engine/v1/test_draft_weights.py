# SPDX-License-Identifier: Apache-2.0
"""Strict loading: which parameters may stay without a tensor."""

import re

import pytest
import torch
from torch import nn

from vllm_dflash.engine.draft_weights import StrictLoader

SCALES = ("weight_scale", "input_scale", "weight_zero_point", "qzeros", "g_idx", "scales", "weight_scale_inv", "k_scale")


def module_of(*names):
    """`proj` with parameters of these names, and a norm."""
    module = nn.Module()
    module.proj, module.norm = nn.Module(), nn.LayerNorm(2, bias=False)
    for name in names:
        module.proj.register_parameter(name, nn.Parameter(torch.zeros(2)))
    return module


@pytest.mark.parametrize("missing", ["proj.weight", "proj.weight_packed", "proj.qweight", "proj.bias", "norm.weight"])
def test_a_quantised_draft_must_be_complete(missing):
    """Breaks when quantisation forgives every parameter: a norm without a tensor would stay as it was allocated."""
    module = module_of("weight", "weight_packed", "qweight", "bias", *SCALES)
    loader = StrictLoader(module)
    for name, parameter in module.named_parameters():
        if name != missing:
            loader.load(name, torch.ones_like(parameter))
    with pytest.raises(ValueError, match=f"no tensors for '{re.escape(missing)}'"):
        loader.finish(quantised=True)


def test_scales_and_index_tables_may_be_missing_from_a_quantised_draft_only():
    """Breaks when a scheme's optional tensors are demanded, or a plain draft is forgiven."""
    loader = StrictLoader(module_of("weight", *SCALES))
    for name in ("proj.weight", "norm.weight"):
        loader.load(name, torch.ones(2))
    assert loader.finish(quantised=True) == {"proj.weight", "norm.weight"}
    with pytest.raises(ValueError, match=r"no tensors for .*'proj\.g_idx'"):
        loader.finish()
