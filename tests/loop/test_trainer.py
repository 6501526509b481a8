"""The training loop over real HTTP: its order, what it writes, and what survives when it ends early."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import START, StateGraph

from langgraph_art.chat_model import ChatART
from langgraph_art.client import AsyncClient, Client
from langgraph_art.embedded import EmbeddedServer
from langgraph_art.errors import (
    EmptyDataset,
    NoCallsRecorded,
    RewardError,
    ServerRefused,
    ServerUnreachable,
    TrainingFailed,
)
from langgraph_art.history import StepLog, TrainHistory
from langgraph_art.protocol import LoraConfig, TrainConfig
from langgraph_art.rewards import Score
from langgraph_art.runs import GraphRun, load_runs
from langgraph_art.trainer import Trainer

from .conftest import Ticket, build
from .stub_server import StubServer

INPUTS = [{"text": "word " * count} for count in range(1, 6)]


def words(run: GraphRun) -> dict[str, float]:
    return {"words": float(len(run.output["answer"].split())), "bonus": 0.5}


def trainer(graph: Any = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"policies": ["desk"], "runs_per_input": 2, "inputs_per_step": 2, "progress": False}
    return Trainer(graph or build(), INPUTS, words, **{**defaults, **options})


def test_fit_rolls_out_trains_and_logs(stub: StubServer, tmp_path: Path) -> None:
    logs: list[StepLog] = []
    with trainer(out_dir=tmp_path, on_step=logs.append) as training:
        history = training.fit(3)
    assert history.steps == logs == training.history.steps
    assert [log.step for log in logs] == [1, 2, 3]
    assert [log.versions for log in logs] == [{"desk": 1}, {"desk": 2}, {"desk": 3}]
    assert len(stub.jobs) == 3
    for log, submission in zip(logs, stub.submissions.values(), strict=True):
        rewards = [run.reward for group in submission.groups for run in group.runs]
        assert [len(group.runs) for group in submission.groups] == [2, 2]
        assert log.reward_mean == pytest.approx(sum(rewards) / 4)
        assert log.reward_std == pytest.approx((sum((r - log.reward_mean) ** 2 for r in rewards) / 4) ** 0.5)
        assert log.reward_parts == {"words": pytest.approx(log.reward_mean - 0.5), "bonus": 0.5}
        saved = load_runs(tmp_path / "runs" / f"step-{log.step:04}.jsonl")
        assert {run.run_id for run in saved} == {run.run_id for group in submission.groups for run in group.runs}
        assert log.tokens == sum(call.usage["output_tokens"] for run in saved for call in run.calls) > 0
        assert (log.runs, log.failed, log.skipped) == (4, 0, {"group:no_signal": 1})
        assert set(log.seconds) == {"rollout", "reward", "queue", "train"}
        counts = {"runs": 1, "calls": 1, "trained_tokens": 1, "computed_tokens": 1}
        assert log.metrics == {"desk": {"loss": 0.5, **counts}}
    assert TrainHistory.load(tmp_path / "history.jsonl") == history
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["seed"]) == (3, 0)
    assert (summary["reward_before"], summary["reward_after"]) == (logs[0].reward_mean, logs[-1].reward_mean)


def test_inputs_come_in_seeded_shuffled_epochs(stub: StubServer, tmp_path: Path) -> None:
    def order(name: str, seed: int) -> list[str]:
        trainer(out_dir=tmp_path / name, seed=seed, inputs_per_step=5).fit(2)
        runs = [load_runs(path) for path in sorted((tmp_path / name / "runs").iterdir())]
        assert all({run.input["text"] for run in step} == {item["text"] for item in INPUTS} for step in runs)
        submitted = list(stub.submissions.values())[-2:]
        texts = {run.run_id: run.input["text"] for step in runs for run in step}
        return [texts[group.runs[0].run_id] for submission in submitted for group in submission.groups]

    first = order("a", 1)
    assert order("b", 1) == first
    assert order("c", 2) != first
    assert first[:5] != first[5:], "each epoch has another order"


def test_a_history_is_continued(stub: StubServer, tmp_path: Path) -> None:
    trainer(out_dir=tmp_path).fit(2)
    history = trainer(out_dir=tmp_path).fit(1)
    assert [log.step for log in history.steps] == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "step-0001.jsonl",
        "step-0002.jsonl",
        "step-0003.jsonl",
    ]
    whole = trainer(out_dir=tmp_path / "whole").fit(3)
    assert [log.reward_mean for log in history.steps] == [log.reward_mean for log in whole.steps], "same inputs"


async def test_the_async_form(stub: StubServer) -> None:
    seen: list[int] = []

    async def on_step(log: StepLog) -> None:
        await asyncio.sleep(0)
        seen.append(log.step)

    async with trainer(on_step=on_step) as training:
        await training.afit(1)
        evaluation = await training.aevaluate(INPUTS[:2])
    assert seen == [1]
    assert evaluation.mean > 0


def test_evaluate_is_greedy_and_trains_nothing(stub: StubServer) -> None:
    evaluation = trainer().evaluate(INPUTS[:3], reward=lambda run: {"strict": float(len(run.input["text"]) > 6)})
    assert (evaluation.mean, evaluation.parts, evaluation.failed) == (
        pytest.approx(2 / 3),
        {"strict": pytest.approx(2 / 3)},
        0,
    )
    assert evaluation.std == pytest.approx((2 / 9) ** 0.5)
    assert evaluation.versions == ["desk@7"]
    assert [run.input for run in evaluation.runs] == INPUTS[:3]
    assert {request.body["temperature"] for request in stub.chat.log} == {0.0}
    assert stub.jobs == {}
    trainer().evaluate(INPUTS[:1], n=2, temperature=0.7)
    assert [request.body["temperature"] for request in stub.chat.log[3:]] == [0.7, 0.7]


def test_policies_are_created_once(stub: StubServer) -> None:
    trainer(policies=["desk", "scribe"]).fit(1)
    trainer(policies="desk").fit(1)
    assert list(stub.policies) == ["desk", "scribe"]
    assert stub.requests.count("POST /api/policies") == 2


def test_policies_with_shapes_of_their_own(stub: StubServer) -> None:
    shapes = {"desk": LoraConfig(rank=4, targets=["q_proj"]), "scribe": LoraConfig(rank=8, seed=5)}
    trainer(policies=shapes, seed=3).fit(1)
    assert {name: policy.lora for name, policy in stub.policies.items()} == shapes
    trainer(policies=shapes).fit(1)
    with pytest.raises(ServerRefused, match="desk exists with another shape"):
        trainer(policies={"desk": LoraConfig(rank=16)}).fit(1)


def test_the_configuration_and_node_rewards_go_to_the_server(stub: StubServer) -> None:
    config = TrainConfig(learning_rate={"desk": 1e-3, "scribe": 1e-4}, node_advantage=0.5, nodes=["clerk"])
    training = trainer(policies=["desk", "scribe"], config=config)
    training.reward = lambda run: Score(1.0, nodes={"clerk": float(len(run.input["text"]))})
    training.fit(1)
    (submission,) = stub.submissions.values()
    assert submission.config == config
    runs = [run for group in submission.groups for run in group.runs]
    assert [run.node_rewards for run in runs] == [
        {"clerk": float(len(run.input["text"]))} for group in training.groups for run in group.runs
    ]


def test_an_option_without_effect_is_warned_of_once(stub: StubServer, caplog: pytest.LogCaptureFixture) -> None:
    stub.warnings = ["nodes: 'clark' means none of the nodes 'clerk'"]
    trainer().fit(3)
    assert caplog.text.count("nodes: 'clark' means none of the nodes 'clerk'") == 1


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    with pytest.raises(EmptyDataset):
        Trainer(build(), [], words, policies=["desk"])
    with pytest.raises(ValueError, match="policies is empty"):
        trainer(policies=[])
    with pytest.raises(ValueError, match="runs_per_input is 1"):
        trainer(runs_per_input=1)
    with pytest.raises(ValueError, match=r"learning_rate is for \['desk'\].*\['desk', 'scribe'\]"):
        trainer(policies=["desk", "scribe"], config=TrainConfig(learning_rate={"desk": 1e-3}))
    with pytest.raises(ValueError, match=r"kl_reference names \['dask'\]"):
        trainer(config=TrainConfig(kl=0.1, kl_reference={"dask": 1}))
    with pytest.raises(ValueError, match="not both"):
        trainer(url="http://127.0.0.1:1", server=EmbeddedServer())


def test_a_server_that_is_down_is_named_before_any_run(stub: StubServer) -> None:
    stub.stop()
    with pytest.raises(ServerUnreachable, match="langgraph-art serve"):
        trainer().fit(1)
    assert stub.chat.log == []


def test_an_engine_that_failed_is_named_with_its_reason(stub: StubServer) -> None:
    stub.engine = "failed"
    with pytest.raises(ServerUnreachable, match=r"(?s)engine .* is failed.*out of memory"):
        trainer().fit(1)
    assert stub.chat.log == []


async def test_an_engine_that_starts_is_waited_for(stub: StubServer) -> None:
    stub.engine = "starting"
    fitting = asyncio.ensure_future(trainer().afit(1))
    await asyncio.sleep(0.3)
    assert stub.chat.log == []
    stub.engine = "ready"
    assert len((await fitting).steps) == 1


def test_a_policy_that_the_graph_does_not_call(stub: StubServer) -> None:
    training = trainer(policies=["dask"])
    with pytest.raises(
        NoCallsRecorded, match=r"No run called a policy of \['dask'\]; .* asked for \['desk'\]"
    ) as caught:
        training.fit(1)
    assert caught.value.groups == training.groups
    assert [len(group.runs) for group in training.groups] == [2, 2]


def test_calls_that_were_all_refused_are_not_said_to_ask_for_another_policy(stub: StubServer) -> None:
    training = Trainer(
        build(),
        [{"text": "!overflow"}],
        lambda run: 0.0,
        policies=["desk"],
        runs_per_input=2,
        inputs_per_step=1,
        progress=False,
    )
    with pytest.raises(NoCallsRecorded, match=r"No call of a policy was answered\..* the context holds 2048") as caught:
        training.fit(1)
    assert [len(group.runs) for group in caught.value.groups] == [2]


def test_the_groups_of_a_failed_update_can_be_trained_again(stub: StubServer) -> None:
    training = trainer()
    stub.fail = "the disk is full"
    with pytest.raises(TrainingFailed, match=r"(?s)the disk is full.*client.train again with the same groups"):
        training.fit(1)
    (submission,) = stub.submissions.values()
    assert [[run.run_id for run in group.runs] for group in training.groups] == [
        [run.run_id for run in group.runs] for group in submission.groups
    ]
    stub.fail = None
    stub.jobs.clear()  # as a server does that queues a failed job again
    with Client() as client:
        assert client.train(training.groups).updates[0].version == 1
    assert list(stub.submissions) == [submission.idempotency_key], "the same submission"
    kept = training.groups
    training.fit(1)
    assert {group.group_id for group in training.groups}.isdisjoint(group.group_id for group in kept)


def test_the_groups_survive_a_refused_submission(stub: StubServer) -> None:
    def lock(run: GraphRun) -> float:
        stub.api_key = "changed"
        return 1.0

    training = trainer()
    training.reward = lock
    with pytest.raises(ServerRefused, match="missing or wrong"):
        training.fit(1)
    assert [group.rewards for group in training.groups] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("skipped", "advice"),
    [
        (
            {"call:not_recorded": 4},
            r"4 call:not_recorded.*another server than http://127\.0\.0\.1:\d+; set its base_url",
        ),
        (
            {"call:altered_distribution": 3, "call:greedy": 1},
            r"3 call:altered.*1 call:greedy.*sampling=TRAINING_SAMPLING",
        ),
        ({"call:no_ids": 4}, r"4 call:no_ids\. docs/design\.md"),
        ({"call:node_not_chosen": 4}, r"4 call:node_not_chosen\. nodes: 'x' means none of the nodes 'clerk'\. docs"),
    ],
)
def test_a_step_with_nothing_to_train_on_is_an_error(stub: StubServer, skipped: dict[str, int], advice: str) -> None:
    stub.untrainable = skipped
    stub.warnings = ["nodes: 'x' means none of the nodes 'clerk'"] if "call:node_not_chosen" in skipped else []
    training = trainer()
    with pytest.raises(TrainingFailed, match=advice):
        training.fit(2)
    assert (len(stub.jobs), training.history.steps) == (1, [])
    assert [len(group.runs) for group in training.groups] == [2, 2]


def test_an_engine_that_cannot_serve_the_update_is_named(stub: StubServer) -> None:
    def break_engine(run: GraphRun) -> float:
        stub.engine, stub.not_serving = "failed", "the adapter could not be loaded"
        return 1.0

    training = trainer()
    training.reward = break_engine
    with pytest.raises(TrainingFailed, match="is trained but not serving: the adapter could not be loaded"):
        training.fit(1)
    assert len(training.groups) == 2


def test_failed_training_keeps_runs_and_history(stub: StubServer, tmp_path: Path) -> None:
    training = trainer(out_dir=tmp_path)
    training.fit(1)
    stub.fail = "the disk is full"
    with pytest.raises(TrainingFailed, match="the disk is full"):
        training.fit(3)
    assert [log.step for log in training.history.steps] == [1]
    assert TrainHistory.load(tmp_path / "history.jsonl") == training.history
    assert len(load_runs(tmp_path / "runs" / "step-0002.jsonl")) == 4, "the runs of the failed update"


def test_a_reward_that_raises_keeps_the_runs(stub: StubServer, tmp_path: Path) -> None:
    def reward(run: GraphRun) -> float:
        raise KeyError("label")

    with pytest.raises(RewardError, match="label") as caught:
        Trainer(
            build(),
            INPUTS,
            reward,
            policies=["desk"],
            runs_per_input=2,
            inputs_per_step=2,
            out_dir=tmp_path,
            progress=False,
        ).fit(1)
    saved = load_runs(tmp_path / "runs" / "step-0001.jsonl")
    assert {run.run_id for run in saved} == {run.run_id for group in caught.value.groups for run in group.runs}
    assert len(saved) == 4
    assert stub.jobs == {}


def test_runs_finished_before_a_fatal_error_are_kept(stub: StubServer, tmp_path: Path) -> None:
    turn = iter(["fine", "fine", "!404", "fine"])
    training = trainer(build(before=lambda state: next(turn)), concurrency=1, out_dir=tmp_path)
    with pytest.raises(ServerRefused, match="no policy desk"):
        training.fit(1)
    saved = load_runs(tmp_path / "runs" / "step-0001.jsonl")
    assert [group.rewards for group in training.groups] == [[2.5, 2.5]]
    assert {run.run_id for run in saved} == {run.run_id for run in training.groups[0].runs}
    with Client() as client:
        assert client.train(training.groups).updates[0].version == 1


async def test_finished_runs_survive_a_cancelled_rollout(stub: StubServer) -> None:
    """What Ctrl-C does: it cancels the task."""
    llm = ChatART(model="desk", max_retries=0)
    turn = iter(["fine", "!slow 30", "fine", "fine"])

    async def clerk(state: Ticket) -> Ticket:
        return {"answer": str((await llm.ainvoke(next(turn))).content)}

    builder = StateGraph(Ticket)
    builder.add_node("clerk", clerk)
    builder.add_edge(START, "clerk")
    training = trainer(builder.compile())
    fitting = asyncio.ensure_future(training.afit(1))
    while sum(len(group.runs) for group in training.groups) < 3:
        await asyncio.sleep(0.02)
    fitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fitting
    assert sorted(group.rewards for group in training.groups) == [[2.5], [2.5, 2.5]]
    async with AsyncClient() as client:
        assert (await client.train(training.groups)).updates[0].version == 1


@pytest.mark.slow
def test_ctrl_c_keeps_the_history_so_far(stub: StubServer, tmp_path: Path) -> None:
    code = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from tests.loop.test_trainer import trainer
        training = trainer(out_dir={str(tmp_path)!r})
        try:
            training.fit(100000)
        except KeyboardInterrupt:
            print(len(training.history.steps), flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    deadline = time.monotonic() + 40
    while len(stub.jobs) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    steps = int(output)
    assert steps >= 2
    assert len(TrainHistory.load(tmp_path / "history.jsonl").steps) == steps
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == steps
