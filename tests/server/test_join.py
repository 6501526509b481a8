"""Which calls train, and how everything else is counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from langgraph_art.protocol import CallClaim, GroupSubmission, RecordedCall, RunSubmission, Submission, TrainConfig
from langgraph_art_server.training.join import Joined, join

from .records import recorded


def run(
    run_id: str,
    *call_ids: str,
    reward: float = 1.0,
    delivered: bool = True,
    nodes: dict[str, str] | None = None,
    node_rewards: dict[str, float] | None = None,
) -> RunSubmission:
    """A run whose calls are at the node ``plan``, or where ``nodes`` says."""
    calls = [
        CallClaim(call_id=call_id, node=(nodes or {}).get(call_id, "plan"), delivered=delivered) for call_id in call_ids
    ]
    return RunSubmission(run_id=run_id, reward=reward, node_rewards=node_rewards or {}, calls=calls)


def joined(
    *runs: RunSubmission, records: list[RecordedCall], already: set[tuple[str, str]] | None = None, **options: Any
) -> Joined:
    by_id: dict[str, list[RecordedCall]] = {}
    for record in records:
        by_id.setdefault(record.call_id, []).append(record)
    submission = Submission(
        idempotency_key="k", groups=[GroupSubmission(group_id="g", runs=list(runs))], config=TrainConfig(**options)
    )
    return join(submission, by_id, {"desk": 0, "clerk": 4}, already or set())


def trained(result: Joined) -> dict[str, list[str]]:
    """Ids of the calls that train, by policy."""
    return {
        policy: [call.call_id for group in groups for run in group.runs for call in run.calls]
        for policy, groups in result.groups.items()
    }


def test_calls_go_to_their_policy() -> None:
    records = [recorded("a"), recorded("b", policy="clerk", version=4, sampling={"temperature": 0.7})]
    result = joined(run("r1", "a", "b", reward=0.5), records=records)
    assert sorted(result.groups) == ["clerk", "desk"]
    (desk,) = result.groups["desk"][0].runs
    assert (desk.run_id, desk.reward, [call.call_id for call in desk.calls]) == ("r1", 0.5, ["a"])
    (clerk,) = result.groups["clerk"][0].runs
    assert clerk.calls[0].temperature == 0.7
    assert result.skipped == {}


def test_a_run_without_calls_still_counts_in_its_group() -> None:
    result = joined(run("r1", "a"), run("r2", reward=0.0), records=[recorded("a")])
    assert [(part.run_id, len(part.calls)) for part in result.groups["desk"][0].runs] == [("r1", 1), ("r2", 0)]


def test_what_does_not_train_is_counted() -> None:
    records = [
        recorded("greedy", untrainable="greedy"),
        recorded("stale", version=-1),
        recorded("other", run_id="r2"),
        recorded("base", policy=None, version=None, untrainable="base_model"),
        recorded("large", policy="of-a-larger-model"),
        recorded("second", choice=1, untrainable="unused_choice"),
    ]
    result = joined(run("r1", "greedy", "stale", "other", "base", "large", "second", "nowhere"), records=records)
    assert result.groups == {}
    assert result.skipped == {
        "call:greedy": 1,
        "call:stale_version": 1,
        "call:of_another_run": 1,
        "call:base_model": 1,
        "call:other_base_model": 1,
        "call:unused_choice": 1,
        "call:not_recorded": 2,
    }


def test_an_answer_that_never_arrived_does_not_train() -> None:
    result = joined(run("r1", "a", delivered=False), records=[recorded("a")])
    assert (result.groups, result.skipped) == ({}, {"call:not_delivered": 1})


def test_a_call_that_was_refused_before_sampling_was_not_delivered() -> None:
    result = joined(run("r1", "too-long", delivered=False), run("r2", "lost"), records=[])
    assert result.skipped == {"call:not_delivered": 1, "call:not_recorded": 1}


def test_the_last_attempt_and_the_first_choice_train() -> None:
    records = [
        recorded("a", attempt=0, sampled_ids=[1, 1]),
        recorded("a", attempt=1, sampled_ids=[2, 2]),
        recorded("a", attempt=1, choice=1, sampled_ids=[3, 3], untrainable="unused_choice"),
    ]
    result = joined(run("r1", "a"), records=records)
    assert [call.sampled_ids for call in result.groups["desk"][0].runs[0].calls] == [[2, 2]]
    assert result.skipped == {"call:retried": 1, "call:unused_choice": 1}


def test_a_run_is_not_trained_twice() -> None:
    result = joined(
        run("r1", "a"), run("r2", "b"), records=[recorded("a"), recorded("b", run_id="r2")], already={("r1", "desk")}
    )
    assert [part.run_id for part in result.groups["desk"][0].runs] == ["r2"]
    assert result.skipped == {"run:already_trained": 1}


def test_a_group_without_calls_is_counted() -> None:
    result = joined(run("r1"), run("r2"), records=[])
    assert (result.groups, result.skipped) == ({}, {"group:no_calls": 1})


# -- options ----------------------------------------------------------------------------------------------------------

MIXED = run("r1", "a", "b", "c", nodes={"b": "write|model", "c": "write|check"})
RECORDS = [recorded(call_id) for call_id in "abc"]


def test_nodes_are_chosen_by_pattern_and_the_run_still_knows_all() -> None:
    result = joined(MIXED, records=RECORDS, nodes=["write"])
    assert trained(result) == {"desk": ["b", "c"]}
    assert result.skipped == {"call:node_not_chosen": 1}
    assert result.groups["desk"][0].runs[0].nodes == ["plan", "write|check", "write|model"]
    assert trained(joined(MIXED, records=RECORDS, nodes=["pl*", "check"])) == {"desk": ["a", "c"]}


def test_a_pattern_that_means_no_node_names_those_there_are() -> None:
    result = joined(MIXED, records=RECORDS, nodes=["write", "rite"], node_weights={"plan": 2.0, "check": 0.5})
    assert result.skipped == {"call:node_not_chosen": 1, "option:no_such_node": 2}
    assert result.warnings == [
        "nodes: 'rite' means none of the nodes 'plan', 'write|check', 'write|model'",
        "node_weights: 'plan' means none of the nodes 'write|check', 'write|model'",
    ]
    result = joined(run("r1"), records=[], nodes=["write"])
    assert result.warnings == ["nodes: 'write' means none of the nodes (there are none)"]


def test_a_learning_rate_by_policy_chooses_policies() -> None:
    records = [recorded("a"), recorded("b", policy="clerk", version=4)]
    result = joined(run("r1", "a", "b"), records=records, learning_rate={"clerk": 1e-3, "clark": 1e-3})
    assert trained(result) == {"clerk": ["b"]}
    assert result.skipped == {"call:policy_not_chosen": 1, "option:no_such_policy": 1}
    assert result.warnings == ["learning_rate: 'clark' is none of the policies 'clerk', 'desk'"]
    result = joined(run("r1", "a", "b"), records=records, kl=0.1, kl_reference={"desks": 3})
    assert (result.skipped, len(trained(result))) == ({"option:no_such_policy": 1}, 2)


def test_node_rewards_go_to_every_policy() -> None:
    records = [recorded("a"), recorded("b", policy="clerk", version=4)]
    claim = run("r1", "a", "b", nodes={"b": "write"}, node_rewards={"plan": 0.5, "write": 1.0, "rite": 2.0})
    result = joined(claim, records=records, node_advantage=1.0)
    for policy in ("desk", "clerk"):
        (part,) = result.groups[policy][0].runs
        assert (part.node_rewards["plan"], part.node_rewards["write"], part.nodes) == (0.5, 1.0, ["plan", "write"])
    assert (result.skipped, result.warnings) == ({"node:reward_without_call": 1}, [])


def test_node_rewards_and_their_option_need_each_other() -> None:
    result = joined(run("r1", "a", node_rewards={"plan": 0.5}), records=[recorded("a")])
    assert result.skipped == {"option:node_advantage": 1}
    assert result.warnings == ["node_advantage is 0: without it node rewards cannot count"]
    result = joined(run("r1", "a"), records=[recorded("a")], node_advantage=0.5)
    assert result.warnings == ["node_advantage is 0.5: without node rewards it cannot count"]
    assert trained(result) == {"desk": ["a"]}


def test_truncated_and_constrained_calls_are_a_choice() -> None:
    records = [
        recorded("a"),
        recorded("b", finish_reason="length"),
        recorded("c", constrained=True, untrainable="constrained"),
        recorded("d", constrained=True, untrainable="greedy"),
    ]
    claim = run("r1", "a", "b", "c", "d")
    default = joined(claim, records=records)
    assert trained(default) == {"desk": ["a", "b"]}
    assert default.skipped == {"call:constrained": 1, "call:greedy": 1}
    other = joined(claim, records=records, truncated="skip", constrained="train")
    assert trained(other) == {"desk": ["a", "c"]}
    assert other.skipped == {"call:truncated": 1, "call:greedy": 1}


@pytest.mark.parametrize(("limit", "versions"), [(0, [4]), (1, [3, 4]), (2, [2, 3, 4]), (9, [2, 3, 4])])
def test_staleness_is_limited_and_recorded(limit: int, versions: list[int]) -> None:
    records = [recorded(str(version), policy="clerk", version=version) for version in (2, 3, 4, 5)]
    result = joined(run("r1", "2", "3", "4", "5"), records=records, max_staleness=limit)
    calls = result.groups["clerk"][0].runs[0].calls
    assert [call.version for call in calls] == versions
    # Version 5 is not in the past of version 4: it may be a roll-back's other branch.
    assert result.skipped == {"call:stale_version": 4 - len(versions)}


# -- garbage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused(value: float) -> None:
    for options in ({"reward": value}, {"node_rewards": {"plan": value}}):
        with pytest.raises(ValidationError, match="finite"):
            run("r1", **options)


records_of = st.builds(
    recorded,
    st.sampled_from(["a", "b", "c"]),
    attempt=st.integers(0, 2),
    choice=st.integers(0, 2),
    run_id=st.sampled_from(["r1", "r2", None]),
    policy=st.sampled_from(["desk", "clerk", "unknown", None]),
    version=st.sampled_from([None, -1, 0, 3, 4]),
    status=st.sampled_from(["complete", "abandoned", "failed"]),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    sampling=st.dictionaries(st.just("temperature"), st.sampled_from([1.0, 0, True, "hot", [1]])),
    untrainable=st.sampled_from([None, "constrained", "greedy", "base_model"]),
    prompt_ids=st.lists(st.integers(-5, 5), max_size=2),
    sampled_ids=st.lists(st.integers(-5, 5), max_size=2),
    logprobs=st.lists(st.floats(), max_size=2),
)
some_options = st.fixed_dictionaries(
    {},
    optional={
        "nodes": st.sampled_from([["plan"], ["nowhere"], ["*"]]),
        "node_weights": st.just({"write": 2.0}),
        "truncated": st.just("skip"),
        "constrained": st.just("train"),
        "max_staleness": st.integers(1, 3),
        "learning_rate": st.sampled_from([{"desk": 1e-4}, {"nobody": 1e-4}]),
    },
)


@settings(max_examples=80, deadline=None)
@given(st.lists(records_of, max_size=6), st.booleans(), st.sets(st.just(("r1", "desk"))), some_options)
def test_garbage_is_counted_call_by_call(
    records: list[RecordedCall], delivered: bool, already: set[tuple[str, str]], options: dict[str, Any]
) -> None:
    """Each claimed call trains, is counted once, or was trained before with its run."""
    runs = [
        run("r1", "a", "b", delivered=delivered, nodes={"b": "write"}),
        run("r2", "c", nodes={"c": ""}, node_rewards={"": 1.0, "nowhere": 2.0}),
        run("r3"),
    ]
    result = joined(*runs, records=records, already=already, **options)
    calls = [call_id for ids in trained(result).values() for call_id in ids]
    assert len(calls) == len({*calls})
    beside = ("call:retried", "call:unused_choice")  # further records of a claimed call
    counted = sum(n for reason, n in result.skipped.items() if reason.startswith("call:") and reason not in beside)
    before = 3 - len(calls) - counted
    assert 0 <= before <= 2 * result.skipped["run:already_trained"]
    assert bool(before) == bool(result.skipped["run:already_trained"])
    assert all(count > 0 for count in result.skipped.values())
    for groups in result.groups.values():
        for group in groups:
            assert any(part.calls for part in group.runs)
