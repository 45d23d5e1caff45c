# SPDX-License-Identifier: Apache-2.0
"""Torch oracles of the ops that prepare a draft step; same signatures as the launchers, made to be read, not to be fast.

`query_block` and `draft_budget` work in Python lists. The others compute like plain torch in the dtype of their input, so that
with float64 inputs and caches they give the truth that both the kernel and plain torch are measured against.
"""

import torch

from dflash_kernels.draft_budget import Admission
from dflash_kernels.kv_layout import LayerCaches
from dflash_kernels.page_list import PageList
from dflash_kernels.query_layout import PAD_SLOT, DraftBlockTables, QueryBlockBuffers, QueryBlockSpec, TargetStep


def _slot(tables: DraftBlockTables, step: TargetStep, group: int, request: int, state: int, position: int) -> int:
    """Slot of one position of one request in one group, PAD_SLOT where nothing may be stored."""
    table, kv_block_size = tables.tables[group], tables.kv_block_sizes[group]
    column = position // kv_block_size
    num_columns = table.shape[1]
    if step.num_blocks is not None:
        num_columns = min(num_columns, int(step.num_blocks[tables.group_ids[group], state]))
    if column >= num_columns:
        return PAD_SLOT
    page = int(table[request, column])
    return page * kv_block_size + position % kv_block_size if page > 0 else PAD_SLOT


def _live_block(step: TargetStep, spec: QueryBlockSpec, request: int) -> tuple[int, int, int] | None:
    """(state index, anchor token, its position) of a live request, None for an inert one."""
    state = int(step.idx_mapping[request])
    start, end = int(step.query_start_loc[request]), int(step.query_start_loc[request + 1])
    committed_end = end - int(step.num_rejected[request])
    sampled = int(step.num_sampled[request]) > 0
    if state < 0 or committed_end <= start or not (sampled or spec.draft_mid_prefill):
        return None
    anchor = step.last_sampled[state, 0] if sampled else step.next_prefill_tokens[0, state]
    return state, int(anchor), int(step.positions[committed_end - 1]) + 1


def _query_rows(
    out: QueryBlockBuffers, tables: DraftBlockTables, spec: QueryBlockSpec, step: TargetStep, request: int, real: bool
) -> None:
    block = _live_block(step, spec, request) if real else None
    for j in range(spec.num_query_per_req):
        row = request * spec.num_query_per_req + j
        out.input_ids[row] = block[1] if block is not None and j == 0 else spec.mask_token_id
        out.positions[row] = 0 if block is None else min(block[2] + j, spec.max_model_len - 1)
        for group in range(len(tables.tables)):
            writable = block is not None and block[2] + j < spec.max_model_len
            out.slots[group, row] = (
                _slot(tables, step, group, request, block[0], block[2] + j) if block and writable else PAD_SLOT
            )
    for k in range(spec.num_speculative_tokens):
        sample = request * spec.num_speculative_tokens + k
        out.sample_positions[sample] = block[2] + k if block else 0
        out.sample_req_state[sample] = block[0] if block else -1
    out.seq_lens[request] = min(block[2] + spec.num_query_per_req, spec.max_model_len) if block else 0


def query_block(
    out: QueryBlockBuffers,
    tables: DraftBlockTables,
    spec: QueryBlockSpec,
    step: TargetStep,
    *,
    num_reqs: int,
    num_reqs_padded: int,
    num_context_rows: int,
    max_query_len: int,
) -> None:
    """Oracle of `dflash_kernels.query_block.query_block`."""
    del max_query_len  # a hint for the kernel's grid
    for request in range(num_reqs_padded):
        _query_rows(out, tables, spec, step, request, request < num_reqs)
    for i in range(num_reqs_padded + 1):
        out.query_start_loc[i] = min(i, num_reqs) * spec.num_query_per_req
    num_tokens = int(step.query_start_loc[num_reqs])
    for row in range(num_tokens, num_context_rows):
        out.context_positions[row] = 0
        out.context_slots[:, row] = PAD_SLOT
    for request in range(num_reqs):
        state = int(step.idx_mapping[request])
        start, end = int(step.query_start_loc[request]), int(step.query_start_loc[request + 1])
        for row in range(start, end):
            committed = state >= 0 and row < end - int(step.num_rejected[request])
            position = int(step.positions[row]) if committed else 0
            out.context_positions[row] = position
            for group in range(len(tables.tables)):
                slot = _slot(tables, step, group, request, state, position) if committed else PAD_SLOT
                out.context_slots[group, row] = slot


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis, in at least float32, rounded to the dtype of `x`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.to(wide.dtype)).to(x.dtype)


