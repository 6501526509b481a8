"""The fused nodes against autograd over their formulas, and which modules get them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from langgraph_art_server.training.fused import ACTIVATIONS, Gated, RmsNorm, fuse


def noise(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def test_rms_norm() -> None:
    x, weight = noise(2, 3, 5), noise(5).detach()
    expected = weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-3)
    torch.testing.assert_close(RmsNorm.apply(x, weight, 1e-3), expected, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: RmsNorm.apply(x, weight, 1e-3), (x,))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(activation: str) -> None:
    gate, up = noise(3, 5), noise(2, 3, 5)[0].detach().requires_grad_()
    theirs = ACT2FN[{"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[activation]]
    torch.testing.assert_close(Gated.apply(gate, up, activation), theirs(gate) * up, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda gate, up: Gated.apply(gate, up, activation), (gate, up))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_recognised(kind: type[nn.Module], dtype: torch.dtype) -> None:
    module, plain = kind(8).to(dtype), kind(8).to(dtype)
    with torch.no_grad():
        module.weight.copy_(noise(8))
        plain.weight.copy_(noise(8))
    fuse(module.requires_grad_(False))
    assert "forward" in vars(module)
    x = noise(2, 8, dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(module(x), plain(x), rtol=tolerance, atol=tolerance)
    module(x).sum().backward()
    ours, x.grad = x.grad, None
    plain(x).sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=4 * tolerance, atol=4 * tolerance)


def test_unknown_variants_keep_their_own_code() -> None:
    class OddRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + 1

    class OddMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    for module in (OddRMSNorm(4), OddMLP()):
        fuse(module.requires_grad_(False))
        assert "forward" not in vars(module)
