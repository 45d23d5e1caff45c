# SPDX-License-Identifier: Apache-2.0
"""Times of draft and verification passes, handed from the worker that runs them to the planner beside the scheduler.

Both live in one process unless the engine runs several workers; then nothing arrives and the planner splits whole steps by its
prior. Bounded: a planner that is switched off never reads it.
"""

from collections import deque

_PASSES: deque[tuple[int, float]] = deque(maxlen=1024)
_VERIFICATIONS: deque[tuple[int, float]] = deque(maxlen=256)
_CATCH_UPS: deque[float] = deque(maxlen=16)


def record_draft(query_rows: int, seconds: float) -> None:
    """One draft pass over ``query_rows`` rows took ``seconds``."""
    _PASSES.append((query_rows, seconds))


def take_drafts() -> list[tuple[int, float]]:
    """All (query rows, seconds) since the last call."""
    taken = list(_PASSES)
    _PASSES.clear()
    return taken


def forget() -> None:
    """Drop what no planner has taken."""
    _PASSES.clear()
    _VERIFICATIONS.clear()
    _CATCH_UPS.clear()


def record_verification(rows: int, seconds: float) -> None:
    """The target's pass over ``rows`` rows took ``seconds`` when the engine started."""
    _VERIFICATIONS.append((rows, seconds))


def take_verifications() -> list[tuple[int, float]]:
    """All (rows, seconds) since the last call."""
    taken = list(_VERIFICATIONS)
    _VERIFICATIONS.clear()
    return taken


def record_catch_up(seconds: float) -> None:
    """The step that runs spends ``seconds`` on context of earlier steps: no part of what a step like it costs."""
    _CATCH_UPS.append(seconds)


def take_catch_up() -> float:
    """Seconds since the last call, together."""
    seconds = sum(_CATCH_UPS)
    _CATCH_UPS.clear()
    return seconds
