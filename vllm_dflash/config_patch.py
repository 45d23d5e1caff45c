# SPDX-License-Identifier: Apache-2.0
"""The patch behind ``hooks.ENGINE_CONFIG``: what is decided when vLLM's configuration is built; light, as the entry point is."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_dflash import hooks
from vllm_dflash.options import read_options
from vllm_dflash.patching import Patch


def engine_config(claims: Callable[[Any], bool], enabled: Callable[[], bool]) -> Patch:
    """Check the plugin's options before anything is loaded, prepare the planner, and cover verification with graphs.

    Options that nothing can act on are told. ``claims(vllm_config)``: the draft is ours; ``enabled()``: the plugin is.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = enabled() and read_options(self.additional_config).given()
            if not claims(self):
                result = original(self, *args, **kwargs)
                if given and not claims(self):
                    _warn_of(given)
                return result
            # Here, as vLLM imports its config before its engine.
            from vllm_dflash.engine import capture_sizes, planned_widths, verify_lengths

            planned_widths.configure(self)
            open_to_us = capture_sizes.are_default(self)
            result = original(self, *args, **kwargs)
            verify_lengths.choose(self)
            if open_to_us:
                capture_sizes.cover_verification(self)
            return result

        return post_init

    return Patch(hooks.ENGINE_CONFIG, wrap)


def _warn_of(given: Any) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.plugins.dflash").warning_once(
        f"vllm-dflash: options {sorted(given)} have no effect: no DFlash draft of ours is configured"
    )
