# SPDX-License-Identifier: Apache-2.0
"""Attention of the DFlash query block over the paged KV cache, for machines without a FlashAttention that fits.

DFlash (arXiv 2602.06036) drafts K tokens in one pass over Q = K + 1 query rows per request, which attend to the
request's whole context *and* to each other. Q is the same for every request, so no per-row index arrays are needed.

Row i of a request with n keys has position p = n - Q + i. A non-causal row sees the keys j < n, a causal row j <= p. A
sliding window w narrows that to |p - j| <= w - 1, FlashAttention's `(w - 1, w - 1)` (causal: `(w - 1, 0)`). Slots that
no row of the block sees are never loaded.

CUDA graphs: lengths are read on the device only; grid and scratch follow from shapes and from the workspace's
capacity, never from lengths; the scratch is allocated once and keeps its address. Two variants are compiled per
geometry (split and unsplit); all batch sizes share them.
"""

import torch
import triton

from .block_attention_kernel import _block_attention_kernel, _merge_splits_kernel
from .block_attention_tile import MOST_KEYS, Tuning, choose_tile
from .shared_memory import shared_memory

_INTERPRETED = not isinstance(_block_attention_kernel, triton.JITFunction)
_DEFAULT_NUM_SMS = 132  # H100 and H200; used where the device does not say (interpreter)
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class AttentionWorkspace:
    """Fixed-address scratch of `block_attention`; layers of one geometry run in order and may share it.

    Args:
        max_num_reqs: largest R of any call, graph padding included.
        num_query_per_req: Q, query rows per request.
        num_heads: Hq, query heads on this rank.
        num_kv_heads: Hkv, KV heads on this rank.
        head_dim: hd.
        max_seq_len: most keys that a request can have, the query rows included; bounds the number of splits.
        device: where q lives.
        num_sms: multiprocessors to fill; None asks the device.
        tuning: launch parameters of all calls.
    """

    __slots__ = (
        "_memory",
        "_num_sms",
        "head_dim",
        "lse",
        "max_num_reqs",
        "max_seq_len",
        "num_heads",
        "num_kv_heads",
        "num_query_per_req",
        "partial",
        "tuning",
    )

    def __init__(
        self,
        *,
        max_num_reqs: int,
        num_query_per_req: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        device: torch.device | str,
        num_sms: int | None = None,
        tuning: Tuning = Tuning(),  # noqa: B008  # immutable
    ) -> None:
        if tuning.min_keys % (tuning.keys or MOST_KEYS):
            keys = tuning.keys or MOST_KEYS
            raise ValueError(f"tuning: min_keys must be a multiple of keys; got {tuning.min_keys} and {keys}.")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads; got {num_heads} and {num_kv_heads}. "
                "Pass the head counts of one rank; KV heads fewer than ranks are replicated first."
            )
        if num_sms is None:
            on_gpu = torch.device(device).type == "cuda"
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else _DEFAULT_NUM_SMS
        self.max_num_reqs, self.num_query_per_req, self.max_seq_len = max_num_reqs, num_query_per_req, max_seq_len
        self.num_heads, self.num_kv_heads, self.head_dim, self._num_sms = num_heads, num_kv_heads, head_dim, num_sms
        self.tuning, self._memory = tuning, shared_memory(torch.device(device))
        splits = ((reqs, self.num_splits(reqs)) for reqs in range(1, max_num_reqs + 1))
        most = max((reqs * count for reqs, count in splits if count > 1), default=0)
        rows = most * num_query_per_req * num_heads
        self.partial = torch.empty(rows * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return (self.partial.numel() + self.lse.numel()) * 4

    def num_splits(self, num_reqs: int, window: int | None = None) -> int:
        """Splits per request for R = `num_reqs`: from capacity only, hence constant for a captured graph."""
        keys = self.max_seq_len if window is None else min(self.max_seq_len, window - 1 + self.num_query_per_req)
        packed_rows = self.num_query_per_req * (self.num_heads // self.num_kv_heads)
        programs = num_reqs * self.num_kv_heads * int(triton.cdiv(packed_rows, 128))
        wanted = self.tuning.programs_per_sm * self._num_sms // programs
        return max(1, min(wanted, int(triton.cdiv(keys, self.tuning.min_keys)), self.tuning.max_splits))


def block_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    workspace: AttentionWorkspace,
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
    """Attend from the last Q rows of each request to its paged keys; the module says which keys a row sees.

    Args:
        q: `[R * Q, Hq, hd]`, bf16 | fp16 | fp32, last stride 1.
        k_cache: `[num_blocks, kv_block_size, Hkv, hd]`, q's dtype or fp8 (e4m3fn, e5m2), any strides with last 1: NHD
            and (transposed) HND caches alike. Holds the Q query rows already.
        v_cache: as `k_cache`, with strides of its own.
        block_table: int32 `[>= R, max_blocks]`, last stride 1.
        seq_lens: int32 `[>= R]`, keys with the Q query rows; 0 is a padded request, whose output is zeros.
        workspace: scratch made for this geometry.
        num_query_per_req: Q.
        scale: softmax scale, usually `hd ** -0.5`.
        causal: mask keys after the row's own position.
        window: w in tokens, the row's own included; None is full attention.
        softcap: `softcap * tanh(score / softcap)` where positive.
        sinks: `[Hq]`, one logit per head that joins the softmax's denominator without a value.
        k_scale: fp32 `[1]` on the device; stored keys times this are the keys.
        v_scale: fp32 `[1]` on the device, given together with `k_scale`.
        out: `[R * Q, Hq, hd]`, q's dtype, last stride 1; allocated and returned where None.

    Raises:
        ValueError: a shape, dtype or stride that the kernel does not take.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _check_query(q, out, workspace, num_query_per_req)
    _check_cache(q, k_cache, v_cache, workspace)
    _check_requests(block_table, seq_lens, q.shape[0] // num_query_per_req)
    _check_options(window, sinks, k_scale, v_scale, workspace.num_heads)
    if q.shape[0]:
        tensors = (q, k_cache, v_cache, block_table, seq_lens, sinks, k_scale, v_scale, out)
        _launch(*tensors, workspace, scale=float(scale), softcap=float(softcap), causal=causal, window=window)
    return out


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
    workspace: AttentionWorkspace,
    *,
    scale: float,
    softcap: float,
    causal: bool,
    window: int | None,
) -> None:
    num_query, heads, head_dim = workspace.num_query_per_req, workspace.num_heads, workspace.head_dim
    group = heads // workspace.num_kv_heads
    num_reqs = q.shape[0] // num_query
    tuning = workspace.tuning
    tile = choose_tile(num_query * group, head_dim, q.dtype, tuning, cache_dtype=k_cache.dtype, memory=workspace._memory)
    m_tiles = triton.cdiv(num_query * group, tile.rows)
    splits = workspace.num_splits(num_reqs, window)
    shared = {"HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)), "NUM_QUERY": num_query}
    shared |= {"WINDOW": window or 0, "HAS_SINKS": sinks is not None, "MIN_KEYS": tuning.min_keys}
    partial = workspace.partial.view(q.dtype) if tuning.short_scratch else workspace.partial
    _block_attention_kernel[(workspace.num_kv_heads * m_tiles, num_reqs, splits)](
        q, k_cache, v_cache, block_table, seq_lens, sinks, k_scale, v_scale, out, partial, workspace.lse,
        scale, softcap, splits,
        q.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3], block_table.stride(0), out.stride()[:2],
        GROUP=group, M_TILES=m_tiles, PAGE=k_cache.shape[1], CAUSAL=causal, HAS_SOFTCAP=softcap > 0.0,
        HAS_KV_SCALE=k_scale is not None, SPLIT=splits > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # concerns fp32 only
        WIDEN=_INTERPRETED, BLOCK_M=tile.rows, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **shared,
    )  # fmt: skip
    if splits > 1:
        grid = (q.shape[0], triton.cdiv(heads, tuning.merge_heads))
        scratch = (partial, workspace.lse, seq_lens, sinks)
        blocks = {"BLOCK_S": tuning.merge_splits, "BLOCK_H": tuning.merge_heads}
        _merge_splits_kernel[grid](*scratch, out, heads, splits, out.stride()[:2], **blocks, **shared)


def _check_query(q: torch.Tensor, out: torch.Tensor, workspace: AttentionWorkspace, num_query_per_req: int) -> None:
    if q.dtype not in _FLOAT_DTYPES:
        raise ValueError(f"block_attention takes q in bf16, fp16 or fp32; got {q.dtype}.")
    if q.ndim != 3 or q.shape[1:] != (workspace.num_heads, workspace.head_dim):
        raise ValueError(
            f"q must be [rows, {workspace.num_heads}, {workspace.head_dim}], the geometry of the workspace; "
            f"got {list(q.shape)}. Make one AttentionWorkspace per geometry."
        )
    if num_query_per_req != workspace.num_query_per_req:
        raise ValueError(
            f"num_query_per_req is {num_query_per_req}, the workspace was made for {workspace.num_query_per_req}. "
            "Make one AttentionWorkspace per draft width."
        )
    if q.shape[0] % num_query_per_req or q.shape[0] > workspace.max_num_reqs * num_query_per_req:
        raise ValueError(
            f"q has {q.shape[0]} rows; needed a multiple of num_query_per_req = {num_query_per_req}, at most "
            f"{workspace.max_num_reqs} times. Pad the batch to whole requests, or raise max_num_reqs."
        )
    if q.stride(2) != 1 or out.stride(-1) != 1 or out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(
            "q and out must agree in shape and dtype and have last stride 1; got "
            f"{list(q.shape)} {q.dtype} stride {q.stride()} and {list(out.shape)} {out.dtype} stride {out.stride()}."
        )


def _check_cache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, workspace: AttentionWorkspace) -> None:
    needed = (workspace.num_kv_heads, workspace.head_dim)
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape or k_cache.shape[2:] != needed:
        raise ValueError(
            f"k_cache and v_cache must both be [num_blocks, kv_block_size, {needed[0]}, {needed[1]}]; got "
            f"{list(k_cache.shape)} and {list(v_cache.shape)}. Transpose an HND cache before the call."
        )
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, *_FP8_DTYPES):
        raise ValueError(
            f"k_cache and v_cache must hold {q.dtype} like q, or fp8; got {k_cache.dtype} and {v_cache.dtype}. "
            "View an fp8 cache stored as uint8 with .view(torch.float8_e4m3fn)."
        )
    if q.is_cuda and k_cache.dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(q.device) < (8, 9):
        raise ValueError(
            "Triton reads an fp8 e4m3 cache on compute capability 8.9 and above; this device has "
            f"{torch.cuda.get_device_capability(q.device)}. Keep the draft's cache in {q.dtype}."
        )
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(
            f"the caches need last stride 1; got strides {k_cache.stride()} and {v_cache.stride()}. "
            "Keep the head dimension innermost."
        )


def _check_requests(block_table: torch.Tensor, seq_lens: torch.Tensor, num_reqs: int) -> None:
    for name, tensor, ndim in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        if tensor.dtype != torch.int32 or tensor.ndim != ndim or tensor.shape[0] < num_reqs or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be int32 with {ndim} dimension(s), at least {num_reqs} rows and last stride 1; "
                f"got {tensor.dtype} {list(tensor.shape)} stride {tensor.stride()}."
            )


def _check_options(
    window: int | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    num_heads: int,
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (the row's own key); got {window}. Use None for full attention.")
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be contiguous [{num_heads}], one logit per head; got {list(sinks.shape)}.")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale come together; got one of them. Pass ones(1) for the missing one.")
    for name, tensor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if tensor is not None and (tensor.numel() != 1 or tensor.dtype != torch.float32):
            raise ValueError(f"{name} must be one fp32 number on the device; got {tensor.dtype} {list(tensor.shape)}.")
