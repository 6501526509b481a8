"""Which calls train, and how everything else is counted."""

from __future__ import annotations

from langgraph_art.protocol import CallClaim, GroupSubmission, RecordedCall, RunSubmission, Submission
from langgraph_art_server.training.join import Joined, join

from .records import recorded


def run(run_id: str, *call_ids: str, reward: float = 1.0, delivered: bool = True) -> RunSubmission:
    calls = [CallClaim(call_id=call_id, node="plan", delivered=delivered) for call_id in call_ids]
    return RunSubmission(run_id=run_id, reward=reward, calls=calls)


def joined(*runs: RunSubmission, records: list[RecordedCall], already: set[tuple[str, str]] | None = None) -> Joined:
    by_id: dict[str, list[RecordedCall]] = {}
    for record in records:
        by_id.setdefault(record.call_id, []).append(record)
    submission = Submission(idempotency_key="k", groups=[GroupSubmission(group_id="g", runs=list(runs))])
    return join(submission, by_id, {"desk": 0, "clerk": 4}, already or set())


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
    ]
    result = joined(run("r1", "greedy", "stale", "other", "base", "nowhere"), records=records)
    assert result.groups == {}
    assert result.skipped == {
        "call:greedy": 1,
        "call:stale_version": 1,
        "call:of_another_run": 1,
        "call:base_model": 1,
        "call:not_recorded": 1,
    }


def test_an_answer_that_never_arrived_does_not_train() -> None:
    result = joined(run("r1", "a", delivered=False), records=[recorded("a")])
    assert (result.groups, result.skipped) == ({}, {"call:not_delivered": 1})


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
