# SPDX-License-Identifier: Apache-2.0
"""Child of `doctor`: imports vLLM, and says which hooks fit and which attention backend this machine would use.

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
    emit(channel, "backend", **_backend(request.get("head_dim")))


def _hooks() -> list[dict[str, Any]]:
    from vllm_dflash.hooks import HOOKS

    return [{"path": hook.path, "moment": hook.moment, "problem": _problem(hook)} for hook in HOOKS]


def _problem(hook: Any) -> str | None:
    try:
        found: str | None = hook.problem()
    except Exception as error:  # noqa: BLE001 - a module of vLLM that cannot be imported is a finding, not a crash
        return f"{hook.path}: {type(error).__name__}: {error}"
    return found


def _backend(head_dim: int | None) -> dict[str, Any]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {"device": None, "backend": "CPU_ATTN", "error": None}
    try:
        device = current_platform.get_device_name()
        return {"device": device, "backend": _selected(head_dim) if head_dim else None, "error": None}
    except Exception as error:  # noqa: BLE001 - vLLM's selector raises whatever its backends raise
        return {"device": None, "backend": None, "error": f"{type(error).__name__}: {error}"}


def _selected(head_dim: int) -> str:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    with set_current_vllm_config(VllmConfig()):
        return str(get_attn_backend(head_dim, torch.bfloat16, "auto").get_name())


if __name__ == "__main__":
    main()
