# SPDX-License-Identifier: Apache-2.0
"""From what a user typed (a folder or a name on the hub) to a pair that is known to fit, before anything heavy is loaded."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_dflash.checkpoint import DraftConfig, TargetFacts, check_pair, check_width, read_draft_config
from vllm_dflash.cli.failure import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft that fit; `target` and `draft` are what vLLM is given, `k` the drafts per step."""

    target: str
    draft: str
    target_config: dict[str, Any]
    draft_config: DraftConfig
    k: int

    @property
    def local(self) -> bool:
        """Whether both are folders, so that no hub has to be asked."""
        return Path(self.target).is_dir() and Path(self.draft).is_dir()


def checked_pair(target: str, draft: str, k: int | None = None) -> Pair:
    """Read both configs and check them against each other and against K.

    Raises:
        UserError: a model cannot be found or its config cannot be read.
        CheckpointError: the draft is unreadable, made for another target, or K is larger than it was trained for.
    """
    target_config = read_target_config(locate(target, "target"))
    draft_config = read_draft_config(locate(draft, "draft"))
    check_pair(draft_config, target_facts(target_config))
    return Pair(target, draft, target_config, draft_config, checked_k(draft_config, k))


def checked_k(draft: DraftConfig, k: int | None) -> int:
    """K as asked for, or as the draft was trained for.

    Raises:
        UserError: K is less than one.
        CheckpointError: K is larger than the draft was trained for.
    """
    if k is not None and k < 1:
        raise UserError(f"--k: found {k}; expected at least 1. Leave it out for the draft's own value.")
    k = k or draft.max_num_speculative_tokens
    check_width(draft, k)
    return k


def locate(name: str, role: str) -> Path:
    """The folder with the config files of `name`: itself, or a snapshot from the hub's cache (downloaded where needed).

    Raises:
        UserError: there is no such folder, or the hub does not give it.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or folder.exists():
        what = "is a file" if folder.is_file() else "no such folder"
        raise UserError(f"{role} {name!r}: {what}. Give a folder with a checkpoint, or a name on the hub like owner/model.")
    return _from_hub(name, role)


def _from_hub(name: str, role: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json")).parent
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{role} {name!r}: no such folder here, and the hub does not give it ({type(error).__name__}: {reason}) Check the "
            "name and the network, or unset HF_HUB_OFFLINE."
        ) from error


def hub_file(folder: Path, name: str, file: str) -> Path | None:
    """Another file of a located checkpoint; None where it does not exist or cannot be had."""
    if (folder / file).is_file():
        return folder / file
    if Path(name).expanduser().is_dir():
        return None
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, file))
    except Exception:  # noqa: BLE001 - optional information: its absence is an answer
        return None


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UserError: no such file, not JSON, or not an object.
    """
    if not path.is_file():
        raise UserError(f"{what} {str(path.parent)!r}: the folder has no {path.name}. Give a folder with a checkpoint.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{what} {str(path)!r} is not JSON ({error}). Download the checkpoint again.") from error
    if not isinstance(found, dict):
        raise UserError(
            f"{what} {str(path)!r} holds a {type(found).__name__}; expected an object. Download the checkpoint again."
        )
    return found


def read_target_config(folder: Path) -> dict[str, Any]:
    """The target's language-model config: `text_config` of a multimodal one laid over the rest."""
    config = read_json(folder / "config.json", "target")
    if not is_draft(config):
        nested = config.get("text_config")
        return config | nested if isinstance(nested, dict) else config
    raise UserError(f"target {str(folder)!r} is a DFlash draft; expected the model to be accelerated. Swap target and draft?")


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a DFlash draft rather than a model that can answer by itself."""
    names = config.get("architectures")
    named = isinstance(names, list) and any("DFlash" in str(name) for name in names)
    return named or "dflash_config" in config or "transformer_layer_config" in config


def target_facts(config: Mapping[str, Any]) -> TargetFacts:
    """What a draft must agree with.

    Raises:
        UserError: the target's config lacks one of the three numbers.
    """
    wanted = {"hidden_size": ("hidden_size", "n_embd"), "layers": ("num_hidden_layers", "n_layer"), "vocabulary": ("vocab_size",)}
    found = {what: next((config[n] for n in names if isinstance(config.get(n), int)), None) for what, names in wanted.items()}
    for what, value in found.items():
        if value is None or value < 1:
            key = wanted[what][0]
            raise UserError(
                f"{key}: missing from the target's config.json; expected a positive integer. Is this a language model?"
            )
    return TargetFacts(*(int(value or 0) for value in found.values()))


def chosen_names(target: str | None, draft: str | None, console: Console) -> tuple[str, str]:
    """Target and draft as given, or the demo pair where neither is.

    Raises:
        UserError: only one of the two was given, or the demo pair cannot be prepared.
    """
    if target is None and draft is None:
        return prepared_demo_pair(console)
    if target is None or draft is None:
        missing = "--target" if target is None else "--draft"
        raise UserError(
            f"{missing} is missing: give a target and the draft that was trained for it, or neither for the demo pair."
        )
    return target, draft


def prepared_demo_pair(console: Console) -> tuple[str, str]:
    """Prepare the demo pair with a progress bar; instant when it is cached."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from vllm_dflash.demo_pair.prepare import DemoPairError, prepare

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing the demo pair", total=1.0)
        try:
            pair = prepare(progress=lambda text, done: bar.update(task, description=text, completed=done))
        except DemoPairError as error:
            raise UserError(str(error)) from error
    return str(pair.target), str(pair.draft)
