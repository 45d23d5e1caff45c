# SPDX-License-Identifier: Apache-2.0
"""What a plan is, and what plans are worth: tokens per second of drafts and verify lengths, by the formula of ``planner.py``."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_dflash.planner.costs import StepCosts

Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]

_SHARES = 4
"""Numbers of drafting requests that are tried, as parts of the batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Drafts of the next step.

    Attributes:
        width: drafts per request to make, 0 for none.
        lengths: int64 [R], how many of them to verify, by request.
        rate: expected tokens per second; 0 where nothing was expected, as the width is held.
        probe: chosen to learn and not to gain.
    """

    width: int
    lengths: Lengths
    rate: float
    probe: bool = False


def uniform_rates(survivals: Sequence[Floats], widths: Lengths, costs: StepCosts, query_rows: Lengths, context: int) -> Floats:
    """Tokens per second where every request drafts and verifies the same number of tokens, for each of ``widths``.

    ``survivals``: [R, width] of each; ``query_rows``: rows per request of each width's draft pass.
    """
    requests = len(survivals[0])
    tokens = requests + np.array([survival.sum() for survival in survivals])
    seconds = costs.seconds(requests * (1 + widths), requests * query_rows, context, requests)
    rates: Floats = tokens / np.where(widths > 0, seconds, costs.plain(requests, context))
    return rates


def fitted_plan(
    survival: Floats,
    width: int,
    costs: StepCosts,
    query_rows: int,
    context: int,
    *,
    worth: float = 0.0,
    priced: tuple[Floats, Floats] | None = None,
) -> Plan:
    """Lengths up to ``width`` by request, ``survival`` [R, >= width]; requests of length 0 are not drafted for.

    None is drafted for at all where that does not promise ``worth``, a share, over plain decoding. Positions are admitted in the
    order of their survival, among the most promising requests only, for several numbers of them: each request that drafts pays
    for its ``query_rows``. ``priced``: what ``costs.by_rows`` says of enough rows, where it is known already.
    """
    requests = survival.shape[0]
    ranked = np.argsort(-survival[:, :width].sum(1), kind="stable")
    grid, verify = priced or costs.by_rows(requests, requests * (1 + width), context)
    best = Plan(0, np.zeros(requests, dtype=np.int64), requests / float(verify[0]))
    least = (1 + worth) * best.rate
    if not width:
        return best
    for count in sorted({max(1, round(requests * part / _SHARES)) for part in range(1, _SHARES + 1)}):
        some = ranked[:count]
        flat = survival[some, :width].ravel()
        order = np.argsort(-flat, kind="stable")  # stable: an earlier position comes before an equal later one
        tokens = requests + np.cumsum(flat[order])
        drafting = np.cumsum(order % width == 0)
        seconds = np.interp(requests + np.arange(1, flat.size + 1), grid, verify) + costs.drafting(drafting * query_rows)
        rates = tokens / seconds
        at = int(np.argmax(rates))
        if rates[at] > max(best.rate, least):
            lengths = np.zeros(requests, dtype=np.int64)
            lengths[some] = np.bincount(order[: at + 1] // width, minlength=count)
            best = Plan(width, lengths, float(rates[at]))
    return best
