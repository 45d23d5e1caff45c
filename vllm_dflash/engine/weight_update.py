# SPDX-License-Identifier: Apache-2.0
"""What a loaded draft can take as an update of its weights (RL weight sync, wake-up from a deep sleep), and what not."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from vllm_dflash.engine.draft_weights import shorten


class UpdateGuard:
    """Remembers the first load; checks later ones before they overwrite anything."""

    def __init__(self) -> None:
        self._names: frozenset[str] | None = None
        self._made_while_loading: list[str] = []

    def remember(self, names: frozenset[str], made_while_loading: Iterable[str]) -> None:
        """Called after every load; the first one counts.

        Args:
            names: tensors of the checkpoint.
            made_while_loading: those that no module had a place for until they came.
        """
        if self._names is None:
            self._names, self._made_while_loading = names, sorted(made_while_loading)

    def check(self, names: frozenset[str], parameters: Sequence[torch.Tensor], *, packed: bool = False) -> None:
        """Refuse an update that would be applied by half.

        Args:
            names: tensors of the update.
            parameters: the draft's own.
            packed: they were quantised after the first load.

        Raises:
            ValueError: some tensors only, or memory that cannot be filled.
        """
        if self._names is None:
            return
        if names != self._names:
            missing, new = (shorten(sorted(n)) or "none" for n in (self._names - names, names - self._names))
            raise ValueError(
                f"draft weight update: found {len(names)} tensors (missing: {missing}; new: {new}); expected the "
                f"{len(self._names)} of the first load in one call, since fc and the fused K/V weights are computed from whole "
                "tensors. Send the whole draft at once."
            )
        if packed or any(parameter.numel() == 0 for parameter in parameters):
            raise ValueError(
                "draft weight update: vLLM packed the weights for this platform after the first load, so load_weights alone "
                "cannot fill them. Use vLLM's reload_weights, or restart the engine."
            )
        if self._made_while_loading and any(parameter.is_meta for parameter in parameters):
            raise ValueError(
                f"draft weight update: {', '.join(self._made_while_loading)} came with the first load, and vLLM's layer by layer "
                "reload restores only what was there before it. Restart the engine with the new checkpoint."
            )


def keep_through_deep_sleep(model_config: Any) -> None:
    """Have vLLM keep the draft's own weights in host memory while the engine sleeps at level 2.

    That level drops all weights, and ``reload_weights`` brings back the target's only: the draft would go on with whatever its
    memory holds then, which no text shows, only the speed. Where the user names parameters of the draft, that is obeyed.
    """
    names = getattr(model_config, "sleep_preserve_parameter_names", None)
    if names is None or not model_config.enable_sleep_mode or any(name.startswith("draft.") for name in names):
        return
    model_config.sleep_preserve_parameter_names = [*names, "draft.*"]


def set_buffer(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """In place where there is a buffer of that shape: captured graphs hold its address."""
    current = getattr(module, name)
    if current is None or current.shape != value.shape:
        setattr(module, name, value)
    else:
        current.copy_(value)
