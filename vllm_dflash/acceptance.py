# SPDX-License-Identifier: Apache-2.0
"""Is drafting still worth it? Counts of accepted drafts per class of requests, and a verdict where they collapse.

Verification hides a faulty draft: the text stays right and only the speed is gone. So acceptance is judged while it is
served, window by window, for all requests together and for each :class:`Class` on its own:

========== ===================================== =================================================================
verdict    compares a window of                  with
========== ===================================== =================================================================
low        all requests                          :attr:`Limits.floor`: the draft never helped
drop       all requests, or one class            the mean of all its earlier windows, so that a slow drift counts too
behind     one class                             the requests outside this class
========== ===================================== =================================================================

A window is closed only when it has enough verifications of enough requests (one text can be hard), and a verdict needs several
windows in a row. Acceptance is compared over the draft positions that both sides have, because K may differ between batch sizes.
Standard library only; the engine's side is in ``engine/watchdog.py``.
"""

import dataclasses
import enum
from collections.abc import Iterable


class Class(enum.IntFlag):
    """Classes that a verification belongs to, as bits; none for a cold, short request that runs alone."""

    CACHED = 1
    """The prompt, or a part of it, came from the prefix cache or a KV connector."""
    RESUMED = 2
    """The request was preempted and computed again."""
    LONG = 4
    """At least :data:`LONG_CONTEXT` tokens."""
    VERY_LONG = 8
    """At least :data:`VERY_LONG_CONTEXT` tokens."""
    FEW = 16
    """2 to 8 requests in the batch."""
    SOME = 32
    """9 to 32."""
    MANY = 64
    """33 and more."""


LONG_CONTEXT, VERY_LONG_CONTEXT = 4096, 32768


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """When a verdict is passed.

    Attributes:
        window: verifications that a window has at least.
        requests: requests that it has at least.
        floor: acceptance length (1 is "no draft accepted") below which a draft is of no use.
        share: part of the compared acceptance length that is too little.
        confirmations: windows in a row that must say so.
        history: windows that must have been seen of what a window is compared with.
    """

    window: int = 512
    requests: int = 16
    floor: float = 1.2
    share: float = 0.6
    confirmations: int = 2
    history: int = 4


