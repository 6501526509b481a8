"""Apps that are not edited, on the real engine: exact tokens, and training."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import openai
import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

from langgraph_art import Client, EmbeddedServer, GraphRun, arollout, node_call, record, swap
from langgraph_art.rollouts import TRAINING_SAMPLING

pytestmark = pytest.mark.engine
APPS = Path(__file__).parents[1] / "apps"
Load = Callable[[str], ModuleType]


@pytest.fixture(autouse=True)
def address(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGGRAPH_ART_URL", server.url)
    for name in ("OPENAI_API_KEY", "OPENAI_API_BASE", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    def anew(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"app_{name}", APPS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return anew


def same_at_the_server(run: GraphRun, client: Client, untrainable: str | None = None) -> None:
    recorded = {call.call_id: call for call in client.calls(run.run_id)}
    assert [(call.call_id, call.node) for call in run.calls] == [
        (call.call_id, recorded[call.call_id].node) for call in run.calls
    ]
    assert len(recorded) == len(run.calls)
    for call in run.calls:
        assert recorded[call.call_id].untrainable == untrainable
        assert call.usage is not None
        assert len(recorded[call.call_id].sampled_ids) == call.usage["output_tokens"]


async def test_an_app_of_five_nodes_is_trained(load: Load, client: Client, policy: str) -> None:
    with swap({"*": policy}):
        graph = load("held_models").graph
        groups = await arollout(
            graph,
            [{"text": "Say something."}],
            n=4,
            reward=lambda run: float(sum(len(text) for text in run.output["said"].values())),
            sampling={**TRAINING_SAMPLING, "max_tokens": 3},
            progress=False,
        )
        nodes = ["in_global", "in_closure", "in_method", "in_method", "in_binding", "in_chain"]
        for run in groups[0].runs:
            assert [call.node for call in run.calls] == nodes
            same_at_the_server(run, client)
        result = client.train(groups)
        assert client.policies.get(policy).version == 1
        assert result.skipped == {}
        with record() as run:
            await graph.ainvoke({"text": "Again."})
    assert {call.version for call in run.calls} == {f"{policy}@1"}


def test_what_is_written_for_anthropic(load: Load, client: Client, policy: str) -> None:
    with swap({"ask": policy}):
        ask = load("anthropic_app").ask
        graph = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile()
        with record(sampling={"temperature": 1.0, "max_tokens": 3}) as run:
            graph.invoke({"messages": [HumanMessage("Oslo?")]})
    same_at_the_server(run, client, untrainable="constrained")  # parallel_tool_calls=False: vLLM applies a grammar
    assert run.calls[0].messages[0]["content"][0]["cache_control"]


def test_the_openai_sdk_in_a_node(server: EmbeddedServer, client: Client, policy: str) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    def say(state: MessagesState) -> dict[str, object]:
        with node_call(model=policy, messages=[{"role": "user", "content": "Hi"}], max_tokens=3) as call:
            answer = sdk.chat.completions.create(**call.request)
            call.answer(answer)
        return {"messages": [("ai", answer.choices[0].message.content)]}

    graph = StateGraph(MessagesState).add_node("say", say).add_edge(START, "say").compile()
    with record() as run:
        graph.invoke({"messages": []})
    same_at_the_server(run, client)
    assert run.calls[0].version == f"{policy}@0"
