# SPDX-License-Identifier: Apache-2.0
"""What the engine would do with a pair, as far as config files tell: options, reach, KV-cache groups, memory."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint import DraftConfig
from vllm_dflash.cli.probes import Finding
from vllm_dflash.cli.weight_probe import weight_bytes
from vllm_dflash.context_limits import longest_context, windowed
from vllm_dflash.options import SECTION, OptionsError, PluginOptions, read_options

BYTES_PER_VALUE = 2  # bfloat16, vLLM's default for KV and weights of such checkpoints
STEP_TOKENS = 8192  # vLLM's default max_num_batched_tokens on large GPUs: rows of the aux buffer
MANY_GROUPS = 12


def parse_options(text: str | None) -> PluginOptions:
    """Options from the JSON that stands in ``additional_config["vllm_dflash"]``.

    Raises:
        OptionsError: not JSON, an unknown name, or a value out of its range.
    """
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise OptionsError(f'--options: not JSON ({error}); expected an object such as {{"draft_window": 4096}}.') from error
    if isinstance(given, dict) and set(given) == {SECTION}:  # the whole additional_config was pasted
        given = given[SECTION]
    return read_options({SECTION: given})


def options(text: str | None, chosen: list[PluginOptions]) -> Iterable[Finding]:
    """The options that differ from their defaults; the parsed ones are left in `chosen`."""
    chosen.append(parse_options(text))
    given = chosen[0].given()
    shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in given.items())
    yield Finding("options", "ok", shown or "all at their defaults", {"given": given})


def reach(draft: DraftConfig, chosen: PluginOptions, k: int | None, target_config: dict[str, Any]) -> Iterable[Finding]:
    """How far back the draft looks, and up to which context it drafts."""
    length = target_config.get("max_position_embeddings")
    longest_target = length if isinstance(length, int) else 1 << 30
    most = draft.max_num_speculative_tokens
    limit = longest_context(draft, min(max(k or most, 1), most), longest_target, chosen.draft_max_context)
    data = {"longest_context": limit, "target_length": length, "draft_window": chosen.draft_window}
    if chosen.draft_window is not None:
        narrowed = [layer for layer in windowed(draft, chosen, _layer_count(target_config)).layers if layer.window is not None]
        frees = all(layer.frees for layer in narrowed)
        yield Finding(
            "window",
            "ok",
            f"draft layers look back at most {max(layer.window or 0 for layer in narrowed)} tokens; KV blocks behind are "
            f"{'freed' if frees else 'kept, as freeing them would split the KV cache of the target into too many groups'}",
        )
    if limit is None:
        yield Finding("reach", "ok", "drafts for every context that the target takes", data)
    else:
        text = f"drafts for contexts up to {limit} tokens; longer requests go on without drafts, as long as the target allows"
        yield Finding("reach", "ok" if chosen.draft_max_context is not None else "warn", text, data)


def _layer_count(target_config: dict[str, Any]) -> int:
    found = target_config.get("num_hidden_layers")
    return found if isinstance(found, int) else 0


def _target_kinds(target_config: dict[str, Any]) -> Counter[tuple[Any, ...]]:
    """Layers of the target by kind of cache: (kind, window, KV heads, head size)."""
    heads = target_config.get("num_attention_heads") or 1
    kv_heads = target_config.get("num_key_value_heads") or heads
    head_dim = target_config.get("head_dim") or (target_config.get("hidden_size") or 0) // heads
    types = target_config.get("layer_types")
    if not isinstance(types, list):
        types = ["full_attention"] * _layer_count(target_config)
    window = target_config.get("sliding_window")
    kinds: Counter[tuple[Any, ...]] = Counter()
    for kind in types:
        if kind == "full_attention":
            kinds["full", None, kv_heads, head_dim] += 1
        elif "attention" in str(kind) and "linear" not in str(kind):
            kinds["window", window, kv_heads, head_dim] += 1
        else:
            kinds["state", None, 0, 0] += 1
    return kinds


def count_groups(kinds: Counter[tuple[Any, ...]]) -> int:
    """KV-cache groups that vLLM makes of layers of these kinds: equally many layers each, cut to the rarest kind's number."""
    if len({kind[0] for kind in kinds}) <= 1:
        return 1
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < 1.5 * fewest else fewest
    return sum(-(-count // size) for count in kinds.values())


def groups(draft: DraftConfig, chosen: PluginOptions, target_config: dict[str, Any]) -> Iterable[Finding]:
    """KV-cache groups with and without the draft; each costs host time in every step."""
    kinds = _target_kinds(target_config)
    before = count_groups(kinds)
    for layer in windowed(draft, chosen, _layer_count(target_config)).layers:
        windows = layer.window is not None and layer.frees
        kinds["window" if windows else "full", layer.window if windows else None, draft.num_kv_heads, draft.head_dim] += 1
    after = count_groups(kinds)
    data = {"with_draft": after, "without_draft": before}
    if after > max(MANY_GROUPS, 2 * before):
        text = (
            f"about {after} KV-cache groups with the draft, {before} without, which costs host time in every step: the draft "
            "shares no group with the target. A draft with the target's KV heads, head size and windows would."
        )
        yield Finding("groups", "warn", text, data)
    else:
        yield Finding("groups", "ok", f"about {after} KV-cache group(s) with the draft, {before} without", data)


def memory(draft: DraftConfig, draft_folder: Path, target_config: dict[str, Any], target_folder: Path) -> Iterable[Finding]:
    """Weights on disk, KV cache per token, and what the draft step holds besides."""
    kinds = _target_kinds(target_config)
    target_kv = sum(2 * count * kind[2] * kind[3] * BYTES_PER_VALUE for kind, count in kinds.items())
    draft_kv = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * BYTES_PER_VALUE
    target_weights, draft_weights = weight_bytes(target_folder), weight_bytes(draft_folder)
    buffers = STEP_TOKENS * draft.target_hidden_size * len(set(draft.target_layer_ids)) * BYTES_PER_VALUE
    data = {
        "target_weight_bytes": target_weights,
        "draft_weight_bytes": draft_weights,
        "target_kv_bytes_per_token": target_kv,
        "draft_kv_bytes_per_token": draft_kv,
        "buffer_bytes": buffers,
    }
    text = (
        f"weights {_size(target_weights)} + {_size(draft_weights)}, KV cache {target_kv / 1024:.1f} + {draft_kv / 1024:.1f} KiB "
        f"per token (target + draft), buffers up to {_size(buffers)} for steps of {STEP_TOKENS} tokens"
    )
    yield Finding("memory", "ok", text, data)


def _size(size: int | None) -> str:
    return "unknown (not downloaded)" if size is None else f"{size / 1e9:.2f} GB"
