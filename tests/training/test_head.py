"""The head's hand-written gradient against autograd over full logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from langgraph_art_server.training import head as head_module
from langgraph_art_server.training.head import read_sampled
from langgraph_art_server.training.tree import Pack, TreeCall, build_tree

CALLS = [
    TreeCall([1, 2], [3, 4, 5], [-1.0] * 3, 1.0, 0.3),
    TreeCall([1, 2], [3, 4, 5], [-1.0] * 3, 1.0, -0.1),
    TreeCall([1, 2], [3, 9], [-1.0] * 2, 0.5, 0.7),
    TreeCall([1, 2], [7, 9], [-1.0] * 2, 1.0, 0.7),
    TreeCall([1, 2, 3, 4, 6], [9], [-1.0], 1.5, -0.9),
]


def by_autograd(hidden: Tensor, head: nn.Linear, pack: Pack) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(head(hidden)[pack.row_nodes] / pack.row_temperatures[:, None], -1)
    logprobs = log_p[pack.target_rows, pack.target_tokens][pack.entry_targets]
    entropies = -(log_p.exp() * log_p).sum(-1)[pack.target_rows[pack.entry_targets]]
    return logprobs, entropies


def any_objective(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """Neither linear nor a sum over tokens: any function will do."""
    return torch.exp(logprobs.mean()) * logprobs.sum() + (logprobs * entropies).sum() - entropies.square().sum()


@pytest.mark.parametrize("chunk_rows", [1, 3, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_any_objective_by_autograd_over_full_logits(chunk_rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    pack = build_tree(CALLS)
    head = nn.Linear(8, 12, bias=bias).double().requires_grad_(False)
    hidden = torch.randn(len(pack), 8, generator=generator, dtype=torch.float64).requires_grad_()
    expected = by_autograd(hidden, head, pack)
    (wanted,) = torch.autograd.grad(any_objective(*expected), hidden)

    sampled = read_sampled(hidden, head, pack, entropy_gradient=True, chunk_rows=chunk_rows)
    torch.testing.assert_close(sampled.logprobs, expected[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(sampled.entropies, expected[1], rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(any_objective(sampled.logprobs, sampled.entropies), hidden)
    torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-13)

    plain = read_sampled(hidden.detach(), head, pack, chunk_rows=chunk_rows)
    assert torch.equal(plain.logprobs, sampled.logprobs)
    assert not plain.logprobs.requires_grad


def test_entropies_in_the_loss_must_be_announced() -> None:
    pack = build_tree(CALLS)
    head = nn.Linear(8, 12).requires_grad_(False)
    sampled = read_sampled(torch.ones(len(pack), 8, requires_grad=True), head, pack)
    with pytest.raises(RuntimeError, match="computed without entropy_gradient"):
        sampled.entropies.sum().backward()


def test_never_more_logits_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    product = head_module._product

    def watch(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        result = product(left, right, dtype)
        sizes.append(tuple(result.shape))
        return result

    monkeypatch.setattr(head_module, "_product", watch)
    calls = [TreeCall([1, 2], [3, 4, index], [-1.0] * 3, 1.0, 0.1) for index in range(9)]
    pack = build_tree([*calls, TreeCall([7] * 300, [8], [-1.0], 1.0, 0.1)])
    head = nn.Linear(8, 12).requires_grad_(False)
    hidden = torch.ones(len(pack), 8, requires_grad=True)
    read_sampled(hidden, head, pack, chunk_rows=2).logprobs.sum().backward()
    # Four rows: after [1, 2], after 3, after 4, after the 300. Two products each, logits and expected embedding.
    assert sizes == [(2, 12), (2, 8)] * 2


def test_sixteen_bits_keep_the_small_gradient_of_a_likely_token() -> None:
    """With p = 0.9997 a sum over all embeddings, rounded to 16 bits, would drown the gradient."""
    generator = torch.Generator().manual_seed(3)
    pack = build_tree([TreeCall([1], [3], [-1.0], 1.0, 1.0)])
    weight = torch.randn(12, 8, generator=generator).bfloat16()
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        head = nn.Linear(8, 12, bias=False).requires_grad_(False)
        head.weight.data = weight.to(dtype)
        hidden = (weight[3:4] * 0.8).to(dtype).requires_grad_()
        sampled = read_sampled(hidden, head, pack)
        sampled.logprobs.sum().backward()
        gradients.append(hidden.grad.double())
    assert -1e-2 < float(sampled.logprobs[0]) < -1e-5
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()
