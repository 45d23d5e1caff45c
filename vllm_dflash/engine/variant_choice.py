# SPDX-License-Identifier: Apache-2.0
"""Which precision the draft gets, decided before it is built: what the user asks for, or what is measured to be faster here.

On a GPU the products of one draft layer, ``fc`` and the context projection are timed with random weights of this rank's
shapes, captured in CUDA graphs, for one request and for the largest step. The answer goes into a copy of the configuration:
vLLM's compile cache hashes that, so a graph traced for one precision is never found for another.
"""

import copy
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.platforms import current_platform

from dflash_kernels.fp8_linear import fp8_linear, quantise_rows
from vllm_dflash.draft_config import DraftConfig
from vllm_dflash.engine import draft_quantization
from vllm_dflash.engine.graph_timing import agreed, graph_times
from vllm_dflash.options import SECTION, OptionsError, read_options

logger = init_logger("vllm.plugins.dflash")

_REPLAYS = 15
_MOST_ROWS = 2048  # a step of more rows is bound by compute like this one
_GAIN = 0.97  # noise must not decide: the other variant has to be this much faster


def resolve_weights(vllm_config: Any, draft: DraftConfig) -> Any:
    """``vllm_config`` with ``draft_weights`` decided: "checkpoint", "fp8" or "int8"; a copy where that changes anything.

    Raises:
        OptionsError: the wanted precision cannot be had here.
    """
    if not isinstance(vllm_config.additional_config, Mapping):  # another plugin's object: it has no options of ours
        return vllm_config
    wanted = read_options(vllm_config.additional_config).draft_weights
    stored = get_draft_quant_config(vllm_config)
    if stored is not None and wanted in ("fp8", "int8"):
        raise OptionsError(
            f'additional_config["{SECTION}"].draft_weights: found {wanted!r}; the draft checkpoint is already quantised '
            f'({stored.get_name()}) and loads as it is. Remove the option, or set "auto".'
        )
    chosen = "checkpoint" if stored is not None else _decide(wanted, vllm_config, draft)
    if chosen == wanted:
        return vllm_config
    resolved = copy.copy(vllm_config)
    section = dict(vllm_config.additional_config.get(SECTION, {})) | {"draft_weights": chosen}
    resolved.additional_config = dict(vllm_config.additional_config) | {SECTION: section}
    return resolved


def _decide(wanted: str, vllm_config: Any, draft: DraftConfig) -> str:
    on_cuda = current_platform.is_cuda()
    if wanted == "int8" and not current_platform.is_cpu():
        raise OptionsError(
            f'additional_config["{SECTION}"].draft_weights: found "int8"; int8 drafts are for CPUs. Set "fp8" or "auto".'
        )
    if wanted == "fp8" and not on_cuda and not current_platform.is_cpu():
        raise OptionsError(
            f'additional_config["{SECTION}"].draft_weights: found "fp8"; it needs an NVIDIA GPU. Set "checkpoint" or "auto".'
        )
    if wanted == "fp8" and not on_cuda:
        logger.warning_once(
            "vllm-dflash: draft_weights fp8 on a CPU rounds the draft's weights and saves nothing; use it to measure acceptance."
        )
    if wanted == "int8":
        plain, packed = int8_times(vllm_config.model_config.dtype, draft)
        if packed < plain:
            return "int8"
        logger.warning_once(
            f"vllm-dflash: draft_weights int8 is refused: {packed:.0f} us against {plain:.0f} us for the products of a draft "
            "layer on this CPU. The draft keeps the checkpoint's precision."
        )
        return "checkpoint"
    # Below sm_89 Triton has no e4m3; the kernel's way round it gives 16-bit numbers only.
    no_kernel = on_cuda and vllm_config.model_config.dtype == torch.float32 and not current_platform.has_device_capability(89)
    if wanted == "fp8" and no_kernel:
        raise OptionsError(
            f'additional_config["{SECTION}"].draft_weights: found "fp8"; a float32 draft needs a GPU from sm_89 on for it. Set '
            '"checkpoint".'
        )
    # Sleep mode loads weights into a memory pool of its own, in which no graph can be captured to time anything.
    timeable = not getattr(vllm_config.model_config, "enable_sleep_mode", False)
    if wanted == "fp8" and on_cuda and timeable:
        limit_rows(draft, vllm_config.model_config.dtype)
    if wanted != "auto":
        return wanted
    if not on_cuda or not timeable or no_kernel or not current_platform.has_device_capability(80):
        return "checkpoint"
    return _faster_on_gpu(vllm_config, draft)


