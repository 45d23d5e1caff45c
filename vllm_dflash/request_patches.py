# SPDX-License-Identifier: Apache-2.0
"""The patches behind ``hooks.REQUESTS``: requests with a draft of ours may use ``min_p`` and ``logit_bias``.

Light, as the entry point is: what the patches do is imported when vLLM imports what they replace.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm_dflash import hooks
from vllm_dflash.patching import Patch

Claims = Callable[[Any], bool]


def request_patches(claims_draft: Claims) -> tuple[Patch, ...]:
    """The three patches; ``claims_draft(speculative_config)`` says whether the draft is ours."""
    runner = "vllm.v1.worker.gpu_model_runner"
    return (
        Patch(hooks.PARAMETERS, functools.partial(_lift_refusal, claims_draft)),
        Patch(hooks.V1_PROCESSORS, functools.partial(_build_processors, claims_draft), rebind=(runner,)),
        Patch(hooks.V1_DRAFT_ROWS, _process_draft_rows),
    )


def _lift_refusal(claims_draft: Claims, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate(self: Any, speculative_config: Any, *args: Any, **kwargs: Any) -> Any:
        if speculative_config is None or not claims_draft(speculative_config):
            return original(self, speculative_config, *args, **kwargs)  # not our draft: nothing of ours is even imported
        from vllm_dflash.engine.request_parameters import allowed  # here: vLLM imports this class before its engine

        return original(allowed(self), speculative_config, *args, **kwargs)

    return validate


def _build_processors(claims_draft: Claims, original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dflash.engine.request_parameters import with_every_processor

    return with_every_processor(original, claims_draft)


def _process_draft_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dflash.engine.request_parameters import with_draft_rows

    return with_draft_rows(original)
