# SPDX-License-Identifier: Apache-2.0
"""``min_p`` and ``logit_bias`` of a request, which vLLM refuses with any speculative method, for our drafts.

Model Runner V2 applies both to every row that it verifies; there only the refusal has to go. The V1 runner applies them to the
bonus row alone, and only where its processors exist: :func:`with_every_processor` builds them, :func:`with_draft_rows` applies
them to the rows of the drafts, in the order of vLLM's own sampler (bias, penalties, masks, temperature, min_p).
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor


def allowed(params: Any) -> Any:
    """A copy of a request's ``SamplingParams`` without the two: vLLM's check of the rest goes on."""
    params = copy.copy(params)
    params.min_p, params.logit_bias = 0.0, None
    return params


def with_every_processor(build: Callable[..., Any], claims_draft: Callable[[Any], bool]) -> Callable[..., Any]:
    """Wrap ``build_logitsprocs``: with our drafts the V1 runner gets all built-in processors, as without speculation.

    Custom processors stay vLLM's business: it refuses them, since they know nothing of rows that may be rejected.
    """

    @functools.wraps(build)
    def wrapper(
        vllm_config: Any, device: torch.device, is_pin_memory: bool, is_pooling_model: bool, custom_logitsprocs: Any = ()
    ) -> Any:
        if is_pooling_model or custom_logitsprocs or not claims_draft(vllm_config.speculative_config):
            return build(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        return LogitsProcessors(processor(vllm_config, device, is_pin_memory) for processor in BUILTIN_LOGITS_PROCESSORS)

    return wrapper


def with_draft_rows(apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``RejectionSampler.apply_logits_processors(self, logits, sampling_metadata, metadata)``; other methods pass through.

    ``logits``: float32 [T, V], the rows of all drafts, request by request; ``metadata.num_draft_tokens``: how many each has.
    """

    @functools.wraps(apply)
    def wrapper(sampler: Any, logits: torch.Tensor, sampling_metadata: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        counts = np.asarray(metadata.num_draft_tokens, dtype=np.int64)
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            if isinstance(processor, LogitBiasLogitsProcessor) and processor.biases:
                add_bias(logits, processor.biases, counts)
        logits = apply(sampler, logits, sampling_metadata, metadata, *args, **kwargs)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count and not sampling_metadata.all_greedy:
                mask_unlikely(logits, processor.min_p_cpu[: len(counts)], sampling_metadata.temperature, counts)
        return logits

    return wrapper


def add_bias(logits: torch.Tensor, biases: dict[int, dict[int, float]], counts: np.ndarray) -> None:
    """Add ``biases[request][token]`` to all rows of the request, in place.

    Args:
        logits: float32 [T, V].
        biases: only of requests that have some.
        counts: int64 [B], rows per request; their sum is T.
    """
    first = np.cumsum(counts) - counts
    for request, bias in biases.items():
        if counts[request]:
            rows = slice(int(first[request]), int(first[request] + counts[request]))
            tokens = torch.tensor(list(bias), dtype=torch.int64).to(logits.device, non_blocking=True)
            values = torch.tensor(list(bias.values()), dtype=logits.dtype).to(logits.device, non_blocking=True)
            logits[rows].index_add_(1, tokens, values.expand(int(counts[request]), -1))


def mask_unlikely(logits: torch.Tensor, min_p: np.ndarray, temperature: torch.Tensor, counts: np.ndarray) -> None:
    """Mask, in place, every token less likely than ``min_p`` times the likeliest one, at the request's temperature.

    Args:
        logits: float32 [T, V], before temperature.
        min_p: float32 [B]; 0 masks nothing.
        temperature: float32 [B]; 0 is a greedy request, whose likeliest token no ``min_p`` masks.
        counts: int64 [B], rows per request; their sum is T.
    """
    owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(logits.device, non_blocking=True)
    scale = torch.where(temperature == 0, 1.0, temperature)[owner].unsqueeze(1)
    probabilities = (logits / scale).softmax(dim=-1)
    share = torch.from_numpy(min_p.copy()).to(logits.device, non_blocking=True)[owner].unsqueeze(1)
    logits.masked_fill_(probabilities < share * probabilities.amax(dim=-1, keepdim=True), float("-inf"))
