# SPDX-License-Identifier: Apache-2.0
"""One captured target layer written once: hidden + residual into its columns of the [rows, A * H] buffer.

vLLM's own capture adds, copies to a persistent buffer and concatenates: three passes over every aux state. Here the sum
goes straight to where the draft's `fc` reads it. Registered as `torch.ops.dflash.capture_aux` with a mutated argument, so
that torch.compile keeps its order and a CUDA graph replays it; CUDA runs the Triton kernel, a CPU plain torch.

Invariants: `out` has a fixed address and at least as many rows as any step; rows and columns that this call does not own
keep their bytes, so captures of different layers commute; the row count of a captured graph is baked in, which is right
because the target's padded rows are inert for the draft (their slots are PAD).

Cost model (H200, 4.3 TB/s, H = 4096, bf16): 16 rows move 0.4 MB, launch-bound at 2 us; 2,048 rows 50 MB, 12 us; 8,192
rows 201 MB, 47 us. Tile: 1,024 columns of one row, 8 elements (16 bytes) per thread of 4 warps.
"""

import torch
import triton
import triton.language as tl

__all__ = ["aux_capture"]

_BLOCK_COLUMNS = 1024
_NUM_WARPS = 4


# The row strides are constants of a model and stay specialised (wide accesses); the row count only enters the grid.
@triton.jit
def _aux_capture_kernel(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    out_ptr, out_stride, first_column, hidden_ptr, hidden_stride, residual_ptr, residual_stride,
    HIDDEN_SIZE: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, column tiles)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = column < HIDDEN_SIZE
    total = tl.load(hidden_ptr + row * hidden_stride + column, mask=mask).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * residual_stride + column, mask=mask).to(tl.float32)
    target = out_ptr + row * out_stride + first_column + column
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)


def _check(out: torch.Tensor, index: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Refuse a capture that would leave its rows or columns."""
    num_rows, hidden_size = hidden.shape
    if out.dim() != 2 or out.shape[0] < num_rows or not 0 <= index < out.shape[1] // hidden_size:
        raise ValueError(
            f"aux buffer {tuple(out.shape)} cannot take {num_rows} rows of hidden size {hidden_size} as column block {index}: "
            "allocate it as [max_num_tokens, captured layers * hidden size]"
        )
    tensors = [out, hidden] if residual is None else [out, hidden, residual]
    if any(tensor.stride(1) != 1 for tensor in tensors) or (residual is not None and residual.shape != hidden.shape):
        raise ValueError(
            "hidden, residual and the aux buffer need unit column stride and equal hidden shapes; got strides "
            f"{[tensor.stride() for tensor in tensors]} and shapes {[tuple(tensor.shape) for tensor in tensors]}"
        )


def aux_capture(out: torch.Tensor, index: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Write hidden + residual into column block `index` of the first n rows of `out`, summed in fp32, rounded once.

    Args:
        out: bf16, fp16 or fp32 [rows >= n, A * H], unit column stride; other rows and columns keep their bytes.
        index: column block, 0 <= index < A.
        hidden: bf16, fp16 or fp32 [n, H], unit column stride.
        residual: like `hidden`, or None where the model adds it itself.

    Raises:
        ValueError: rows, columns or strides that do not fit.
    """
    _check(out, index, hidden, residual)
    num_rows, hidden_size = hidden.shape
    if num_rows == 0:
        return
    _aux_capture_kernel[(num_rows, triton.cdiv(hidden_size, _BLOCK_COLUMNS))](
        out, out.stride(0), index * hidden_size, hidden, hidden.stride(0), residual,
        0 if residual is None else residual.stride(0),
        HIDDEN_SIZE=hidden_size, BLOCK_COLUMNS=min(_BLOCK_COLUMNS, triton.next_power_of_2(hidden_size)),
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def _aux_capture_cpu(out: torch.Tensor, index: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    """CPU implementation of the registered op: the same sum without a kernel."""
    _check(out, index, hidden, residual)
    num_rows, hidden_size = hidden.shape
    columns = out[:num_rows, index * hidden_size : (index + 1) * hidden_size]
    if residual is None:
        columns.copy_(hidden)
    else:
        columns.copy_(hidden.float() + residual.float())


def _aux_capture_fake(out: torch.Tensor, index: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Shape-only implementation: the op returns nothing."""


# A Library rather than torch.library.custom_op: no Python dispatch layer on the eager path. It must stay referenced.
# The ignores: torch.library's methods carry no annotations.
_LIBRARY = torch.library.Library("dflash", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("capture_aux(Tensor(a!) out, int index, Tensor hidden, Tensor? residual) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.impl("capture_aux", aux_capture, "CUDA")  # type: ignore[no-untyped-call]
_LIBRARY.impl("capture_aux", _aux_capture_cpu, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("dflash::capture_aux", _aux_capture_fake, lib=_LIBRARY)
