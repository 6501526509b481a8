"""The parts of the objective on tensors small enough to write down, and expectations by enumeration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.head import Sampled
from langgraph_art_server.training.objective import likelihood, reinforcement
from langgraph_art_server.training.objective.corrections import CORRECTIONS
from langgraph_art_server.training.objective.divergence import reverse_kl
from langgraph_art_server.training.objective.entries import Entries
from langgraph_art_server.training.objective.surrogates import SURROGATES


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def entries(calls: list[int], advantages: list[float], **others: Any) -> Entries:
    size = len(calls)
    return Entries(
        calls=torch.tensor(calls),
        advantages=numbers(*advantages),
        **{"weights": torch.ones(size).double(), "behaviour": numbers(*[-1.0] * size)}
        | {"teacher": numbers(*[math.nan] * size)}
        | others,
    )


def sampled(logprobs: Tensor) -> Sampled:
    return Sampled(logprobs, torch.full_like(logprobs.detach(), 0.5))


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_first_step_is_the_policy_gradient(surrogate: str) -> None:
    """Its value may be anything; its gradient is minus the advantages, whatever the behaviour logprobs."""
    given = entries([0, 0, 1], [0.5, 0.5, -2.0], weights=numbers(0.3, 0.3, 0.4))
    logprobs = numbers(-1.0, -2.0, -0.3).requires_grad_()
    loss = reinforcement(sampled(logprobs), given, TrainConfig(surrogate=surrogate))
    loss.loss.backward()
    torch.testing.assert_close(logprobs.grad, numbers(-0.15, -0.15, 0.8))
    assert "clip_low" not in loss.measures, "there is no ratio"


def test_clip_stops_only_what_goes_on_in_its_direction() -> None:
    """Ratios 0.7, 1.3, 0.7, 1.3 with limits 0.2: of a good token the high one, of a bad one the low one."""
    given = entries([0, 1, 2, 3], [1.0, 1.0, -1.0, -1.0], old=numbers(0, 0, 0, 0))
    logprobs = numbers(0.7, 1.3, 0.7, 1.3).log().requires_grad_()
    result = SURROGATES["clip"](logprobs, given, None, None)
    torch.testing.assert_close(result.loss.detach(), numbers(-0.7, -1.2, 0.8, 1.3))
    result.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, numbers(-0.7, 0.0, 0.0, 1.3))
    assert result.clipped_low is not None
    assert result.clipped_high is not None
    assert result.clipped_low.tolist() == [False, False, True, False]
    assert result.clipped_high.tolist() == [False, True, False, False]


def test_sequence_clip_has_one_ratio_for_a_call() -> None:
    """Two tokens that moved by +0.3 and -0.3: the ratio of their call is 1, though each alone would be clipped."""
    given = entries([0, 0, 1], [1.0, 1.0, 1.0], old=numbers(-1.3, -0.7, -1.0))
    logprobs = numbers(-1.0, -1.0, -0.5).requires_grad_()
    result = SURROGATES["sequence_clip"](logprobs, given, None, None)
    torch.testing.assert_close(result.loss.detach(), numbers(-1, -1, -1.0004))
    result.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, numbers(-1, -1, 0))


def test_cispo_limits_the_ratio_but_keeps_the_gradient() -> None:
    given = entries([0, 1, 2], [1.0, -1.0, 1.0], old=numbers(0, 0, 0))
    logprobs = numbers(7.0, 7.0, 0.5).log().requires_grad_()
    SURROGATES["cispo"](logprobs, given, None, None).loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, numbers(-5.0, 5.0, -0.5))


def test_corrections_by_hand() -> None:
    """Three calls with the ratios (3, 0.5), (1.5, 1.2), (1.01,)."""
    rho = numbers(3, 0.5, 1.5, 1.2, 1.01)
    given = entries([0, 0, 1, 1, 2], [1.0] * 5)
    wanted = {
        "token_truncation": ([2, 0.5, 1.5, 1.2, 1.01], [1, 0, 0, 0, 0]),
        "token_mask": ([0, 0.5, 1.5, 1.2, 1.01], [1, 0, 0, 0, 0]),
        "sequence_mask": ([1.5, 1.5, 1.8, 1.8, 1.01], [0, 0, 0, 0, 0]),
        "geometric_mask": ([0, 0, 0, 0, 1], [1, 1, 1, 1, 0]),
    }
    assert wanted.keys() == CORRECTIONS.keys()
    for name, (factors, acted) in wanted.items():
        limit = 1.011 if name == "geometric_mask" else None
        found, where = CORRECTIONS[name](rho.log(), given, limit)
        torch.testing.assert_close(found, numbers(*factors), msg=name)
        assert where.long().tolist() == acted, name
    found, _ = CORRECTIONS["sequence_mask"](rho.log(), given, 1.6)
    torch.testing.assert_close(found, numbers(1.5, 1.5, 0, 0, 1.01))
    low = numbers(0.5, 0.5).log()
    assert CORRECTIONS["geometric_mask"](low, entries([0, 0], [1.0] * 2), 1.5)[0].tolist() == [0, 0], "either side"


def test_correction_is_measured_before_the_first_step() -> None:
    """Old against behaviour, not current against behaviour."""
    given = entries([0], [1.0], behaviour=numbers(-1.0), old=numbers(-1.0 + math.log(1.5)))
    logprobs = numbers(-0.9 + math.log(1.5)).requires_grad_()
    config = TrainConfig(surrogate="reinforce", correction="token_truncation", minibatches=2)
    result = reinforcement(sampled(logprobs), given, config)
    result.loss.backward()
    torch.testing.assert_close(logprobs.grad, numbers(-1.5))
    assert result.measures["mismatch_mean"].item() == pytest.approx(math.log(1.5))


@pytest.mark.parametrize("stepped", [False, True])
def test_kl_and_its_gradient_are_unbiased(stepped: bool) -> None:
    """By enumeration over a vocabulary of five; tokens drawn from the old policy."""
    logits = numbers(0.3, -1.0, 0.7, 0.0, 2.0).requires_grad_()
    other = torch.log_softmax(numbers(1.0, 0.2, -0.5, 0.4, 0.1), -1)
    before = torch.log_softmax(numbers(0.5, -0.4, 0.2, 0.3, 1.0), -1)
    log_p = torch.log_softmax(logits, -1)
    exact = (log_p.exp() * (log_p - other)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)

    drawn_from = before.exp() if stepped else log_p.detach().exp()
    log_ratios = log_p - (before if stepped else log_p.detach())
    expected = (drawn_from * reverse_kl(log_p, other, log_ratios)).sum()
    (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    assert expected.item() == pytest.approx(exact.item(), rel=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)

    # Token for token it is the gradient of k2 with a detached ratio; k3 alone has the gradient of another function.
    k2 = log_ratios.exp().detach() * (log_p - other).square() / 2
    k3 = (other - log_p).exp() - 1 - (other - log_p)
    (as_k2,) = torch.autograd.grad((drawn_from * k2).sum(), logits, retain_graph=True)
    torch.testing.assert_close(as_k2, wanted, rtol=1e-12, atol=1e-14)
    (as_k3,) = torch.autograd.grad((drawn_from * k3).sum(), logits, retain_graph=True)
    assert (as_k3 - wanted).norm() > 0.2 * wanted.norm()


def test_distillation_is_the_policy_gradient_of_the_divergence() -> None:
    """As if ``teacher - logp`` were each token's advantage, times the coefficient; nothing where it has none."""
    given = entries([0, 1, 2], [0.0, 0.0, 0.0], teacher=numbers(-0.2, -3.0, math.nan))
    logprobs = numbers(-1.0, -1.0, -1.0).requires_grad_()
    result = reinforcement(sampled(logprobs), given, TrainConfig(teacher="large", distill=0.5))
    result.loss.backward()
    torch.testing.assert_close(logprobs.grad, -0.5 * numbers(0.8, -2.0, 0.0))
    assert result.measures["teacher_kl"].tolist() == pytest.approx([math.exp(0.8) - 1.8, math.exp(-2) + 1, 0.0])


def test_entropy_bonus_pushes_up() -> None:
    entropies = numbers(0.5, 0.7).requires_grad_()
    given = entries([0, 1], [1.0, 1.0], weights=numbers(0.25, 0.75))
    logprobs = numbers(-1.0, -1.0).requires_grad_()
    config = TrainConfig(entropy=0.1, correction="token_mask")
    reinforcement(Sampled(logprobs, entropies), given, config).loss.backward()
    torch.testing.assert_close(entropies.grad, -0.1 * numbers(0.25, 0.75))


def test_likelihood() -> None:
    logprobs = numbers(-1.0, -2.0).requires_grad_()
    result = likelihood(sampled(logprobs), entries([0, 0], [5.0, 5.0], weights=numbers(0.25, 0.75)))
    assert result.loss.item() == pytest.approx(1.75)
    result.loss.backward()
    torch.testing.assert_close(logprobs.grad, numbers(-0.25, -0.75))


def test_reference_that_is_missing() -> None:
    with pytest.raises(ValueError, match="reference's logprobs were not computed"):
        reinforcement(sampled(numbers(-1.0)), entries([0], [1.0]), TrainConfig(kl=0.1))