def _rope(x: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate the first `rot_dim` of the last axis of x [n, heads, hd] by cos_sin [n, rot_dim]."""
    rot_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.to(x.dtype)[:, None, :].chunk(2, dim=-1)
    rotated, rest = x[..., :rot_dim], x[..., rot_dim:]
    if is_neox:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        even, odd = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


def _store(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Write rows [m, heads, hd] at `slots` of a cache seen as [pages, kv_block_size, heads, hd]."""
    if scale is not None:
        rows = rows / scale.to(rows.dtype)
    if cache.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(torch.float8_e4m3fn).max
        rows = rows.clamp(-limit, limit)
    rows = rows.to(cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)  # torch cannot index fp8
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def context_kv(
    caches: LayerCaches,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_norm_weight: torch.Tensor | None,
    *,
    eps: float,
    is_neox: bool = True,
    value_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Oracle of `dflash_kernels.context_kv.context_kv`."""
    num_rows, num_layers = kv.shape[0], len(caches.k_caches)
    num_heads, head_dim = caches.num_kv_heads, caches.head_dim
    per_layer = kv.reshape(num_rows, num_layers, 2, num_heads, head_dim)
    for layer, group in enumerate(caches.layer_groups):
        kept = torch.nonzero(slots[group, :num_rows] >= 0).flatten()
        keys, values = per_layer[kept, layer, 0], per_layer[kept, layer, 1]
        if k_norm_weight is not None:
            keys = _rms_norm(keys, k_norm_weight[layer], eps)
        keys = _rope(keys, cos_sin_cache[positions[kept]], is_neox)
        if value_scale is not None:
            values = values * value_scale[layer].to(values.dtype)
        kept_slots = slots[group, :num_rows][kept]
        _store(caches.k_caches[layer], kept_slots, keys, None if k_scale is None else k_scale[layer])
        _store(caches.v_caches[layer], kept_slots, values, None if v_scale is None else v_scale[layer])


def query_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    is_neox: bool = True,
    value_scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Oracle of `dflash_kernels.query_kv.query_kv`."""
    num_rows = qkv.shape[0]
    heads = qkv.reshape(num_rows, num_heads + 2 * num_kv_heads, head_dim)
    queries, keys, values = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    if q_norm_weight is not None:
        queries = _rms_norm(queries, q_norm_weight, eps)
    if k_norm_weight is not None:
        keys = _rms_norm(keys, k_norm_weight, eps)
    cos_sin = cos_sin_cache[positions[:num_rows]]
    queries, keys = _rope(queries, cos_sin, is_neox), _rope(keys, cos_sin, is_neox)
    if value_scale is not None:
        values = values * value_scale
    kept = torch.nonzero(slots[:num_rows] >= 0).flatten()
    _store(k_cache, slots[kept], keys[kept], k_scale)
    _store(v_cache, slots[kept], values[kept], v_scale)
    if q_out is None:
        q_out = qkv.new_empty(num_rows, num_heads * head_dim)
    return q_out.copy_(queries.flatten(1))


def page_list(block_table: torch.Tensor, seq_lens: torch.Tensor, kv_block_size: int, out: PageList) -> None:
    """Oracle of `dflash_kernels.page_list.page_list`; see there for shapes and meaning."""
    start = 0
    for request, length in enumerate(seq_lens.tolist()):
        count = min(-(-length // kv_block_size), block_table.shape[1])
        out.indptr[request : request + 2] = torch.tensor([start, start + count])
        out.pages[start : start + count] = block_table[request, :count]
        out.last_page_len[request] = min(length, count * kv_block_size) - max(count - 1, 0) * kv_block_size
        start += count


def draft_budget(
    confidences: torch.Tensor,
    idx_mapping: torch.Tensor,
    scheduled: torch.Tensor,
    budget: int,
    num_bonus_tokens: int,
    out: Admission,
) -> None:
    """Oracle of `dflash_kernels.draft_budget.draft_budget`; see there. Drafts are sorted, and the first of them admitted."""
    confidences = confidences[idx_mapping]
    survival = torch.where(confidences > 0, confidences.clamp(max=1.0), 0.0).cumprod(1)
    steps = (survival * 2**30).long().tolist()
    drafts, others = scheduled.tolist()
    ranked = sorted((-steps[r][k], r, k) for r in range(len(drafts)) for k in range(min(drafts[r], confidences.shape[1])))
    admitted, logits, starts = [0] * len(drafts), [0], [0]
    for _, request, _ in ranked[: max(budget, 0)]:
        admitted[request] += 1
    for request, count in enumerate(admitted):
        logits.append(logits[-1] + count + num_bonus_tokens)
        starts.append(starts[-1] + count + others[request])
    out.admitted[: len(admitted)] = torch.tensor(admitted)
    out.cu_num_logits[: len(logits)] = torch.tensor(logits)
    out.query_start_loc[: len(starts)] = torch.tensor(starts)
    out.query_start_loc[len(starts) :] = starts[-1]
