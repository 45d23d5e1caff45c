# SPDX-License-Identifier: Apache-2.0
"""Lossless acceptance of drafted tokens, and the filters that turn logits into a sampling distribution.

At one position let **q** be the target's distribution and **p** the distribution that the draft was sampled from, x ~ p.

    accept x with probability   min(1, q(x) / p(x))
    otherwise sample from       r(y) = max(q(y) - p(y), 0) / sum_z max(q(z) - p(z), 0)

Then P(output = y) = min(p(y), q(y)) + (1 - sum_z min(p(z), q(z))) * r(y) = q(y): the draft changes the speed, never the
distribution. Both sides must see the same filters, because q and p have to be the distributions really sampled from.

A plain DFlash draft proposes its argmax: p is one-hot, so x is accepted with probability q(x), and r is q without x.
Sampling each row from its own marginal is lossless too, but accepts less: the rows of a block do not know of each other.

Names: q target, p draft. Everything is float64, so that the filters and sums have no rounding to argue about.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How a token is chosen; the defaults are greedy decoding.

    Attributes:
        temperature: 0 chooses the argmax; otherwise logits are divided by it.
        min_p: keep tokens with at least this share of the most likely token's probability; 0 keeps all.
        top_k: keep the k most likely tokens and ties with the last; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this probability; 1 keeps all.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, fits, needed in (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not fits:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {needed}.")

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is taken."""
        return self.temperature == 0


class RandomStreams:
    """Three independent random streams of one seed.

    Drafting, accepting and resampling must not share random numbers: a uniform that already decided which token was drafted
    says something about it, and accepting with the same number would bend the distribution.
    """

    def __init__(self, seed: int) -> None:
        self.draft, self.accept, self.resample = (torch.Generator().manual_seed(3 * seed + i) for i in range(3))


def distribution(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Probabilities that `settings` samples from: logits [rows, V] -> float64 [rows, V].

    The order is vLLM's: temperature, min_p, top_k, top_p. Greedy settings give one-hot rows.
    """
    if settings.is_greedy:
        return one_hot(logits.argmax(dim=-1), logits.shape[-1])
    scaled = logits.double() / settings.temperature
    probabilities = scaled.softmax(dim=-1)
    if settings.min_p > 0:
        floor = settings.min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.where(probabilities >= floor, 0.0)
    if 0 < settings.top_k < logits.shape[-1]:
        least = probabilities.topk(settings.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.where(probabilities >= least, 0.0)
    probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    if settings.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        mass_before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.where(mass_before < settings.top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, kept)
    return probabilities / probabilities.sum(dim=-1, keepdim=True)


def one_hot(ids: Tensor, vocab_size: int) -> Tensor:
    """Distributions that always give `ids` int64 [rows]: float64 [rows, V]."""
    return torch.nn.functional.one_hot(ids, vocab_size).double()


def sample(probabilities: Tensor, stream: torch.Generator) -> Tensor:
    """One token per row of float64 [rows, V] -> int64 [rows]."""
    return torch.multinomial(probabilities.cpu(), 1, generator=stream).squeeze(-1).to(probabilities.device)


def accept_greedy(draft_ids: Tensor, target_logits: Tensor) -> list[int]:
    """Longest prefix of drafts that the target's argmax agrees with, then the bonus token.

    Args:
        draft_ids: int64 [K].
        target_logits: [K + 1, V]; row i is what the target says after i drafts.

    Returns:
        1 to K + 1 tokens: the accepted drafts and the target's own next token.
    """
    wanted = target_logits.argmax(dim=-1)
    num_accepted = int((draft_ids == wanted[:-1]).long().cumprod(dim=0).sum())
    return wanted[: num_accepted + 1].tolist()


def accept_by_rejection(draft_ids: Tensor, q: Tensor, p: Tensor, streams: RandomStreams) -> list[int]:
    """Rejection sampling of one block; the formulas are at the top of this module.

    Args:
        draft_ids: int64 [K]; row i was sampled from p[i].
        q: float64 [K + 1, V], target distributions; row i is after i drafts, the last one gives the bonus token.
        p: float64 [K, V], draft distributions; one-hot rows for argmax proposals.
        streams: `accept` decides, `resample` draws the replacement and the bonus token.

    Returns:
        1 to K + 1 tokens: the accepted drafts, then the replacement of the first rejected one or the bonus token.
    """
    uniforms = torch.rand(len(draft_ids), generator=streams.accept, dtype=torch.float64)
    accepted: list[int] = []
    for i, token in enumerate(draft_ids.tolist()):
        # u * p < q is u < q / p without the division by zero
        if uniforms[i] * p[i, token] >= q[i, token]:
            residual = (q[i] - p[i]).clamp(min=0)
            return [*accepted, int(sample((residual / residual.sum())[None], streams.resample))]
        accepted.append(token)
    return [*accepted, int(sample(q[-1:], streams.resample))]
