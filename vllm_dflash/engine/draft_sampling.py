# SPDX-License-Identifier: Apache-2.0
"""Draft tokens drawn from the draft's own distribution, with the probabilities that rejection sampling needs.

The output distribution is the target's for any proposal distribution, as long as tokens are drawn from exactly the
probabilities handed over. Only the temperature is applied: top-k, top-p and penalties change acceptance, not correctness.
"""

import torch

GREEDY_BELOW = 1e-5
"""vLLM's ``_SAMPLING_EPS``: a smaller temperature means greedy."""


def sample_drafts(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: [m, V], -inf where the draft has no token.
        temperature: fp32 [m]; rows below ``GREEDY_BELOW`` take the most likely token.

    Returns:
        Token ids int64 [m] and probabilities fp32 [m, V]. The probabilities of a greedy row are not read by the verifier.
    """
    greedy = temperature < GREEDY_BELOW
    probs = (logits.float() / torch.where(greedy, 1.0, temperature).unsqueeze(1)).softmax(dim=-1)
    # argmax(p / e) with e ~ Exp(1) is a draw from p; unlike multinomial it has no host sync and no limit on V.
    noise = torch.empty_like(probs).exponential_()
    noise.masked_fill_(greedy.unsqueeze(1), 1.0)
    return (probs / noise).argmax(dim=-1), probs
