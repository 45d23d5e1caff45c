# SPDX-License-Identifier: Apache-2.0
"""The entry point: :func:`register` runs in every process that vLLM starts, before any runner is imported.

It never raises and does no heavy work. Where vLLM differs from what :mod:`vllm_dflash.hooks` expects, it logs one ERROR and
leaves vLLM as it is; whatever is wrong with a *draft* is raised later, when that draft is used.
"""

import contextvars
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

from vllm_dflash import __version__, hooks
from vllm_dflash.config_patch import engine_config
from vllm_dflash.draft_config import OUR_ARCHITECTURES, check_width, claims_architectures
from vllm_dflash.patching import Patch
from vllm_dflash.planner_patches import planner_table, verification_timing
from vllm_dflash.request_patches import request_patches

KILL_SWITCH = "VLLM_DFLASH"
_WIDTH_ASKED: contextvars.ContextVar[int | None] = contextvars.ContextVar("num_speculative_tokens", default=None)
_OURS = "_vllm_dflash_claims"
DRAFT_MODEL = "vllm_dflash.engine.draft_model:DFlashDraftModel"


def register() -> None:
    """Take over ``"method": "dflash"``; entry point ``dflash`` of the group ``vllm.general_plugins``."""
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - an exception here would break every vLLM command of this environment
        _report(f"{type(error).__name__}: {error}")


def enabled() -> bool:
    """Whether the kill switch is unset: ``VLLM_DFLASH=0`` gives vLLM's own DFlash back."""
    return os.environ.get(KILL_SWITCH, "1") != "0"


def claims(vllm_config: Any) -> bool:
    """Whether the configured draft is ours: method dflash with a plain DFlash body."""
    return claims_draft(vllm_config.speculative_config)


def claims_draft(speculative: Any) -> bool:
    """The same, of a ``SpeculativeConfig`` or None."""
    if speculative is None or speculative.method != "dflash" or not enabled():
        return False
    architectures = list(speculative.draft_model_config.architectures)
    if claims_architectures(architectures):
        return True
    _logger().info_once(f"vllm-dflash leaves the draft {architectures} to vLLM's own implementation")
    return False


def _register() -> None:
    import vllm.envs

    vllm.envs.environment_variables.setdefault(KILL_SWITCH, lambda: os.environ.get(KILL_SWITCH, "1"))
    if not enabled():
        return
    found = hooks.problems("load")
    if found:
        _report("; ".join(found))
        return
    for patch in seams():
        patch.install(on_problem=_report)
    for patch in watches():
        patch.install(on_problem=_report_watch)
    for patch in request_patches(claims_draft):
        patch.install(on_problem=_report_requests)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for patch in repairs():
            patch.install(on_problem=_report_repair)


def seams() -> tuple[Patch, ...]:
    """What is replaced in vLLM to take over DFlash drafts; each entry's reason stands in its hook."""
    return (
        Patch(hooks.V2_FACTORY, _wrap_init_speculator, rebind=("vllm.v1.worker.gpu.model_runner",)),
        Patch(hooks.V2_CAPTURE, _wrap_capture, rebind=("vllm.v1.worker.gpu.model_runner",)),
        Patch(hooks.V1_PROPOSER, _proposer_seam),
        Patch(hooks.DRAFT_CONFIG, _wrap_hf_config_override),
        Patch(hooks.WIDTH_ASKED, _wrap_post_init),
        engine_config(claims, enabled),
        Patch(hooks.SCHEDULE, _wrap_schedule),
    )


def watches() -> tuple[Patch, ...]:
    """Where the acceptance watchdog and the planner read; the last keeps the planner's table."""
    return (
        Patch(hooks.SPEC_STATS, _watch_spec_stats),
        Patch(hooks.CACHED_TOKENS, _watch_cached_tokens),
        Patch(hooks.STEP_DONE, _watch_step_done),
        verification_timing(claims),
        planner_table(claims),
    )


