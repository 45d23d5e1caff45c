# SPDX-License-Identifier: Apache-2.0
"""Child of `doctor`: imports vLLM, and says which hooks fit and which attention backend the draft would run on here.

A process of its own: importing vLLM takes seconds and prints, and a broken installation may even crash.
"""

import json
import sys
from typing import Any

from vllm_dflash.cli.engine_child import claim_stdout, emit


def main() -> None:
    """Print one `hooks` event, then one `backend` event."""
    channel = claim_stdout()
    request = json.loads(sys.stdin.readline())
    emit(channel, "hooks", hooks=_hooks())
    emit(channel, "backend", **_backend(request.get("needs")))


def _hooks() -> list[dict[str, Any]]:
    from vllm_dflash.hooks import HOOKS

    return [{"path": hook.path, "moment": hook.moment, "problem": _problem(hook)} for hook in HOOKS]


def _problem(hook: Any) -> str | None:
    try:
        found: str | None = hook.problem()
    except Exception as error:  # noqa: BLE001 - a module of vLLM that cannot be imported is a finding, not a crash
        return f"{hook.path}: {type(error).__name__}: {error}"
    return found


def _backend(needs: dict[str, Any] | None) -> dict[str, Any]:
    from vllm.platforms import current_platform

    answer: dict[str, Any] = {"backend": None, "graphs": None, "runner": "V2", "error": None}
    if current_platform.is_cpu():
        return answer | {"backend": "CPU_ATTN", "graphs": "no CUDA graphs on a CPU", "runner": "V1"}
    try:
        return answer | (_chosen(**needs) if needs else {})
    except Exception as error:  # noqa: BLE001 - vLLM's selector raises whatever its backends raise
        return answer | {"error": f"{type(error).__name__}: {error}"}


def _chosen(*, num_heads: int, num_kv_heads: int, **needs: Any) -> dict[str, Any]:
    """Name and graph support of the backend that the engine would give layers with these needs, in bfloat16 on one rank."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_dflash.engine.block_backend import choose_backend
    from vllm_dflash.engine.capability import backend_name, graph_verdict

    config = VllmConfig()
    asked = AttentionSelectorConfig(dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, **needs)
    with set_current_vllm_config(config):
        ours = choose_backend(None, asked, num_heads) if needs["use_non_causal"] else None
        path = current_platform.get_attn_backend_cls(None, asked, num_heads) if ours is None else ours.get_path()
        backend = resolve_obj_by_qualname(path)
        spec = FullAttentionSpec(block_size=16, num_kv_heads=num_kv_heads, head_size=needs["head_size"], dtype=torch.bfloat16)
        support = backend.get_builder_cls().get_cudagraph_support(config, spec)
    name = backend_name(backend)
    return {"backend": name, "graphs": graph_verdict(wanted=True, support=support, backend=name)}


if __name__ == "__main__":
    main()
