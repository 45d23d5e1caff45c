# SPDX-License-Identifier: Apache-2.0
"""Every uniform verification that fits into a captured CUDA graph of the target finds it.

vLLM offers a batch the graphs of the next larger number of tokens alone. With several widths these differ: 85 requests of 3 rows
are 255 tokens, the next number is 256, whose graphs are of 1, 2, 4 and 8 rows each, and the graph of 86 requests with 3 rows, 258
tokens, is never asked. Such steps ran piecewise.
"""

from collections.abc import Iterable
from typing import Any

Candidates = dict[tuple[int, int], list[Any]]
"""vLLM's ``BatchExecutionDescriptor`` in the order they are tried, by number of tokens and of adapters."""


def offer_uniform_graphs(candidates: Candidates, captured: Iterable[Any]) -> None:
    """Add the smallest graph that holds it to the candidates of each uniform batch that has none, before piecewise ones.

    ``captured``: the descriptors of the full graphs.
    """
    graphs: dict[tuple[int, int], list[Any]] = {}
    for desc in captured:
        if desc.uniform_token_count and getattr(desc, "num_ubatches", 1) == 1:
            graphs.setdefault((desc.uniform_token_count, desc.num_active_loras), []).append(desc)
    for (rows, adapters), some in graphs.items():
        first = 1
        for desc in sorted(some, key=lambda desc: desc.num_tokens):
            last = desc.num_tokens // rows
            for requests in range(first, last + 1):
                _add(candidates.setdefault((requests * rows, adapters), []), desc)
            first = last + 1


def _add(listed: list[Any], desc: Any) -> None:
    full = [at for at, other in enumerate(listed) if other.cg_mode == desc.cg_mode]
    if all(listed[at].uniform_token_count not in (None, desc.uniform_token_count) for at in full):
        listed.insert(full[-1] + 1 if full else 0, desc)
