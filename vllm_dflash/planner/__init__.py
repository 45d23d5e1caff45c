# SPDX-License-Identifier: Apache-2.0
"""How many tokens to draft and to verify in the next step, for the most tokens per second.

Plain Python and numpy; the engine's side is in ``engine/planning.py``. The formula is on one page: ``docs/planner.md``.

================ =================================================================
acceptance.py    how likely each request's next drafts survive, from its history
narrow_blocks.py what drafts of a narrower block lose
costs.py         what a step costs by its rows, from observed times
row_curve.py     seconds by rows of one pass · context_slope.py what contexts add
widths.py        which widths there are · targets.py for which targets · plan.py what plans are worth
planner.py       the choice: best rate, held steady, probed now and then · turns.py when
measured.py      draft times on their way from the worker to the planner
confidences.py   how likely drafts survive where the device cuts them, from their confidences
trimmed.py       the choice of a width there · kept_promises.py what it brought, over what was promised
record.py        what was decided, and what deciding cost
================ =================================================================

Nothing here sees a draft token or the probability of one that was drawn, so that no choice can bias what is accepted.
"""
