# SPDX-License-Identifier: Apache-2.0
"""What a tile's loads take of a multiprocessor's shared memory, so that a launcher picks tiles that start on its device.

Tiles are tuned for 16-bit numbers; the same tile of fp32 is twice as large, and a launch that asks for more than there is ends in
Triton's OutOfResources. Every launcher with `num_stages` counts its bytes by dtype and shrinks its tile before the launch.

How Triton stages a loop (checked by compiling for compute capability 8.0 and 9.0): loads that nothing else waits for have
`stages - 1` buffers, and one more where the tensor cores read shared memory on their own (wgmma: 16- and 8-bit products with at
least 64 rows); fp32 products run on FMA units and have no such buffer.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch
import triton

T = TypeVar("T")


class SharedMemory(NamedTuple):
    """Of one device.

    Attributes:
        limit: most bytes that a program can have.
        wgmma: whether products of 16 and 8 bits read their operands from it while the next loads arrive.
    """

    limit: int
    wgmma: bool


HOPPER = SharedMemory(232_448, True)
"""H100 and H200: what tiles are tuned on, and what stands for a device without such a limit (Triton's interpreter)."""


def shared_memory(device: torch.device) -> SharedMemory:
    """Of `device`, "cuda" without a number being the current one."""
    if device.type != "cuda":
        return HOPPER
    return _of_index(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache
def _of_index(index: int) -> SharedMemory:
    limit = int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
    # Consumer Blackwell (12) has the older instructions. Where it is not known, one buffer too many is counted.
    return SharedMemory(limit, torch.cuda.get_device_capability(index)[0] in (9, 10, 11))


def first_that_fits(tiles: Iterable[T], num_bytes: Callable[[T], int], limit: int) -> T:
    """The first of `tiles` (best first, at least one) of at most `limit` bytes; the last one where none is."""
    best_first = list(tiles)
    return next((tile for tile in best_first if num_bytes(tile) <= limit), best_first[-1])
