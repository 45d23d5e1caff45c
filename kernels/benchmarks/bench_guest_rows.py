# SPDX-License-Identifier: Apache-2.0
"""Time of `admit_guests` at hidden size 4096: steps in which every token has its row, and steps in which some come new.

The torch arm has the answer before it starts: it only quantises and stores as many rows. Bytes are ids, map and copied rows.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels.fp8_linear import quantise_rows
from dflash_kernels.guest_rows import admit_guests
from harness import Case, main

VOCAB, WIDTH, LISTED, GUESTS = 151_936, 4096, 32_768, 2048


def _cases(num_tokens: int, num_new: int) -> Iterator[Case]:
    device = torch.device("cuda")
    head = torch.randn(VOCAB, WIDTH, dtype=torch.bfloat16, device=device)
    home = torch.arange(VOCAB, dtype=torch.int32, device=device)
    home[:LISTED] = -1
    slot_of = torch.full((VOCAB,), -1, dtype=torch.int32, device=device)
    owner, cursor = torch.full((GUESTS,), -1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    weight = torch.zeros(LISTED + GUESTS, WIDTH, device=device).to(torch.float8_e4m3fn)
    scale, offsets = torch.ones(LISTED + GUESTS, device=device), torch.zeros(LISTED + GUESTS, dtype=torch.int64, device=device)
    ids = torch.arange(num_tokens, dtype=torch.int32, device=device)
    new = torch.arange(LISTED, LISTED + num_new, device=device)
    ids[:num_new] = new
    name = f"tokens={num_tokens} new={num_new}"
    num_bytes = 8 * num_tokens + 3 * WIDTH * num_new

    def with_kernel() -> None:
        slot_of.index_fill_(0, new, -1)  # indexing by assignment copies -1 from the host, which no graph captures
        admit_guests(ids, head, home, slot_of, owner, cursor, weight, scale, offsets, first_row=LISTED)

    def with_torch() -> None:
        slot_of.index_fill_(0, new, -1)
        numbers, scales = quantise_rows(head[new])
        weight.view(torch.uint8).index_copy_(0, new, numbers.view(torch.uint8))
        scale.index_copy_(0, new, scales)

    yield Case("guest_rows", name, "kernel", with_kernel, num_bytes)
    if num_new:  # else there is nothing to do, and to time
        yield Case("guest_rows", name, "torch", with_torch, num_bytes)


def cases(thorough: bool) -> Iterator[Case]:
    """A decode step of one request and of many, with and without new tokens; thorough: a prefill."""
    for num_tokens, num_new in ((16, 0), (16, 1), (1024, 0), (1024, 16), *(((8192, 500),) if thorough else ())):
        yield from _cases(num_tokens, num_new)


if __name__ == "__main__":
    main(cases)
