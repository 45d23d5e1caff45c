# SPDX-License-Identifier: Apache-2.0
"""Whether ``--hold`` can be done, told before an engine starts: on a GPU that takes minutes for all of them.

A planner is told its width beside the scheduler, by the engine's one worker, which shares a process with it. Where workers have
processes of their own all engines of such a benchmark run in the process that asks (`IN_PROCESS` is "0"), to stay comparable.
"""

import os
from collections.abc import Sequence
from typing import Any

from vllm_dflash.bench.arms import BenchArm
from vllm_dflash.bench.loads import numbers
from vllm_dflash.cli.engine_measure import WORKER_EXTENSION
from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.machine import IN_PROCESS, on_cpu
from vllm_dflash.cli.models import Pair, target_facts
from vllm_dflash.planner.targets import is_large


def need_planner(arms: Sequence[BenchArm]) -> bool:
    """Check what a held width needs of the arm that is told, and of those beside it. Returns whether they run in our process.

    Raises:
        UserError: a variable or a setting keeps the planner out of reach, or no planner can be told.
    """
    for arm in arms:
        ranks = arm.engine.get("data_parallel_size", 1)
        if ranks != 1:
            raise UserError(
                f"--hold: found data_parallel_size {ranks} in arm {arm.name}; expected 1, as ranks are engines in processes of "
                "their own. Leave --hold out."
            )
    told = planning_arm(arms)
    _need_free_width(told)
    found, apart = os.environ.get(IN_PROCESS, "0"), _workers_apart(told)
    if apart is not None and found != "0":
        raise UserError(
            f"{IN_PROCESS}: found {found!r}; --hold needs 0 {apart}, as workers run in processes of their own there, and "
            "nothing of ours beside the scheduler can be asked. Unset it, or leave --hold out."
        )
    extension = told.engine.get("worker_extension_cls", WORKER_EXTENSION)
    if apart is None and extension != WORKER_EXTENSION:
        raise UserError(
            f"--hold: found worker_extension_cls {extension!r} in arm {told.name}; expected none, as its worker gets the methods "
            "through it that the planner is told its width by. Leave it out, or --hold."
        )
    return apart is not None


def _workers_apart(arm: BenchArm) -> str | None:
    """Why the workers of an arm have processes of their own; None where its one worker shares the scheduler's."""
    ranks, executor = arm.engine.get("tensor_parallel_size", 1), arm.engine.get("distributed_executor_backend") or "uni"
    if ranks != 1:
        return f"with tensor_parallel_size {ranks} in arm {arm.name}"
    if executor != "uni":
        return f"with distributed_executor_backend {executor} in arm {arm.name}"
    return "on a CPU" if on_cpu() else None


def _need_free_width(arm: BenchArm) -> None:
    """What `why_fixed` of the engine would say, as far as the settings tell."""
    table, stages = "num_speculative_tokens_per_batch_size", arm.engine.get("pipeline_parallel_size", 1)
    ranks = arm.engine.get("tensor_parallel_size", 1)
    trimmed = arm.speculative.get("enable_adaptive_verification") and not on_cpu()
    fixed = {
        f"{table} is set": table in arm.speculative,
        f"pipeline_parallel_size is {stages}": stages != 1,
        f"enable_adaptive_verification is set with tensor_parallel_size {ranks}": trimmed and ranks != 1,
    }
    for reason, holds in fixed.items():
        if holds:
            raise UserError(f"--hold: arm {arm.name} has a fixed K, as {reason}. Leave that out, or --hold.")


def widths_to_hold(text: str | None, pair: Pair, arms: Sequence[BenchArm]) -> list[int]:
    """The widths of ``--hold``; none where it was not given.

    Raises:
        UserError: not numbers, more than K, or a planner that leaves K alone with a target of this size.
    """
    if text is None:
        return []
    arm = planning_arm(arms)
    widths: list[int] = numbers("--hold", text, int, least=0)
    if max(widths) > pair.k:
        raise UserError(f"--hold: found {max(widths)}; expected at most K = {pair.k}.")
    planned = on_cpu() or _option(arm, "planner") == "on" or "hf_overrides" in arm.engine  # which may be of any size
    facts = target_facts(pair.target_config)
    if not (planned or is_large(facts.num_layers, facts.hidden_size)):
        raise UserError(
            f'--hold: arm {arm.name} has planner "auto", which leaves K fixed with a target this small on a GPU; expected "on": '
            f'--arm \'NAME=ours:{{"engine": {{"additional_config": {{"vllm_dflash": {{"planner": "on"}}}}}}}}\'.'
        )
    return widths


def planning_arm(arms: Sequence[BenchArm]) -> BenchArm:
    """The arm whose planner is told to hold a width: of several the one with equal lengths, as a fixed K verifies all of them.

    Raises:
        UserError: there is none, or more than one.
    """
    found = [arm for arm in arms if arm.kind == "ours" and _option(arm, "planner") != "off"]
    if len(found) > 1:
        found = [arm for arm in found if _option(arm, "verify_lengths") == "equal"] or found
    if len(found) != 1:
        names = ", ".join(arm.name for arm in found) or "none"
        raise UserError(
            f"--hold: found {names} of kind ours with a planner; expected one, or one of them with verify_lengths equal. Leave "
            "--hold out, or the others."
        )
    return found[0]


def _option(arm: BenchArm, name: str) -> Any:
    found: Any = arm.engine
    for key in ("additional_config", "vllm_dflash", name):
        found = found.get(key) if isinstance(found, dict) else None
    return found
