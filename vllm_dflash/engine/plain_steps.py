# SPDX-License-Identifier: Apache-2.0
"""Steps of the V1 runner that verify nothing are sampled as without speculation; the others are timed.

The runner decides by its configuration, not by the step: with a draft model it prepares verification and runs the rejection
sampler over no drafts at all. Both know the other path, which ``None`` in the place of what is to be verified selects, and both
paths sample the same: the row of each request goes through the same sampler. Of what was sampled nothing has to be sorted out
then, either (:class:`PlainSteps`).
"""

import functools
import time
from typing import Any

import torch


class VerificationClock:
    """``seconds``: what rejection sampling took in the latest step, 0 for a plain one."""

    def __init__(self) -> None:
        self.seconds = 0.0


class PlainSteps:
    """Mixin before ``SpecDecodeBaseProposer``, which looks up a token of every request in case that it sampled none."""

    _compact: bool

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: torch.Tensor, requests: Any, gpu_input_batch: Any, discard_request_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's: next token and number of valid ones, int32 [B] each, of ``sampled_token_ids`` [B, n].

        ``discard_request_mask``: bool [>= B], requests in mid-prefill.
        """
        count, width = sampled_token_ids.shape
        if self._compact and width == 1 and not bool(discard_request_mask[:count].any()):
            return sampled_token_ids[:, 0].int(), sampled_token_ids.new_ones(count, dtype=torch.int32)
        base: Any = super()
        found: tuple[torch.Tensor, torch.Tensor] = base.prepare_next_token_ids_padded(
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask
        )
        return found


def sample_plainly(runner: Any) -> VerificationClock:
    """Make ``runner`` (a ``GPUModelRunner`` on a CPU) take the plain path in steps without drafts, and time the other one."""
    prepare, sample, clock = runner._prepare_inputs, runner._sample, VerificationClock()

    @functools.wraps(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        logits_indices, verification, most_sampled = prepare(*args, **kwargs)
        if verification is not None and not any(verification.num_draft_tokens):
            verification = None
        return logits_indices, verification, most_sampled

    @functools.wraps(sample)
    def timed(logits: Any, spec_decode_metadata: Any) -> Any:
        began = time.perf_counter()
        output = sample(logits, spec_decode_metadata)
        clock.seconds = 0.0 if spec_decode_metadata is None else time.perf_counter() - began
        return output

    runner._prepare_inputs, runner._sample = prepare_inputs, timed  # of this instance only
    return clock
