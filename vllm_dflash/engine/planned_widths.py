# SPDX-License-Identifier: Apache-2.0
"""Whether the planner chooses the draft width, and which widths vLLM is told of: decided when an engine is configured."""

from typing import Any

from vllm.platforms import current_platform

from vllm_dflash import hooks
from vllm_dflash.engine.workers import share_process
from vllm_dflash.options import read_options
from vllm_dflash.planner.targets import is_large
from vllm_dflash.planner.widths import schedule_of


def why_fixed(vllm_config: Any) -> str | None:
    """Why K stays as configured; None where the planner may choose."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    option = read_options(vllm_config.additional_config).planner
    auto, on_cpu, v2 = option == "auto", current_platform.is_cpu(), vllm_config.use_v2_model_runner
    reasons = {
        'option "planner" is off': option == "off",
        'option "planner" is auto, and the target is small': auto and not on_cpu and not _is_large(vllm_config),
        "num_speculative_tokens_per_batch_size is set": not _table_is_ours(vllm_config),
        "adaptive verification tells its confidences in other processes": trims(vllm_config) and not share_process(parallel),
        "data-parallel ranks run every step together, and tell each other no width": _in_lockstep(vllm_config),
        "ranks under a launcher of yours plan apart": parallel.world_size > 1 and _is_launched(parallel),
        "pipeline stages expect all drafts": parallel.pipeline_parallel_size > 1,
        "the target keeps recurrent state": bool(getattr(model, "is_hybrid", False)),
        "vLLM differs where adaptive verification is prepared": trims(vllm_config) and hooks.V2_CAPTURED.problem() is not None,
        "vLLM differs where steps end": hooks.STEP_DONE.problem() is not None,
        "model runner V1 would lose its full graphs": not (on_cpu or v2),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def trims(vllm_config: Any) -> bool:
    """Whether vLLM's adaptive verification cuts drafts on the device (Model Runner V2 only)."""
    return bool(vllm_config.speculative_config.enable_adaptive_verification and vllm_config.use_v2_model_runner)


def _in_lockstep(vllm_config: Any) -> bool:
    """Whether data-parallel ranks join their forwards, whose rows vLLM pads alike on all of them (``dp_utils``).

    Experts are spread over them. Ranks of a dense target are engines of their own, which vLLM sets to a size of 1 when they
    start (``ParallelConfig.reconfigure_for_independent_dp_rank``), unless a launcher of the user's starts them.
    """
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size == 1:
        return False
    return bool(vllm_config.model_config.is_moe) or _is_launched(parallel)


def _is_launched(parallel_config: Any) -> bool:
    """Whether each rank has a scheduler of its own; their clocks differ, so would their widths."""
    return bool(parallel_config.distributed_executor_backend == "external_launcher")


def _is_large(vllm_config: Any) -> bool:
    model = vllm_config.model_config
    return is_large(model.get_total_num_hidden_layers(), model.get_hidden_size())


def configure(vllm_config: Any) -> None:
    """Name the planner's widths to vLLM; runs when the engine's configuration is built, before graph sizes are chosen."""
    if why_fixed(vllm_config) is None:
        vllm_config.speculative_config.num_speculative_tokens_per_batch_size = _table(vllm_config)


def _table(vllm_config: Any) -> list[tuple[int, int, int]]:
    return schedule_of(vllm_config.speculative_config.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs)


def _table_is_ours(vllm_config: Any) -> bool:
    table = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    return table is None or [tuple(row) for row in table] == _table(vllm_config)
