"""A linear layer with a LoRA adapter as one autograd node, in the place of PEFT's chain of five.

Invariant: values and gradients are those of ``x W^T + b + s (x A^T) B^T``. The adapter takes part rounded to the type
of ``x``, which is what the engine serves, while its gradients arrive at the float32 weights. Nothing of the size of the
output is kept for the backward pass, and the adapter's part is added in place. A W that bitsandbytes stores in 4 or 8
bits is unpacked where it is used, in both passes, and multiplied in the type of ``x``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        down = flat @ a.to(x.dtype).T * scale
        ctx.save_for_backward(flat, a, b, down)
        ctx.base, ctx.scale = base, scale
        output = nn.functional.linear(flat, unpacked(base, x.dtype), base.bias)
        return output.addmm_(down, b.to(x.dtype).T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        flat, a, b, down = ctx.saved_tensors
        slope = gradients[0].reshape(-1, gradients[0].shape[-1])
        down_slope = slope @ b.to(slope.dtype) * ctx.scale
        x_slope = None
        if ctx.needs_input_grad[0]:
            x_slope = (slope @ unpacked(ctx.base, slope.dtype)).addmm_(down_slope, a.to(slope.dtype))
            x_slope = x_slope.view(*gradients[0].shape[:-1], -1)
        return x_slope, None, (down_slope.T @ flat).to(a.dtype), (slope.T @ down).to(b.dtype), None


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Linear) -> Tensor:
        ctx.base = base
        return nn.functional.linear(x, unpacked(base, x.dtype), base.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ unpacked(ctx.base, gradients[0].dtype), None


def unpacked(base: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Returns a frozen layer's weight [out, in], from 4 or 8 bits to ``dtype`` if bitsandbytes packed it."""
    weight: Any = base.weight
    if weight.is_floating_point():
        return base.weight
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant  # optional, and slow to import

    whole: Tensor = (
        dequantize_4bit(weight.data, weight.quant_state)
        if hasattr(weight, "quant_state")
        else int8_vectorwise_dequant(weight.data, weight.SCB)
    )
    return whole.to(dtype)


def _forward(layer: LoraLayer, x: Tensor) -> Tensor:
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    output: Tensor = _LoraLinear.apply(x, layer.get_base_layer(), a, b, layer.scaling["default"])  # type: ignore[no-untyped-call]
    return output


def _packed_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    output: Tensor = _PackedLinear.apply(x, layer)  # type: ignore[no-untyped-call]
    return output


def unpack_in_use(model: nn.Module) -> None:
    """Makes packed linear layers multiply in the type of their input; bitsandbytes would round that to 8 bits too."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            module.forward = partial(_packed_forward, module)  # type: ignore[method-assign]


def fuse_lora(model: nn.Module) -> None:
    """Makes PEFT's LoRA layers in ``model`` compute as one node. They need the adapter ``default``, without dropout."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), nn.Linear):
            module.forward = partial(_forward, module)
