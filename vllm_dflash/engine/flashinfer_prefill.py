# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged prefill over the draft's query block, planned once per request count and replayed by CUDA graphs.

FlashInfer plans on the host: vLLM's builder copies lengths back for that in every step. The plan of its FA2 kernels without
split-KV holds tiles of query rows and nothing else (``PrefillSplitQOKVIndptr`` of flashinfer 0.7.2: one key chunk per request,
query offsets, a mask of unused programs), so for R requests of Q rows each it is the same for all lengths. The arrays that
do depend on lengths are plain inputs of the kernel, at fixed addresses, and :func:`page_list` writes them inside the graph.

FlashInfer's FA3 plan, its choice on Hopper, copies every length into the work list and cannot be replayed. Without splits few
requests fill few multiprocessors: at one request and 8 KV heads 8 programs run, so long contexts at small batches are served
faster by FlashAttention or by ``block_attention``.

Needs torch and flashinfer only; vLLM's side is ``flashinfer_backend.py``.
"""

import dataclasses
import importlib
import importlib.util
import inspect
from typing import Any

import torch

from dflash_kernels.page_list import PageList, page_list

HEAD_SIZES = (64, 128, 256)
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""vLLM's names of KV-cache dtypes that these kernels read."""


def why_not_flashinfer(head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *, sinks: bool) -> str | None:
    """Why FlashInfer cannot serve draft layers of this kind, as a clause; None if it can.

    Raises:
        ValueError: the package is not installed.
    """
    if importlib.util.find_spec("flashinfer") is None:
        raise ValueError(
            'attention_backend: the speculative config asks for "FLASHINFER", and the package flashinfer is not installed. Run '
            'pip install flashinfer-python, or leave "attention_backend" out of the speculative config.'
        )
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer reads queries in bf16 or fp16, the draft runs in {dtype}"
    if head_size not in HEAD_SIZES:
        return f"FlashInfer has heads of {', '.join(map(str, HEAD_SIZES))}, the draft's are {head_size}"
    if kv_cache_dtype is not None and kv_cache_dtype not in CACHE_DTYPES:
        return f"FlashInfer does not read a draft cache of dtype {kv_cache_dtype}"
    return "FlashInfer's prefill has no attention sinks" if sinks else None


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillSpec:
    """What a plan holds besides the request count: one compiled kernel and its constants.

    Attributes:
        num_heads, num_kv_heads, head_dim: geometry of one rank.
        kv_block_size: keys per page.
        num_query_per_req: Q.
        dtype, cache_dtype: of queries and output, and of the cache.
        scale: softmax scale.
        causal: rows see only keys up to their own.
        window: w in tokens, the row's own included; None is full attention.
        softcap: 0 is none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_block_size: int
    num_query_per_req: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal and self.window < self.num_query_per_req:
            raise ValueError(
                f"attention_backend: a non-causal draft layer has a window of {self.window} tokens, and {self.num_query_per_req} "
                "query rows. FlashInfer bounds a window on the left only, which is right from as many tokens as rows on. Set "
                '"attention_backend": "TRITON_ATTN" in the speculative config.'
            )


class BlockPrefill:
    """FlashInfer over query blocks of one KV group: fixed inputs, and one plan per request count and ``PrefillSpec``.

    Args:
        max_requests: most requests of a step, graph padding included.
        max_pages_per_req: most pages of a request; further columns of block tables are ignored.
        device: of the KV cache.
    """

    def __init__(self, max_requests: int, max_pages_per_req: int, device: torch.device) -> None:
        self.pages = PageList.empty(max_requests, max_pages_per_req, device)
        self._device, self._max_pages = device, max_pages_per_req
        on_gpu = device.type == "cuda"
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        self._plans: dict[tuple[int, PrefillSpec], Any] = {}
        # Scratch of split-KV, of which a plan without splits takes nothing.
        self._float_workspace = torch.empty(256, dtype=torch.uint8, device=device)
        self._step: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def refresh(self, block_table: torch.Tensor, seq_lens: torch.Tensor, kv_block_size: int) -> None:
        """Follow this step's pages and lengths; recorded in a graph. Arguments as of ``page_list``."""
        self._step = (block_table, seq_lens, kv_block_size)
        # vLLM's tables may have spare columns that no request of max_model_len tokens reaches.
        page_list(block_table[:, : self._max_pages], seq_lens, kv_block_size, self.pages)

    def run(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        spec: PrefillSpec,
        out: torch.Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """Attend from ``query`` to the pages of the last :meth:`refresh`.

        Args:
            query: [R * Q, heads, head_dim], last stride 1.
            k_cache: [pages, kv heads, kv_block_size, head_dim], ``spec.cache_dtype``, last stride 1.
            v_cache: as ``k_cache``, with equal strides.
            spec: what ``query`` and caches are.
            out: like ``query``, contiguous; rows of requests without keys become zeros.
            k_scale: stored keys times this are the keys. A number on the host: a graph holds it.
            v_scale: the same for values.

        Raises:
            ValueError: shapes or strides that the kernel does not take.
            RuntimeError: the first run of a request count happens inside a capture.
        """
        num_reqs = query.shape[0] // spec.num_query_per_req
        _check(query, k_cache, v_cache, spec, out)
        plan = self._plans.get((num_reqs, spec))
        if plan is None:
            plan = self._plans[num_reqs, spec] = self._plan(num_reqs, spec)
            assert self._step is not None, "run() before refresh()"
            self.refresh(*self._step)  # planning has written its own numbers into the inputs
        # PDL starts this kernel before its predecessor has ended, and FlashInfer reads lengths before it waits for that.
        plan.run(query, (k_cache, v_cache), out=out, k_scale=k_scale, v_scale=v_scale, enable_pdl=False)
        return out

    def _plan(self, num_reqs: int, spec: PrefillSpec) -> Any:
        """A planned wrapper for ``num_reqs`` requests; compiles the kernel when it is the first of its kind on this machine."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"FlashInfer has no plan for {num_reqs} requests and cannot make one inside a CUDA graph. Run the step once "
                "before it is captured."
            )
        wrapper_class = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        starts = torch.arange(num_reqs + 1, dtype=torch.int32)  # on the host: the lengths of a plan are never looked at again
        query_starts = starts * spec.num_query_per_req
        wrapper = wrapper_class(
            self._float_workspace,
            "HND",
            use_cuda_graph=True,
            qo_indptr_buf=query_starts.to(self._device),
            paged_kv_indptr_buf=self.pages.indptr[: num_reqs + 1],
            paged_kv_indices_buf=self.pages.pages,
            paged_kv_last_page_len_buf=self.pages.last_page_len[:num_reqs],
            backend="fa2",
        )
        # A wrapper comes with 8 MiB on the device and 8 pinned; a plan needs some kilobytes.
        integers = torch.empty(plan_bytes(num_reqs, spec, self._num_sms), dtype=torch.uint8, device=self._device)
        wrapper.reset_workspace_buffer(self._float_workspace, integers)
        ones = torch.ones(num_reqs, dtype=torch.int32)
        wrapper.plan(
            query_starts,
            starts,
            torch.zeros(num_reqs, dtype=torch.int32),
            ones,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.kv_block_size,
            causal=spec.causal,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap or None,
            q_data_type=spec.dtype,
            kv_data_type=spec.cache_dtype,
            o_data_type=spec.dtype,
            disable_split_kv=True,
            **_uniform_rows(wrapper_class, spec.num_query_per_req),
        )
        return wrapper


def plan_bytes(num_reqs: int, spec: PrefillSpec, num_sms: int) -> int:
    """Bytes that the plan's integers need at most: three int32 and a flag per program, two per request, alignment.

    Programs per KV head: two per multiprocessor, or a query tile (at least 16 packed rows) for every request and one more.
    """
    tiles = -(-spec.num_query_per_req * spec.num_heads // spec.num_kv_heads // 16) + 1
    programs = max(2 * num_sms // spec.num_kv_heads, num_reqs * tiles)
    return (16 * programs + 8 * num_reqs + 4096 + 255) // 256 * 256


def _uniform_rows(wrapper_class: Any, num_query_per_req: int) -> dict[str, int]:
    """Tiles of Q rows instead of ragged ones, where this FlashInfer can be told (0.7.2 can)."""
    known = "uniform_q_len" in inspect.signature(wrapper_class.plan).parameters
    return {"uniform_q_len": num_query_per_req} if known else {}


def _check(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, spec: PrefillSpec, out: torch.Tensor) -> None:
    needed = (spec.num_kv_heads, spec.kv_block_size, spec.head_dim)
    if tuple(k_cache.shape[1:]) != needed or k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        raise ValueError(
            f"k_cache and v_cache must be [pages, {needed[0]}, {needed[1]}, {needed[2]}] with equal strides, the last 1; got "
            f"{list(k_cache.shape)} stride {k_cache.stride()} and {list(v_cache.shape)} stride {v_cache.stride()}."
        )
    rows = tuple(query.shape)
    if query.shape[0] % spec.num_query_per_req or rows[1:] != (spec.num_heads, spec.head_dim) or query.stride(-1) != 1:
        raise ValueError(
            f"query must be whole blocks of [{spec.num_query_per_req}, {spec.num_heads}, {spec.head_dim}] with last stride 1; "
            f"got {list(rows)} stride {query.stride()}."
        )
    if tuple(out.shape) != rows or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {list(rows)} like query; got {list(out.shape)} stride {out.stride()}.")
