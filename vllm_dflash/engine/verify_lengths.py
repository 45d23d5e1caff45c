# SPDX-License-Identifier: Apache-2.0
"""Whether requests of one step may verify different numbers of drafts on a GPU: vLLM's adaptive verification does it there.

It is off in vLLM by default, and an engine that asks for it where it cannot run does not start. So the planner asks for it where
it is known to run and to gain, after vLLM has completed its configuration; ``"verify_lengths": "equal"`` keeps it off, and who
sets vLLM's own ``enable_adaptive_verification`` gets it wherever vLLM has it.
"""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dflash.engine.planned_widths import why_fixed
from vllm_dflash.engine.workers import share_process
from vllm_dflash.options import read_options
from vllm_dflash.planner.costs import KNEE_GPU

logger = init_logger("vllm.plugins.dflash")

_HOPPER = (9, 0)


def why_equal(vllm_config: Any) -> str | None:
    """Why all requests of a step verify alike, of a complete configuration; None where lengths may differ."""
    parallel, model, speculative = vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
    rows = vllm_config.scheduler_config.max_num_seqs * (1 + speculative.num_speculative_tokens)
    reasons = {
        'option "verify_lengths" is equal': read_options(vllm_config.additional_config).verify_lengths == "equal",
        "the planner is off": why_fixed(vllm_config) is not None,
        "model runner V1 has no varying lengths in graphs": not vllm_config.use_v2_model_runner,
        "tried with FlashAttention 3 on Hopper alone": not _is_tried(vllm_config),
        "the target is no dense one": bool(model.is_moe),
        "this is a part of a target": bool(getattr(model, "is_submodel_config", False)),
        "there are adapters": vllm_config.lora_config is not None,
        "workers have processes of their own": not share_process(parallel),
        "KV blocks are sent elsewhere": vllm_config.kv_transfer_config is not None,
        "there are no full CUDA graphs": not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
        "the KV cache is quantised": vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"),
        "acceptance is another than by probability": speculative.rejection_sample_method != "standard",
        "drafts are picked without logits": bool(speculative.use_local_argmax_reduction),
        "masks of sampling are to be returned": bool(getattr(model, "return_sampling_mask", False)),
        "no batch has more rows than are free": rows <= KNEE_GPU,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def choose(vllm_config: Any) -> None:
    """Switch adaptive verification on where lengths may differ; vLLM's own switch stays where the user has set it."""
    speculative = vllm_config.speculative_config
    if speculative.enable_adaptive_verification:
        return
    reason = why_equal(vllm_config)
    if reason is None:
        speculative.enable_adaptive_verification = True
        reason = why_fixed(vllm_config)  # with it there may be another: where vLLM's runner differs, for one
        speculative.enable_adaptive_verification = reason is None
    if reason is not None:
        logger.debug("DFlash planner: all requests of a step verify alike; %s", reason)


def _is_tried(vllm_config: Any) -> bool:
    """Whether the target's layers run in FlashAttention 3: vLLM's first choice on Hopper for what it can run."""
    if not current_platform.is_cuda() or current_platform.get_device_capability() != _HOPPER:
        return False
    model, attention = vllm_config.model_config, vllm_config.attention_config
    if model.use_mla or model.get_head_size() > 256 or model.get_head_size() % 8:
        return False
    if model.dtype not in (torch.bfloat16, torch.float16) or attention.flash_attn_version not in (None, 3):
        return False
    return (attention.backend is None or attention.backend.name == "FLASH_ATTN") and _has_version_3()


def _has_version_3() -> bool:
    """Whether this build of vLLM comes with it."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
    except ImportError:
        return False
    return bool(is_fa_version_supported(3))
