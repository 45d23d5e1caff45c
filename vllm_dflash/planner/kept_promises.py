# SPDX-License-Identifier: Apache-2.0
"""What drafting brought, over what its plans promised: a fault of any estimate in them shows there, whichever it is."""

MEMORY = 32
"""Steps that a promise is remembered for while drafting."""
REST = 256
"""Steps that do something else until it is forgotten: a width is tried again then, should it promise more."""
PRIOR = 200.0
"""Tokens that are imagined as promised, and kept as those of other widths: of one request 32 steps have fewer, and luck is most
of what they tell."""
BOUNDS = (0.7, 1.3)


class KeptPromises:
    """Tokens that came in the last steps that drafted, over those that were promised for the time they took, by draft width.

    Many requests make it: at 256 a plan of 3 drafts promised 12 % more than came, and none would have been as fast
    (``docs/results/never_slower_256.json`` of commit fee12df). What is wrong with one width may be more so with another: a
    chance that is thought too high is so once more for each draft behind it.
    """

    def __init__(self) -> None:
        self._promised: dict[int, float] = {}
        self._came: dict[int, float] = {}

    def note(self, width: int, promised: float, came: float) -> None:
        """A step that drafted as the ones before it did: tokens by the plan and the step's time, and those that came."""
        self._fade(but=width)
        fade = 1.0 - 1.0 / MEMORY
        self._promised[width] = fade * self._promised.get(width, 0.0) + promised
        self._came[width] = fade * self._came.get(width, 0.0) + came

    def rest(self) -> None:
        """A step without drafts."""
        self._fade()

    def share(self, width: int) -> float:
        """Of what a width promises, what to expect; 1 before anything is known, and for no drafts."""
        if not width:
            return 1.0
        promised, came = self._promised.get(width, 0.0), self._came.get(width, 0.0)
        of_others = (sum(self._came.values()) - came + PRIOR) / (sum(self._promised.values()) - promised + PRIOR)
        least, most = BOUNDS
        return min(max((came + PRIOR * of_others) / (promised + PRIOR), least), most)

    def _fade(self, but: int | None = None) -> None:
        for sums in (self._promised, self._came):
            for width in sums.keys() - {but}:
                sums[width] *= 1.0 - 1.0 / REST
