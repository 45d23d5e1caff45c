# SPDX-License-Identifier: Apache-2.0
"""Which targets are planned for without being told, by their size."""

# On an H200 8e9 parameters gain up to 2.1 times from narrower blocks under load; 0.1e9, whose steps the host bounds, ran at 0.79
# to 1.13 of K fixed (docs/benchmarks.md).
_LARGE_TARGET = 2e9


def is_large(layers: int, hidden_size: int) -> bool:
    """Whether option ``planner`` "auto" plans on a GPU; parameters by the usual 12 h^2 of a layer, as their order is enough."""
    return 12 * layers * hidden_size**2 >= _LARGE_TARGET
