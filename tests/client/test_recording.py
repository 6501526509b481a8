"""Every call under the right run and node, compared with what the server itself saw."""

from __future__ import annotations

import asyncio
import contextvars
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import httpx
import openai
import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langchain_openai.chat_models.base import OpenAIAPIContextOverflowError
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError, NodeTimeoutError
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record
from langgraph_art.runs import GraphRun

from .graphs import agrees, ask_model, ask_model_async, graph_of, said
from .openai_stub import OpenAIStub

MODULE_LEVEL = graph_of(plan=ask_model, write=ask_model_async)
"""Compiled long before any recording, and before the server's address is known."""


# -- nodes ------------------------------------------------------------------------------------------------------------


async def test_a_graph_compiled_before_is_recorded_with_all_its_parts(stub: OpenAIStub) -> None:
    with record(group_id="g1", metadata={"item": 3}) as run:
        state = await MODULE_LEVEL.ainvoke(said("hello"))
    assert [call.node for call in run.calls] == ["plan", "write"]
    agrees(run, stub)
    assert {request.group for request in stub.log} == {"g1"}
    assert run.input == said("hello")
    assert run.output == state
    assert run.metadata == {"item": 3}
    assert run.error is None
    first, second = run.calls
    assert (first.model, first.version, first.art, first.delivered) == ("desk", "desk@7", True, True)
    assert [message["content"] for message in second.messages] == ["hello", "re: hello"]
    assert second.response is not None
    assert second.response["content"] == "re: re: hello"
    assert second.response["id"] == state["messages"][-1].id
    assert second.usage is not None
    assert (second.usage["input_tokens"], second.usage["output_tokens"]) == (3, 3)
    assert second.finish_reason == "stop"
    assert first.ended_at is not None
    assert run.started_at <= first.started_at <= first.ended_at <= second.started_at
    assert run.ended_at is not None
    assert second.ended_at is not None
    assert second.ended_at <= run.ended_at


def test_sync_node_in_a_sync_run(stub: OpenAIStub) -> None:
    with record() as run:
        graph_of(plan=ask_model).invoke(said("hello"))
    assert [call.node for call in run.calls] == ["plan"]
    agrees(run, stub)


@pytest.mark.parametrize("as_chain", [False, True], ids=["function", "lcel"])
async def test_streaming_knows_node_and_call(stub: OpenAIStub, as_chain: bool) -> None:
    llm = ChatART(model="desk")
    chain = (
        RunnableLambda(lambda state: state["messages"]) | llm | RunnableLambda(lambda answer: {"messages": [answer]})
    )
    graph = graph_of(plan=chain if as_chain else ask_model, write=chain if as_chain else ask_model_async)
    with record() as sync_run:
        if as_chain:
            list(graph.stream(said("hello there"), stream_mode="messages"))
    with record() as run:
        pieces = [piece async for piece, _ in graph.astream(said("hello there"), stream_mode="messages")]
    assert len(pieces) > 4
    assert all(request.body["stream"] for request in stub.of_run(run.run_id))
    assert [call.node for call in run.calls] == ["plan", "write"]
    agrees(run, stub)
    agrees(sync_run, stub)
    assert len(sync_run.calls) == (2 if as_chain else 0)
    for call in run.calls + sync_run.calls:
        assert call.version == "desk@7"
        assert call.usage is not None
        assert call.response is not None
        assert call.response["type"] == "ai"
    assert run.output["messages"][-1].content.split() == ["re:", "re:", "hello", "there"]


