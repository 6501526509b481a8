"""Rollouts of real graphs over real HTTP: whole groups, concurrency, failure classes, rewards, clear errors."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from langgraph_art.chat_model import ChatART
from langgraph_art.errors import EmptyDataset, NoCallsRecorded, RewardError, RolloutFailed, ServerRefused
from langgraph_art.rewards import Score
from langgraph_art.rollouts import arollout, ascore, rollout, score
from langgraph_art.runs import GraphRun, load_runs, save_runs
from langgraph_art.submissions import make_submission

from .conftest import Ticket, build
from .stub_server import StubServer


def words(run: GraphRun) -> float:
    return float(len(run.output["answer"].split())) if run.output else 0.0


def in_turn(*texts: str) -> Callable[[Ticket], str | None]:
    """For ``build(before=)``: each run asks about the next text."""
    following = itertools.cycle(texts)
    lock = threading.Lock()

    def choose(state: Ticket) -> str:
        with lock:
            return next(following)

    return choose


# -- groups -----------------------------------------------------------------------------------------------------------


def test_every_input_gives_one_whole_group_in_order(stub: StubServer) -> None:
    inputs = [{"text": "a"}, {"text": "a b"}, {"text": "a b c"}]
    groups = rollout(build(), inputs, n=4, reward=words)
    assert [[run.input for run in group.runs] for group in groups] == [[item] * 4 for item in inputs]
    assert [group.rewards for group in groups] == [[2.0] * 4, [3.0] * 4, [4.0] * 4]
    runs = [run for group in groups for run in group.runs]
    assert len({run.run_id for run in runs}) == 12
    assert len({group.group_id for group in groups}) == 3
    assert all(run.group_id == group.group_id for group in groups for run in group.runs)
    for run in runs:
        (request,) = stub.chat.of_run(run.run_id)
        (call,) = run.calls_at("clerk")
        assert (request.group, request.call, request.node) == (run.group_id, call.call_id, "clerk")
        assert (call.art, call.delivered, call.version) == (True, True, "desk@7")
        assert request.body["temperature"] == 1.0, "training samples the plain distribution"


def test_the_apps_own_sampling_can_be_kept(stub: StubServer) -> None:
    rollout(build(), [{"text": "a"}], n=1, sampling=None)
    assert stub.chat.log[0].body["temperature"] == 0.3
    rollout(build(), [{"text": "a"}], n=1, sampling={"temperature": 0.0})
    assert stub.chat.log[1].body["temperature"] == 0.0


def test_training_removes_the_apps_settings_that_alter_the_distribution(stub: StubServer) -> None:
    engine = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3, "bad_words": ["no"]}
    llm = ChatART(
        model="desk",
        temperature=0.3,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={5: 1},
        seed=3,
        extra_body={**engine, "ignore_eos": True, "priority": 1},
    )
    builder = StateGraph(Ticket)
    builder.add_node("clerk", lambda state: {"answer": str(llm.invoke(state["text"]).content)})
    builder.add_edge(START, "clerk")
    rollout(builder.compile(), [{"text": "a"}], n=1)
    rollout(builder.compile(), [{"text": "a"}], n=1, sampling=None)
    trained, own = (request.body for request in stub.chat.log)
    altering = {"presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos", *engine}
    assert altering <= set(own), "the app does set them"
    assert altering.isdisjoint(trained)
    assert (trained["temperature"], trained["top_p"], trained["seed"], trained["priority"]) == (1.0, 1.0, 3, 1)


def test_synchronous_nodes_run_concurrently(stub: StubServer) -> None:
    """All 64 nodes must be inside at once to pass the barrier, far more than the default executor has threads."""
    barrier = threading.Barrier(64)
    groups = rollout(build(before=lambda state: barrier.wait(20) and None), [{"text": "a"}] * 8, n=8, concurrency=64)
    assert [run.error for group in groups for run in group.runs] == [None] * 64
    assert Counter(request.run for request in stub.chat.log) == {
        run.run_id: 1 for group in groups for run in group.runs
    }, "each call is in the run that made it"


async def test_concurrency_is_a_limit(stub: StubServer) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def count(state: Ticket) -> None:
        nonlocal inside, most
        with lock:
            inside, most = inside + 1, max(most, inside + 1)
        time.sleep(0.05)
        with lock:
            inside -= 1

    await arollout(build(before=count), [{"text": "a"}] * 4, n=4, concurrency=3)
    assert most == 3


def test_each_run_gets_its_own_copy_of_the_input(stub: StubServer) -> None:
    item: Ticket = {"text": "a", "tags": []}
    lengths: list[int] = []

    def spoil(state: Ticket) -> None:
        state["tags"].append("seen")
        lengths.append(len(state["tags"]))

    groups = rollout(build(before=spoil), [item], n=3)
    assert lengths == [1, 1, 1]
    assert item == {"text": "a", "tags": []} == groups[0].runs[0].input


def test_a_graph_with_a_checkpointer_starts_every_run_afresh(stub: StubServer) -> None:
    graph = build(before=lambda state: state.get("answer", "fresh"), checkpointer=InMemorySaver())
    groups = rollout(graph, [{"text": "a"}], n=3)
    assert {run.output["answer"] for run in groups[0].runs} == {"re: fresh"}
    with pytest.raises(ValueError, match="every run needs its own"):
        rollout(graph, [{"text": "a"}], config={"configurable": {"thread_id": "1"}})


def test_what_counts_as_a_graph(stub: StubServer) -> None:
    class InvokeOnly:
        def invoke(self, given: Ticket, config: Any) -> Any:
            return build().invoke(given, config)

    async def factory() -> Any:
        return build()

    made: list[Any] = []

    def fresh() -> Any:
        made.append(build())
        return made[-1]

    for graph in (InvokeOnly(), factory, fresh):
        groups = rollout(graph, [{"text": "a"}], n=2, reward=words)
        assert groups[0].rewards == [2.0, 2.0]
        assert [run.nodes for run in groups[0].runs] == [["clerk"], ["clerk"]]
    assert len(made) == 2, "a factory makes a graph for each run"


def test_a_factory_that_raises_ends_the_rollout(stub: StubServer) -> None:
    def broken() -> Any:
        raise KeyError("no such setting")

    with pytest.raises(KeyError, match="no such setting"):
        rollout(broken, [{"text": "a"}])


async def test_the_blocking_form_works_inside_a_running_loop(stub: StubServer) -> None:
    groups = rollout(build(), [{"text": "a"}], n=2, reward=words)
    assert groups[0].rewards == [2.0, 2.0]


def test_progress_is_reported_after_scoring(stub: StubServer) -> None:
    seen: list[tuple[float | None, int, int]] = []
    rollout(
        build(),
        [{"text": "a"}],
        n=3,
        reward=words,
        progress=lambda run, done, total: seen.append((run.reward, done, total)),
    )
    assert seen == [(2.0, 1, 3), (2.0, 2, 3), (2.0, 3, 3)]


def test_groups_survive_a_file(stub: StubServer, tmp_path: Path) -> None:
    (group,) = rollout(build(), [{"text": "a"}], n=2, reward=words)
    save_runs(tmp_path / "runs.jsonl", group.runs)
    assert load_runs(tmp_path / "runs.jsonl") == group.runs


# -- failed runs ------------------------------------------------------------------------------------------------------


def test_what_a_policy_cannot_cause_is_kept_and_not_scored(stub: StubServer) -> None:
    scored: list[str] = []

    def reward(run: GraphRun) -> float:
        scored.append(run.run_id)
        return 1.0

    (group,) = rollout(build(before=in_turn("!500", "fine", "!429", "fine")), [{"text": "x"}], n=4, reward=reward)
    failed = [run for run in group.runs if run.error is not None]
    assert len(group.runs) == 4
    assert len(failed) == 2
    assert [(run.error.infrastructure, run.error.node, run.reward) for run in failed] == [(True, "clerk", None)] * 2
    assert sorted(scored) == sorted(run.run_id for run in group.runs if run.error is None)


def test_what_a_policy_can_cause_goes_to_the_reward(stub: StubServer) -> None:
    graph = build(before=in_turn("!overflow", "fine"))
    (group,) = rollout(graph, [{"text": "x"}], n=2, reward=lambda run: -5.0 if run.error else 1.0)
    assert sorted(group.rewards) == [-5.0, 1.0]
    (failed,) = [run for run in group.runs if run.error]
    assert not failed.error.infrastructure
    assert "5000 tokens, the context holds 2048" in failed.error.message


def test_or_gets_the_fixed_reward(stub: StubServer) -> None:
    graph = build(before=in_turn("!overflow", "!500", "fine"))

    def never_for_errors(run: GraphRun) -> float:
        assert run.error is None
        return 1.0

    (group,) = rollout(graph, [{"text": "x"}], n=3, reward=never_for_errors, on_error=-0.5)
    assert sorted(group.rewards, key=str) == [-0.5, 1.0, None]
    with pytest.raises(ValueError, match="no effect without reward="):
        rollout(graph, [{"text": "x"}], on_error=0.0)


def test_a_recursion_limit_can_be_caused_by_a_policy(stub: StubServer) -> None:
    llm = ChatART(model="desk", max_retries=0)
    builder = StateGraph(Ticket)
    builder.add_node("clerk", lambda state: {"answer": str(llm.invoke("again").content)})
    builder.add_edge(START, "clerk")
    builder.add_conditional_edges("clerk", lambda state: "clerk", ["clerk", END])
    (group,) = rollout(builder.compile(), [{"text": "x"}], n=2, reward=lambda run: -1.0, config={"recursion_limit": 4})
    assert group.rewards == [-1.0, -1.0]
    assert [(run.error.infrastructure, len(run.calls)) for run in group.runs] == [(False, 4)] * 2


@pytest.mark.parametrize("pause", [0.0, 30.0])
def test_a_run_that_takes_too_long(stub: StubServer, pause: float) -> None:
    """Both where the model is slow and where a synchronous node hangs in its thread."""
    hang = threading.Event()
    slow = itertools.chain([True], itertools.repeat(False))

    def before(state: Ticket) -> str | None:
        if not next(slow):
            return None
        hang.wait(pause)
        return "!slow 30"

    started = time.monotonic()
    try:
        (group,) = rollout(build(before=before), [{"text": "x"}], n=2, reward=words, timeout=1.5, concurrency=1)
    finally:
        hang.set()
    assert time.monotonic() - started < 10, "nobody waits for the thread"
    late, fine = group.runs
    assert (late.reward, late.error.infrastructure) == (None, True)
    assert "longer than its timeout of 1.5 s" in late.error.message
    assert fine.reward == 2.0


def test_a_timeout_of_the_nodes_own_keeps_its_message(stub: StubServer) -> None:
    def before(state: Ticket) -> None:
        raise TimeoutError("the order table did not answer")

    with pytest.raises(RolloutFailed, match="the order table did not answer"):
        rollout(build(before=before), [{"text": "x"}], n=2, timeout=60)


def test_a_server_that_is_down_is_one_clear_error_with_the_runs(stub: StubServer) -> None:
    graph = build()
    stub.stop()
    with pytest.raises(RolloutFailed, match=r"All 4 runs failed .*node 'clerk'.*langgraph-art doctor") as caught:
        rollout(graph, [{"text": "a"}, {"text": "b"}], n=2, reward=words)
    assert [len(group.runs) for group in caught.value.groups] == [2, 2]


def test_a_wrong_model_name_ends_the_rollout_at_once(stub: StubServer) -> None:
    with pytest.raises(ServerRefused, match=r"node 'clerk': .*no policy dsk") as caught:
        rollout(build(before=lambda state: "!404", model="dsk"), [{"text": "a"}] * 50, n=8, concurrency=2)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert len(stub.chat.log) < 20, "no run can succeed, so the others are not tried"
    assert caught.value.groups == []


def test_a_wrong_model_name_in_a_late_node_keeps_the_finished_runs(stub: StubServer) -> None:
    graph = build(before=in_turn("a", "a", "a", "!404"))
    with pytest.raises(ServerRefused, match="no policy desk") as caught:
        rollout(graph, [{"text": "x"}, {"text": "y"}, {"text": "z"}], n=2, reward=words, concurrency=1)
    groups = caught.value.groups
    assert [group.rewards for group in groups] == [[2.0, 2.0], [2.0]]
    assert [run.input["text"] for group in groups for run in group.runs] == ["x", "x", "y"]
    assert all(run.group_id == group.group_id for group in groups for run in group.runs)


def test_an_empty_data_set() -> None:
    with pytest.raises(EmptyDataset, match="at least one input"):
        rollout(object(), [])


def test_a_graph_without_calls(stub: StubServer) -> None:
    builder = StateGraph(Ticket)
    builder.add_node("rule", lambda state: {"answer": "42"})
    builder.add_edge(START, "rule")
    with pytest.raises(NoCallsRecorded, match=r'None of 2 runs .* ChatART\(model="<policy>"\).* join_remote') as caught:
        rollout(builder.compile(), [{"text": "a"}], n=2)
    assert [[run.output["answer"] for run in group.runs] for group in caught.value.groups] == [["42", "42"]]

    def broken(state: Ticket) -> None:
        raise KeyError("txet")

    with pytest.raises(NoCallsRecorded, match=r"2 of them failed; the first: Run .*, node 'clerk': KeyError: 'txet'"):
        rollout(build(before=broken), [{"text": "a"}], n=2)


@pytest.mark.parametrize("option", ["n", "concurrency"])
def test_arguments_out_of_range(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        rollout(object(), [1], **{option: 0})


# -- rewards ----------------------------------------------------------------------------------------------------------


async def _async_words(run: GraphRun) -> float:
    await asyncio.sleep(0)
    return words(run)


class _Judge:
    async def __call__(self, run: GraphRun) -> float:
        return words(run)


@pytest.mark.parametrize("reward", [words, _async_words, _Judge(), lambda run: _async_words(run)])
def test_sync_and_async_rewards(stub: StubServer, reward: Any) -> None:
    assert rollout(build(), [{"text": "a"}], n=2, reward=reward)[0].rewards == [2.0, 2.0]


def test_named_parts_sum_to_the_reward(stub: StubServer) -> None:
    (group,) = rollout(build(), [{"text": "a"}], n=1, reward=lambda run: {"right": 1, "brief": 0.25})
    assert (group.runs[0].reward, group.runs[0].reward_parts) == (1.25, {"right": 1.0, "brief": 0.25})


def test_a_score_also_rewards_nodes(stub: StubServer, tmp_path: Path) -> None:
    (group,) = rollout(
        build(), [{"text": "a"}], n=2, reward=lambda run: Score({"right": 1, "brief": 0.25}, {"clerk": 2})
    )
    for run in group.runs:
        assert (run.reward, run.reward_parts) == (1.25, {"right": 1.0, "brief": 0.25})
        assert run.node_rewards == {"clerk": 2.0}
    save_runs(tmp_path / "runs.jsonl", group.runs)
    assert load_runs(tmp_path / "runs.jsonl") == group.runs
    score([group], words)
    assert [run.node_rewards for run in group.runs] == [{}, {}], "scoring replaces them"


def _raises(run: GraphRun) -> float:
    raise ZeroDivisionError("no words")


async def _raises_later(run: GraphRun) -> float:
    raise ZeroDivisionError("no words")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (_raises, "ZeroDivisionError: no words"),
        (_raises_later, "ZeroDivisionError: no words"),
        (lambda run: math.nan, "it returned nan, which is not a finite number"),
        (lambda run: {"a": 1.0, "b": math.inf}, "not a finite number"),
        (lambda run: None, "it returned None"),
        (lambda run: next(iter([])), "StopIteration"),
        (lambda run: Score(math.nan), "it returned nan, which is not a finite number"),
        (
            lambda run: Score(1.0, nodes={"clark": 1.0}),
            "it rewards the node 'clark', but the nodes that called a policy are: clerk",
        ),
        (lambda run: Score(1.0, nodes={"clerk": math.nan}), "its reward for the node 'clerk' is nan"),
        (lambda run: Score(1.0, nodes={"clerk": None}), "TypeError"),
    ],
)
def test_a_bad_reward_marks_its_run_and_loses_nothing(
    stub: StubServer, caplog: pytest.LogCaptureFixture, reward: Any, says: str
) -> None:
    bad_text = "b"

    def sometimes(run: GraphRun) -> Any:
        return reward(run) if run.input["text"] == bad_text else words(run)

    groups = rollout(build(), [{"text": "a"}, {"text": bad_text}, {"text": "c"}], n=2, reward=sometimes)
    assert "failed on 2 of 6 runs" in caplog.text
    assert all(says in run.reward_error for run in groups[1].runs)
    assert any(run.run_id in caplog.text for run in groups[1].runs)
    assert [group.rewards for group in groups] == [[2.0, 2.0], [None, None], [2.0, 2.0]]
    submission, skipped = make_submission(groups)
    assert [len(group.runs) for group in submission.groups] == [2, 0, 2]
    assert skipped == {"run:reward_error": 2}
    with pytest.raises(RewardError, match="failed on 2 of 2 runs") as caught:
        score([groups[1]], reward)
    assert says in str(caught.value)
    assert caught.value.groups == [groups[1]]
    assert not any(run.node_rewards for group in groups for run in group.runs)
    assert all(run.output["answer"] for group in groups for run in group.runs)
    score(groups, words)
    assert [group.rewards for group in groups] == [[2.0, 2.0]] * 3
    assert all(run.reward_error is None for run in groups[1].runs)


def test_a_reward_that_trips_over_a_failed_run_says_so(stub: StubServer) -> None:
    with pytest.raises(RewardError, match=r"the run itself had failed: .*5000 tokens.*on_error"):
        rollout(build(), [{"text": "!overflow"}], n=2, reward=lambda run: len(run.output["answer"]))


async def test_scoring_replaces_rewards(stub: StubServer) -> None:
    groups = await arollout(build(), [{"text": "a"}], n=2, reward=lambda run: {"part": 9.0})
    await ascore(groups, _async_words)
    assert [(run.reward, run.reward_parts) for run in groups[0].runs] == [(2.0, {})] * 2


# -- cancellation -----------------------------------------------------------------------------------------------------


async def test_cancelling_ends_and_awaits_every_run(stub: StubServer) -> None:
    llm = ChatART(model="desk", max_retries=0)
    ended: list[str] = []

    async def clerk(state: Ticket) -> Ticket:
        try:
            return {"answer": str((await llm.ainvoke("!slow 30")).content)}
        finally:
            await asyncio.sleep(0.05)
            ended.append("yes")

    builder = StateGraph(Ticket)
    builder.add_node("clerk", clerk)
    builder.add_edge(START, "clerk")
    rolling = asyncio.ensure_future(arollout(builder.compile(), [{"text": "a"}], n=4))
    while len(stub.chat.log) < 4:
        await asyncio.sleep(0.02)
    rolling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rolling
    assert ended == ["yes"] * 4
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.slow
@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_ctrl_c_ends_a_rollout_soon(stub: StubServer, inside_a_loop: bool) -> None:
    code = textwrap.dedent(
        f"""
        import asyncio
        from langgraph.graph import START, StateGraph
        from langgraph_art.chat_model import ChatART
        from langgraph_art.rollouts import rollout

        llm = ChatART(model="desk", max_retries=0)
        builder = StateGraph(dict)

        async def clerk(state):
            try:
                return {{"answer": (await llm.ainvoke("!slow 60")).content}}
            finally:
                print("cleaned", flush=True)

        builder.add_node("clerk", clerk)
        builder.add_edge(START, "clerk")

        async def main():
            rollout(builder.compile(), [{{}}], n=3, progress=False)

        try:
            asyncio.run(main()) if {inside_a_loop} else rollout(builder.compile(), [{{}}], n=3, progress=False)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    deadline = time.monotonic() + 30
    while len(stub.chat.log) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert output.split() == ["cleaned"] * 3 + ["interrupted"]


def test_a_group_reward_gets_whole_groups(stub: StubServer) -> None:
    class Ranks:
        async def score_group(self, runs: Sequence[GraphRun], /) -> list[Any]:
            return [Score(place, info={"of": len(runs)}) for place in range(len(runs))]

    groups = rollout(build(before=in_turn("a", "!500", "b")), [{"text": "x"}], n=3, reward=Ranks())
    assert sorted(run.reward for run in groups[0].runs if run.reward is not None) == [0.0, 1.0]
    assert [run.reward_info for run in groups[0].runs if run.error is None] == [{"of": 2}] * 2
