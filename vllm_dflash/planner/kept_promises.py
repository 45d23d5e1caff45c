# SPDX-License-Identifier: Apache-2.0
"""What drafting brought, over what its plans promised: a fault of any estimate in them shows there, whichever it is."""

MEMORY = 32
"""Steps that a promise is remembered for while drafting."""
REST = 256
"""Steps without drafts until it is forgotten: drafting is tried again then, should it promise more than none."""
PRIOR = 200.0
"""Tokens that are imagined as promised and kept: of one request 32 steps have fewer, and luck is most of what they tell."""
BOUNDS = (0.7, 1.3)


class KeptPromises:
    """Tokens that came in the last steps that drafted, over those that were promised for the time they took.

    Many requests make it: at 256 a plan of 3 drafts promised 12 % more than came, and none would have been as fast
    (``docs/results/never_slower_256.json`` of commit fee12df).
    """

    def __init__(self) -> None:
        self._promised = self._came = 0.0

    def note(self, promised: float, came: float) -> None:
        """A step that drafted as the ones before it did: tokens by the plan and the step's time, and those that came."""
        self._fade(1.0 / MEMORY)
        self._promised += promised
        self._came += came

    def rest(self) -> None:
        """A step without drafts."""
        self._fade(1.0 / REST)

    @property
    def share(self) -> float:
        """Of what is promised, what to expect; 1 before anything is known."""
        least, most = BOUNDS
        return min(max((self._came + PRIOR) / (self._promised + PRIOR), least), most)

    def _fade(self, part: float) -> None:
        self._promised *= 1.0 - part
        self._came *= 1.0 - part
