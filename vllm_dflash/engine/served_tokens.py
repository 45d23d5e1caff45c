# SPDX-License-Identifier: Apache-2.0
"""Counts the target's own output while it serves, for the rows of the next start's small draft head.

The scheduler's output has the tokens that a step added to each answer, up to its end, as lists on the host; nothing is asked of a
device. They are gathered by request, and a finished request is counted. The file is written when it would grow by an eighth, and
every minute in which something was counted: vLLM kills an engine process that takes more than a few seconds to end.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_dflash.options import read_options
from vllm_dflash.served_counts import add_counts, counts_file, read_counts
from vllm_dflash.token_frequency import ENOUGH_TOKENS, TokenCounts

logger = init_logger("vllm.plugins.dflash")

COUNTER = "_dflash_token_counter"
"""Attribute of ours on vLLM's scheduler."""
_FIRST_SAVE = 8192  # tokens; a save takes 18 ms with 5,000 different tokens in the file, 0.1 s with 30,000
_PERIOD = 60.0  # seconds


class TokenCounter:
    """Counts the answers of one scheduler's requests.

    Args:
        path: the file to add to.
        vocab_size: ids from here on are not counted.
        known: how many tokens the file holds.
    """

    def __init__(self, path: Path, vocab_size: int, known: int) -> None:
        self._path, self._vocab_size = path, vocab_size
        self._answers: dict[str, list[int]] = {}
        self._counts, self._num_counted = TokenCounts(), 0
        self._due, self._saved = max(_FIRST_SAVE, known // 8), time.monotonic()

    def step(self, finished: Iterable[str], new: Iterable[tuple[str, Sequence[int], bool]]) -> None:
        """Count a step: requests that had ``finished`` before it (or were aborted); (request, new tokens, whether its last)."""
        for name in finished:
            self._count(self._answers.pop(name, []))
        for name, tokens, ends in new:
            self._answers.setdefault(name, []).extend(tokens)
            if ends:
                self._count(self._answers.pop(name))
        if self._num_counted >= self._due or (self._num_counted and time.monotonic() > self._saved + _PERIOD):
            self._save(wait=False)

    def save_at_end(self) -> None:
        """Save what is left, unfinished answers included; an engine must end even where the disk is full."""
        for name in list(self._answers):
            self._count(self._answers.pop(name))
        try:
            self._save(wait=True)
        except Exception as error:  # noqa: BLE001  # see above
            logger.warning("vllm-dflash: the last counted tokens are lost (%s).", error)

    def _count(self, answer: list[int]) -> None:
        self._counts.add([token for token in answer if 0 <= token < self._vocab_size])
        self._num_counted += len(answer)

    def _save(self, *, wait: bool) -> None:
        if self._num_counted:
            try:
                known = add_counts(self._path, self._counts, self._vocab_size, wait=wait)
            except BlockingIOError:  # another engine is saving; requests must not wait for it
                self._due = self._num_counted + _FIRST_SAVE
                self._saved = time.monotonic()
                return
            self._counts, self._num_counted = TokenCounts(), 0
            self._due, self._saved = max(_FIRST_SAVE, known // 8), time.monotonic()


def count_step(scheduler: Any, output: Any, results: Any, claims: Callable[[Any], bool]) -> None:
    """Count a finished step (vLLM's ``SchedulerOutput``, and ``EngineCoreOutputs`` by client) where asked; else one look-up."""
    counter = scheduler.__dict__.get(COUNTER)
    if counter is False:
        return
    try:
        if counter is None:
            counter = scheduler.__dict__[COUNTER] = _start(scheduler, claims)
        if counter:
            new = (one for client in results.values() for one in client.outputs)
            counter.step(output.finished_req_ids, [(o.request_id, o.new_token_ids, o.finish_reason is not None) for o in new])
    except Exception as error:  # noqa: BLE001  # a statistic must not end the engine
        scheduler.__dict__[COUNTER] = False
        logger.warning("vllm-dflash: output tokens are no longer counted (%s: %s).", type(error).__name__, error)


def _start(scheduler: Any, claims: Callable[[Any], bool]) -> TokenCounter | bool:
    config = scheduler.vllm_config
    if not claims(config) or not read_options(config.additional_config).draft_head_counting:
        return False
    path, vocab_size = place_of(config), config.model_config.get_vocab_size()
    known = read_counts(path, vocab_size).total
    counter = TokenCounter(path, vocab_size, known)
    # Runs when the scheduler goes, and at the end of child processes too, where `atexit` is silent.
    Finalize(scheduler, counter.save_at_end, exitpriority=10)
    logger.info(
        f"DFlash draft head: output tokens are counted into {path}, {known} so far; a later start uses them from "
        f"{ENOUGH_TOKENS} on"
    )
    return counter


def place_of(vllm_config: Any) -> Path:
    """The file of this pair's counts."""
    return counts_file(vllm_config.model_config.model, vllm_config.speculative_config.draft_model_config.model)
