from __future__ import annotations

import json
from typing import Any

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel.remote import RemoteGraph

from langgraph_art import ChatART, join_remote, record, record_all
from langgraph_art.remote import KEY, caller_of
from langgraph_art.runs import GraphRun

from .openai_stub import OpenAIStub


class Asked:
    """The SDK's client, as far as a `RemoteGraph` uses it to ask."""

    def __init__(self) -> None:
        self.runs = self
        self.configs: list[Any] = []

    def stream(self, **request: Any) -> Any:
        self.configs.append(request["config"])
        return iter(())


def around(remote: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("far", remote)
    builder.add_edge(START, "far")
    outer = StateGraph(MessagesState)
    outer.add_node("outer", builder.compile())
    outer.add_edge(START, "outer")
    return outer.compile()


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def remote(asked: Asked) -> RemoteGraph:
    return RemoteGraph("agent", sync_client=asked)  # type: ignore[arg-type]


def test_a_remote_graph_is_told_who_asks(remote: RemoteGraph, asked: Asked) -> None:
    own = RemoteGraph.__dict__["stream"]
    with record(group_id="g", sampling={"temperature": 1.0, "top_k": None}) as run:
        around(remote).invoke({"messages": []})
        remote.invoke({"messages": []}, {"metadata": {"mine": 1}})
    remote.invoke({"messages": []})
    inside, outside, unrecorded = (config.get("metadata") or {} for config in asked.configs)
    caller = caller_of(inside)
    assert caller is not None
    assert (caller.run, caller.group, caller.sampling) == (run.run_id, "g", {"temperature": 1.0, "top_k": None})
    assert [part.split(":")[0] for part in caller.namespace.split("|")] == ["outer", "far"]
    assert outside["mine"] == 1
    assert json.loads(outside[KEY])["namespace"] == ""
    assert KEY not in unrecorded
    assert RemoteGraph.__dict__["stream"] is own


async def test_async(asked: Asked) -> None:
    class Async(Asked):
        async def stream(self, **request: Any) -> Any:
            asked.configs.append(request["config"])
            return
            yield

    with record() as run:
        await around(RemoteGraph("agent", client=Async())).ainvoke({"messages": []})  # type: ignore[arg-type]
    caller = caller_of(asked.configs[0]["metadata"])
    assert caller is not None
    assert (caller.run, caller.namespace.split(":")[0]) == (run.run_id, "outer")


def test_who_asks_is_passed_on_within_record_all(remote: RemoteGraph, asked: Asked, stub: OpenAIStub) -> None:
    runs: list[GraphRun] = []
    stop = record_all(runs.append)
    around(remote).invoke({"messages": []})
    stop()
    caller = caller_of(asked.configs[0]["metadata"])
    assert caller is not None
    assert caller.run == runs[0].run_id


@pytest.mark.parametrize("entry", ["nonsense", "{}", '{"run": "a\\nb", "namespace": "", "sampling": {}}', 3])
def test_entries_of_others_are_ignored(entry: Any) -> None:
    assert caller_of({KEY: entry}) is None


def test_the_remote_part_is_recorded_under_the_callers_run_and_joined(
    remote: RemoteGraph, asked: Asked, stub: OpenAIStub
) -> None:
    def say(state: MessagesState) -> dict[str, Any]:
        return {"messages": [ChatART(model="p", temperature=0.1).invoke("hi")]}

    builder = StateGraph(MessagesState)
    builder.add_node("say", say)
    builder.add_edge(START, "say")
    far = builder.compile()
    with record(group_id="g", sampling={"temperature": 1.0}) as run:
        around(remote).invoke({"messages": []})
    parts: list[GraphRun] = []
    stop = record_all(parts.append)
    far.invoke({"messages": []}, {"metadata": asked.configs[0]["metadata"], "configurable": {"thread_id": "t"}})
    far.invoke({"messages": []})
    stop()
    part, other = parts
    assert (part.run_id, part.group_id, part.thread_id) == (run.run_id, "g", "t")
    assert part.output["messages"][0].text == "re: hi"
    assert other.run_id != run.run_id
    assert [(r.run, r.group, r.node, r.body["temperature"]) for r in stub.log] == [
        (run.run_id, "g", "say", 1.0),
        (other.run_id, None, "say", 0.1),
    ]
    assert join_remote([run], parts) == 1
    assert join_remote([run], parts) == 0
    assert [(call.call_id, call.node, call.art) for call in run.calls] == [
        (part.calls[0].call_id, "outer|far|say", True)
    ]
    assert run.calls[0].namespace.count("|") == 2
    assert part.calls[0].node == "say"