async def test_direct_streams_and_event_streams(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")

    def stream(state: MessagesState) -> dict[str, Any]:
        return {"messages": ["".join(str(chunk.content) for chunk in llm.stream(state["messages"]))]}

    async def stream_async(state: MessagesState) -> dict[str, Any]:
        return {"messages": ["".join([str(chunk.content) async for chunk in llm.astream(state["messages"])])]}

    graph = graph_of(plan=stream, write=stream_async)
    with record() as run:
        [event async for event in graph.astream_events(said("hello"), version="v2")]
    assert [call.node for call in run.calls] == ["plan", "write"]
    assert [call.response["type"] for call in run.calls if call.response] == ["ai", "ai"]
    agrees(run, stub)


@pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
async def test_v3_event_streams(stub: OpenAIStub) -> None:
    with record() as run:
        stream = await graph_of(plan=ask_model, write=ask_model_async).astream_events(said("hello"), version="v3")
        async for _ in stream:
            pass
    assert [(call.node, call.version, call.delivered) for call in run.calls] == [
        ("plan", "desk@7", True),
        ("write", "desk@7", True),
    ]
    agrees(run, stub)


async def test_several_prompts_in_one_generate_while_streaming(stub: OpenAIStub) -> None:
    """All calls of a batch start before the first request goes out; each request must still carry its own id."""
    llm = ChatART(model="desk", streaming=True)
    prompts: list[list[Any]] = [[HumanMessage(f"q{index}")] for index in range(3)]

    def generate(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.generate(prompts).generations[0][0].text]}

    async def generate_async(state: MessagesState) -> dict[str, Any]:
        return {"messages": [(await llm.agenerate(prompts)).generations[0][0].text]}

    with record() as run:
        await graph_of(plan=generate, write=generate_async).ainvoke(said("hello"))
    assert [call.node for call in run.calls] == ["plan"] * 3 + ["write"] * 3
    agrees(run, stub)
    asked = {request.call: request.body["messages"][-1]["content"] for request in stub.log}
    assert all(asked[call.call_id] == call.messages[-1]["content"] for call in run.calls)


async def test_subgraphs_the_same_one_twice_and_one_called_inside_a_node(stub: OpenAIStub) -> None:
    inner = graph_of(model=ask_model)

    async def outer(state: MessagesState) -> dict[str, Any]:
        first = await inner.ainvoke(state)
        second = await inner.ainvoke(first)
        return {"messages": second["messages"][-1:]}

    with record() as run:
        await graph_of(planner=inner, writer=inner, outer=outer).ainvoke(said("hello"))
    assert [call.node for call in run.calls] == ["planner|model", "writer|model", "outer|model", "outer|model"]
    agrees(run, stub)
    assert [len(run.calls_at(name)) for name in ("model", "planner", "outer|model")] == [4, 1, 2]
    assert len(run.output["messages"]) == 4


class Topics(TypedDict):
    topics: list[str]
    answers: Annotated[list[str], operator.add]


def fan_out(state: Topics) -> list[Send]:
    return [Send("study", {"topic": topic}) for topic in state["topics"]]


async def study(state: dict[str, Any]) -> dict[str, Any]:
    return {"answers": [(await ChatART(model="desk").ainvoke(state["topic"])).content]}


async def test_twenty_branches_at_once(stub: OpenAIStub) -> None:
    builder = StateGraph(Topics)
    builder.add_node("study", study)
    builder.add_conditional_edges(START, fan_out, ["study"])
    graph = builder.compile()
    topics = [f"topic-{index}" for index in range(20)]
    with record() as run:
        await graph.ainvoke({"topics": topics, "answers": []})
    assert [call.node for call in run.calls] == ["study"] * 20
    agrees(run, stub)
    asked = {request.call: request.body["messages"][-1]["content"] for request in stub.log}
    assert sorted(asked.values()) == sorted(topics)
    assert all(asked[call.call_id] == call.messages[-1]["content"] for call in run.calls)


async def test_an_agent_and_a_model_inside_its_tool(stub: OpenAIStub) -> None:
    def lookup(topic: str) -> str:
        """Look a topic up."""
        return str(ChatART(model="helper").invoke(f"tell of {topic}").content)

    agent = create_agent(ChatART(model="desk"), [lookup], name="planner")
    with record() as run:
        await graph_of(planner=agent).ainvoke(said('!tool lookup {"topic": "rivers"}'))
    assert [(call.node, call.model) for call in run.calls] == [
        ("planner|model", "desk"),
        ("planner|tools", "helper"),
        ("planner|model", "desk"),
    ]
    agrees(run, stub)
    assert run.calls[0].finish_reason == "tool_calls"
    assert run.calls[0].response is not None
    assert run.calls[0].response["tool_calls"][0]["args"] == {"topic": "rivers"}


async def test_functional_api(stub: OpenAIStub) -> None:
    @task
    async def draft(text: str) -> str:
        return str((await ChatART(model="desk").ainvoke(text)).content)

    @entrypoint()
    async def flow(text: str) -> str:
        return await draft(text)

    with record() as run:
        await flow.ainvoke("hello")
    assert [call.node for call in run.calls] == ["flow|draft"]
    agrees(run, stub)
    assert (run.input, run.output) == ("hello", "re: hello")


