# SPDX-License-Identifier: Apache-2.0
"""Which draft widths there are to choose from, for the planner, for the draft's passes, and for vLLM's table."""

from collections.abc import Callable, Sequence

_LADDER = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
_GRAPH_LADDER = (1, 2, 3, 7, 15, 31, 63)
"""Where each width has its own graphs of the target, some 50: at K = 15 and 256 requests 284 of them, 373 with 5 and 11 too. By
the roofline of an H200, leaving out 2 costs 5 % at 64 requests, and leaving out 11 costs 13 % at 16."""


def widths_up_to(max_width: int, limit: int | None = None) -> tuple[int, ...]:
    """Widths to choose from, ascending: 0, a ladder, and ``max_width``.

    ``limit``: widths have graphs of their own, so the ladder is coarse; at most this many, the middle goes first.
    """
    ladder = _LADDER if limit is None else _GRAPH_LADDER
    widths = [0, *(w for w in ladder if w < max_width), max_width]
    while limit is not None and len(widths) > max(limit, 1):
        del widths[len(widths) // 2 if len(widths) > 2 else 0]
    return tuple(widths)


def draft_widths(max_width: int, anchors: int) -> tuple[int, ...]:
    """Widths with a draft pass of their own, ascending, ``max_width`` last: 2, 4, 8, 16 ... rows.

    ``anchors``: rows among them that draft nothing, 1 or 0. A width in between runs the next one and drops what it does not need.
    From 128 requests on, where few drafts pay, a pass of 4 rows for the one draft of width 1 would waste 10 % of a step.
    """
    return (*(rows - anchors for rows in (2, 4, 8, 16, 32, 64) if rows - anchors < max_width), max_width)


def query_rows_of(graphed: Sequence[int], anchors: int) -> Callable[[int], int]:
    """Query rows per request of a width: those of the narrowest draft pass that holds it, and ``anchors`` that draft nothing."""
    return lambda wanted: next(width for width in graphed if width >= wanted) + anchors


def schedule_of(max_width: int, max_requests: int) -> list[tuple[int, int, int]]:
    """A table of vLLM's form (first batch size, last, width) that names every width the planner may choose.

    vLLM captures full graphs of the target for the widths in it. Without a planner it would be obeyed as it stands, so it gives
    each batch size the widest that stays near the knee of an H200.
    """
    widths = widths_up_to(max_width, max_requests)
    table, first = [], 1
    for place, width in enumerate(reversed(widths)):
        rest = len(widths) - 1 - place
        last = max_requests - rest if rest == 0 else min(max(first, 2 * 184 // (width + 1)), max_requests - rest)
        table.append((first, last, width))
        first = last + 1
    return table
