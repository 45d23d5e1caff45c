# SPDX-License-Identifier: Apache-2.0
"""The patches behind ``hooks.DATA_PARALLEL`` and ``hooks.V2_CAPTURED``; light, as the entry point is."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm_dflash import hooks
from vllm_dflash.patching import Patch


def planner_table(claims: Callable[[Any], bool]) -> Patch:
    """Keep the planner's widths where data-parallel ranks need not agree; ``claims(vllm_config)``: the draft is ours.

    A table of the user's own is dropped as ever.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def disable(self: Any) -> Any:
            if claims(self):
                from vllm_dflash.engine.planned_widths import why_fixed  # here: vLLM imports its config before its engine

                if why_fixed(self) is None:
                    return None
            return original(self)

        return disable

    return Patch(hooks.DATA_PARALLEL, wrap)


def verification_timing(claims: Callable[[Any], bool]) -> Patch:
    """Once the target's graphs exist: offer them to every batch that fits, time verification, and stand before vLLM's cut of it.

    A fault there leaves the planner with what it learns, and vLLM with its own budgets.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if kwargs.get("profile_only") or not claims(self.vllm_config):
                return result
            _or_warn(lambda: _offer_graphs(self), "some verifications run piecewise, though a graph would hold them")
            _or_warn(lambda: _time(self), "verification was not timed at start-up")
            if getattr(self, "adaptive_verification", None) is not None:
                _or_warn(lambda: _trim(self), "vLLM prices trimmed verification by the full draft width")
                _or_warn(lambda: _prepare_cut(self), "the cut of trimmed verification is compiled while serving")
            return result

        return capture_model

    return Patch(hooks.V2_CAPTURED, wrap)


def _offer_graphs(runner: Any) -> None:
    from vllm.config import CUDAGraphMode

    from vllm_dflash.engine.target_graphs import offer_uniform_graphs

    manager = runner.cudagraph_manager
    if manager is not None:
        offer_uniform_graphs(manager._candidates, manager._capture_descs.get(CUDAGraphMode.FULL, ()))


def _time(runner: Any) -> None:
    from vllm_dflash.engine.verify_timing import time_verification

    time_verification(runner)


def _trim(runner: Any) -> None:
    from vllm_dflash.engine.trimming import trim

    graphs = runner.cudagraph_manager
    trim(runner.adaptive_verification, runner.speculator, () if graphs is None else graphs.captured_token_counts())


def _prepare_cut(runner: Any) -> None:
    from vllm_dflash.engine.draft_budget import prepare_cut

    prepare_cut(runner.adaptive_verification)


def _or_warn(work: Callable[[], None], consequence: str) -> None:
    """Do ``work``, which serving can do without."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  # see above
        logger = logging.getLogger("vllm.plugins.dflash")
        logger.warning("vllm-dflash: %s (%s: %s)", consequence, type(error).__name__, error)
