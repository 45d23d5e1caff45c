# SPDX-License-Identifier: Apache-2.0
"""Torch oracles of the compute ops: one naive function per launcher, with the launcher's signature.

They loop over requests and heads, read lengths on the host and build full score matrices: right first, never fast.
Arithmetic is done in the dtype of the floating-point inputs, so an oracle fed with float64 gives the truth and one fed
with bf16 is "plain torch" for the error bound. `workspace` and `method` are accepted and ignored.
"""

import torch

from .draft_head import Temperatures, Winner


def block_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    workspace: object = None,
    num_query_per_req: int,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Oracle of `dflash_kernels.block_attention.block_attention`; see there for shapes and meaning."""
    del workspace
    out = torch.zeros_like(q) if out is None else out.zero_()
    group = q.shape[1] // k_cache.shape[2]
    for request in range(q.shape[0] // num_query_per_req):
        num_keys = int(seq_lens[request])
        if num_keys == 0:
            continue
        keys = _gather_pages(k_cache, block_table[request], num_keys, q.dtype, k_scale)
        values = _gather_pages(v_cache, block_table[request], num_keys, q.dtype, v_scale)
        seen = visible(num_keys, num_query_per_req, causal=causal, window=window).to(q.device)
        rows = slice(request * num_query_per_req, (request + 1) * num_query_per_req)
        for head in range(q.shape[1]):
            scores = (q[rows, head] @ keys[:, head // group].T) * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].to(q.dtype).expand(num_query_per_req, 1)], dim=1)
            # A row that sees nothing has a softmax of NaN and an output of zero.
            weights = torch.nan_to_num(torch.softmax(scores, dim=1), nan=0.0)[:, :num_keys]
            # A key outside every window may be NaN: leave it out instead of multiplying it by zero.
            used = seen.any(dim=0)
            out[rows, head] = weights[:, used] @ values[used][:, head // group]
    return out


def visible(num_keys: int, num_query: int, *, causal: bool, window: int | None) -> torch.Tensor:
    """Mask [Q, num_keys] of the keys that each row of the query block sees."""
    position = torch.arange(num_keys - num_query, num_keys)[:, None]
    key = torch.arange(num_keys)[None, :]
    seen = torch.ones(num_query, num_keys, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window is not None:
        seen &= (key - position).abs() <= window - 1
    return seen


def _gather_pages(
    cache: torch.Tensor, pages: torch.Tensor, num_keys: int, dtype: torch.dtype, scale: torch.Tensor | None
) -> torch.Tensor:
    """[num_keys, Hkv, hd]: the first `num_keys` slots of a request, in `dtype`, times `scale`."""
    position = torch.arange(num_keys, device=cache.device)
    page = pages[position // cache.shape[1]].long()
    rows = cache.to(torch.float32 if cache.element_size() == 1 else cache.dtype)[page, position % cache.shape[1]]
    return rows.to(dtype) if scale is None else rows.to(dtype) * scale.to(dtype)


def draft_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    workspace: object = None,
    num_valid: int | None = None,
    d2t: torch.Tensor | None = None,
    target_ids: torch.Tensor | None = None,
    temperatures: Temperatures | None = None,
    method: str = "auto",
    out: Winner | None = None,
) -> Winner:
    """Oracle of `dflash_kernels.draft_head.draft_head`; see there for shapes and meaning."""
    del workspace, method
    return _winner(hidden @ weight[:num_valid].T, 0, d2t, target_ids, out, temperatures)


def draft_head_local(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    workspace: object = None,
    vocab_start: int = 0,
    num_valid: int | None = None,
    temperatures: Temperatures | None = None,
    method: str = "auto",
    out: Winner | None = None,
) -> Winner:
    """Oracle of `dflash_kernels.draft_head.draft_head_local`; see there for shapes and meaning."""
    del workspace, method
    return _winner(hidden @ weight[:num_valid].T, vocab_start, None, None, out, temperatures)


def combine_shards(
    values: torch.Tensor,
    tokens: torch.Tensor,
    *,
    d2t: torch.Tensor | None = None,
    target_ids: torch.Tensor | None = None,
    against: torch.Tensor | None = None,
    temperatures: Temperatures | None = None,
    out: Winner | None = None,
) -> Winner:
    """Oracle of `dflash_kernels.draft_head.combine_shards`; see there for shapes and meaning."""
    best = [max(zip(v, (-t for t in ts), strict=True)) for v, ts in zip(values.T.tolist(), tokens.T.tolist(), strict=True)]
    winners = torch.tensor([-token for _, token in best], dtype=torch.int64, device=values.device)
    logits = torch.tensor([value for value, _ in best], device=values.device)
    if against is None or temperatures is None:
        return _write(winners, logits, d2t, target_ids, out)
    # A rank's tokens together: its winner's share times 1 + odds, as shares of the best winner's.
    shares = ((values - logits).double() / _of_rows(temperatures)).exp() * (1.0 + against.double())
    total = torch.where(values > float("-inf"), shares, 0.0).sum(0) - 1.0
    return _write(winners, logits, d2t, target_ids, out, torch.where(logits > float("-inf"), total, float("inf")))


def _winner(
    scores: torch.Tensor,
    first: int,
    d2t: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    out: Winner | None,
    temperatures: Temperatures | None = None,
) -> Winner:
    """Highest score per row, the lowest column on ties; NaN counts as -inf."""
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    rows = [row.tolist() for row in scores]
    columns = torch.tensor([row.index(max(row)) for row in rows], dtype=torch.int64, device=scores.device)
    values = scores.gather(1, columns[:, None])[:, 0]
    against = None if temperatures is None else _odds_against(scores, columns, temperatures)
    return _write(columns + first, values, d2t, target_ids, out, against)


def _of_rows(temperatures: Temperatures) -> torch.Tensor:
    """fp64 [m]: 1 for padding rows and greedy requests."""
    states, by_state = temperatures
    found = torch.where(states < 0, 0.0, by_state[states.clamp_min(0)].double())
    return torch.where(found > 0, found, 1.0)


def _odds_against(scores: torch.Tensor, columns: torch.Tensor, temperatures: Temperatures) -> torch.Tensor:
    """(1 - q) / q in fp64, q the softmax of `scores` / temperature at `columns`; infinite for rows of -inf."""
    logs = (scores.double() / _of_rows(temperatures)[:, None]).log_softmax(-1)
    best = logs.gather(1, columns[:, None])
    others = logs.scatter(1, columns[:, None], float("-inf")).logsumexp(-1)
    return torch.where(best[:, 0].isnan(), float("inf"), (others - best[:, 0]).exp())


def _write(
    tokens: torch.Tensor,
    values: torch.Tensor,
    d2t: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    out: Winner | None,
    against: torch.Tensor | None = None,
) -> Winner:
    tokens = tokens if d2t is None else tokens + d2t[tokens]
    tokens = tokens if target_ids is None else target_ids[tokens]
    if out is None:
        return Winner(tokens, values.float(), None if against is None else against.float())
    out.tokens.copy_(tokens)
    out.values.copy_(values)
    if out.against is not None and against is not None:
        out.against.copy_(against)
    return out
