# SPDX-License-Identifier: Apache-2.0
"""Which drafts of a batch are verified: the `budget` most likely ones, and where each request's rows then begin, in one launch.

A draft counts only where all before it in its request were right, so it is ranked by its *survival*, the running product of the
request's confidences. Survival never rises along a request: the best drafts of the batch are a first part of each request's, and
a count per request says it all. vLLM 0.32/0.33 does this with a compiled top-k, two copies and eight small launches.

Invariants:

* exactly `min(budget, drafts scheduled)` drafts are admitted, whatever the confidences: ties go to the earlier request, and NaN
  counts as 0, what is above 1 as 1;
* survivals are compared in steps of 2^-30: those that agree to that go by index too, and a product's last bit, which depends on
  the order of multiplications, may decide between neighbours;
* entries of `query_start_loc` behind the batch hold its end: FlashAttention 3 wants it not to fall.

One program: a tile of requests by drafts stays in registers, and the least survival admitted is found by halving [0, 1] until as
many drafts as wanted lie above it. Tiles have three sizes, by the number of requests, one thread per request; nothing else that a
step changes is compiled for. CUDA graphs: meant to run before the replay, as the budget is an argument.

Cost model: 256 requests of 7 drafts move 15 kB, so time is latency: two dependent loads, then rounds of one reduction over the
program of 0.2 us each. Distinct survivals need about log2(drafts) + 2 rounds, ties at most 31. On an H200 (`kernels.json`) 4.5
us, 9.4 us with ties, and 33 us for 1,024 requests of 31 drafts, as one SM then compares 32,000 numbers in every round.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["MAX_DRAFTS", "TILES", "Admission", "draft_budget"]

TILES = (64, 256, 1024)
"""Requests per tile: a launch takes the smallest that holds its batch."""
MAX_DRAFTS = 32
"""Per request: the largest tile then fits the registers of one program."""
_THREADS = 32  # of a warp


@dataclass(frozen=True, slots=True)
class Admission:
    """Outputs of `draft_budget`, allocated once for `max_num_reqs` requests.

    Attributes:
        admitted: int32 `[max_num_reqs]`, drafts of each request that are verified.
        cu_num_logits: int32 `[max_num_reqs + 1]`, where the rows to sample from begin, request by request.
        query_start_loc: int32 `[max_num_reqs + 1]`, where the tokens of each request begin.
    """

    admitted: torch.Tensor
    cu_num_logits: torch.Tensor
    query_start_loc: torch.Tensor

    @classmethod
    def empty(cls, max_num_reqs: int, device: torch.device | str) -> "Admission":
        """Zeroed outputs."""
        sizes = (max_num_reqs, max_num_reqs + 1, max_num_reqs + 1)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


# The batch and its budget change with every step; tensors of the step and of the runner may begin anywhere.
@triton.jit(
    do_not_specialize=["num_reqs", "budget", "num_bonus_tokens", "size"],
    do_not_specialize_on_alignment=["mapping_ptr", "scheduled_ptr", "admitted_ptr", "logits_ptr", "starts_ptr"],
)
def _draft_budget_kernel(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    confidence_ptr, mapping_ptr, scheduled_ptr, admitted_ptr, logits_ptr, starts_ptr, num_reqs, budget, num_bonus_tokens, size,
    NUM_DRAFTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """One program for the batch; survival 1.0 is the integer ONE, and a draft that was not scheduled is -1."""
    row, position = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)[None, :]
    real = row < num_reqs
    state = tl.load(mapping_ptr + row, mask=real, other=0).to(tl.int64)
    drafts = tl.load(scheduled_ptr + row, mask=real, other=0)
    others = tl.load(scheduled_ptr + num_reqs + row, mask=real, other=0)
    scheduled = position < tl.minimum(drafts, NUM_DRAFTS)[:, None]
    confidence = tl.load(confidence_ptr + state[:, None] * NUM_DRAFTS + position, mask=scheduled, other=0.0)
    confidence = tl.where(confidence > 0.0, tl.minimum(confidence, 1.0), 0.0)  # NaN is not above 0
    survival = tl.where(scheduled, (tl.cumprod(confidence, axis=1) * ONE).to(tl.int32), -1)

    # As many drafts as wanted or more are at `low` or above, fewer at `high` or above; equal from the start where nothing is cut.
    total = tl.sum(scheduled.to(tl.int32))
    low = tl.where(budget > 0, 0, ONE + 1)
    high = tl.where((budget > 0) & (budget < total), ONE + 1, low + 1)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        found = tl.sum((survival >= middle).to(tl.int32))
        low = tl.where(found >= budget, middle, low)
        high = tl.where(found == budget, middle + 1, tl.where(found > budget, high, middle))

    above = tl.sum((survival > low).to(tl.int32), 1)
    ties = tl.sum((survival == low).to(tl.int32), 1)
    left = budget - tl.sum(above, 0) - (tl.cumsum(ties, 0) - ties)
    admitted = above + tl.minimum(tl.maximum(left, 0), ties)
    tl.store(admitted_ptr + row, admitted, mask=real)
    tl.store(logits_ptr, 0)
    tl.store(logits_ptr + 1 + row, tl.cumsum(admitted + num_bonus_tokens, 0), mask=real)
    tl.store(starts_ptr, 0)
    tl.store(starts_ptr + 1 + row, tl.cumsum(admitted + others, 0), mask=real)
    end = tl.sum(admitted + others, 0)
    for base in range(num_reqs + 1, size, BLOCK_R):
        tl.store(starts_ptr + base + row, tl.zeros_like(row) + end, mask=base + row < size)


def draft_budget(
    confidences: torch.Tensor,
    idx_mapping: torch.Tensor,
    scheduled: torch.Tensor,
    budget: int,
    num_bonus_tokens: int,
    out: Admission,
) -> None:
    """Admit the `budget` scheduled drafts of highest survival and write the layout of the batch that is left.

    Args:
        confidences: fp32 `[M, K]`, contiguous; probability of each draft given those before it, by request state. Read where a
            draft is scheduled only.
        idx_mapping: int64 `[R]`, contiguous; state of each request, 0 to M - 1.
        scheduled: int32 `[2, R]`, contiguous; drafts of each request, at most K, and its other tokens.
        budget: drafts to verify; with as many as are scheduled, or more, none is cut.
        num_bonus_tokens: rows that each request samples from beside its drafts.
        out: `query_start_loc` is written whole, the others' entries behind the batch keep their values.

    Raises:
        ValueError: a shape, dtype or stride that the kernel does not take, or outputs too small.
    """
    num_reqs = idx_mapping.shape[0]
    _check(confidences, idx_mapping, scheduled, out)
    if num_reqs == 0:
        return
    rows = next(tile for tile in TILES if tile >= num_reqs)
    _draft_budget_kernel[(1,)](
        confidences, idx_mapping, scheduled, out.admitted, out.cu_num_logits, out.query_start_loc,
        num_reqs, budget, num_bonus_tokens, out.query_start_loc.shape[0],
        NUM_DRAFTS=confidences.shape[1], BLOCK_R=rows, BLOCK_K=triton.next_power_of_2(confidences.shape[1]), ONE=1 << 30,
        num_warps=rows // _THREADS,
    )  # fmt: skip


def _check(confidences: torch.Tensor, idx_mapping: torch.Tensor, scheduled: torch.Tensor, out: Admission) -> None:
    num_reqs = idx_mapping.shape[0]
    for name, tensor, dtype, shape in (
        ("confidences", confidences, torch.float32, confidences.shape[:1] + confidences.shape[-1:]),
        ("idx_mapping", idx_mapping, torch.int64, (num_reqs,)),
        ("scheduled", scheduled, torch.int32, (2, num_reqs)),
    ):
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {dtype}, contiguous, {list(shape)}; got {tensor.dtype} {list(tensor.shape)} stride "
                f"{tensor.stride()}."
            )
    if not 1 <= confidences.shape[1] <= MAX_DRAFTS:
        raise ValueError(f"1 to {MAX_DRAFTS} drafts per request are served; got {confidences.shape[1]}.")
    room = min(out.admitted.shape[0], out.cu_num_logits.shape[0] - 1, out.query_start_loc.shape[0] - 1, TILES[-1])
    if num_reqs > room:
        raise ValueError(
            f"outputs hold {room} requests; {num_reqs} were given. Make the Admission for the largest batch, at most {TILES[-1]}."
        )
