# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash doctor`: what works on this machine, what does not and why, and the command to run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_dflash.checkpoint import DraftConfig, read_draft_config
from vllm_dflash.cli import engine_probes, pair_probes, probes
from vllm_dflash.cli.machine import on_cpu
from vllm_dflash.cli.models import locate, read_target_config, target_facts
from vllm_dflash.cli.probes import Finding, guarded
from vllm_dflash.cli.weight_probe import weights
from vllm_dflash.options import SECTION, PluginOptions

SIGNS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def doctor(
    target: Annotated[str | None, typer.Option(help="Folder or hub name of the model.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or hub name of its DFlash draft.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Drafts per step that you want.")] = None,
    options: Annotated[str | None, typer.Option(help="Options of the plugin as JSON, see docs/options.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check versions, plugin and hooks; with --target and --draft also whether the two fit and how they would run.

    Exit code 1 if something is wrong.

    Loads no weights. Works offline with folders and with models in the hub's cache.
    """
    console = Console(stderr=as_json, soft_wrap=True)
    found_versions, machine = probes.versions(), probes.hardware()
    with console.status("looking"):
        findings = examine(target, draft, k, options)
    ok = all(finding.status != "fail" for finding in findings)
    command = command_line(target, draft, k, options) if ok and target and draft else None
    if as_json:
        checks = [{"name": f.name, "status": f.status, "text": f.text, **({"data": f.data} if f.data else {})} for f in findings]
        report = {"ok": ok, "versions": found_versions, "hardware": machine, "checks": checks, "command": command}
        typer.echo(json.dumps(report))
    else:
        _print(console, found_versions, machine, findings, command)
    if not ok:
        raise typer.Exit(1)


def examine(target: str | None, draft: str | None, k: int | None, options: str | None = None) -> list[Finding]:
    """All findings, in the order in which they are shown."""
    config: list[DraftConfig] = []
    chosen: list[PluginOptions] = []
    findings = [*guarded("vllm", probes.vllm_supported), *guarded("plugin", probes.plugin, draft is not None)]
    given = guarded("options", engine_probes.options, options, chosen) if options else []
    models = list(_examine_models(target, draft, k, config, (chosen or [PluginOptions()])[0]))
    if findings[0].status != "fail":
        findings += guarded("hooks", probes.hooks_and_backend, config[0] if config else None)
    return findings + given + models


def _examine_models(
    target: str | None, draft: str | None, k: int | None, config: list[DraftConfig], chosen: PluginOptions
) -> Iterable[Finding]:
    """Findings about the models; the draft's config is left in `config` for the other probes."""
    folders: dict[str, Path] = {}
    target_config: dict[str, Any] = {}

    def read_target() -> Iterable[Finding]:
        folders["target"] = locate(target or "", "target")
        target_config.update(read_target_config(folders["target"]))
        facts = target_facts(target_config)
        yield Finding("target", "ok", f"{facts.num_layers} layers, hidden {facts.hidden_size}, vocabulary {facts.vocab_size}")

    def read_draft() -> Iterable[Finding]:
        folders["draft"] = locate(draft or "", "draft")
        config.append(read_draft_config(folders["draft"]))
        return pair_probes.draft_read(config[0])

    if target:
        yield from guarded("target", read_target)
    if draft:
        yield from guarded("draft", read_draft)
    for role, name in (("target", target), ("draft", draft)):
        if role in folders and Path(name or "").expanduser().is_dir():  # what is missing of a hub model, vLLM downloads
            yield from guarded("weights", weights, folders[role], role, config[0] if role == "draft" and config else None)
    if config:
        yield from guarded("k", pair_probes.width, config[0], k)
    if config and target_config:
        yield from guarded("match", lambda: pair_probes.match(config[0], target_facts(target_config)))
        yield from guarded("rope", pair_probes.rope, config[0], target_config)
        yield from guarded("tokenizer", pair_probes.tokenizer, config[0], folders["target"], target or "", folders["draft"])
        yield from guarded("reach", engine_probes.reach, config[0], chosen, k, target_config)
        yield from guarded("groups", engine_probes.groups, config[0], chosen, target_config)
        yield from guarded("memory", engine_probes.memory, config[0], folders["draft"], target_config, folders["target"])


def command_line(target: str, draft: str, k: int | None, options: str | None = None) -> str:
    """What to type to serve this pair here; `vllm serve` does not start in vLLM's CPU wheel."""
    given = engine_probes.parse_options(options).given()
    extra = f" --additional-config {_json({SECTION: given})}" if given else ""
    if on_cpu():
        return f"vllm-dflash serve {target} --draft {draft}{f' --k {k}' if k else ''}{extra}"
    speculation: dict[str, Any] = {"method": "dflash", "model": draft}
    if k:
        speculation["num_speculative_tokens"] = k
    return f"vllm serve {target} --speculative-config {_json(speculation)}{extra}"


def _json(value: dict[str, Any]) -> str:
    return f"'{json.dumps(value, separators=(',', ':'))}'"


def _print(console: Console, found: dict[str, str | None], machine: str, findings: list[Finding], command: str | None) -> None:
    parts = [f"{name} {version or '(not installed)'}" for name, version in found.items() if name != "python"]
    console.print(" " + " · ".join([*parts, machine]), highlight=False, markup=False)
    for finding in findings:
        sign, style = SIGNS[finding.status]
        console.print(f" {sign} {finding.name:<10}", style=style, end="", highlight=False, markup=False)
        console.print(finding.text, highlight=False, markup=False)
    if command:
        console.print(f" → {command}", style="bold", highlight=False, markup=False)
    elif all(finding.status != "fail" for finding in findings):
        console.print(" → vllm-dflash demo", style="bold", highlight=False)
