# SPDX-License-Identifier: Apache-2.0
"""Time of `aux_capture` for one captured layer of width 4096: kernel, oracle, and the three passes that it replaces."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels import reference
from dflash_kernels.aux_capture import aux_capture
from harness import Case, main

HIDDEN_SIZE, NUM_AUX, INDEX = 4096, 5, 2


def _cases(num_rows: int) -> Iterator[Case]:
    """One size, three arms; the bytes are those of a single pass for all of them."""
    hidden, residual = (torch.randn(num_rows, HIDDEN_SIZE, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.zeros(num_rows, NUM_AUX * HIDDEN_SIZE, device="cuda", dtype=torch.bfloat16)
    persistent = torch.zeros_like(hidden)
    columns = out[:, INDEX * HIDDEN_SIZE : (INDEX + 1) * HIDDEN_SIZE]

    def three_passes() -> None:
        persistent.copy_(hidden + residual)
        columns.copy_(persistent)

    num_bytes = 3 * num_rows * HIDDEN_SIZE * 2
    name = f"rows={num_rows} hidden={HIDDEN_SIZE} bf16"
    yield Case("aux_capture", name, "kernel", lambda: aux_capture(out, INDEX, hidden, residual), num_bytes)
    yield Case("aux_capture", name, "torch", lambda: reference.aux_capture(out, INDEX, hidden, residual), num_bytes)
    yield Case("aux_capture", name, "three passes", three_passes, num_bytes)


def cases() -> Iterator[Case]:
    """Decode batches of 1, 8, 32, 128 requests at K = 15, and a prefill chunk."""
    for num_rows in (16, 128, 512, 2048, 8192):
        yield from _cases(num_rows)


if __name__ == "__main__":
    main(cases)
