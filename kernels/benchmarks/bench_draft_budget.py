# SPDX-License-Identifier: Apache-2.0
"""Time of `draft_budget`: decode batches with random confidences of which half of the drafts are verified, one of equal ones.

The torch arm is vLLM's cut (0.33, `AdaptiveVerificationManager.reallocate_drafts`) in eager mode, without its two copies from the
host; vLLM compiles its first part, which saves launches and recompiles as batches change. Bytes are confidences and the integers
in and out.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels.draft_budget import Admission, draft_budget
from harness import Case, main

MAX_NUM_REQS = 1024


def _cases(num_reqs: int, num_drafts: int, *, equal: bool = False) -> Iterator[Case]:
    device = torch.device("cuda")
    confidences = torch.rand(MAX_NUM_REQS, num_drafts, device=device) ** 0.2
    if equal:
        confidences.fill_(1.0)
    mapping = torch.randperm(MAX_NUM_REQS, device=device)[:num_reqs]
    scheduled = torch.tensor([[num_drafts] * num_reqs, [1] * num_reqs], dtype=torch.int32, device=device)
    out, budget = Admission.empty(MAX_NUM_REQS, device), max(1, num_reqs * num_drafts // 2)
    name = f"reqs={num_reqs} drafts={num_drafts}{' equal' if equal else ''}"
    num_bytes = 4 * num_reqs * (num_drafts + 4 + 2) + 4 * MAX_NUM_REQS
    with_kernel = functools.partial(draft_budget, confidences, mapping, scheduled, budget, 1, out)
    yield Case("draft_budget", name, "kernel", with_kernel, num_bytes)
    capacities = torch.empty(num_reqs, dtype=torch.int32, device=device)

    def with_torch() -> None:
        capacities.copy_(scheduled[0])
        survival = confidences[mapping].cumprod(dim=1)
        survival = survival.masked_fill(torch.arange(num_drafts, device=device) >= capacities[:, None], -float("inf"))
        flat = survival.flatten()
        winners = torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, flat.topk(budget).indices, True)
        torch.sum(winners.view_as(survival), dim=1, dtype=torch.int32, out=capacities)
        out.cu_num_logits[:1].zero_()
        torch.cumsum(capacities + 1, dim=0, out=out.cu_num_logits[1 : num_reqs + 1])
        out.query_start_loc[:1].zero_()
        torch.cumsum(capacities + scheduled[1], dim=0, out=out.query_start_loc[1 : num_reqs + 1])
        out.query_start_loc[num_reqs + 1 :].fill_(num_reqs + budget)

    yield Case("draft_budget", name, "torch", with_torch, num_bytes)


def cases(thorough: bool) -> Iterator[Case]:
    """One request, the batches of the engine's benchmark, ties, and the largest tile; thorough: more of them."""
    for num_reqs in (1, 16, 64, 128, 256, 512) if thorough else (1, 64, 256):
        yield from _cases(num_reqs, 7)
    yield from _cases(256, 7, equal=True)
    yield from _cases(256, 15)
    yield from _cases(1024, 31)


if __name__ == "__main__":
    main(cases)