async def test_interrupt_and_resume_are_one_run(stub: OpenAIStub) -> None:
    def ask_human(state: MessagesState) -> dict[str, Any]:
        answer = ChatART(model="desk").invoke(state["messages"])
        return {"messages": [answer, ("user", interrupt("go on?"))]}

    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask_human)
    builder.add_node("write", ask_model)
    builder.add_edge(START, "ask")
    builder.add_edge("ask", "write")
    graph = builder.compile(checkpointer=InMemorySaver())
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    with record() as run:
        await graph.ainvoke(said("hello"), config)
        await graph.ainvoke(Command(resume="yes"), config)
    assert run.input == said("hello")
    assert run.output["messages"][-1].content == "re: yes"
    assert run.error is None
    assert [(call.node, call.delivered) for call in run.calls] == [("ask", True), ("ask", True), ("write", True)]
    agrees(run, stub)


# -- threads, tasks, several recordings -------------------------------------------------------------------------------


def test_threads_with_context_inside_a_node(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")

    def spread(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        with ContextThreadPoolExecutor(4) as pool:
            list(pool.map(llm.invoke, [f"a{index}" for index in range(4)]))
        with ThreadPoolExecutor(1) as pool:  # no context, but handlers travel in the config, also when streaming
            pool.submit(llm.invoke, "b", config).result()
            pool.submit(lambda: list(llm.stream("c", config))).result()
        return {"messages": llm.batch(["d", "e"])[:1]}

    with record() as run:
        graph_of(spread=spread).invoke(said("hello"))
    assert [call.node for call in run.calls] == ["spread"] * 8
    agrees(run, stub)


def test_whole_graphs_in_a_thread_pool_with_copied_context(stub: OpenAIStub) -> None:
    def one(index: int) -> GraphRun:
        with record(run_id=f"run-{index}") as run:
            graph_of(plan=ask_model).invoke(said(f"q{index}"))
        return run

    with ThreadPoolExecutor(5) as pool:
        runs = list(pool.map(one, range(5)))
        with record(run_id="outside") as outside:
            context = contextvars.copy_context()
            pool.submit(context.run, graph_of(plan=ask_model).invoke, said("q9")).result()
    for run in [*runs, outside]:
        assert len(run.calls) == 1
        agrees(run, stub)


async def test_thirty_recordings_at_once_do_not_mix(stub: OpenAIStub) -> None:
    async def one(index: int) -> GraphRun:
        with record(run_id=f"run-{index}", group_id=f"group-{index % 3}") as run:
            if index % 2:
                await MODULE_LEVEL.ainvoke(said(f"q{index}"))
            else:
                [piece async for piece in MODULE_LEVEL.astream(said(f"q{index}"), stream_mode="messages")]
        return run

    runs = await asyncio.gather(*map(one, range(30)))
    for index, run in enumerate(runs):
        assert [call.node for call in run.calls] == ["plan", "write"]
        assert run.calls[0].messages[0]["content"] == f"q{index}"
        agrees(run, stub)
    assert len(stub.log) == 60
    assert all(request.group == f"group-{int((request.run or '')[4:]) % 3}" for request in stub.log)


def test_two_asyncio_runs(stub: OpenAIStub) -> None:
    for _ in range(3):
        with record() as run:
            asyncio.run(MODULE_LEVEL.ainvoke(said("hello")))
        assert len(run.calls) == 2
        agrees(run, stub)


async def test_the_innermost_recording_owns_a_call(stub: OpenAIStub) -> None:
    inside: list[GraphRun] = []

    def judge(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        with record() as inner:
            graph_of(rate=ask_model).invoke(said("rate this"))
            with ThreadPoolExecutor(1) as pool:  # knows both recordings from the config only
                pool.submit(graph_of(rate=ask_model).invoke, said("again"), inner_config()).result()
        inside.append(inner)
        return ask_model(state)

    def inner_config() -> RunnableConfig:
        seen: list[RunnableConfig] = []
        RunnableLambda(lambda _, config: seen.append(config)).invoke(0)
        return seen[0]

    with record() as outer:
        await graph_of(plan=ask_model, judge=judge).ainvoke(said("hello"))
    (inner,) = inside
    assert [call.node for call in outer.calls] == ["plan", "judge"]
    assert [call.messages[0]["content"] for call in inner.calls] == ["rate this", "again"]
    agrees(outer, stub)
    agrees(inner, stub)
    assert inner.input == said("rate this")
    assert outer.input == said("hello")
    assert len(outer.output["messages"]) == 3


def test_a_graph_of_an_inner_recording_is_not_the_outers_graph(stub: OpenAIStub) -> None:
    def judged(text: str) -> str:
        with record():
            graph_of(rate=ask_model).invoke(said("rate this"))
        return text.upper()

    with record() as outer:
        RunnableLambda(judged).invoke("hello")
    assert (outer.input, outer.output, outer.calls) == ("hello", "HELLO", [])


def test_two_recordings_one_after_the_other_and_calls_outside(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    with record() as first:
        llm.invoke("one")
    llm.invoke("two")
    list(llm.stream("three"))
    with record() as second:
        llm.invoke("four")
    assert [len(first.calls), len(second.calls)] == [1, 1]
    assert [request.run for request in stub.log] == [first.run_id, None, None, second.run_id]
    assert all(request.call for request in stub.log)
    assert len({request.call for request in stub.log}) == 4
    assert first.calls[0].node == ""


def test_nodes_are_known_without_a_recording(stub: OpenAIStub) -> None:
    def stream(state: MessagesState) -> dict[str, Any]:
        return {"messages": [chunk.content for chunk in ChatART(model="desk").stream(state["messages"])][:1]}

    graph_of(plan=ask_model, write=stream).invoke(said("hello"))
    assert [(request.node, request.run) for request in stub.log] == [("plan", None), ("write", None)]


async def test_other_models_are_recorded_but_not_as_ours(stub: OpenAIStub) -> None:
    other = GenericFakeChatModel(messages=iter([AIMessage("fake")]))

    def mixed(state: MessagesState) -> dict[str, Any]:
        return {"messages": [other.invoke(state["messages"])]}

    with record() as run:
        await graph_of(mixed=mixed, plan=ask_model).ainvoke(said("hello"))
    assert [(call.node, call.art, call.version) for call in run.calls] == [
        ("mixed", False, None),
        ("plan", True, "desk@7"),
    ]
    assert run.calls[0].response is not None
    assert run.calls[0].response["content"] == "fake"
    agrees(run, stub)


def test_without_a_graph_the_topmost_chain_gives_input_and_output(stub: OpenAIStub) -> None:
    def step(text: str) -> str:
        return str((RunnableLambda(lambda question: question) | ChatART(model="desk")).invoke(text).content)

    with record() as run:
        RunnableLambda(step).invoke("hello")
    assert (run.input, run.output) == ("hello", "re: hello")


def test_graphs_inside_a_chain_give_input_and_output(stub: OpenAIStub) -> None:
    graph = graph_of(plan=ask_model)

    def both(text: str) -> str:
        graph.invoke(said(f"{text} 1"))
        return str(graph.invoke(said(f"{text} 2"))["messages"][-1].content)

    with record() as run:
        RunnableLambda(both).invoke("hello")
    assert run.input == said("hello 1")
    assert run.output["messages"][-1].content == "re: hello 2"


def test_dict_messages_and_plain_strings(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    with record() as run:
        llm.invoke([{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}])
        llm.invoke("hi")
    assert [[(m["type"], m["content"]) for m in call.messages] for call in run.calls] == [
        [("system", "brief"), ("human", "hi")],
        [("human", "hi")],
    ]


def test_messages_are_recorded_as_they_were_at_each_call(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    history: list[Any] = [HumanMessage("first"), HumanMessage([{"type": "text", "text": "part"}])]
    with record() as run:
        llm.invoke(history)
        llm.invoke(history)
        history[0].content = "second"
        history[1].content[0]["text"] = "changed inside"
        llm.invoke(history)
    before, again, after = (call.messages for call in run.calls)
    assert [message["content"] for message in before] == ["first", [{"type": "text", "text": "part"}]]
    assert all(one is other for one, other in zip(before, again, strict=True))
    assert [message["content"] for message in after] == ["second", [{"type": "text", "text": "changed inside"}]]


# -- failures ---------------------------------------------------------------------------------------------------------


def failing(error: BaseException) -> Any:
    def node(state: MessagesState) -> dict[str, Any]:
        ask_model(state)
        raise error

    return node


async def test_an_exception_keeps_the_calls_made_before(stub: OpenAIStub) -> None:
    error = ValueError("no such tool")
    with pytest.raises(ValueError, match="no such tool") as caught, record() as run:
        await graph_of(plan=ask_model, inner=graph_of(fall=failing(error))).ainvoke(said("hello"))
    assert caught.value is error
    assert [(call.node, call.delivered, call.error) for call in run.calls] == [
        ("plan", True, None),
        ("inner|fall", True, None),
    ]
    assert run.error is not None
    assert run.error.model_dump() == {
        "type": "ValueError",
        "message": "no such tool",
        "node": "inner|fall",
        "infrastructure": False,
    }
    assert run.output is None
    assert run.input == said("hello")
    assert run.ended_at is not None


@pytest.mark.parametrize(
    ("prompt", "kind", "infrastructure", "message"),
    [
        ("!500", "OpenAIAPIError", True, "engine died"),
        ("!429", "OpenAIRateLimitError", True, "too many"),
        ("!404", "OpenAIModelNotFoundError", True, "no policy desk"),
        ("!422", "openai.UnprocessableEntityError", False, "not like this"),
        ("!slow 2", "OpenAITimeoutError", True, "timed out"),
        (
            "!overflow",
            "OpenAIInvalidRequestError",
            False,
            "node plan: the prompt has 5000 tokens, the context holds 2048",
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_errors_of_the_server(
    stub: OpenAIStub, prompt: str, kind: str, infrastructure: bool, message: str, streaming: bool
) -> None:
    llm = ChatART(model="desk", max_retries=0, timeout=0.5, streaming=streaming)

    async def plan(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    with pytest.raises(openai.APIError), record() as run:
        await graph_of(plan=plan).ainvoke(said(prompt))
    assert run.error is not None
    assert kind in run.error.type
    assert message in run.error.message
    assert (run.error.node, run.error.infrastructure) == ("plan", infrastructure)
    (call,) = run.calls
    assert (call.delivered, call.art, call.response, call.error) == (False, True, None, run.error)


async def test_a_server_that_is_not_there_and_a_stream_that_breaks(stub: OpenAIStub) -> None:
    gone = ChatART(model="desk", max_retries=0, base_url="http://127.0.0.1:9/v1")
    with pytest.raises(openai.APIConnectionError), record() as run:
        await gone.ainvoke("hello")
    assert run.error is not None
    assert run.error.infrastructure
    breaking = ChatART(model="desk", max_retries=0, streaming=True)
    with pytest.raises(Exception, match=r"(?i)peer|closed|incomplete|connection"), record() as run:
        await breaking.ainvoke("!drop this")
    assert run.error is not None
    assert run.error.infrastructure
    assert not run.calls[0].delivered


class GivingUp(Exception):
    pass


def status_error(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://x")
    return httpx.HTTPStatusError(str(status), request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "infrastructure"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (OutputParserException("not a number"), False),
        (KeyError("tool"), False),
        (NodeTimeoutError("plan", 2.0, kind="run", run_timeout=1.0), True),
        (openai.APIError("the engine died", httpx.Request("POST", "http://x"), body=None), True),  # type: ignore[arg-type]
        (
            OpenAIAPIContextOverflowError("exceeds the context window", httpx.Request("POST", "http://x"), body=None),
            False,
        ),
        (httpx.ConnectError("away"), True),
        (status_error(503), True),
        (status_error(404), False),  # a tool that the policy sent to a wrong address
        (ExceptionGroup("both", [KeyError("tool"), TimeoutError()]), True),
    ],
)
def test_errors_of_nodes(stub: OpenAIStub, error: Exception, infrastructure: bool) -> None:
    with pytest.raises(type(error)), record() as run:
        graph_of(plan=failing(error)).invoke(said("hello"))
    assert run.error is not None
    assert (run.error.node, run.error.infrastructure) == ("plan", infrastructure)
    assert run.error.message


def test_an_error_wrapped_by_the_app_keeps_its_cause_and_node(stub: OpenAIStub) -> None:
    def wrap(run_graph: Any) -> None:
        try:
            run_graph.invoke(said("hello"))
        except TimeoutError as error:
            raise GivingUp("giving up") from error

    with pytest.raises(GivingUp), record() as run:
        wrap(graph_of(plan=failing(TimeoutError("slow tool"))))
    assert run.error is not None
    assert run.error.type.endswith("GivingUp")
    assert (run.error.node, run.error.infrastructure) == ("plan", True)


def test_the_recursion_limit_is_the_policys_doing(stub: OpenAIStub) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("plan", ask_model)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "plan")
    with pytest.raises(GraphRecursionError), record() as run:
        builder.compile().invoke(said("hello"), {"recursion_limit": 3})
    assert run.error is not None
    assert not run.error.infrastructure
    assert len(run.calls) == 3


async def test_node_retries_and_model_retries_are_calls_of_their_own(stub: OpenAIStub) -> None:
    failures = iter([True, False])

    async def shaky(state: MessagesState) -> dict[str, Any]:
        answer = await ask_model_async(state)
        if next(failures):
            raise ConnectionError("the tool was away")
        return answer

    builder = StateGraph(MessagesState)
    builder.add_node("shaky", shaky, retry_policy=RetryPolicy(initial_interval=0.01, jitter=False))
    builder.add_edge(START, "shaky")
    with record() as run:
        await builder.compile().ainvoke(said("hello"))
    assert [(call.node, call.delivered) for call in run.calls] == [("shaky", True), ("shaky", True)]
    assert run.error is None
    agrees(run, stub)

    tries = iter(["!500", "hello"])
    llm = RunnableLambda(lambda _: next(tries)) | ChatART(model="desk", max_retries=0)
    with record() as run:
        await llm.with_retry(stop_after_attempt=2, wait_exponential_jitter=False).ainvoke("x")
    assert [call.delivered for call in run.calls] == [False, True]
    assert run.calls[0].error is not None
    agrees(run, stub)


async def test_abandoned_streams_are_not_delivered(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")

    def peek(state: MessagesState) -> dict[str, Any]:
        stream = llm.stream("one two three four")
        next(stream)
        stream.close()
        return {"messages": []}

    with record() as run:
        await graph_of(peek=peek, plan=ask_model).ainvoke(said("hello"))
        left_open = llm.astream("!paced one two three")
        await anext(left_open)
    await left_open.aclose()  # after the block: it is closed and stays as it is
    assert [(call.node, call.delivered) for call in run.calls] == [("peek", False), ("plan", True), ("", False)]
    assert all(call.ended_at is not None for call in run.calls)
    assert run.calls[2].ended_at == run.ended_at
    agrees(run, stub)


async def test_cancellation_goes_through_and_leaves_the_call_undelivered(stub: OpenAIStub) -> None:
    runs: list[GraphRun] = []

    async def one() -> None:
        with record() as run:
            runs.append(run)
            await MODULE_LEVEL.ainvoke(said("!slow 1"))

    work = asyncio.create_task(one())
    while not stub.log:
        await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    (run,) = runs
    assert run.error is not None
    assert run.error.infrastructure
    assert "CancelledError" in run.error.type
    assert [(call.delivered, call.response) for call in run.calls] == [(False, None)]
    assert run.ended_at is not None


async def test_what_ends_after_the_block_changes_nothing(stub: OpenAIStub) -> None:
    with record() as run:
        late = asyncio.create_task(ChatART(model="desk").ainvoke("!slow 0.2"))
        while not stub.log:
            await asyncio.sleep(0.01)
    before = run.model_dump()
    assert (await late).content == "re: !slow 0.2"
    assert run.model_dump() == before
    assert not run.calls[0].delivered


def test_a_failed_branch_does_not_hide_the_others(stub: OpenAIStub) -> None:
    together = threading.Barrier(2, timeout=5)

    def good(state: MessagesState) -> dict[str, Any]:
        answer = ask_model(state)
        together.wait()
        return answer

    def bad(state: MessagesState) -> dict[str, Any]:
        together.wait()
        raise ValueError("bad branch")

    builder = StateGraph(MessagesState)
    builder.add_node("good", good)
    builder.add_node("bad", bad)
    builder.add_edge(START, "good")
    builder.add_edge(START, "bad")
    with pytest.raises(ValueError, match="bad branch"), record() as run:
        builder.compile().invoke(said("hello"))
    assert run.error is not None
    assert run.error.node == "bad"
    assert [(call.node, call.delivered) for call in run.calls] == [("good", True)]


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"run_id": "a/b"}, {"group_id": "ä"}, {"run_id": ""}, {"run_id": "x" * 129}])
def test_ids_that_cannot_travel_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="letters, digits"), record(**bad):  # type: ignore[arg-type]
        pass


def test_unknown_sampling_parameters_are_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"unknown parameter temprature.*temperature"),
        record(sampling={"temprature": 1}),
    ):
        pass


async def test_no_token_arrays_in_states_and_checkpoints(stub: OpenAIStub) -> None:
    saver = InMemorySaver()
    builder = StateGraph(MessagesState)
    builder.add_node("plan", ask_model)
    builder.add_edge(START, "plan")
    graph = builder.compile(checkpointer=saver)
    with record() as run:
        await graph.ainvoke(said("hello"), {"configurable": {"thread_id": "t"}})
    for text in (repr(run.output), repr(saver.storage), repr(saver.blobs), run.model_dump_json()):
        assert "token_ids" not in text
        assert "prompt_ids" not in text
    assert run.calls[0].tokens is None
