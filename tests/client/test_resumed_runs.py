"""One run over several recordings, invocations and processes; and runs that go another way from a checkpoint."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record
from langgraph_art.runs import GraphRun, load_runs, save_runs

from .graphs import agrees, ask_model, graph_of, said
from .openai_stub import OpenAIStub

THREAD: RunnableConfig = {"configurable": {"thread_id": "t"}}


def ask_human(state: MessagesState) -> dict[str, Any]:
    """Calls the model, asks twice, and calls it again: each answer replays the node from its top."""
    first = ChatART(model="desk").invoke(state["messages"])
    answers = [interrupt("go on?"), interrupt("sure?")]
    return {"messages": [first, ChatART(model="desk").invoke(answers[-1])]}


def calls(run: GraphRun) -> list[tuple[str, int, bool]]:
    return [(call.node, call.attempt, call.delivered) for call in run.calls]


def test_a_recording_goes_on_with_each_answer(stub: OpenAIStub) -> None:
    graph = graph_of(inner=graph_of(ask=ask_human), write=ask_model, checkpointer=InMemorySaver())
    with record(group_id="g", metadata={"item": 3}) as run:
        graph.invoke(said("hello"), THREAD)
    assert calls(run) == [("inner|ask", 1, True)]
    assert (run.thread_id, run.interrupts[0].value, run.interrupts[0].node) == ("t", "go on?", "inner|ask")
    run.reward = 0.5  # of the part; the whole has none yet
    for answer in ("yes", "very"):
        with record(resume=run, metadata={"answer": answer}) as again:
            graph.invoke(Command(resume=answer), THREAD)
        assert again is run
    assert calls(run) == [
        ("inner|ask", 1, True),
        ("inner|ask", 2, True),
        ("inner|ask", 3, True),
        ("inner|ask", 3, True),
        ("write", 1, True),
    ]
    assert len({call.namespace for call in run.calls_at("ask")}) == 1
    assert [(i.value, i.answered, i.answer) for i in run.interrupts] == [
        ("go on?", True, "yes"),
        ("sure?", True, "very"),
    ]
    assert run.input == said("hello")
    assert run.output["messages"][-1].content.startswith("re: ")
    assert (run.metadata, run.error, run.reward) == ({"item": 3, "answer": "very"}, None, None)
    agrees(run, stub)
    assert {request.group for request in stub.log} == {"g"}


def test_an_error_of_the_first_part_is_not_one_of_the_whole(stub: OpenAIStub) -> None:
    tries = iter([ValueError("tool away"), None])

    def shaky(state: MessagesState) -> dict[str, Any]:
        answer = ask_model(state)
        if error := next(tries):
            raise error
        return answer

    graph = graph_of(plan=ask_model, shaky=shaky, checkpointer=InMemorySaver())
    with pytest.raises(ValueError, match="tool away"), record() as run:
        graph.invoke(said("hello"), THREAD)
    assert run.error is not None
    with record(resume=run):
        graph.invoke(None, THREAD)
    assert run.error is None
    assert calls(run) == [("plan", 1, True), ("shaky", 1, True), ("shaky", 2, True)]
    assert run.output["messages"][-1].content == "re: re: hello"
    agrees(run, stub)


FIRST_PROCESS = """
    import sys
    from pathlib import Path
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph_art import record, save_runs
    from tests.client.graphs import ask_model, graph_of, said
    from tests.client.test_resumed_runs import THREAD, ask_human, write_checkpoints

    folder, saver = Path(sys.argv[1]), InMemorySaver()
    with record() as run:
        graph_of(ask=ask_human, write=ask_model, checkpointer=saver).invoke(said("hello"), THREAD)
    save_runs(folder / "runs.jsonl", [run])
    write_checkpoints(saver, folder / "checkpoints")
