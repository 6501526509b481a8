"""A linear layer with a LoRA adapter as one autograd node, in the place of PEFT's chain of five.

Invariant: values and gradients are those of ``x W^T + b + s (x A^T) B^T``. The adapter takes part rounded to the type
of ``x``, which is what the engine serves, while its gradients arrive at the float32 weights. Nothing of the size of the
output is kept for the backward pass, and the adapter's part is added in place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        down = flat @ a.to(x.dtype).T * scale
        ctx.save_for_backward(flat, weight, a, b, down)
        ctx.scale = scale
        return nn.functional.linear(flat, weight, bias).addmm_(down, b.to(x.dtype).T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        flat, weight, a, b, down = ctx.saved_tensors
        slope = gradients[0].reshape(-1, gradients[0].shape[-1])
        down_slope = slope @ b.to(slope.dtype) * ctx.scale
        x_slope = None
        if ctx.needs_input_grad[0]:
            x_slope = (slope @ weight).addmm_(down_slope, a.to(slope.dtype)).view(*gradients[0].shape[:-1], -1)
        return x_slope, None, None, (down_slope.T @ flat).to(a.dtype), (slope.T @ down).to(b.dtype), None


def _forward(layer: Linear, x: Tensor) -> Tensor:
    base = layer.get_base_layer()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    output: Tensor = _LoraLinear.apply(x, base.weight, base.bias, a, b, layer.scaling["default"])  # type: ignore[no-untyped-call]
    return output


def fuse_lora(model: nn.Module) -> None:
    """Makes PEFT's LoRA layers in ``model`` compute as one node. They need the adapter ``default``, without dropout."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]
