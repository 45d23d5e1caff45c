# SPDX-License-Identifier: Apache-2.0
"""A draft with smaller weights, made while loading: e4m3 on GPUs, int8 on CPUs, one scale per output channel.

A draft only proposes, so its precision is free: verification keeps the output exact and a rounding costs acceptance at most.
On GPUs few rows go through one kernel that reads the weights once (``dflash_kernels.fp8_linear``); more rows are bound by compute
and go through vLLM's fp8 product with activations quantised per token. On CPUs both sides are int8 (oneDNN, vLLM's ops).

The linear methods derive from vLLM's unquantised one: parameters are plain while weights are loaded, so weight loaders, tensor
parallelism and vLLM's layer by layer reload work unchanged, and ``process_weights_after_loading`` packs them.
"""

from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from dflash_kernels.fp8_linear import Fp8Workspace, fp8_linear, quantise_rows
from vllm_dflash.options import read_options

_WORKSPACES: dict[torch.device, Fp8Workspace] = {}
"""One per device, never freed: captured graphs hold its addresses."""
_FUSED_ROWS = 32  # where nothing was measured: on an H200 cutlass is ahead at 64
FUSED_ROWS: dict[tuple[int, int], int] = {}
"""(N, K) of a weight -> most rows that the one-launch kernel is faster for; measured by ``variant_choice``."""


class OnlineDraftQuantization(QuantizationConfig):
    """Quantises the linear layers of a draft that was stored in 16 or 32 bits.

    Args:
        kind: "fp8" or "int8".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def get_name(self) -> str:
        """Not in vLLM's registry: only the draft's own layers see this object."""
        return f"dflash_{self.kind}"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """All that a draft runs in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The weight-only kernel needs 16-bit fused multiply-add in pairs."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the weights are not quantised yet."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OnlineDraftQuantization":
        """From ``{"kind": ...}``."""
        return cls(config["kind"])

    def get_quant_method(self, layer: nn.Module, prefix: str) -> UnquantizedLinearMethod | None:
        """For linear layers; attention keeps its KV-cache dtype."""
        if not isinstance(layer, LinearBase):
            return None
        if self.kind == "int8" and prefix == "fc":
            return UnquantizedLinearMethod()  # hidden states of the target have outliers that one int8 scale per token drowns in
        if self.kind == "int8":
            return Int8LinearMethod()
        return Fp8LinearMethod() if current_platform.is_cuda() else RoundedLinearMethod()


def online_quantization(vllm_config: Any) -> OnlineDraftQuantization | None:
    """What ``vllm_config``'s options, decided by :func:`vllm_dflash.engine.variant_choice.resolve_weights`, ask for."""
    kind = read_options(vllm_config.additional_config).draft_weights
    return OnlineDraftQuantization(kind) if kind in ("fp8", "int8") else None


class Fp8LinearMethod(UnquantizedLinearMethod):
    """e4m3 weight [N, K] and scales fp32 [N] on a GPU; 16- or 32-bit activations."""

    supports_pre_processed_weights = False  # the scales are made here

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantise ``layer.weight``; a later load restores the plain parameter first."""
        numbers, scales = quantise_rows(layer.weight.data)
        replace_parameter(layer, "weight", nn.Parameter(numbers, requires_grad=False))
        replace_parameter(layer, "weight_scale", nn.Parameter(scales, requires_grad=False))
        workspace(numbers.device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., K] -> [..., N]."""
        output: torch.Tensor = torch.ops.dflash.fp8_linear(x, layer.weight, layer.weight_scale, bias)
        return output


class RoundedLinearMethod(UnquantizedLinearMethod):
    """Weights rounded to e4m3 but stored as they were: shows on a CPU what fp8 costs in acceptance, and saves nothing."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Round ``layer.weight`` in place, then pack it as usual."""
        numbers, scales = quantise_rows(layer.weight.data)
        layer.weight.data = (numbers.float() * scales[:, None]).to(layer.weight.dtype)
        super().process_weights_after_loading(layer)


class Int8LinearMethod(UnquantizedLinearMethod):
    """int8 weights and, per token, int8 activations on a CPU, both symmetric."""

    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack ``layer.weight`` for oneDNN and free it, as vLLM does with its own."""
        weight = layer.weight.data
        scales = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        numbers = (weight.float() / scales).round().to(torch.int8)
        layer.int8_scales = scales  # the product reads them where they are, and does not keep them alive
        layer.int8_product = ops.create_onednn_scaled_mm(numbers.t(), scales, weight.dtype, True, False, 32)
        layer.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        numbers, scales, _ = ops.onednn_scaled_int8_quant(rows)
        output = torch.empty(rows.shape[0], layer.int8_product.n, dtype=x.dtype)
        ops.onednn_scaled_mm(layer.int8_product, numbers, output, scales, None, None, bias)
        return output.view(*x.shape[:-1], -1)


def workspace(device: torch.device) -> Fp8Workspace:
    """The scratch of ``fp8_linear`` on ``device``."""
    return _WORKSPACES.setdefault(device, _WORKSPACES.get(device) or Fp8Workspace(device))


def reserve_workspace(vllm_config: Any, device: torch.device) -> None:
    """Make the scratch of ``fp8_linear`` before weights are loaded.

    Sleep level 2 drops whatever is allocated while they are, and this scratch holds counters that are zero between kernels.
    """
    if device.type == "cuda" and read_options(vllm_config.additional_config).draft_weights in ("auto", "fp8"):
        workspace(device)


def fp8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` [n, K] times e4m3 ``weight`` [N, K] with ``scale`` fp32 [N]: one launch for few rows, vLLM's W8A8 for more."""
    if x.shape[0] <= FUSED_ROWS.get((weight.shape[0], weight.shape[1]), _FUSED_ROWS):
        return fp8_linear(x, weight, scale, workspace=workspace(x.device), bias=bias)
    return many_rows(x, weight, scale, bias)


def many_rows(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As :func:`fp8_product` for any number of rows; GPUs without an fp8 product widen the weight first."""
    if current_platform.is_cuda() and current_platform.has_device_capability(89) and x.dtype != torch.float32:
        numbers, scales = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
        product: torch.Tensor = ops.cutlass_scaled_mm(numbers, weight.t(), scales, scale.view(-1, 1), x.dtype, bias)
        return product
    return nn.functional.linear(x, (weight.float() * scale[:, None]).to(x.dtype), bias)


def _fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Implementation of the op; opaque to torch.compile, since the way depends on the number of rows."""
    return fp8_product(x.reshape(-1, x.shape[-1]), weight, scale, bias).view(*x.shape[:-1], -1)


def _fp8_linear_fake(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_LIBRARY = torch.library.Library("dflash", "FRAGMENT")  # type: ignore[no-untyped-call]  # must stay referenced
direct_register_custom_op("fp8_linear", _fp8_linear, fake_impl=_fp8_linear_fake, target_lib=_LIBRARY)
