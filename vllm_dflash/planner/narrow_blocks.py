# SPDX-License-Identifier: Apache-2.0
"""What a narrower block costs in acceptance: drafts are fewer, and each of them is guessed worse.

A draft is trained on blocks of one length, and its masks see each other. With the demo pair, behind the same anchors, a block of
4 rows has some 14 % fewer of its first three drafts accepted than one of 8 (``docs/results/narrow_blocks.json``). Who takes
acceptance for the same at every width thinks too well of narrow blocks and, having run them, too little of wide ones.

So counts are kept as if every block had been of full length, and each narrower length has one number, the log-odds that its
drafts lose at every position. It starts from a guess, for which K is taken for the length that the draft was trained on, and is
learnt where blocks of another length follow: what was expected of the same requests a step before then tells more of the length
than of the text. The numbers are a Kalman filter's.
"""

import math
from collections.abc import Mapping

HURT = 0.5
"""Log-odds that a block is thought to lose before it is compared, times the root of the part that is missing, with as much
uncertainty: the demo pair lost 0.44 of them with 2 rows of 8, 0.31 with 4 and 0.24 with 6, in the mean of positions. Not
measured for blocks of 16."""
DRIFT = 0.15
"""Log-odds by which text changes from one step to the next, on average over a batch."""
FORGETS = 1e-4
"""Variance that a comparison adds to all lengths: drafts are replaced, texts are not alike."""
OTHER = 0.3
"""Part of what is known that must come from blocks of another length, or a comparison says nothing."""


class NarrowBlocks:
    """Log-odds that drafts lose in each block, against those of a block of full length.

    Args:
        rows: of the block that each width runs in, K among them; widths of the same rows share a number, others run the next.
        decay: per step, of what is known of requests.
    """

    def __init__(self, rows: Mapping[int, int], decay: float) -> None:
        most = max(rows)
        self._rows = [rows[min(known for known in rows if known >= width)] for width in range(most + 1)]
        missing = {block: HURT * math.sqrt(1.0 - block / rows[most]) for block in self._rows}
        self._lost = dict(missing)
        self._prior = {block: lost**2 for block, lost in missing.items()}
        self._variance = dict(self._prior)
        self._known, self._decay = dict.fromkeys(missing, 0.0), decay  # steps that what is known of requests comes from
        self._counted = dict(self._known)  # of these steps, the sum of what they were thought to lose when they were counted

    def lost(self, width: int) -> float:
        """Log-odds that every draft of a pass of ``width`` drafts loses."""
        return self._lost[self._rows[width]]

    def widened(self, width: int) -> tuple[float, float]:
        """Weights of a hit and of a miss in a block of ``width``, to count as of a full one: odds change by what is lost."""
        weight = math.exp(self.lost(width) / 2)
        return weight, 1.0 / weight

    def note(self, width: int, steps: float) -> None:
        """What is known of requests now comes from ``steps`` more blocks of ``width``, less where some of them had none."""
        kept = self._decay**steps
        for rows in self._known:
            self._known[rows] *= kept
            self._counted[rows] *= kept
        new, rows = (1.0 - kept) / (1.0 - self._decay), self._rows[width]
        self._known[rows] += new
        self._counted[rows] += new * self._lost[rows]

    def tells(self, width: int) -> bool:
        """Whether a block of ``width`` can be compared with what is known: of more than one step, and from other lengths."""
        total = sum(self._known.values())
        return total > 1.0 and 1.0 - self._known[self._rows[width]] / total > OTHER

    def compare(self, width: int, surprise: float, variance: float) -> None:
        """Drafts of ``width`` did better than expected by ``surprise`` log-odds, known to ``variance`` beside the drift of text.

        What was counted before the last comparisons says as much as it did then, so their correction is taken off. The rest is
        shared out between this length and those that the expectation comes from, by their uncertainty.
        """
        total = sum(self._known.values())
        surprise -= sum(known * self._lost[rows] - self._counted[rows] for rows, known in self._known.items()) / total
        part = {rows: -known / total for rows, known in self._known.items()}
        part[self._rows[width]] += 1.0
        spread = {rows: share * self._variance[rows] for rows, share in part.items()}
        whole = sum(part[rows] * spread[rows] for rows in part) + variance + DRIFT**2
        for rows, mine in spread.items():
            self._lost[rows] -= mine / whole * surprise
            self._variance[rows] = min(self._variance[rows] - mine**2 / whole + FORGETS, self._prior[rows])
