# SPDX-License-Identifier: Apache-2.0
"""The acceptance watchdog: reads the scheduler's own counts and warns once per cause, with figures and likely causes.

The scheduler learns on the host, on both runners, how many drafts of each request were accepted, and passes that to
``Scheduler.make_spec_decoding_stats``. That call is where we count: no device is asked, and nothing is added to the model's
step. Which requests began with cached tokens is noted when vLLM takes their prefill statistics.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from vllm.logger import init_logger

from vllm_dflash.acceptance import LONG_CONTEXT, VERY_LONG_CONTEXT, AcceptanceWatch, Class, Verdict
from vllm_dflash.options import read_options

logger = init_logger("vllm.plugins.dflash")

WATCH, CACHED = "_dflash_watchdog", "_dflash_cached"
"""Attributes of ours on vLLM's scheduler and on its requests."""

_CACHED, _RESUMED, _LONG = int(Class.CACHED), int(Class.RESUMED), int(Class.LONG)
_VERY_LONG = int(Class.LONG | Class.VERY_LONG)  # plain integers: an IntFlag's "|" takes ten times as long


class Watchdog:
    """Watches the requests of one scheduler.

    Args:
        scheduler: vLLM's, in this process.
        watch: the statistics.
    """

    def __init__(self, scheduler: Any, watch: AcceptanceWatch) -> None:
        self._scheduler = scheduler
        self.watch = watch
        self._observe = watch.observe
        sizes = range(scheduler.max_num_running_reqs + 1)
        self._batch_bits = [_batch_class(size) for size in sizes]
        self._strides = [1 if size <= 16 else 3 if size <= 48 else 7 if size <= 128 else 13 for size in sizes]
        self._turn = 0

    def verified(self, drafted: int, accepted: int, name: str) -> None:
        """Count a verification: ``accepted`` of ``drafted`` tokens of the request called ``name``.

        Of larger batches only every third, seventh or 13th, which bounds a step's cost at about 20 of these.
        """
        scheduler = self._scheduler
        size = len(scheduler.running)
        self._turn += 1
        if self._turn % self._strides[size]:
            return
        request = scheduler.requests[name]
        bits = self._batch_bits[size]
        if CACHED in request.__dict__:
            bits |= _CACHED
        if request.num_preemptions:
            bits |= _RESUMED
        context = request.num_computed_tokens
        if context >= LONG_CONTEXT:
            bits |= _VERY_LONG if context >= VERY_LONG_CONTEXT else _LONG
        for verdict in self._observe(name, drafted, accepted, bits):
            logger.warning(warning(verdict))


def watch_scheduler(original: Callable[..., Any], claims: Callable[[Any], bool]) -> Callable[..., Any]:
    """``Scheduler.make_spec_decoding_stats`` that shows each verification to the watchdog first."""

    @functools.wraps(original)
    def make_spec_decoding_stats(
        self: Any,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Mapping[str, int] | None,
        request_id: str,
    ) -> Any:
        drafted = num_draft_tokens
        if num_invalid_spec_tokens:  # cut by a grammar, so never verified
            drafted -= num_invalid_spec_tokens.get(request_id, 0)
        try:
            watchdog = self.__dict__.get(WATCH)
            if watchdog is None:
                watchdog = self.__dict__[WATCH] = _start(self, claims)
            if watchdog and drafted > 0:
                watchdog.verified(drafted, num_accepted_tokens, request_id)
        except Exception as error:  # noqa: BLE001  # a statistic must not end the engine
            self.__dict__[WATCH] = False
            logger.warning("vllm-dflash: the acceptance watchdog stopped (%s: %s).", type(error).__name__, error)
        return original(self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id)

    return make_spec_decoding_stats


def note_cached_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Request.take_prefill_stats`` that marks requests which began with cached tokens."""

    @functools.wraps(original)
    def take_prefill_stats(self: Any) -> Any:
        if getattr(self, "prefill_stats", self) is None:  # asked for every request in every step: no call more than without us
            return None
        stats = original(self)
        if stats is not None and stats.num_cached_tokens > 0:
            self.__dict__[CACHED] = True
        return stats

    return take_prefill_stats


def _start(scheduler: Any, claims: Callable[[Any], bool]) -> Watchdog | bool:
    """The watchdog of ``scheduler``; False where the draft is not ours or the option is off."""
    config = scheduler.vllm_config
    if not claims(config) or not read_options(config.additional_config).watchdog:
        return False
    return Watchdog(scheduler, AcceptanceWatch(scheduler.num_spec_tokens))


def _batch_class(size: int) -> int:
    if size <= 1:
        return 0
    return int(Class.FEW if size <= 8 else Class.SOME if size <= 32 else Class.MANY)


NAMES = {
    None: "",
    Class.CACHED: " after prefix-cache hits",
    Class.RESUMED: " of preempted and resumed requests",
    Class.LONG: f" in contexts of {LONG_CONTEXT:,} tokens and more",
    Class.VERY_LONG: f" in contexts of {VERY_LONG_CONTEXT:,} tokens and more",
    Class.FEW: " in batches of 2 to 8",
    Class.SOME: " in batches of 9 to 32",
    Class.MANY: " in batches of 33 and more",
}
_BATCH = (
    "requests disturb each other's drafts, which is a fault to be reported, or the requests of large batches are of another kind"
)
CAUSES = {
    None: "another kind of text, another language or a higher temperature than before, weights of the target updated without the "
    "draft's, or the draft's context damaged (an engine restart tells)",
    Class.CACHED: "cached blocks that lack the draft's K/V, as from a KV connector that moves only the target's layers (a run "
    "with enable_prefix_caching false tells), or follow-up turns of another kind than first ones",
    Class.RESUMED: "holes in the draft's context after preemption, which is a fault to be reported; more KV-cache memory or a "
    "smaller max_num_seqs avoids preemption",
    Class.LONG: "a draft trained on shorter contexts, its rope scaling or its window read wrongly (see the start-up line); the "
    "option draft_max_context ends drafting where it does not pay",
    Class.FEW: _BATCH,
}
CAUSES |= {Class.VERY_LONG: CAUSES[Class.LONG], Class.SOME: _BATCH, Class.MANY: _BATCH}
NEVER = (
    "the draft was trained for another target, or for another revision or fine-tune of it (`vllm-dflash doctor` compares them); "
    "target layers, mask token, rope, window or causality in the start-up line are not those it was trained with; a bfloat16 "
    "draft in float16; random or very hot sampled text"
)


def warning(verdict: Verdict) -> str:
    """What a user reads about ``verdict``."""
    rates = ", ".join(f"{rate:.0%}" for rate in verdict.rates[:4])
    compared = {
        "low": f"near 1, so drafting costs more than it gives (below {verdict.expected:.2f})",
        "drop": f"down from {verdict.expected:.2f} before",
        "behind": f"against {verdict.expected:.2f} of all other requests",
    }[verdict.kind]
    return (
        f"DFlash: acceptance length{NAMES[verdict.of]} is {verdict.found:.2f}, {compared}; over {verdict.verifications:,} "
        f"verifications of {verdict.requests:,} requests, drafts accepted at positions 1, 2, ...: {rates}. The output is not "
        f"affected, only the speed. Likely causes: {NEVER if verdict.kind == 'low' else CAUSES[verdict.of]}."
    )
