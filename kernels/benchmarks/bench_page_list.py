# SPDX-License-Identifier: Apache-2.0
"""Time of `page_list`: decode batches of a draft with pages of 16 keys, tables as wide as 40,960 tokens need.

The torch arm masks the table by length and keeps the pages that are left, which reads their number on the host: no graph can
capture it. Bytes are lengths, the pages that are read and written, and the two small arrays.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels.page_list import PageList, page_list
from harness import Case, main

MAX_NUM_REQS, KV_BLOCK_SIZE, COLUMNS = 256, 16, 2560


def _cases(num_reqs: int, num_keys: int) -> Iterator[Case]:
    device = torch.device("cuda")
    table = torch.randint(1, 1_000_000, (num_reqs, COLUMNS), dtype=torch.int32, device=device)
    lens = torch.full((num_reqs,), num_keys, dtype=torch.int32, device=device)
    out = PageList.empty(MAX_NUM_REQS, COLUMNS, device)
    name = f"reqs={num_reqs} keys={num_keys}"
    num_bytes = 4 * num_reqs * (3 + 2 * -(-num_keys // KV_BLOCK_SIZE))
    yield Case("page_list", name, "kernel", functools.partial(page_list, table, lens, KV_BLOCK_SIZE, out), num_bytes)

    def with_torch() -> None:
        counts = (lens + KV_BLOCK_SIZE - 1) // KV_BLOCK_SIZE
        torch.cumsum(counts, 0, dtype=torch.int32, out=out.indptr[1 : num_reqs + 1])
        out.last_page_len[:num_reqs] = lens - (counts - 1) * KV_BLOCK_SIZE
        pages = table[torch.arange(COLUMNS, device=device) < counts[:, None]]
        out.pages[: pages.shape[0]] = pages

    yield Case("page_list", name, "torch", with_torch, num_bytes, graph=False)


def cases(thorough: bool) -> Iterator[Case]:
    """One request, the batches of the engine's benchmark (thorough: more of them), and a long context."""
    yield from _cases(1, 1024)
    for num_reqs in (8, 32, 128, 256) if thorough else (128,):
        yield from _cases(num_reqs, 1024)
    yield from _cases(8, 40_000)


if __name__ == "__main__":
    main(cases)
