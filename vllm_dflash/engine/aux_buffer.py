# SPDX-License-Identifier: Apache-2.0
"""Aux hidden states in place: the target stores each captured layer in its columns of the draft's buffer.

Natively (``SupportsEagle3``) the target returns one sum per captured layer, a full graph of the target copies each to a tensor
of its own, and the draft sets them side by side: each value is written, then read and written twice more. Here the one method
that collects the sums, ``EagleModelMixin._maybe_add_hidden_state``, is replaced on this target alone: it stores the sum where
the draft's ``fc`` reads it, and the target returns an empty list. One write per value remains.

The store is plain torch, no operator of our own, because of what compiles it. Inductor computes ``hidden + residual`` in the
kernel of the next layer's norm already, and the store joins that kernel: no launch, no read. A custom op is opaque to it: one
launch more per layer, and both operands are read again. CUDA graphs of every mode replay the store at the buffer's one address.
Eager targets store with one kernel per layer.

Shape of an 8B model (5 layers of 4096 values in bf16, 41 kB per row), at 4.3 TB/s: at one request (16 rows, a full graph) 6
launches less, some 8 us of a step of 5 ms; at 128 requests (2,048 rows, no full graph) 168 MB less, 39 us. Predicted, not
measured.

What may stand in rows that no request owns: the target's padding rows, NaN included. All that reads them works row by row and
their slots are padding.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models import interfaces

from vllm_dflash.draft_config import DraftConfig
from vllm_dflash.engine.capture import captured_layers, text_model

_COLLECT = "_maybe_add_hidden_state"
_COMPILE_KEY = "vllm_dflash_aux"


def why_not_in_place(target: nn.Module, vllm_config: VllmConfig, draft: DraftConfig) -> str | None:
    """None where ``target`` can store its aux hidden states itself, else the reason for staying with its list."""
    parallel = vllm_config.parallel_config
    holder = _holder(target)
    layers = captured_layers(draft)
    size = vllm_config.scheduler_config.max_num_batched_tokens * len(layers) * draft.target_hidden_size
    reasons = {
        f"target {type(target).__name__} collects them its own way": holder is target or not _collects_by_method(holder),
        "the target captures other layers": getattr(holder, "aux_hidden_state_layers", ()) != tuple(i + 1 for i in layers),
        "pipeline stages hand them on": parallel.pipeline_parallel_size > 1,
        "a step is split over ranks": parallel.prefill_context_parallel_size > 1 or parallel.use_sequence_parallel_moe,
        "a step is split into microbatches": parallel.use_ubatching,
        "torch.compile may not assume a bound on rows": _unbounded_rows(vllm_config),
        f"a buffer of {size} values needs more than 32-bit indices": size >= 1 << 31,
        "additional_config is no dict": not isinstance(vllm_config.additional_config, dict),
        "fc of the draft is quantised": vllm_config.speculative_config.draft_model_config.quantization is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def store_in_place(target: Any, vllm_config: VllmConfig, buffer: torch.Tensor) -> None:
    """Make ``target`` store its aux hidden states in ``buffer`` and return an empty list of them.

    Call after the runner has set the layers and before the first forward.

    Args:
        target: a target that :func:`why_not_in_place` has nothing against.
        vllm_config: the engine's; its compile-cache key changes, as compiled graphs with and without the store differ.
        buffer: float [max_num_tokens, A * H_target]; block a holds the a-th captured layer, ascending. Its address is kept.
    """
    holder: Any = _holder(target)
    holder.dflash_aux = buffer  # not a registered buffer: sleep mode and weight transfer would move it
    setattr(holder, _COLLECT, types.MethodType(_store, holder))
    target.forward = _with_empty_list(target.forward)
    vllm_config.additional_config[_COMPILE_KEY] = "in place"


def _store(
    self: Any, states: list[torch.Tensor], layer_idx: int, hidden_states: torch.Tensor, residual: torch.Tensor | None
) -> list[torch.Tensor]:
    """In the place of ``EagleModelMixin._maybe_add_hidden_state``; torch.compile traces it as part of the target's forward."""
    layers = self.aux_hidden_state_layers
    if layer_idx in layers:
        buffer = self.dflash_aux
        width = buffer.shape[1] // len(layers)
        # A strided view, not a slice: Inductor always mutates the former in place, while several slices written in one graph
        # become selects over the whole buffer (torch._inductor.fx_passes.reinplace.scatter_always_uses_mutation).
        rows = hidden_states.shape[0]
        columns = torch.as_strided(buffer, (rows, width), (buffer.shape[1], 1), layers.index(layer_idx) * width)
        if residual is None:
            columns.copy_(hidden_states)
        elif torch.compiler.is_compiling():
            columns.copy_(hidden_states + residual)
        else:
            torch.add(hidden_states, residual, out=columns)
    return states


def _with_empty_list(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What the runner unpacks, ``(hidden, list)``, around a forward whose list has stayed empty."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return output if isinstance(output, tuple) else (output, [])

    return wrapped


def _holder(target: Any) -> nn.Module:
    """The module that runs the decoder layers; found as ``SupportsEagle3.set_aux_hidden_state_layers`` finds it."""
    inner = target.language_model if hasattr(target, "language_model") and not hasattr(target, "get_language_model") else target
    inner = text_model(inner)
    holder: nn.Module = getattr(inner, "model", inner)
    return holder


def _collects_by_method(holder: nn.Module) -> bool:
    """Whether every state passes through the method that is replaced: a few model classes append to the list themselves."""
    own = getattr(type(holder), _COLLECT, None)
    mixin = getattr(interfaces, "EagleModelMixin", None)
    forward = inspect.unwrap(type(holder).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return own is not None and own is getattr(mixin, _COLLECT, None) and _COLLECT in names


def _unbounded_rows(vllm_config: VllmConfig) -> bool:
    shapes = getattr(vllm_config.compilation_config, "dynamic_shapes_config", None)
    return shapes is not None and str(shapes.type.value) == "unbacked"
