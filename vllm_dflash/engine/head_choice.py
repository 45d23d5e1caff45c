# SPDX-License-Identifier: Apache-2.0
"""Which head drafts come from where the user left it open: the one with the most tokens per second, by times and by coverage.

With L the acceptance length and T the time of a step with the full head, tokens per second are L / T. Another head h takes t_h
instead of t_full and loses a share ``loss_h`` of L::

    gain_h = (1 - loss_h) / (1 - share * (1 - t_h / t_full))        share = t_full / T

The head is a product over the same rows as the target's own, so ``share`` is its part of the weights that a step reads. That
leaves out attention, sampling and the host, which makes the share, and so the gain, too large; the margins below are for it. All
weights count as equally wide: a target with narrower ones than its head reads less, and its share is larger than said.

``loss`` comes from the list's coverage c of text that was not counted. A draft survives to position i with s^i; a target token
without a row ends it. Tokens that a draft guesses right are frequent ones, so of those only ``MISSED`` times 1 - c have no row,
and rows for tokens in use leave ``MISSED_WITH_GUESTS`` (measured: docs/results/head_rows_cpu.json)::

    L(s) = sum of s^i, i = 0..K        loss = 1 - L(s * (1 - MISSED * (1 - c))) / L(s)
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from vllm.logger import init_logger

from vllm_dflash.engine.graph_timing import agreed, graph_times

logger = init_logger("vllm.plugins.dflash")

Choice = Literal["full", "every", "small"]
SURVIVAL = 0.8  # acceptance length 4.2 at K = 7, 4.9 at K = 15: a good draft, which loses more than a bad one
MISSED = 0.6  # 0.54 to 0.70 with lists that hold 90 to 96 % of the target's tokens
MISSED_WITH_GUESTS = 0.25  # rows for all tokens in use leave 0.05 to 0.41 of the loss
ENOUGH_GUESTS = 2048  # fewer hold less than what is in use; this many were tried
_GAIN = 0.97  # noise must not decide: the other variant has to be this much faster
_WORTH = 1.005  # a small head has to win this much more: its loss is an estimate, that of all rows is none
_MOST_ROWS = 2048  # a step of more rows is bound by compute like this one


@dataclasses.dataclass(frozen=True, slots=True)
class HeadTimes:
    """Microseconds of a step's draft head with ``rows`` sample rows: the full one, an fp8 copy of every row, of the list's."""

    rows: int
    full: float
    every: float
    small: float | None = None


def choose_head(times: Sequence[HeadTimes], share: float, loss: float | None) -> Choice:
    """The head with the highest expected tokens per second, over all of ``times`` alike.

    Args:
        times: for few and for many rows.
        share: of the full head in the time of a step, between 0 and 1.
        loss: share of the acceptance length that the small head costs; None where nothing is known about its list.
    """
    every = _mean(gain(t.every / t.full, share, 0.0) for t in times) if _mean(t.every / t.full for t in times) < _GAIN else 1.0
    if loss is not None and all(t.small is not None for t in times):
        small = _mean(gain(t.small / t.full, share, loss) for t in times if t.small is not None)
        if small > _WORTH * every:
            return "small"
    return "every" if every > 1 else "full"


def gain(ratio: float, share: float, loss: float) -> float:
    """Tokens per second against the full head; ``ratio`` is t_h / t_full."""
    return (1 - loss) / (1 - share * (1 - ratio))


def expected_loss(coverage: float, num_drafts: int, *, guests: bool = False) -> float:
    """Share of the acceptance length that a list with this ``coverage`` of unseen text costs at K = ``num_drafts``.

    ``guests``: whether tokens in use get rows besides.
    """
    kept = SURVIVAL * (1 - (MISSED_WITH_GUESTS if guests else MISSED) * (1 - coverage))
    return 1 - sum(kept**i for i in range(num_drafts + 1)) / sum(SURVIVAL**i for i in range(num_drafts + 1))


def head_share(vllm_config: Any, num_head_rows: int) -> float:
    """Part of the full head in the weights that a step reads: head, target and draft, layers of 12 H^2 each."""
    model, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    hidden, draft_hidden = model.get_hidden_size(), draft.get_hidden_size()
    head = num_head_rows * draft_hidden
    layers = 12 * (model.get_total_num_hidden_layers() * hidden**2 + draft.get_total_num_hidden_layers() * draft_hidden**2)
    return float(head / (2 * head + layers))  # the target reads its own head too


def choose_by_time(private: Any, full: Any, model: Any, max_rows: int, vllm_config: Any) -> Choice:
    """Time the heads on this GPU and choose; the same on all ranks, and said in one line.

    Args:
        private: a private head of every row, which may have a shortlist.
        full: callable, hidden states [m, H] -> tokens, over the target's head; or a reason (text) why it goes through logits.
        model: our draft model.
        max_rows: most sample rows of a step.
        vllm_config: of the engine.
    """
    listed = private.shortlist
    heads = [model.get_top_tokens_of_full_head if isinstance(full, str) else full, private]
    if listed is not None and listed.coverage is not None:
        heads.append(private.leading(len(listed.rows)))
    times = [_times(heads, model, rows) for rows in sorted({min(16, max_rows), min(max_rows, _MOST_ROWS)})]
    torch.cuda.empty_cache()
    loss, share = None, head_share(vllm_config, model.lm_head.org_vocab_size)
    if len(heads) == 3:
        num_drafts = vllm_config.speculative_config.num_speculative_tokens
        loss = expected_loss(listed.coverage, num_drafts, guests=private.num_guests >= ENOUGH_GUESTS)
    chosen = choose_head(times, share, loss)
    told = "; ".join(describe(t) for t in times)
    expected = "" if loss is None else f"; {len(listed.rows)} rows are expected to cost {loss:.1%} of the acceptance length"
    logger.info_once(f"DFlash draft head: {told}{expected}; drafts come from {_WORDS[chosen]}")
    return chosen


_WORDS = {"full": "the target's own head", "every": "an fp8 copy of every row", "small": "the listed rows in fp8"}


def describe(times: HeadTimes) -> str:
    """The times in words."""
    small = "" if times.small is None else f", listed rows {times.small:.0f} us"
    return f"{times.rows} sample rows: full {times.full:.0f} us, fp8 {times.every:.0f} us{small}"


def _times(heads: Sequence[Any], model: Any, rows: int) -> HeadTimes:
    hidden = torch.randn(rows, model.draft.hidden_size, dtype=model.hidden_norm.weight.dtype, device="cuda")
    return HeadTimes(rows, *(agreed(time) for time in graph_times([functools.partial(head, hidden) for head in heads])))


def _mean(values: Any) -> float:
    """Geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
