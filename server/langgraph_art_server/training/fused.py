"""RMS norms and gated activations as one autograd node each, in the place of the chains that ``transformers`` builds.

Invariant: a module gets a node only if the node reproduces what the module itself computes on random input, so an
unknown or odd variant keeps its own code. The nodes keep their inputs and no intermediate results, and compute in the
type of the input or float32, whichever is wider; ``transformers`` rounds to float32 inside its norms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_PROBE_ROWS = 4


class RmsNorm(torch.autograd.Function):
    """``y = w x / sqrt(mean(x^2) + eps)`` over the last dimension (https://arxiv.org/abs/1910.07467), ``w`` frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x`` is [..., dim], ``weight`` [dim]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normed: Tensor = (wide * inverse).mul_(weight).to(x.dtype)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """With ``g`` the gradient of ``y`` and ``s = 1 / sqrt(...)``: ``s (w g - x s^2 mean(w g x))``."""
        x, weight, inverse = ctx.saved_tensors
        wide = x.to(inverse.dtype)
        slope = gradients[0].to(inverse.dtype) * weight
        along = (slope * wide).sum(-1, keepdim=True).mul_(inverse.square()).div_(x.shape[-1])
        return slope.addcmul_(wide, along, value=-1).mul_(inverse).to(x.dtype), None, None


class Gated(torch.autograd.Function):
    """``act(gate) * up``: SwiGLU and GeGLU (https://arxiv.org/abs/2002.05202) without their linear layers."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """``gate`` and ``up`` are [..., dim]; ``activation`` is a key of :data:`ACTIVATIONS`."""
        ctx.save_for_backward(gate, up)
        ctx.activation = ACTIVATIONS[activation]
        gated: Tensor = ctx.activation[0](gate).mul_(up)
        return gated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """``(g up act'(gate), g act(gate))``."""
        gate, up = ctx.saved_tensors
        activate, activate_backward = ctx.activation
        return activate_backward(gradients[0] * up, gate), activate(gate).mul_(gradients[0]), None


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (functional.silu, torch.ops.aten.silu_backward),
    "gelu": (functional.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (
        partial(functional.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
}
"""Activations by name, each with its gradient as a function of (gradient of the output, input)."""


def fuse(model: nn.Module) -> None:
    """Gives the norms and gated MLPs in ``model`` their nodes, where these reproduce them; weights must be frozen."""
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                _fuse_norm(module)
            elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
                _fuse_gate(module)


def _fuse_norm(module: Any) -> None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return
    x = _noise(weight, len(weight))
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for factor in (weight, 1 + wide):  # Gemma keeps the difference to 1
        if _agree(RmsNorm.apply(x, factor, eps), module(x)):  # type: ignore[no-untyped-call]
            module.forward = partial(_norm, factor, eps)
            return


def _norm(weight: Tensor, eps: float, x: Tensor) -> Tensor:
    output: Tensor = RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return output


def _fuse_gate(module: Any) -> None:
    x = _noise(next(module.parameters()), module.gate_proj.in_features)
    for activation in ACTIVATIONS:
        forward = partial(_gated_mlp, module, activation)
        if _agree(forward(x), module(x)):
            module.forward = forward
            return


def _gated_mlp(module: Any, activation: str, x: Tensor) -> Tensor:
    hidden = Gated.apply(module.gate_proj(x), module.up_proj(x), activation)  # type: ignore[no-untyped-call]
    output: Tensor = module.down_proj(hidden)
    return output


def _noise(like: Tensor, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # on the CPU, and without touching the global state
    x = torch.randn(1, _PROBE_ROWS, size, generator=generator)
    return x.to(like.device, like.dtype if like.is_floating_point() else torch.float32)


def _agree(actual: Tensor, expected: Tensor) -> bool:
    tolerance = 2e-2 if actual.dtype in (torch.bfloat16, torch.float16) else 1e-5
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
