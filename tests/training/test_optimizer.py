"""The optimizer against PyTorch's own, its schedules against their formulas, and its state through a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.checkpoint import Checkpoint, TrainerState, read_checkpoint, write_checkpoint
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.optimizer import BETAS, EPSILON, Optimizer, learning_rate_of, schedule_factor

from .conftest import random_weights
from .tasks import LORA

LINEAR = TrainConfig(learning_rate=1e-2, schedule="linear", warmup_steps=2, schedule_steps=6, weight_decay=0.1)


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(3, 4, generator=generator)) for name in ("a", "b")}


def give_gradients(weights: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for parameter in weights.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_a_step_is_adamw_s_with_clipping_decay_and_schedule() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours, LINEAR, "p", None)
    reference = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=BETAS, eps=EPSILON, weight_decay=0.1)
    factors = [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]
    for number, factor in enumerate(factors):
        give_gradients(ours, number)
        give_gradients(theirs, number)
        metrics = optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), LINEAR.max_grad_norm)
        assert norm > LINEAR.max_grad_norm, "clipping must take part"
        reference.param_groups[0]["lr"] = 1e-2 * factor
        reference.step()
        assert metrics == {
            "grad_norm": pytest.approx(float(norm)),
            "learning_rate": pytest.approx(1e-2 * factor),
            "step": number + 1,
        }
        assert all(parameter.grad is None for parameter in ours.values()), "gradients are cleared"
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_schedules() -> None:
    def factors(**options: object) -> list[float]:
        config = TrainConfig.model_validate(options)
        return [schedule_factor(config, taken, "p") for taken in range(5)]

    assert factors() == [1.0] * 5
    assert factors(warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(schedule="linear", schedule_steps=5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = factors(schedule="cosine", schedule_steps=5, warmup_steps=1)
    assert cosine == pytest.approx([0.5] + [(1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)])
    assert min(cosine) > 0, "a step that moves nothing would be trained for nothing"


def test_a_schedule_that_has_run_out_is_an_error_not_a_step_of_nothing() -> None:
    config = TrainConfig(schedule="linear", schedule_steps=2)
    weights = parameters()
    optimizer = Optimizer(weights, config, "desk", None)
    for number in range(2):
        give_gradients(weights, number)
        optimizer.step()
    before = {name: parameter.detach().clone() for name, parameter in weights.items()}
    give_gradients(weights, 2)
    with pytest.raises(ValueError, match=r"policy desk has taken all 2 steps of its linear schedule.*raise schedule_s"):
        optimizer.step()
    assert all(torch.equal(before[name], weights[name]) for name in before)


def test_learning_rates_by_policy() -> None:
    config = TrainConfig(learning_rate={"desk": 1e-3, "clerk": 1e-5})
    assert learning_rate_of(config, "clerk") == 1e-5
    assert learning_rate_of(TrainConfig(learning_rate=2e-4), "clerk") == 2e-4
    with pytest.raises(ValueError, match="no learning rate for policy boss: learning_rate names clerk, desk only"):
        Optimizer(parameters(), config, "boss", None)
    weights = parameters()
    give_gradients(weights, 0)
    assert Optimizer(weights, config, "desk", None).step()["learning_rate"] == 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    weights = parameters()
    before = {name: parameter.detach().clone() for name, parameter in weights.items()}
    optimizer = Optimizer(weights, TrainConfig(), "desk", None)
    give_gradients(weights, 0)
    assert weights["a"].grad is not None
    weights["a"].grad[0, 0] = bad
    with pytest.raises(FloatingPointError, match="gradient of policy desk is not finite"):
        optimizer.step()
    assert all(torch.equal(before[name], weights[name]) for name in before)
    assert optimizer.state()[1] == 0


def test_through_a_checkpoint_it_goes_on_as_if_it_had_never_stopped(model: PolicyModel, tmp_path: Path) -> None:
    model.set_adapter(LORA, None)
    start = random_weights(model)
    model.set_adapter(LORA, start)
    optimizer = Optimizer(model.parameters, LINEAR, "p", None)
    for number in range(5):
        give_gradients(model.parameters, number)
        optimizer.step()
    wanted = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}

    model.set_adapter(LORA, start)
    parent: Checkpoint | None = None
    for number in range(5):
        model.set_adapter(LORA, parent.weights if parent else start)
        optimizer = Optimizer(model.parameters, LINEAR, "p", parent)
        give_gradients(model.parameters, number)
        optimizer.step()
        moments, steps = optimizer.state()
        state = TrainerState(policy="p", version=number + 1, parent=number, step=steps, lora=LORA, config=LINEAR)
        checkpoint = Checkpoint(dict(model.parameters), moments, state)
        write_checkpoint(tmp_path / str(number), checkpoint, model.adapter_config(LORA))
        parent = read_checkpoint(tmp_path / str(number))
    assert parent is not None
    assert parent.state.step == 5
    assert all(torch.equal(wanted[name], parent.weights[name]) for name in wanted)


def test_a_version_without_moments_begins_anew() -> None:
    """As supervised fine-tuning leaves it."""
    state = TrainerState(policy="p", version=3, parent=2, step=0, lora=LORA, config=LINEAR)
    ours, fresh = parameters(), parameters()
    for weights, parent in ((ours, Checkpoint({}, {}, state)), (fresh, None)):
        give_gradients(weights, 0)
        assert Optimizer(weights, LINEAR, "p", parent).step()["step"] == 1
    assert all(torch.equal(ours[name], fresh[name]) for name in ours)
