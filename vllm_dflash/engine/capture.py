# SPDX-License-Identifier: Apache-2.0
"""Aux hidden states: the target's residual stream after the layers that the draft reads.

Two ways to get them:

* **Native.** About sixty of vLLM's model classes return them (``SupportsEagle3``). vLLM captures ascending and once per layer;
  the draft model rearranges ``fc`` for that at load (``draft_weights.fold_columns``). On Model Runner V2 most of these targets
  store them in the draft's buffer instead of returning them (``aux_buffer.py``).
* **Hook.** For other targets, forward hooks on the decoder layers collect the same values and the target's ``forward`` returns
  ``(hidden, [aux...])`` as the native interface does. Hooks are instance attributes: other models stay untouched. They are
  Python code that a compiled or graph-captured forward would not run, so they need eager execution.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.model_executor.models.interfaces import supports_eagle3

from vllm_dflash.draft_config import DraftConfig
from vllm_dflash.engine.pair import resolve_draft


def captured_layers(draft: DraftConfig) -> tuple[int, ...]:
    """The distinct 0-based layer outputs that the draft reads, ascending: the order in which vLLM hands them over."""
    return tuple(sorted(set(draft.target_layer_ids)))


def announce_layers(speculative_config: Any, draft: DraftConfig) -> None:
    """Tell vLLM which layers to capture.

    Both runners look for ``eagle_aux_hidden_state_layer_ids`` in the draft's config first; their other look-ups differ per
    runner (V1 does not know a top-level ``target_layer_ids``). vLLM counts inputs of layers: output i is input i + 1.
    """
    speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = [i + 1 for i in captured_layers(draft)]


def prepare_capture(target: nn.Module, vllm_config: Any) -> None:
    """What every pipeline stage does before vLLM asks which layers it captures; all but the last have read no draft yet."""
    announce_layers(vllm_config.speculative_config, resolve_draft(vllm_config))
    ensure_capture(target, vllm_config)


def ensure_capture(target: nn.Module, vllm_config: Any) -> str:
    """Make ``target`` return its aux hidden states; return how: ``"native"`` or ``"hook"``.

    Raises:
        ValueError: the target has no native interface, and hooks cannot work with this configuration or model.
    """
    if supports_eagle3(target):
        return "native"
    name = type(target).__name__
    compiled = vllm_config.compilation_config.mode != CompilationMode.NONE
    graphs = vllm_config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)
    if compiled or graphs:
        raise ValueError(
            f"enforce_eager: is off, and target {name} has no aux hidden state interface of its own, so vllm-dflash captures "
            "them with hooks, which compiled or graph-captured code does not run. Set enforce_eager=True for this target."
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size: {vllm_config.parallel_config.pipeline_parallel_size}, and target {name} has no aux hidden "
            "state interface of its own; hooks see one stage only. Use pipeline_parallel_size 1 for this target."
        )
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    HookedCapture(target, list(decoder_layers(target, num_layers)))
    return "hook"


class HookedCapture:
    """Gives a target the native interface through hooks on its decoder layers.

    ``set_aux_hidden_state_layers`` (called by the runner) decides which layers are hooked; before that, ``forward`` returns
    what it always did.
    """

    def __init__(self, target: Any, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._probe = ResidualProbe(layers)
        self._states: list[tuple[torch.Tensor, ...]] = []
        self._handles: list[Any] = []
        self._forward: Callable[..., Any] = target.forward
        target.forward = self._forward_with_states  # this instance only
        target.supports_eagle3 = True
        target.has_own_embed_tokens = getattr(target, "has_own_embed_tokens", True)
        target.has_own_lm_head = getattr(target, "has_own_lm_head", True)
        target.set_aux_hidden_state_layers = self.set_aux_hidden_state_layers
        target.get_eagle3_default_aux_hidden_state_layers = lambda: (2, len(layers) // 2, len(layers) - 3)

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Capture the inputs of ``layers``, i.e. the outputs of the layers before them; ascending, once each."""
        for handle in self._handles:
            handle.remove()
        self._handles = [self._layers[i - 1].register_forward_hook(self._collect) for i in sorted(set(layers))]

    def _collect(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        known = self._probe.adds_residual
        self._states.append(tuple(residual_stream(output, adds_residual=adds) for adds in (False, True) if known in (None, adds)))

    def _forward_with_states(self, *args: Any, **kwargs: Any) -> Any:
        self._states = []
        hidden_states = self._forward(*args, **kwargs)
        if not self._handles:
            return hidden_states
        last = self._probe.adds_residual is not False  # of both readings, taken before the probe had seen the second layer
        return hidden_states, [readings[-1 if last else 0] for readings in self._states]


class ResidualProbe:
    """Finds out whether the layers return ``(hidden, residual)`` with the residual still to be added.

    Neither the pair nor an argument ``residual`` proves it: StableLM's second output is stale, Cohere, EXAONE 4 and Phi-MoE
    take a residual and ignore it. What proves it is that the second layer hands its residual to a module, the norm that adds.
    Known after the first forward (vLLM's profile or warm-up run).

    Attributes:
        adds_residual: True, False, or None while no layer has shown it.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.adds_residual: bool | None = None
        watched = layers[min(1, len(layers) - 1)]
        self._signature = inspect.signature(type(watched).forward)
        if "residual" not in self._signature.parameters:
            self.adds_residual = False
        elif watched is not layers[0]:
            self._residual: torch.Tensor | None = None
            self._handles = [
                watched.register_forward_pre_hook(self._begin, with_kwargs=True),
                watched.register_forward_hook(self._end),
                *(m.register_forward_pre_hook(self._used, with_kwargs=True) for m in watched.modules() if m is not watched),
            ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._residual = self._signature.bind(module, *args, **kwargs).arguments.get("residual")

    def _used(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._residual is not None and any(value is self._residual for value in (*args, *kwargs.values())):
            self.adds_residual = True

    def _end(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self.adds_residual = self.adds_residual is True
        for handle in self._handles:
            handle.remove()


def residual_stream(layer_output: Any, *, adds_residual: bool) -> torch.Tensor:
    """Residual stream [n, H] after a decoder layer that returns a tensor, (tensor, ...), or (hidden, residual) to be added."""
    if adds_residual and layer_output[1] is not None:
        hidden_states, residual = layer_output
        total: torch.Tensor = hidden_states + residual
        return total
    output: torch.Tensor = layer_output if isinstance(layer_output, torch.Tensor) else layer_output[0]
    return output.clone()  # later layers may work in place


def decoder_layers(target: nn.Module, num_layers: int) -> nn.ModuleList:
    """The target's decoder stack: the outermost list of exactly ``num_layers`` layers.

    Raises:
        ValueError: there is none, or more than one at the same depth.
    """
    language_model = text_model(target)
    found = [
        (name.count("."), name, module)
        for name, module in language_model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    shallowest = [f for f in found if f[0] == min(depth for depth, _, _ in found)]
    if len(shallowest) != 1:
        names = [name for _, name, _ in shallowest] or "none"
        raise ValueError(
            f"aux hidden states: target {type(target).__name__} has no interface for them, and its stack of {num_layers} decoder "
            f"layers cannot be told (candidates: {names}). Use a target with vLLM's SupportsEagle3 interface."
        )
    return shallowest[0][2]


def text_model(target: Any) -> nn.Module:
    """The language model inside a multimodal target; the target itself otherwise."""
    inner: nn.Module = target.get_language_model() if hasattr(target, "get_language_model") else target
    return inner
