# SPDX-License-Identifier: Apache-2.0
"""The draft and the target of one engine, read from vLLM's config and checked against each other.

Every engine part asks here, so that the proposer, the speculator and the draft model see the same :class:`DraftConfig`, and a
pair that does not fit is refused in one sentence before any weight is loaded.
"""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dflash.checkpoint import DraftConfig, TargetFacts, check_pair, check_width, parse_draft_config
from vllm_dflash.context_limits import longest_context, windowed
from vllm_dflash.mask_token import find_mask_token
from vllm_dflash.options import read_options

logger = init_logger("vllm.plugins.dflash")


def target_facts(vllm_config: Any) -> TargetFacts:
    """What the draft must agree with, from the target's ``ModelConfig``."""
    model = vllm_config.model_config
    return TargetFacts(
        hidden_size=model.get_hidden_size(),
        num_layers=model.get_total_num_hidden_layers(),
        vocab_size=model.get_vocab_size(),
    )


def read_draft(model: str, revision: str | None, hf_config: Any) -> DraftConfig:
    """The draft in folder or hub repository ``model``.

    The checkpoint's own ``config.json`` comes first: what transformers makes of it has defaults filled in that the checkpoint
    never stated, and fields dropped that its class does not expect (``sliding_window`` of a Qwen3 config).

    Raises:
        CheckpointError: a field is missing or wrong.
    """
    if not model:
        return parse_draft_config(hf_config.to_dict())
    config = get_hf_file_to_dict("config.json", model, revision)
    return parse_draft_config(
        config or hf_config.to_dict(), lambda: find_mask_token(model, lambda name: get_hf_file_to_dict(name, model, revision))
    )


def resolve_draft(vllm_config: Any) -> DraftConfig:
    """The draft of ``vllm_config.speculative_config``, checked against its target and the wanted K, with the option's window.

    Raises:
        CheckpointError: the config cannot be read, or draft, target and ``num_speculative_tokens`` do not fit together.
        ValueError: the runner or the scheduler cannot draft over a pipeline.
        OptionsError: an option of ``additional_config`` cannot be used.
    """
    _check_pipeline(vllm_config)
    speculative = vllm_config.speculative_config
    model_config = speculative.draft_model_config
    draft = read_draft(model_config.model, model_config.revision, model_config.hf_config)
    check_pair(draft, target_facts(vllm_config))
    check_width(draft, speculative.num_speculative_tokens)
    warn_of_narrow_range(model_config.hf_config, vllm_config.model_config.dtype)
    return windowed(draft, read_options(vllm_config.additional_config), vllm_config.model_config.get_total_num_hidden_layers())


def _check_pipeline(vllm_config: Any) -> None:
    """Two faults of vLLM's with any draft over a pipeline.

    The V1 runner looks for a drafter on every stage and has one on the last only (``_check_and_update_cudagraph_mode``). A
    synchronous scheduler is told of a step's drafts before it knows the step's tokens (``EngineCore.post_step``), and the first
    stage fails in ``prepare_inputs``.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            f"pipeline_parallel_size: found {stages}; a DFlash draft on vLLM's V1 model runner (that of CPU builds) needs 1, as "
            "vLLM fails on the stages without one. Use tensor_parallel_size instead, or Model Runner V2 on GPUs."
        )
    if not vllm_config.scheduler_config.async_scheduling:
        raise ValueError(
            f"async_scheduling: found False with pipeline_parallel_size {stages}; a DFlash draft needs True there, as vLLM "
            "counts drafts too early without it. Leave out --no-async-scheduling, or use tensor_parallel_size instead."
        )


def drafted_context(vllm_config: Any, draft: DraftConfig) -> int | None:
    """Most tokens of context with which a request is drafted for; None for no limit below ``max_model_len``."""
    speculative = vllm_config.speculative_config
    asked = read_options(vllm_config.additional_config).draft_max_context, speculative.max_model_len
    return longest_context(
        draft,
        speculative.num_speculative_tokens,
        vllm_config.model_config.max_model_len,
        min((limit for limit in asked if limit is not None), default=None),
    )


def warn_of_narrow_range(hf_config: Any, dtype: torch.dtype) -> None:
    """Say once that a bfloat16 draft runs in float16: values above 65504 overflow, and only acceptance shows it."""
    stored = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
    if str(stored).removeprefix("torch.") == "bfloat16" and dtype == torch.float16:
        logger.warning_once(
            "vllm-dflash: dtype is float16, and the DFlash draft was stored in bfloat16. Hidden states beyond float16's range "
            "overflow and cost acceptance without an error; set dtype to bfloat16 where the GPU has it, else float32."
        )
