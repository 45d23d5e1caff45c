# SPDX-License-Identifier: Apache-2.0
"""Whether ``--hold`` can be done, told before an engine starts: on a GPU that takes minutes for all of them.

A planner is told its width in the process of its engine, where the scheduler is. vLLM runs that in another process unless
`IN_PROCESS` is "0", so all engines of such a benchmark get that, to stay comparable.
"""

import os
from collections.abc import Sequence
from typing import Any

from vllm_dflash.bench.arms import BenchArm
from vllm_dflash.bench.loads import numbers
from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.machine import IN_PROCESS, on_cpu
from vllm_dflash.cli.models import Pair, target_facts
from vllm_dflash.planner.targets import is_large


def need_in_process(arms: Sequence[BenchArm]) -> None:
    """Check what a held width needs of the environment, of the arm that is told, and of those beside it.

    Raises:
        UserError: a variable or a setting puts an engine into another process, or no planner can be told.
    """
    found = os.environ.get(IN_PROCESS, "0")
    if found != "0":
        raise UserError(
            f"{IN_PROCESS}: found {found!r}; --hold needs 0, as a planner is told its width in the process of its engine. Unset "
            "it, or leave --hold out."
        )
    for arm in arms:
        ranks = arm.engine.get("data_parallel_size", 1)
        if ranks != 1:
            raise UserError(
                f"--hold: found data_parallel_size {ranks} in arm {arm.name}; expected 1, as ranks are engines in processes of "
                "their own. Leave --hold out."
            )
    _need_free_width(planning_arm(arms))


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
