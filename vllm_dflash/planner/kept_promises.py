# SPDX-License-Identifier: Apache-2.0
"""What drafting brought, over what its plans promised: a fault of any estimate in them shows there, whichever it is."""

import dataclasses
from collections import defaultdict

from vllm_dflash.planner.row_curve import CLIP, Typical

MEMORY = 32
"""Steps that a promise is remembered for while a width is in use; of few requests as many as have `MEMORY_TOKENS` at one each."""
MEMORY_TOKENS = 256
REST = 512
"""Steps that do something else until a third of what was found is left: a width is tried again then, should it promise more."""
PRIOR = 60.0
"""Tokens that are imagined as promised, and kept as those of other widths: few tokens came by luck."""
BOUNDS = (0.4, 1.3)
"""A draft that is never accepted halves what was promised of one that is thought even."""


@dataclasses.dataclass(slots=True)
class _Account:
    promised: float = 0.0
    came: float = 0.0
    usual: Typical = dataclasses.field(default_factory=Typical)
    """Seconds of a step: a stall is no fault of the plan."""


class KeptPromises:
    """Tokens that came in the last steps that drafted, over those that were promised for the time they took.

    By draft width and by power of two of the requests. What is wrong with one width may be more so with another: a chance that
    is thought too high is so once more for each draft behind it. And where one request doubles its speed by drafting, many
    gain next to nothing, so that a few percent decide.
    """

    def __init__(self) -> None:
        self._of: defaultdict[int, defaultdict[int, _Account]] = defaultdict(lambda: defaultdict(_Account))

    def note(self, requests: int, width: int, rate: float, seconds: float, came: float) -> None:
        """A step that drafted as the ones before it did, of a plan that promised ``rate`` tokens per second: those that came."""
        self._rest(requests, but=width)
        account = self._of[requests.bit_length()][width]
        account.usual.observe(seconds, None)
        fade = 1.0 - 1.0 / max(MEMORY, MEMORY_TOKENS / requests)
        account.promised = fade * account.promised + rate * min(seconds, CLIP * account.usual.mean)
        account.came = fade * account.came + came

    def rest(self, requests: int) -> None:
        """A step without drafts."""
        self._rest(requests)

    def others(self, requests: int) -> None:
        """Requests have come of which none was there before: of few, what was found is much of their own text."""
        for account in self._of[requests.bit_length()].values():
            part = min(1.0, PRIOR * requests / 2 / max(account.promised, 1e-9))
            account.promised, account.came = part * account.promised, part * account.came

    def share(self, requests: int, width: int) -> float:
        """Of what a width promises, what to expect; 1 before anything is known, and for no drafts."""
        accounts = self._of.get(requests.bit_length())
        if not width or not accounts:
            return 1.0
        mine = accounts.get(width, _Account())
        promised = sum(account.promised for account in accounts.values())
        came = sum(account.came for account in accounts.values())
        of_others = (came - mine.came + PRIOR) / (promised - mine.promised + PRIOR)
        least, most = BOUNDS
        return min(max((mine.came + PRIOR * of_others) / (mine.promised + PRIOR), least), most)

    def _rest(self, requests: int, but: int | None = None) -> None:
        """What was found of other widths is less and less true: it fades, and so does how far it lies from what was promised."""
        part = 1.0 - 1.0 / REST
        for width, account in self._of[requests.bit_length()].items():
            if width != but:
                beyond = account.came - account.promised
                account.promised *= part
                account.came = account.promised + part * part * beyond
