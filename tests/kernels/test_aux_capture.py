# SPDX-License-Identifier: Apache-2.0
"""`aux_capture` against fp64 and plain torch, and the registered op under torch.compile and torch's own op checks."""

import pytest
import torch

from dflash_kernels import reference
from dflash_kernels.aux_capture import aux_capture

OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def states(num_rows, hidden_size, dtype, with_residual=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    residual = 30 * torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    return hidden, residual if with_residual else None


def moved(tensor, device):
    return None if tensor is None else tensor.to(device)


@pytest.mark.parametrize("dtype", OUT_DTYPES)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("with_residual", [True, False])
def test_sum_lands_in_its_columns_only(device, assert_accurate, dtype, out_dtype, with_residual):
    """A draft in another type than its target, models that add the residual themselves, odd sizes."""
    num_rows, hidden_size = 5, 43
    hidden, residual = states(num_rows, hidden_size, dtype, with_residual)
    canvas = torch.randn(8, 3 * hidden_size).to(out_dtype)
    out = canvas.clone().to(device)
    aux_capture(out, 1, hidden.to(device), moved(residual, device))
    plain, truth = canvas.clone(), canvas.double()
    reference.aux_capture(plain, 1, hidden, residual)
    reference.aux_capture(truth, 1, hidden.double(), None if residual is None else residual.double())
    assert_accurate(out[:5, 43:86].cpu(), plain[:5, 43:86], truth[:5, 43:86])
    out = out.cpu()
    out[:5, 43:86] = canvas[:5, 43:86]
    assert torch.equal(out, canvas), "bytes outside the column block changed"


def test_wide_rows_and_strided_states(device):
    """More columns than one tile, and inputs that are column slices of something wider."""
    hidden_size = 2500
    wide = torch.randn(3, 2 * hidden_size)
    hidden, residual = wide[:, :hidden_size], wide[:, hidden_size:]
    out = torch.zeros(3, 2 * hidden_size, device=device)
    device_wide = wide.to(device)
    aux_capture(out, 1, device_wide[:, :hidden_size], device_wide[:, hidden_size:])
    torch.testing.assert_close(out[:, hidden_size:].cpu(), hidden + residual, rtol=0, atol=0)
    assert (out[:, :hidden_size] == 0).all()


def test_no_rows_write_nothing(device):
    """An empty step of a data-parallel rank."""
    out = torch.ones(2, 8, device=device)
    aux_capture(out, 0, torch.zeros(0, 8, device=device), None)
    assert (out == 1).all()


@pytest.mark.parametrize("shape", [(3, 16), (4, 8), (4, 7)])
def test_capture_beyond_the_buffer_is_refused(device, shape):
    """Rows or columns behind the buffer would be silent corruption on a GPU."""
    with pytest.raises(ValueError, match="aux buffer"):
        aux_capture(torch.zeros(shape, device=device), 1, torch.zeros(4, 8, device=device), None)


def test_registered_op_is_well_formed(device):
    """Schema, fake implementation and dispatch must agree, or compiled targets see a stale buffer."""
    hidden, residual = states(4, 16, torch.float32)
    out = torch.zeros(6, 32, device=device)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.dflash.capture_aux.default, (out, 1, hidden.to(device), residual.to(device)), test_utils=checks
    )


def test_compiled_forward_captures_and_keeps_order(device):
    """torch.compile must neither drop the op, whose result nobody returns, nor move it behind an in-place update."""
    out = torch.zeros(4, 16, device=device)

    def forward(hidden, residual):
        torch.ops.dflash.capture_aux(out, 0, hidden, residual)
        hidden = hidden * 2
        torch.ops.dflash.capture_aux(out, 1, hidden, None)
        return hidden + 1

    hidden, residual = (tensor.to(device) for tensor in states(4, 8, torch.float32))
    with torch.inference_mode():
        result = torch.compile(forward, backend="aot_eager", fullgraph=True)(hidden, residual)
    torch.testing.assert_close(result, hidden * 2 + 1)
    torch.testing.assert_close(out, torch.cat([hidden + residual, hidden * 2], dim=-1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_graph_replay_captures_new_states(device):
    """A replay must read the states that are there now, into the buffer it was captured with."""
    hidden, residual = (tensor.to(device) for tensor in states(4, 64, torch.bfloat16))
    out = torch.zeros(4, 128, device=device, dtype=torch.bfloat16)
    torch.ops.dflash.capture_aux(out, 1, hidden, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.dflash.capture_aux(out, 1, hidden, residual)
    hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    torch.testing.assert_close(out[:, 64:], hidden + residual, rtol=0, atol=0)