class Profile:
    """Verifications counted by drafted and by accepted tokens: enough to compare classes with different K."""

    __slots__ = ("accepted", "drafted", "requests")

    def __init__(self, width: int) -> None:
        self.drafted = [0] * (width + 1)
        self.accepted = [0] * (width + 1)
        self.requests: set[str] = set()

    @property
    def verifications(self) -> int:
        """How many were counted."""
        return sum(self.drafted)

    def add(self, other: "Profile") -> None:
        """Count the verifications of ``other`` too; its requests are not taken over."""
        self.drafted = [mine + more for mine, more in zip(self.drafted, other.drafted, strict=True)]
        self.accepted = [mine + more for mine, more in zip(self.accepted, other.accepted, strict=True)]

    def rates(self) -> list[float]:
        """Probability that the drafts at positions 1, 2, ... are accepted, as far as half of the verifications had them."""
        enough, drafted, accepted, rates = self.verifications / 2, 0, 0, []
        for position in range(len(self.drafted) - 1, 0, -1):
            drafted += self.drafted[position]
            accepted += self.accepted[position]
            if drafted and drafted >= enough:
                rates.append(accepted / drafted)
        return rates[::-1]

    def length(self, positions: int | None = None) -> float:
        """Acceptance length over the first ``positions`` drafts, bonus token included."""
        return 1 + sum(self.rates()[:positions])


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One reason to warn.

    Attributes:
        kind: "low", "drop" or "behind".
        of: the class; None for all requests.
        found: acceptance length of the last window; ``expected``: what it was compared with.
        rates: acceptance by draft position in that window.
        verifications: in that window; ``requests``: how many requests they belong to.
    """

    kind: str
    of: Class | None
    found: float
    expected: float
    rates: tuple[float, ...]
    verifications: int
    requests: int


class _Series:
    """Windows of one class: the open one, all good ones before it, and how often each verdict was due in a row."""

    def __init__(self, width: int) -> None:
        self.open = Profile(width)
        self.history = Profile(width)
        self.windows = 0
        self.due: dict[str, int] = {}
        self.said: set[str] = set()


class AcceptanceWatch:
    """Collects verifications (:meth:`observe`) and now and then hands out verdicts, each once.

    Args:
        width: largest K.
        limits: when to speak.
    """

    def __init__(self, width: int, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._width = width
        self._cells: dict[int, Profile] = {}
        self._until_check = self._interval = max(1, self.limits.window // 4)
        self._all = _Series(width)
        self._classes = {member: _Series(width) for member in Class}
        self._total = Profile(width)
        self._of_class = {member: Profile(width) for member in Class}

    def observe(self, request: str, drafted: int, accepted: int, classes: int) -> Iterable[Verdict]:
        """Count a verification: ``accepted`` of ``drafted`` tokens of ``request``; ``classes`` are its :class:`Class` bits."""
        cell = self._cells.get(classes)
        if cell is None:
            cell = self._cells[classes] = Profile(self._width)
        cell.drafted[drafted] += 1
        cell.accepted[accepted] += 1
        cell.requests.add(request)
        self._until_check -= 1
        if self._until_check:
            return ()
        self._until_check = self._interval
        return self._check()

    def _check(self) -> list[Verdict]:
        """Hand the cells to the classes that they belong to, and judge the windows that are full."""
        for bits, cell in self._cells.items():
            self._total.add(cell)
            members = [member for member in Class if member & bits]
            for member in members:
                self._of_class[member].add(cell)
            for series in (self._all, *(self._classes[member] for member in members)):
                series.open.add(cell)
                series.open.requests |= cell.requests
        self._cells.clear()
        found = self._judge(None, self._all)
        if not self._all.due:  # one verdict on everything says it all
            for member, series in self._classes.items():
                found += self._judge(member, series)
        return found

    def _judge(self, of: Class | None, series: _Series) -> list[Verdict]:
        window, limits = series.open, self.limits
        if window.verifications < limits.window or len(window.requests) < limits.requests:
            return []
        series.open = Profile(self._width)
        reasons = self._reasons(of, series, window)
        series.due = {kind: series.due.get(kind, 0) + 1 for kind in reasons}
        if not reasons:
            series.history.add(window)
            series.windows += 1
        confirmed = [kind for kind in reasons if series.due[kind] >= limits.confirmations and kind not in series.said]
        series.said.update(confirmed)
        return [
            Verdict(
                kind,
                of,
                window.length(),
                reasons[kind],
                tuple(window.rates()),
                window.verifications,
                len(window.requests),
            )
            for kind in confirmed[:1]
        ]

    def _reasons(self, of: Class | None, series: _Series, window: Profile) -> dict[str, float]:
        """Verdicts due for ``window``, each with the acceptance length that was expected."""
        limits, reasons = self.limits, {}
        if of is None and window.length() < limits.floor:
            reasons["low"] = limits.floor
        if series.windows >= limits.history and (expected := self._lost(window, series.history)):
            reasons["drop"] = expected
        if of is not None:
            rest = self._rest(of)
            if rest.verifications >= limits.history * limits.window and (expected := self._lost(window, rest)):
                reasons["behind"] = expected
        return reasons

    def _lost(self, window: Profile, other: Profile) -> float | None:
        """The acceptance length of ``other`` if that of ``window`` is too small a part of it, over the same positions."""
        positions = min(len(window.rates()), len(other.rates()))
        expected = other.length(positions)
        return expected if window.length(positions) < self.limits.share * expected else None

    def _rest(self, of: Class) -> Profile:
        """All verifications so far outside the class ``of``."""
        rest, inside = Profile(self._width), self._of_class[of]
        rest.drafted = [total - part for total, part in zip(self._total.drafted, inside.drafted, strict=True)]
        rest.accepted = [total - part for total, part in zip(self._total.accepted, inside.accepted, strict=True)]
        return rest