def repairs() -> tuple[Patch, ...]:
    """Faults of vLLM's CPU sampling, mended for every speculative method."""
    return (
        Patch(hooks.CPU_EXPAND, _repair_cpu_expand),
        Patch(hooks.CPU_TOP_K, _repair_cpu_top_k),
        Patch(hooks.CPU_SEEDS, _repair_cpu_seeds),
    )


def _wrap_init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        if not claims(vllm_config):
            return original(vllm_config, device, *args, **kwargs)
        _take_over("v2")
        from vllm_dflash.engine.speculator import DFlashSpeculator
        from vllm_dflash.engine.watchdog_self_check import V2Steps, attach

        return attach(DFlashSpeculator(vllm_config, device, *args, **kwargs), vllm_config, V2Steps)

    return init_speculator


def _wrap_capture(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give targets of our drafts the interface that vLLM is about to ask for, where they have none."""

    @functools.wraps(original)
    def set_layers(model: Any, spec_config: Any, *args: Any, **kwargs: Any) -> Any:
        if spec_config.method != "dflash":
            return original(model, spec_config, *args, **kwargs)
        from vllm.config import get_current_vllm_config

        vllm_config = get_current_vllm_config()
        if claims(vllm_config):
            from vllm_dflash.engine.capture import prepare_capture

            prepare_capture(model, vllm_config)
        return original(model, spec_config, *args, **kwargs)

    return set_layers


def _proposer_seam(original: type) -> type:
    """A stand-in for the class name: it builds our proposer or vLLM's, and both are instances of it."""

    class Seam(type):
        def __call__(cls, vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            if not claims(vllm_config):
                return original(vllm_config, device, *args, **kwargs)
            _take_over("v1")
            from vllm_dflash.engine.proposer import DFlashProposer
            from vllm_dflash.engine.watchdog_self_check import V1Steps, attach

            return attach(DFlashProposer(vllm_config, device, *args, **kwargs), vllm_config, V1Steps)

        def __instancecheck__(cls, instance: object) -> bool:
            ours = sys.modules.get("vllm_dflash.engine.proposer")  # never imported for a runner that drafts otherwise
            return isinstance(instance, original) or (ours is not None and isinstance(instance, ours.DFlashProposer))

    return Seam(original.__name__, (), {"__doc__": original.__doc__})


def _wrap_hf_config_override(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give plain DFlash drafts the default K (``n_predict``) that vLLM reads right after this override."""

    @functools.wraps(original)  # pickled by qualified name on its way to other processes
    def hf_config_override(hf_config: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(hf_config, *args, **kwargs)
        if enabled() and claims_architectures(getattr(config, "architectures", None)):
            from vllm_dflash.engine.pair import read_draft

            draft = read_draft(getattr(config, "_name_or_path", ""), getattr(config, "_commit_hash", None), config)
            if (asked := _WIDTH_ASKED.get()) is not None:
                check_width(draft, asked)
            if getattr(config, "n_predict", None) is None:
                config.update({"n_predict": draft.max_num_speculative_tokens})
        return config

    return hf_config_override


def _wrap_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the override above which K was asked for, as vLLM's own check knows multiples only, and free the target's length.

    vLLM 0.33 lowers the target's ``max_model_len`` to a draft's whose rotary embedding is scaled; ours stops drafting there.
    """

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _WIDTH_ASKED.set(getattr(self, "num_speculative_tokens", None))
        try:
            result = original(self, *args, **kwargs)
        finally:
            _WIDTH_ASKED.reset(token)
        draft = getattr(self, "draft_model_config", None)
        if enabled() and draft is not None and self.method == "dflash" and claims_architectures(draft.architectures):
            draft.max_model_len = max(draft.max_model_len, self.target_model_config.max_model_len)
        return result

    return post_init


def _wrap_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let :mod:`vllm_dflash.engine.scheduling` shorten drafts before each step; other methods pay one attribute look-up."""

    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = getattr(self, _OURS, None)
        if ours is None:
            ours = claims(self.vllm_config)
            setattr(self, _OURS, ours)
        if not ours:
            return original(self, *args, **kwargs)
        from vllm_dflash.engine.planning import planning_of
        from vllm_dflash.engine.scheduling import shorten_drafts

        shorten_drafts(self)
        planning = planning_of(self)
        if planning is None:
            return original(self, *args, **kwargs)
        _guarded(self, planning.before, self)
        output = original(self, *args, **kwargs)
        _guarded(self, planning.after, output)
        return output

    return schedule


def _guarded(scheduler: Any, step: Callable[..., None], *args: Any) -> None:
    """A fault of the planner must not end the engine: drafting goes on with a fixed width."""
    try:
        step(*args)
    except Exception as error:  # noqa: BLE001 - see above
        scheduler._vllm_dflash_planning = None
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * len(scheduler.dynamic_sd_lookup)
        _logger().warning(f"vllm-dflash: the planner stopped, K is fixed from now on ({type(error).__name__}: {error})")


def _watch_spec_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dflash.engine.watchdog import watch_scheduler

    return watch_scheduler(original, claims)


def _watch_step_done(original: Callable[..., Any]) -> Callable[..., Any]:
    """Show the planner, where the scheduler has one, what became of the drafts of each step, and count tokens where asked."""
    from vllm_dflash.engine.served_tokens import count_step

    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        planning = getattr(self, "_vllm_dflash_planning", None)
        if planning is not None:
            _guarded(self, planning.finished, scheduler_output, model_runner_output)
        outputs = original(self, scheduler_output, model_runner_output, *args, **kwargs)
        count_step(self, scheduler_output, outputs, claims)
        return outputs

    return update_from_output


def _watch_cached_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dflash.engine.watchdog import note_cached_tokens

    return note_cached_tokens(original)


def _repair_cpu_expand(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dflash.engine.cpu_sampling import expand_rows

    return functools.wraps(original)(expand_rows)


def _repair_cpu_top_k(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dflash.engine.cpu_sampling import allow_no_rows

    return allow_no_rows(original)


def _repair_cpu_seeds(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dflash.engine.cpu_sampling import rewind_seeds

    return rewind_seeds(original)


def _take_over(runner: Literal["v1", "v2"]) -> None:
    """Check the hooks of this runner, then let our model class load the draft.

    The model class is registered only here, in the worker that has just built our speculator or proposer: vLLM's own never
    meets it, however the take-over failed.
    """
    found = hooks.problems(runner)
    if unseen := hooks.SCHEDULE.problem():  # a draft left out by us must not be verified: its probability would be wrong
        found.append(unseen)
    if found:
        raise RuntimeError(f"{_differs('; '.join(found))} Set {KILL_SWITCH}=0 to use vLLM's own DFlash.")
    from vllm import ModelRegistry

    for architecture in OUR_ARCHITECTURES:
        ModelRegistry.register_model(architecture, DRAFT_MODEL)


def _report(difference: str) -> None:
    _logger().error(f"{_differs(difference)} vLLM's own DFlash stays in use.")


def _report_watch(difference: str) -> None:
    _logger().warning(f"{_differs(difference)} The acceptance watchdog and the planner stay off.")


def _report_requests(difference: str) -> None:
    _logger().warning(f"{_differs(difference)} Requests with min_p or logit_bias stay refused.")


def _report_repair(difference: str) -> None:
    _logger().error(f"{_differs(difference)} Sampling with speculation on this CPU stays as vLLM has it; use temperature 0.")


def _differs(difference: str) -> str:
    supported = " and ".join(hooks.SUPPORTED_VLLM)
    return (
        f"vllm-dflash {__version__} does not fit vLLM {hooks.vllm_version()} (supported: {supported}): {difference}. Run "
        "`vllm-dflash doctor` for details."
    )


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.dflash")  # only loggers below "vllm" are configured
