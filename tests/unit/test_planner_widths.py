# SPDX-License-Identifier: Apache-2.0
"""Which widths there are to choose from, and what vLLM is told of them."""

from vllm_dflash.planner.widths import draft_widths, schedule_of, widths_up_to


def test_widths_have_both_ends_and_respect_the_limit():
    """Breaks if the ladder loses no speculation or the width that the user asked for."""
    assert widths_up_to(15) == (0, 1, 2, 3, 5, 7, 11, 15)
    assert widths_up_to(4) == (0, 1, 2, 3, 4)
    assert widths_up_to(15, 256) == (0, 1, 2, 3, 7, 15)
    assert widths_up_to(15, 3)[0] == 0
    assert widths_up_to(15, 3)[-1] == 15
    assert widths_up_to(15, 1) == (15,)
    assert draft_widths(15, anchors=1) == (1, 3, 7, 15)
    assert draft_widths(7, anchors=0) == (2, 4, 7)
    assert draft_widths(1, anchors=1) == (1,)


def test_vllm_is_told_every_width():
    """Breaks if a width has no place in the table that vLLM makes graphs from, or the table has holes."""
    for limit in (1, 3, 8, 300):
        table = schedule_of(15, limit)
        assert {width for _, _, width in table} == set(widths_up_to(15, limit))
        assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
        assert table[-1][1] == limit
        assert all(first <= last for first, last, _ in table)
