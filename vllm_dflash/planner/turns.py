# SPDX-License-Identifier: Apache-2.0
"""When something is tried that is not the best as things look, so that it becomes known."""

PROBE_SHARE = 0.01
"""Part of the time that may go to trying a neighbouring width: what is not tried is not known. Of a batch without drafts whose
lengths may differ: part of what drafts that are all accepted would gain, much for one request and little for many."""
PLAIN_STEPS = 3
"""Steps of a probe without drafts: the first one still verifies, and of the others one is sure to stand for itself."""
PLAIN_EVERY = 32
"""Steps between two such probes at least, of each power of two of the requests; as many more as keep their cost within
`PROBE_SHARE` as things look, 300 at most. A price may have been learnt at a bad time: what looks about as good as drafting is
tried often."""
PLAIN_IN_VAIN = (64, 4096)
"""The same where the last one told nothing, four times as many each time: a busy server has a prefill in nearly every step."""


class Turns:
    """Turns to try something: the first at once, then after ``first`` steps, ``factor`` times as many each, ``last`` at most."""

    def __init__(self, first: int, last: int, factor: int) -> None:
        self._interval, self._last, self._factor = first, last, factor
        self._next = 0

    def due(self, now: int) -> bool:
        """Whether step ``now`` may take a turn."""
        return now >= self._next

    def take(self, now: int) -> None:
        """Step ``now`` does."""
        self._next, self._interval = now + self._interval, min(self._factor * self._interval, self._last)


class PlainTries:
    """When steps without drafts are tried again, of one batch size.

    ``told`` below: how many such steps were timed so far.
    """

    def __init__(self) -> None:
        self._again = self._told = 0
        self._in_vain = Turns(*PLAIN_IN_VAIN, 4)

    def note(self, now: int, ratio: float, told: int) -> None:
        """They are tried in step ``now``; ``ratio``: of their rate to that of drafting, as things look."""
        if told > self._told:
            self._in_vain = Turns(*PLAIN_IN_VAIN, 4)
        self._told = told
        self._in_vain.take(now)
        self._again = now + max(int(PLAIN_STEPS * max(0.0, 1.0 - ratio) / PROBE_SHARE), PLAIN_EVERY)

    def due(self, now: int, told: int) -> bool:
        """Whether they may be tried in step ``now``."""
        return now >= self._again and (told > self._told or self._in_vain.due(now))
