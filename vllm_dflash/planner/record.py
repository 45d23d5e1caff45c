# SPDX-License-Identifier: Apache-2.0
"""What a planner decided and what deciding cost: steps by width, probes, and when the width changed."""

from collections import Counter, deque
from typing import Any

LONGEST = 4096
"""Changes of width that are remembered, the latest: some hours of steady load, and less than a megabyte."""


class Record:
    """Counts since it was made or last reset.

    Attributes:
        widths: steps by the width that they draft.
        probes: steps among them that were to learn and not to gain.
        verified: drafts that were verified, of all requests together.
        seconds: host time spent planning.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._steps = 0  # since it was made
        self._clear()

    def _clear(self) -> None:
        self.widths: Counter[int] = Counter()
        self.probes = self.verified = 0
        self.seconds = self._promised = self._timed = 0.0
        self._timeline: deque[list[int | bool]] = deque(maxlen=LONGEST)
        self._last = -1

    def note(self, requests: int, width: int, *, probe: bool) -> bool:
        """One more step of ``requests`` requests drafts ``width`` tokens; whether that is another width than before."""
        changed = width != self._last
        if changed:
            self._last = width
            self._timeline.append([self._steps, requests, width, probe])
        self._steps += 1
        self.widths[width] += 1
        self.probes += probe
        return changed

    def promise(self, rate: float, seconds: float) -> None:
        """A step of a plan that expected ``rate`` tokens per second took ``seconds``; 0 where nothing was expected."""
        if rate > 0:
            self._promised += rate * seconds
            self._timed += seconds

    def report(self, *, reset: bool = False) -> dict[str, Any]:
        """All figures, ready for JSON and MessagePack.

        Returns:
            ``widths``: steps by width; ``steps``: their sum; ``probes`` among them; ``verified``: drafts, of all requests;
            ``expected_rate``: tokens per second by the plans that were followed; ``seconds``: host time spent planning;
            ``timeline``: [number of the first step, requests in it, width, probe] of each change of width, the last ``LONGEST``,
            steps being numbered from the engine's first.
        """
        report = {
            "widths": dict(sorted(self.widths.items())),
            "steps": self.widths.total(),
            "probes": self.probes,
            "verified": int(self.verified),  # numpy's numbers, which sums of its arrays are, do not leave a process
            "expected_rate": float(self._promised / self._timed) if self._timed else 0.0,
            "seconds": self.seconds,
            "timeline": [list(entry) for entry in self._timeline],
        }
        if reset:
            self._clear()
        return report
