"""The plan of passes from free memory."""

from __future__ import annotations

import pytest
import torch

from langgraph_art_server.training.memory import (
    COMFORTABLE,
    LARGEST,
    SMALLEST,
    free_memory,
    is_out_of_memory,
    plan_passes,
    release_memory,
)
from langgraph_art_server.training.model import PolicyModel


def test_more_memory_more_tokens_and_nothing_computed_twice(model: PolicyModel) -> None:
    plans = [plan_passes(model, 2**bits) for bits in range(16, 36)]
    budgets = [budget for budget, _ in plans]
    again = [checkpointing for _, checkpointing in plans]
    assert again == sorted(again, reverse=True)
    assert again[0]
    assert not again[-1]
    for checkpointing in (True, False):
        own = [budget for budget, twice in plans if twice == checkpointing]
        assert own == sorted(own)
    assert budgets[0] == SMALLEST
    assert budgets[-1] == LARGEST
    assert all(budget >= COMFORTABLE for budget, checkpointing in plans if not checkpointing)


def test_given_budget_is_kept(model: PolicyModel) -> None:
    assert plan_passes(model, 2**35, 777) == (777, False)
    assert plan_passes(model, 2**20, 777) == (777, True)


def test_free_memory_of_this_machine() -> None:
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50
    release_memory(torch.device("cpu"))


def test_running_out_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