"""


def write_checkpoints(saver: InMemorySaver, path: Path) -> None:
    storage = {thread: dict(spaces) for thread, spaces in saver.storage.items()}
    path.write_bytes(pickle.dumps((storage, dict(saver.writes), dict(saver.blobs))))


def read_checkpoints(path: Path) -> InMemorySaver:
    saver = InMemorySaver()
    storage, writes, blobs = pickle.loads(path.read_bytes())
    for thread, spaces in storage.items():
        saver.storage[thread].update(spaces)
    saver.writes.update(writes)
    saver.blobs.update(blobs)
    return saver


@pytest.mark.slow
def test_a_run_goes_on_in_another_process(stub: OpenAIStub, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(FIRST_PROCESS), str(tmp_path)], check=True)
    (saved,) = load_runs(tmp_path / "runs.jsonl")
    assert calls(saved) == [("ask", 1, True)]
    graph = graph_of(ask=ask_human, write=ask_model, checkpointer=read_checkpoints(tmp_path / "checkpoints"))
    for answer in ("yes", "very"):
        with record(resume=saved):
            graph.invoke(Command(resume=answer), THREAD)
        save_runs(tmp_path / "runs.jsonl", [saved])
        (saved,) = load_runs(tmp_path / "runs.jsonl")
    assert calls(saved) == [("ask", 1, True), ("ask", 2, True), ("ask", 3, True), ("ask", 3, True), ("write", 1, True)]
    assert [interrupt.answer for interrupt in saved.interrupts] == ["yes", "very"]
    assert saved.input == said("hello")
    agrees(saved, stub)


async def test_interrupts_of_parallel_branches_are_answered_by_id(stub: OpenAIStub) -> None:
    async def study(state: dict[str, Any]) -> dict[str, Any]:
        answer = await ChatART(model="desk").ainvoke(state["topic"])
        return {"messages": [answer, ("user", interrupt(f"{state['topic']}?"))]}

    builder = StateGraph(MessagesState)
    builder.add_node("study", study)
    builder.add_conditional_edges(START, lambda _: [Send("study", {"topic": topic}) for topic in "ab"], ["study"])
    graph = builder.compile(checkpointer=InMemorySaver())
    with record() as run:
        await graph.ainvoke(said("hello"), THREAD)
    ids = {interrupt.value: interrupt.id for interrupt in run.interrupts}
    assert sorted(ids) == ["a?", "b?"]
    with record(resume=run):
        await graph.ainvoke(Command(resume={ids["b?"]: "yes b"}), THREAD)
    assert {i.value: i.answer for i in run.interrupts} == {"a?": None, "b?": "yes b"}
    with record(resume=run):
        await graph.ainvoke(Command(resume={ids["a?"]: "yes a"}), THREAD)
    assert {i.value: i.answer for i in run.interrupts} == {"a?": "yes a", "b?": "yes b"}
    by_branch: dict[str, list[int]] = {}
    for call in run.calls:
        by_branch.setdefault(call.namespace, []).append(call.attempt)
    assert sorted(by_branch.values()) == [[1, 2], [1, 2, 3]] or sorted(by_branch.values()) == [[1, 2], [1, 2]]
    agrees(run, stub)


def test_tasks_that_were_done_are_not_called_again(stub: OpenAIStub) -> None:
    @task
    def draft(text: str) -> str:
        return str(ChatART(model="desk").invoke(text).content)

    @entrypoint(checkpointer=InMemorySaver())
    def flow(text: str) -> str:
        return draft(text).result() + interrupt("good?") + draft("again").result()

    with record() as run:
        flow.invoke("hello", THREAD)
    with record(resume=run):
        flow.invoke(Command(resume=" yes "), THREAD)
    assert calls(run) == [("flow|draft", 1, True)] * 2
    assert run.output == "re: hello yes re: again"
    agrees(run, stub)


def test_a_fork_is_a_run_of_its_own(stub: OpenAIStub) -> None:
    graph = graph_of(plan=ask_model, write=ask_model, checkpointer=InMemorySaver())
    with record() as first:
        graph.invoke(said("hello"), THREAD)
    before_write = next(state for state in graph.get_state_history(THREAD) if state.next == ("write",))
    checkpoint = before_write.config["configurable"]["checkpoint_id"]
    with record(parent=first) as replay:
        graph.invoke(None, before_write.config)
    edited = graph.update_state(before_write.config, {"messages": [("user", "other")]})
    with record(parent=replay.run_id) as fork:
        graph.invoke(None, edited)
    assert (first.parent_run, first.forked_at) == (None, None)
    assert (replay.parent_run, replay.forked_at, replay.thread_id) == (first.run_id, checkpoint, "t")
    assert (fork.parent_run, fork.forked_at) == (replay.run_id, edited["configurable"]["checkpoint_id"])
    assert [run.nodes for run in (first, replay, fork)] == [["plan", "write"], ["write"], ["write"]]
    assert fork.calls[0].messages[-1]["content"] == "other"
    for run in (first, replay, fork):
        agrees(run, stub)


def test_what_cannot_go_on_is_refused() -> None:
    run = GraphRun(run_id="r1")
    for other in ({"run_id": "r2"}, {"group_id": "g"}, {"parent": "r0"}):
        with pytest.raises(ValueError, match="keeps its own"), record(resume=run, **other):  # type: ignore[arg-type]
            pass
    with record(resume=run), pytest.raises(ValueError, match="is being recorded now"), record(resume=run):
        pass
    assert run.ended_at is not None
