# SPDX-License-Identifier: Apache-2.0
"""How many drafts the scheduler has verified for each request: none where the draft has nothing to say.

vLLM's schedulers put drafts (or placeholders for them) into ``request.spec_token_ids`` and count on as many rows. Shortening that
list before a step is scheduled is all that it takes, on both model runners, with asynchronous scheduling or without: no row is
verified, no draft is counted. What is left out depends on lengths alone, never on a sampled draft token, so the output's
distribution stays the target's.
"""

from typing import Any

from vllm.logger import init_logger

from vllm_dflash.engine.pair import drafted_context, resolve_draft

logger = init_logger("vllm.plugins.dflash")

_LIMIT = "_vllm_dflash_drafted_context"


def shorten_drafts(scheduler: Any) -> None:
    """Drop the drafts of running requests whose context is longer than the draft serves; runs before every step.

    Args:
        scheduler: vLLM's ``Scheduler`` or ``AsyncScheduler``, of an engine whose draft is ours.
    """
    limit = _drafted_context(scheduler)
    if limit is None:
        return
    for request in scheduler.running:
        # The tokens in flight may all be accepted: at least as many as the draft step will find, so that it never leaves out
        # a request whose drafts are verified.
        if request.spec_token_ids and request.num_tokens + request.num_output_placeholders - 1 > limit:
            request.spec_token_ids = []
            logger.info_once(
                f"DFlash draft: a request has more than {limit} tokens, the longest context that is drafted for (the draft's "
                "trained length, draft_max_context or the speculative max_model_len); such requests go on without drafts"
            )


def _drafted_context(scheduler: Any) -> int | None:
    if not hasattr(scheduler, _LIMIT):
        config = scheduler.vllm_config
        setattr(scheduler, _LIMIT, drafted_context(config, resolve_draft(config)))
    limit: int | None = getattr(scheduler, _LIMIT)
    return limit
