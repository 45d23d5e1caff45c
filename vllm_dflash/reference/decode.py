# SPDX-License-Identifier: Apache-2.0
"""Draft, verify, accept: DFlash speculative decoding of one sequence on a Hugging Face target.

One step, with n tokens known and n - 1 of them in both caches:

    1. the draft proposes K tokens from the query block [anchor, mask x K]
    2. the target runs over [anchor, K drafts]: K + 1 logit rows, K + 1 rows of aux hidden states
    3. the acceptance rule keeps a of the K drafts and adds one token of the target's own
    4. both caches keep the a + 1 rows that were right; the rest is cropped

Invariant: after each step both caches hold exactly the accepted tokens but the last one, which is the next anchor.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from vllm_dflash.checkpoint import TargetFacts, check_pair
from vllm_dflash.reference.model import DFlashDraft, load_draft
from vllm_dflash.reference.sampling import (
    RandomStreams,
    SamplingSettings,
    accept_by_rejection,
    accept_greedy,
    distribution,
    one_hot,
    sample,
)

GREEDY = SamplingSettings()


class Target:
    """A Hugging Face causal LM with a KV cache, which also hands out the hidden states that the draft reads.

    Layer i is captured at the output of decoder layer i: `hidden_states[i + 1]` of transformers, except that the last layer
    is taken before the final norm.

    Args:
        model: any causal LM with `get_decoder().layers` and full attention (a sliding-window cache cannot be cropped).
        layer_ids: 0-based, in the order of the draft's `fc`; repetitions are allowed.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.model, self._layer_ids = model, layer_ids
        self._outputs: dict[int, Tensor] = {}
        for i in set(layer_ids):
            model.get_decoder().layers[i].register_forward_hook(self._keep(i))
        self.reset()

    def _keep(self, layer_id: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs[layer_id] = output if isinstance(output, Tensor) else output[0]

        return hook

    def reset(self) -> None:
        """Forget the sequence."""
        self._cache = DynamicCache()

    def drop(self, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens out of the KV cache again."""
        if num_tokens:  # transformers reads a length of 0 as "keep nothing"
            self._cache.crop(-num_tokens)

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append `ids` (n of them) -> logits [n, V] and aux hidden states [n, A * H_t]."""
        input_ids = torch.tensor([list(ids)], device=self.model.device)
        logits = self.model(input_ids, past_key_values=self._cache, use_cache=True).logits[0]
        return logits, torch.cat([self._outputs[i][0] for i in self._layer_ids], dim=-1)


@dataclass(slots=True)
class Generation:
    """What was generated and what it took.

    Attributes:
        tokens: generated ids, at most `max_new_tokens`, an end token included.
        drafts: the K proposed ids of each step.
        accepted: accepted drafts per step, as the acceptance rule counts them (also where an end token cut the answer).
    """

    tokens: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens per verification step, bonus token included (vLLM's formula)."""
        return 1 + sum(self.accepted) / max(1, len(self.accepted))


def load_pair(
    target_folder: Path, draft_folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Target, DFlashDraft]:
    """Load target and draft from folders.

    Raises:
        CheckpointError: the two do not belong together, or the draft's config.json cannot be read.
        ValueError: see `load_draft`.
    """
    config = AutoConfig.from_pretrained(target_folder)
    # transformers' fused attention leaves out the soft cap of Gemma 2's scores
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=dtype, attn_implementation="eager" if capped else None).to(
        device
    )
    model.eval()
    draft = load_draft(draft_folder, model, dtype)
    shape = model.config.get_text_config()
    check_pair(draft.config, TargetFacts(shape.hidden_size, shape.num_hidden_layers, shape.vocab_size))
    return Target(model, draft.config.target_layer_ids), draft


def speculative_decode(
    target: Target,
    draft: DFlashDraft,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    num_speculative_tokens: int | None = None,
    settings: SamplingSettings = GREEDY,
    probabilistic_drafts: bool = False,
    seed: int = 0,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Generate with speculation; the outputs are distributed as those of `plain_decode`, and equal when greedy in float32.

    Args:
        target: is reset first.
        draft: made for this target.
        prompt_ids: at least one token.
        max_new_tokens: upper limit of the answer.
        num_speculative_tokens: K; as many as the draft was trained for when None.
        settings: greedy by default.
        probabilistic_drafts: sample the drafts instead of proposing each row's argmax.
        seed: of the three random streams.
        stop_ids: generation ends with the first of these, which is kept.
    """
    num_drafts = num_speculative_tokens or draft.config.max_num_speculative_tokens
    streams, result = RandomStreams(seed), Generation()
    target.reset()
    context = draft.new_context()
    logits, aux = target.forward(prompt_ids)
    draft.extend_context(context, aux)
    new = sample(distribution(logits[-1:], settings), streams.resample).tolist()
    while not _finish(result, new, max_new_tokens, stop_ids):
        draft_logits = draft.block_logits(context, new[-1], num_drafts)
        drafts, p = _choose(draft, draft_logits, settings if probabilistic_drafts else GREEDY, logits.shape[-1], streams)
        logits, aux = target.forward([new[-1], *drafts.tolist()])
        if settings.is_greedy:
            new = accept_greedy(drafts, logits)
        else:
            new = accept_by_rejection(drafts, distribution(logits, settings), p, streams)
        draft.extend_context(context, aux[: len(new)])
        target.drop(1 + num_drafts - len(new))
        result.drafts.append(drafts.tolist())
        result.accepted.append(len(new) - 1)
    return result


def plain_decode(
    target: Target,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    settings: SamplingSettings = GREEDY,
    seed: int = 0,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Generate token by token, without a draft; arguments as in `speculative_decode`."""
    stream, result = RandomStreams(seed).resample, Generation()
    target.reset()
    logits, _ = target.forward(prompt_ids)
    new = sample(distribution(logits[-1:], settings), stream).tolist()
    while not _finish(result, new, max_new_tokens, stop_ids):
        logits, _ = target.forward(new)
        new = sample(distribution(logits, settings), stream).tolist()
    return result.tokens


def block_proposals(
    target: Target,
    draft: DFlashDraft,
    token_ids: Sequence[int],
    prefix_lengths: Iterable[int],
    num_speculative_tokens: int,
) -> list[list[int]]:
    """The K greedy drafts after given prefixes of a known text, for comparison with another implementation.

    Args:
        target: is reset first.
        draft: made for this target.
        token_ids: the text.
        prefix_lengths: for each n >= 1, draft what follows `token_ids[:n]`; its last token is the anchor.
        num_speculative_tokens: K.
    """
    target.reset()
    context = draft.new_context()
    draft.extend_context(context, target.forward(token_ids)[1])
    blocks = (draft.block_logits(context.prefix(n - 1), token_ids[n - 1], num_speculative_tokens) for n in prefix_lengths)
    return [draft.to_target_ids(logits.argmax(dim=-1)).tolist() for logits in blocks]


def _choose(
    draft: DFlashDraft, draft_logits: Tensor, settings: SamplingSettings, vocab_size: int, streams: RandomStreams
) -> tuple[Tensor, Tensor]:
    """From draft logits [K, V_d]: drafts int64 [K] (target ids) and the distributions p float64 [K, V] they come from."""
    if settings.is_greedy:
        ids = draft.to_target_ids(draft_logits.argmax(dim=-1))
        return ids, one_hot(ids, vocab_size)
    every_id = draft.to_target_ids(torch.arange(draft_logits.shape[-1], device=draft_logits.device))
    logits = draft_logits.new_full((draft_logits.shape[0], vocab_size), float("-inf"))
    logits[:, every_id] = draft_logits
    p = distribution(logits, settings)
    return sample(p, streams.draft), p


def _finish(result: Generation, new: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]) -> bool:
    """Add the tokens of a step, cut at an end token or at the limit; True when the answer is complete."""
    for token in new:
        result.tokens.append(token)
        if token in stop_ids or len(result.tokens) >= max_new_tokens:
            return True
    return False
