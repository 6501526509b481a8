"""Garbage in a task: counted, never a crash, and what is good beside it trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.checkpoint import read_checkpoint
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.plan import plan_update
from langgraph_art_server.training.step import run_task
from langgraph_art_server.training.task import TaskCall, TaskGroup, TaskRun, Trained, TrainTask

from .conftest import VOCABULARY
from .tasks import call, policy_task, train_task

# Random garbage takes its time.
pytestmark = pytest.mark.slow

numbers = st.floats(width=32) | st.sampled_from([0.0, -1.0, 1e30])
token_ids = st.lists(st.integers(-2, 12) | st.sampled_from([10**12, -(10**30)]), max_size=4)
garbage_call = st.builds(
    TaskCall,
    call_id=st.just("c"),
    node=st.sampled_from(["plan", "plan|model", "write", ""]),
    prompt_ids=token_ids,
    sampled_ids=token_ids,
    logprobs=st.lists(numbers, max_size=4),
    temperature=numbers,
    version=st.integers(0, 3),
    teacher_logprobs=st.none() | st.lists(numbers, max_size=4),
)
good_call = st.builds(
    lambda node, tokens: call([1], tokens, node=node),
    st.sampled_from(["plan", "plan|model", "write", ""]),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
rewards = st.sampled_from([0.0, 0.1, 0.1 + 0.2, 1.0, -3.0, 1e12])
garbage_run = st.builds(
    TaskRun,
    run_id=st.uuids().map(str),
    reward=rewards,
    node_rewards=st.dictionaries(st.sampled_from(["plan", "write", "nowhere"]), rewards, max_size=3),
    nodes=st.lists(st.sampled_from(["plan", "write"]), max_size=2),
    calls=st.lists(garbage_call | good_call, max_size=3),
)
garbage_group = st.builds(TaskGroup, group_id=st.just("g"), runs=st.lists(garbage_run, max_size=4))
options = st.fixed_dictionaries(
    {
        "scale": st.sampled_from(["none", "group", "batch"]),
        "weight": st.sampled_from(["run", "token"]),
        "minibatches": st.integers(1, 4),
        "node_advantage": st.sampled_from([0.0, 0.5]),
        "agent_wise": st.booleans(),
        "node_weights": st.sampled_from([{}, {"plan": 2.0, "nowhere": 3.0}]),
        "teacher": st.sampled_from([None, "t"]),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.lists(garbage_group, max_size=4), options)
def test_garbage_is_counted_and_what_is_left_is_planned(groups: list[TaskGroup], options: dict[str, Any]) -> None:
    """Every call is trained, counted, in a group that is counted, or without anything to contribute."""
    task = policy_task(groups, Path("unused"))
    result = plan_update(task, TrainConfig(**options), vocabulary=VOCABULARY, token_budget=16)
    calls = [one for each in groups for run in each.runs for one in run.calls]
    reasons = {"call", "group", "node", "minibatch"}
    assert {reason.partition(":")[0] for reason in result.skipped} <= reasons
    assert all(count > 0 for count in result.skipped.values())
    bad = sum(count for reason, count in result.skipped.items() if reason.startswith("call:"))
    in_skipped_groups = len(calls) - bad - result.calls
    assert in_skipped_groups >= 0
    if not any(reason.startswith("group:") for reason in result.skipped):
        assert in_skipped_groups == 0
    assert len(result.run_ids) == len({*result.run_ids})
    assert all(result.minibatches)
    for pack in result.packs:
        assert 0 <= pack.token_ids.min() <= pack.token_ids.max() < VOCABULARY
        for values in (pack.entry_advantages, pack.entry_weights, pack.entry_logprobs):
            assert values.isfinite().all()
        assert (pack.entry_weights > 0).all()
        assert not pack.entry_teacher.isinf().any()
    if result.packs and not options["teacher"]:
        assert any(value for pack in result.packs for value in pack.entry_advantages.tolist())


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink an example would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(first=st.lists(garbage_group, max_size=3), second=st.lists(garbage_group, max_size=3), options=options)
def test_garbage_through_the_whole_update(
    model: PolicyModel,
    tmp_path_factory: pytest.TempPathFactory,
    first: list[TaskGroup],
    second: list[TaskGroup],
    options: dict[str, Any],
) -> None:
    """As the worker gets it, over JSON, for two policies: each takes finite steps or none at all."""
    root = tmp_path_factory.mktemp("garbage")
    task = train_task(
        policy_task(first, root, policy="a"), policy_task(second, root, policy="b"), config=TrainConfig(**options)
    )
    received = TrainTask.model_validate_json(task.model_dump_json())
    done = run_task(model, received, token_budget=16, checkpointing=False, on_progress=lambda done, total: None)
    assert isinstance(done, Trained)
    for update, groups in zip(done.updates, (first, second), strict=True):
        assert (update.version == 1) == bool(update.computed_tokens)
        assert all(math.isfinite(value) for value in update.metrics.values())
        assert {*done.run_ids[update.policy]} <= {run.run_id for group in groups for run in group.runs}
        if update.version:
            weights = read_checkpoint(root / f"{update.policy}-1").weights
            assert all(tensor.isfinite().all() for tensor in weights.values())
