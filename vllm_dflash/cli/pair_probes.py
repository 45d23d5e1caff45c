# SPDX-License-Identifier: Apache-2.0
"""Facts about a draft and its target for `doctor`, from their config files; weights are only weighed, never loaded."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint import DraftConfig, TargetFacts, check_pair, claims_architectures
from vllm_dflash.cli.models import checked_k, hub_file, read_json
from vllm_dflash.cli.probes import Finding


def draft_read(draft: DraftConfig) -> Iterable[Finding]:
    """How the draft's config was understood."""
    layers = " ".join(map(str, draft.target_layer_ids))
    text = (
        f"DFlash ({draft.dialect} config), {draft.num_layers} layers, block {draft.draft_block_size}, mask token "
        f"{draft.mask_token_id}, target layers {layers}, {attention_summary(draft)}"
    )
    yield Finding("draft", "ok", text, {"dialect": draft.dialect, "target_layer_ids": list(draft.target_layer_ids)})
    if not claims_architectures([draft.architecture]):
        yield Finding(
            "draft", "warn", f"{draft.architecture} is not a plain DFlash draft: vLLM's own implementation will run it."
        )
    for note in draft.notes:
        yield Finding("draft", "warn", f"{note}. State it in the draft's config.json if that is wrong.")


def attention_summary(draft: DraftConfig) -> str:
    """Causality and windows, for example `4 non-causal, 1 causal with window 2048`."""
    counts: dict[str, int] = {}
    for layer in draft.layers:
        kind = "causal" if layer.causal else "non-causal"
        kind += f" with window {layer.window}" if layer.window else ""
        counts[kind] = counts.get(kind, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def match(draft: DraftConfig, target: TargetFacts) -> Iterable[Finding]:
    """Whether the draft was made for this target."""
    check_pair(draft, target)
    yield Finding(
        "match",
        "ok",
        f"hidden {draft.target_hidden_size} = {target.hidden_size} · vocab {draft.vocab_size} <= {target.vocab_size} · "
        f"layer ids below {target.num_layers}",
    )


def width(draft: DraftConfig, k: int | None) -> Iterable[Finding]:
    """Whether K is one that the draft was trained for."""
    found, limit = checked_k(draft, k), draft.max_num_speculative_tokens
    text = f"{found} drafts per step, as trained" if found == limit else f"{found} of at most {limit} drafts per step"
    yield Finding("k", "ok", text, {"k": found})


def rope(draft: DraftConfig, target_config: dict[str, Any]) -> Iterable[Finding]:
    """A draft may rotate differently from its target, but a different theta is more often a lost config key."""
    nested = target_config.get("rope_parameters") or target_config.get("rope_scaling") or {}
    theta = target_config.get("rope_theta", nested.get("rope_theta") if isinstance(nested, dict) else None)
    if isinstance(theta, (int, float)) and float(theta) != draft.rope.theta:
        text = f"rope_theta {draft.rope.theta:g}, the target's is {theta:g}: right only if the draft was trained so."
        yield Finding("rope", "warn", text)
    else:
        yield Finding("rope", "ok", f"theta {draft.rope.theta:g}, {draft.rope.parameters['rope_type']}")


def tokenizer(draft: DraftConfig, target_folder: Path, target: str, draft_folder: Path) -> Iterable[Finding]:
    """The mask token should be one that text never contains, and the draft's own tokenizer, if any, the target's."""
    path = hub_file(target_folder, target, "tokenizer.json")
    if path is None:
        yield Finding("tokenizer", "warn", "the target has no tokenizer.json: mask token not checked")
        return
    content = read_json(path, "tokenizer of the target")
    vocabulary = _vocabulary(content)
    special = {token["id"] for token in content.get("added_tokens", []) if token.get("special")}
    name = vocabulary.get(draft.mask_token_id)
    if name is not None and draft.mask_token_id not in special:
        yield Finding(
            "tokenizer", "warn", f"mask token {draft.mask_token_id} is the ordinary token {name!r}: was the draft trained so?"
        )
    else:
        yield Finding("tokenizer", "ok", f"mask token {draft.mask_token_id} is {name or 'beyond the tokenizer: never in a text'}")
    own = draft_folder / "tokenizer.json"
    if own.is_file() and _vocabulary(read_json(own, "tokenizer of the draft")) != vocabulary:
        text = "the draft's tokenizer differs from the target's: it was trained for another model. Use a draft for this target."
        yield Finding("tokenizer", "fail", text)


def _vocabulary(content: dict[str, Any]) -> dict[int, str]:
    vocabulary = content.get("model", {}).get("vocab", {})
    listed = (
        enumerate(entry[0] for entry in vocabulary) if isinstance(vocabulary, list) else ((i, t) for t, i in vocabulary.items())
    )
    return dict(listed) | {token["id"]: token["content"] for token in content.get("added_tokens", [])}