def _faster_on_gpu(vllm_config: Any, draft: DraftConfig) -> str:
    """Time both: "fp8" or "checkpoint", the same on all ranks."""
    per_request = vllm_config.speculative_config.num_speculative_tokens + 1
    sizes = sorted({per_request, min(per_request * vllm_config.scheduler_config.max_num_seqs, _MOST_ROWS)})
    dtype = vllm_config.model_config.dtype
    limit_rows(draft, dtype)
    plain, small = (torch.tensor(times) for times in zip(*(draft_times(draft, dtype, rows) for rows in sizes), strict=True))
    torch.cuda.empty_cache()
    ratio = agreed(math.exp((small / plain).log().mean().item()))
    line = ", ".join(f"{s:.0f} against {p:.0f} us for {n} rows" for s, p, n in zip(small, plain, sizes, strict=True))
    chosen = "fp8" if ratio < _GAIN else "checkpoint"
    logger.info_once(f"DFlash draft: products with fp8 weights take {line}; the draft's weights are {_WORDS[chosen]}")
    return chosen


_WORDS = {"fp8": "fp8", "checkpoint": "as in the checkpoint"}


def limit_rows(draft: DraftConfig, dtype: torch.dtype) -> None:
    """Up to how many rows the one-launch kernel beats the platform's fp8 product, for every weight of ``draft`` on this rank."""
    for width, depth, _ in shapes(draft):
        weight, scales = quantise_rows(torch.randn(width, depth, dtype=dtype, device="cuda") * 0.02)
        limit = 0
        for rows in (16, 32):  # at 64 an H200's cutlass is ahead for every shape
            x = torch.randn(rows, depth, dtype=dtype, device="cuda")
            scratch = draft_quantization.workspace(x.device)
            fused = functools.partial(fp8_linear, x, weight, scales, workspace=scratch)
            one_launch, products = graph_times([fused, functools.partial(draft_quantization.many_rows, x, weight, scales)])
            if one_launch > products:
                break
            limit = rows
        draft_quantization.FUSED_ROWS[width, depth] = limit
    torch.cuda.empty_cache()
    logger.info_once(f"DFlash draft: fp8 products in one launch up to these rows: {draft_quantization.FUSED_ROWS}")


def draft_times(draft: DraftConfig, dtype: torch.dtype, rows: int) -> tuple[float, float]:
    """Microseconds of a draft step's products with ``rows`` rows: weights in ``dtype``, weights in fp8."""
    plain = small = 0.0
    for width, depth, times in shapes(draft):
        weight = torch.empty(width, depth, dtype=dtype, device="cuda").normal_(std=0.02)
        numbers, scales = quantise_rows(weight)
        x = torch.randn(rows, depth, dtype=dtype, device="cuda")
        calls = (
            functools.partial(functional.linear, x, weight),
            functools.partial(draft_quantization.fp8_product, x, numbers, scales),
        )
        of_plain, of_small = graph_times(calls)
        plain += times * of_plain
        small += times * of_small
    return plain, small


def shapes(draft: DraftConfig) -> list[tuple[int, int, int]]:
    """(rows, columns, how often) of the weights of a draft step on this rank."""
    tp_size = get_tensor_model_parallel_world_size()
    heads, kv_heads = draft.num_heads // tp_size, max(1, draft.num_kv_heads // tp_size)
    hidden, mlp, layers = draft.hidden_size, draft.intermediate_size // tp_size, draft.num_layers
    return [
        ((heads + 2 * kv_heads) * draft.head_dim, hidden, layers),
        (hidden, heads * draft.head_dim, layers),
        (2 * mlp, hidden, layers),
        (hidden, mlp, layers),
        (hidden, draft.target_hidden_size * len(set(draft.target_layer_ids)), 1),
        (2 * layers * kv_heads * draft.head_dim, hidden, 1),
    ]


def int8_times(dtype: torch.dtype, draft: DraftConfig, rows: int = 8) -> tuple[float, float]:
    """Microseconds of one draft layer's products on this CPU, best of several: packed ``dtype`` weights, packed int8 ones."""
    plain = packed = 0.0
    for width, depth, times in shapes(draft):
        if times == 1 and draft.num_layers > 1:
            continue
        weight, x = torch.randn(width, depth, dtype=dtype) * 0.02, torch.randn(rows, depth, dtype=dtype)
        layers = [torch.nn.Module() for _ in range(2)]
        for layer in layers:
            layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        method = draft_quantization.Int8LinearMethod()
        unquantised = UnquantizedLinearMethod()
        unquantised.process_weights_after_loading(layers[0])
        method.process_weights_after_loading(layers[1])
        plain += _best_us(functools.partial(unquantised.apply, layers[0], x))
        packed += _best_us(functools.partial(method.apply, layers[1], x))
    return plain, packed


def _best_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPLAYS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6
