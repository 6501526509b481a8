from __future__ import annotations

import asyncio
import contextvars
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from langchain.chat_models import init_chat_model
from langchain_anthropic import ChatAnthropic
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel

from langgraph_art import ChatART, record, rollout, swap, swap_all
from langgraph_art.async_http import per_loop_client

from .graphs import graph_of
from .openai_stub import OpenAIStub

ENTRY_POINTS = ("generate", "agenerate", "stream", "astream", "stream_events", "astream_events", "__init__")


class Point(BaseModel):
    """A point."""

    x: int


def one_node(model: Any, ask: Callable[[Any, Any], Any] = lambda model, messages: model.invoke(messages)) -> Any:
    def say(state: MessagesState) -> dict[str, Any]:
        return {"messages": [ask(model, state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("say", say)
    builder.add_edge(START, "say")
    builder.add_edge("say", END)
    return builder.compile()


def ask(text: str) -> dict[str, Any]:
    return {"messages": [("human", text)]}


@pytest.fixture
def gpt(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> ChatOpenAI:
    """A model whose provider answers, too: at the stub, under its own name and without our headers."""
    monkeypatch.setenv("OPENAI_API_BASE", f"{stub.url}/v1")
    client = per_loop_client(None, None, trust_env=False)  # LangChain's own is of the loop of the first test
    return ChatOpenAI(model="gpt-4o", api_key="the-apps-own", max_retries=0, http_async_client=client)


# -- scope ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:swap")
def test_the_process_is_as_before_after_the_last_block(gpt: ChatOpenAI) -> None:
    before = {name: BaseChatModel.__dict__.get(name) for name in ENTRY_POINTS}
    with swap({"*": "a"}):
        with pytest.raises(ZeroDivisionError), swap({"*": "b"}):
            raise ZeroDivisionError
        gpt.invoke("hi")
        assert BaseChatModel.generate is not before["generate"]
    assert {name: BaseChatModel.__dict__.get(name) for name in ENTRY_POINTS} == before
    assert gpt.invoke("hi").response_metadata["model_name"] == "gpt-4o@7"


def test_two_swaps_at_once_and_a_thread_without_one(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    graph, together = one_node(gpt), threading.Barrier(3, timeout=10)

    def run(policy: str | None) -> str:
        if policy is None:
            together.wait()
            return str(graph.invoke(ask("hi"))["messages"][-1].response_metadata["model_name"])
        with swap({"say": policy}):
            together.wait()
            return str(graph.invoke(ask("hi"))["messages"][-1].response_metadata["model_name"])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, ["left", "right", None])) == ["left@7", "right@7", "gpt-4o@7"]


async def test_swaps_of_tasks_in_one_loop_do_not_meet(gpt: ChatOpenAI) -> None:
    async def run(policy: str) -> str:
        with swap({"say": policy}):
            await asyncio.sleep(0.01)
            answer = await gpt.ainvoke("hi") if policy == "say" else (await graph.ainvoke(ask("hi")))["messages"][-1]
            return str(answer.response_metadata["model_name"])

    graph = one_node(gpt)
    assert await asyncio.gather(*map(run, ("a", "b", "c"))) == ["a@7", "b@7", "c@7"]


def test_the_innermost_counts(gpt: ChatOpenAI) -> None:
    graph = one_node(gpt)
    with swap({"say": "outer"}):
        with swap({"say": "inner"}):
            assert graph.invoke(ask("hi"))["messages"][-1].response_metadata["model_name"] == "inner@7"
        assert graph.invoke(ask("hi"))["messages"][-1].response_metadata["model_name"] == "outer@7"


def test_what_goes_on_after_the_block_is_the_apps_own(gpt: ChatOpenAI) -> None:
    with swap({"*": "p"}):
        gpt.invoke("hi")
        context = contextvars.copy_context()
    with swap({"*": "q"}):  # so that the entry points are ours, while the other block is over
        answer = context.run(gpt.invoke, "hi")
        gpt.invoke("hi")
    assert answer.response_metadata["model_name"] == "gpt-4o@7"


def test_rollouts_reach_it_in_all_their_threads(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    with swap({"say": "p"}):
        (group,) = rollout(one_node(gpt), [ask("hi")], n=4, reward=lambda run: 1.0, progress=False)
    assert [(call.model, call.art, call.version) for run in group.runs for call in run.calls] == [
        ("p", True, "p@7")
    ] * 4
    assert {request.body["temperature"] for request in stub.log} == {1.0}
    assert {request.group for request in stub.log} == {group.group_id}


# -- which calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["say", "s*", "gpt-4o", "openai:gpt-4o", "openai:*", "gpt-*", "*", "outer|say", "outer", "outer|*"]
)
@pytest.mark.filterwarnings("ignore:swap")
def test_keys_that_fit(gpt: ChatOpenAI, key: str) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("outer", one_node(gpt))
    builder.add_edge(START, "outer")
    with swap({"elsewhere": "no", key: "p"}) as swapped, record() as run:
        builder.compile().invoke(ask("hi"))
    assert [(call.node, call.model) for call in run.calls] == [("outer|say", "p")]
    assert dict(swapped.swapped) == {("outer|say", "openai:gpt-4o", "p"): 1}


@pytest.mark.filterwarnings("ignore:swap")
def test_none_leaves_a_call_alone_and_the_first_key_counts(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    with swap({"say": None, "*": "p"}) as swapped:
        assert one_node(gpt).invoke(ask("hi"))["messages"][-1].response_metadata["model_name"] == "gpt-4o@7"
        gpt.invoke("hi")
    assert [request.body["model"] for request in stub.log] == ["gpt-4o", "p"]
    assert not swapped.missed


def test_the_name_may_come_with_the_call(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    with swap({"o9": "p"}):
        gpt.bind(model="o9").invoke("hi")
        gpt.invoke("hi", model="o9")
    assert [request.body["model"] for request in stub.log] == ["p", "p"]


def test_a_model_as_the_value_sets_more_than_the_name(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    policy = ChatART(model="p", temperature=0.9, max_tokens=5, extra_body={"min_p": 0.1})
    with swap({"*": policy}):
        gpt.model_copy(update={"temperature": 0.2}).invoke("hi")
        gpt.bind(extra_body={"top_k": 3}).invoke("hi")
    first, second = (request.body for request in stub.log)
    assert (first["temperature"], first["max_completion_tokens"], first["min_p"]) == (0.2, 5, 0.1)
    assert (second["temperature"], second["min_p"], second["top_k"]) == (0.9, 0.1, 3)


# -- ways to call -----------------------------------------------------------------------------------------------------


def read(stream: Any) -> str:
    return "".join(str(part.text) for part in stream)


WAYS: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda m: m.invoke("hi").text,
    "batch": lambda m: m.batch(["hi"])[0].text,
    "stream": lambda m: read(m.stream("hi")).strip(),
    "generate": lambda m: m.generate([[HumanMessage("hi")]]).generations[0][0].text,
    "v3": lambda m: m.stream_events("hi", version="v3").output.text.strip(),
    "streaming=True": lambda m: m.model_copy(update={"streaming": True}).invoke("hi").text.strip(),
    "retry": lambda m: m.with_retry().invoke("hi").text,
}


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call(gpt: ChatOpenAI, stub: OpenAIStub, way: str) -> None:
    with swap({"*": "p"}), record() as run:
        assert WAYS[way](gpt) == "re: hi"
    assert [(call.model, call.art, call.delivered, call.version) for call in run.calls] == [("p", True, True, "p@7")]
    assert [request.call for request in stub.log] == [run.calls[0].call_id]


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
async def test_every_async_way_to_call(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    with swap({"*": "p"}), record() as run:
        assert (await gpt.ainvoke("hi")).text == "re: hi"
        assert (await gpt.abatch(["hi"]))[0].text == "re: hi"
        assert (await joined(gpt.astream("hi"))).strip() == "re: hi"
        events = [event async for event in gpt.astream_events("hi", version="v2")]
        assert events[-1]["data"]["output"].text.strip() == "re: hi"
        stream = await gpt.astream_events("hi", version="v3")
        assert (await stream.output).text.strip() == "re: hi"
        await asyncio.sleep(0.05)  # LangChain tells its callbacks after its consumer
    assert [(call.model, call.delivered) for call in run.calls] == [("p", True)] * 5
    assert [request.call for request in stub.log] == [call.call_id for call in run.calls]


async def test_streams_of_a_graph(gpt: ChatOpenAI) -> None:
    graph = one_node(gpt)
    with swap({"say": "p"}), record() as run:
        parts = [message.text async for message, _ in graph.astream(ask("a b"), stream_mode="messages")]
    assert "".join(parts).strip() == "re: a b"
    assert len(parts) > 2
    assert [call.model for call in run.calls] == ["p"]


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
async def test_events_of_a_graph(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    async def say(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await gpt.ainvoke(state["messages"])]}

    sync, waiting = one_node(gpt), graph_of(say=say)
    with swap({"say": "p"}) as swapped, record() as run:
        with sync.stream_events(ask("a b"), version="v3") as events:
            texts = [str(message.text) for message in events.messages]
            assert events.output["messages"][-1].text.strip() == "re: a b"
        stream = await waiting.astream_events(ask("c d"), version="v3")
        async with stream:
            later = [str(await message.text) async for message in stream.messages]
            assert (await stream.output())["messages"][-1].text.strip() == "re: c d"
    assert [text.strip() for text in texts + later] == ["re: a b", "re: c d"]
    assert [(call.model, call.node, call.delivered, call.version) for call in run.calls] == [
        ("p", "say", True, "p@7")
    ] * 2
    assert [request.call for request in stub.log] == [call.call_id for call in run.calls]
    assert not swapped.problems()


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(gpt: ChatOpenAI, stub: OpenAIStub, method: Any) -> None:
    text = '!tool Point {"x": 3}' if method == "function_calling" else '!json {"x": 3}'
    model = gpt.with_structured_output(Point, method=method)
    raw = gpt.with_structured_output(Point, method=method, include_raw=True)
    with swap({"*": "p"}), record() as run:
        assert model.invoke(text) == Point(x=3)
        assert raw.invoke(text)["parsed"] == Point(x=3)  # type: ignore[index]
    assert [call.model for call in run.calls] == ["p", "p"]


def test_what_hangs_on_the_model_is_kept(gpt: ChatOpenAI) -> None:
    seen: list[Any] = []

    class Watch(BaseCallbackHandler):
        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
            seen.append((kwargs["tags"], kwargs["metadata"]["mine"], kwargs["invocation_params"]["model"]))

    model = ChatOpenAI(model="gpt-4o", api_key="k", callbacks=[Watch()], tags=["t"], metadata={"mine": 1})
    with swap({"*": "p"}):
        model.invoke("hi", {"tags": ["now"]})
    assert [(set(tags), mine, name) for tags, mine, name in seen] == [({"t", "now"}, 1, "p")]


# -- keys of providers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["openai:gpt-4o", "anthropic:claude-sonnet-4-5"])
def test_models_are_built_without_a_key_inside_only(
    stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with swap({"*": "p"}):
        assert init_chat_model(name).invoke("hi").text == "re: hi"
        with pytest.raises(ValueError, match="temperature"):
            ChatOpenAI(model="gpt-4o", temperature="warm")
    with pytest.raises(openai.OpenAIError, match="api_key"):
        ChatOpenAI(model="gpt-4o")


# -- reports ----------------------------------------------------------------------------------------------------------


def test_what_no_key_fits_is_reported(gpt: ChatOpenAI) -> None:
    with pytest.warns(UserWarning, match="1 call of ChatOpenAI openai:gpt-4o at node 'say': no key") as caught:  # noqa: SIM117
        with swap({"sya": "p"}):
            one_node(gpt).invoke(ask("hi"))
    assert "no call fitted 'sya' (swapped were: none)" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_options_without_a_counterpart_are_reported(stub: OpenAIStub) -> None:
    claude = ChatAnthropic(model="claude-sonnet-4-5", api_key="k", thinking={"type": "enabled", "budget_tokens": 1024})
    search = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.warns(UserWarning, match="thinking has no counterpart") as caught, swap({"*": "p"}):
        claude.bind_tools([search, Point]).invoke("hi", betas=["x"])
    text = str(caught[0].message)
    assert "tool web_search has no counterpart" in text
    assert "betas has no counterpart" in text
    assert [tool["function"]["name"] for tool in stub.log[0].body["tools"]] == ["Point"]


def test_tools_that_cannot_be_translated_are_an_error(stub: OpenAIStub, gpt: ChatOpenAI) -> None:
    with swap({"*": "p"}), pytest.raises(ValueError, match=r"tools of ChatOpenAI .* cannot be\s+translated"):
        gpt.invoke("hi", tools=[{"function_declarations": []}])
    with pytest.warns(UserWarning, match="cannot be translated"), swap({"*": "p"}, fallback=1):
        gpt.invoke("hi", tools=[{"function_declarations": []}])
    assert [request.body["model"] for request in stub.log] == ["gpt-4o"]


class OfItsOwn(FakeListChatModel):
    """Answers past LangChain's entry points, but tells the callbacks."""

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> AIMessage:
        from langchain_core.callbacks import CallbackManager
        from langchain_core.runnables.config import ensure_config

        manager = CallbackManager.configure(ensure_config(config)["callbacks"])
        metadata = {"ls_provider": "own", "ls_model_name": "m", **ensure_config(config)["metadata"]}
        manager.add_metadata(metadata)
        manager.on_chat_model_start({"id": ["OfItsOwn"]}, [[]])
        return AIMessage("own")


def test_a_class_that_goes_its_own_way_is_reported(stub: OpenAIStub) -> None:
    with pytest.warns(UserWarning, match="OfItsOwn own:m at node 'say': its class has entry points of its own"):  # noqa: SIM117
        with swap({"*": "p"}):
            assert one_node(OfItsOwn(responses=["x"])).invoke(ask("hi"))["messages"][-1].text == "own"


def test_a_completion_model_is_reported(stub: OpenAIStub) -> None:
    llm = OpenAI(model="davinci", api_key="k", base_url=f"{stub.url}/v1", max_retries=0)
    with pytest.warns(UserWarning, match="OpenAI openai:davinci outside any node: it is a completion model"):  # noqa: SIM117
        with swap({"*": "p"}), pytest.raises(openai.NotFoundError):
            llm.invoke("hi")


def test_a_plain_thread(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    def in_thread(model: Any, messages: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(model.invoke, messages).result()

    def run() -> None:
        with swap({"*": "p"}):
            one_node(gpt, in_thread).invoke(ask("lost"))
            gpt.invoke("here")

    with pytest.warns(UserWarning, match="openai:gpt-4o outside any node: called at .* outside the context"):
        run()
    assert [request.body["model"] for request in stub.log] == ["gpt-4o", "p"]


def test_a_plain_thread_that_is_given_the_config(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    from langgraph.config import get_config

    def in_thread(model: Any, messages: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(model.invoke, messages, get_config()).result()

    with swap({"say": "p"}):
        one_node(gpt, in_thread).invoke(ask("hi"))
    assert [request.body["model"] for request in stub.log] == ["p"]


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="no policies"), swap({}):
        pass
    with pytest.raises(ValueError, match="must be positive"), swap({"*": "p"}, fallback=0):
        pass


# -- a server that is away --------------------------------------------------------------------------------------------


@contextmanager
def hanging_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def dead_server() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield url


async def joined(stream: Any) -> str:
    return "".join([str(part.text) async for part in stream])


async def invoked(answer: Any) -> str:
    return str((await answer).text)


async def blocking(text: str) -> str:
    return text


CALLS: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda m: blocking(m.invoke("hi").text),
    "stream": lambda m: blocking(read(m.stream("hi"))),
    "ainvoke": lambda m: invoked(m.ainvoke("hi")),
    "astream": lambda m: joined(m.astream("hi")),
}


@pytest.mark.parametrize("server", [dead_server, hanging_server])
@pytest.mark.parametrize("way", CALLS)
async def test_the_apps_own_model_takes_over(
    gpt: ChatOpenAI, monkeypatch: pytest.MonkeyPatch, server: Callable[..., Any], way: str
) -> None:
    with server() as url:
        monkeypatch.setenv("LANGGRAPH_ART_URL", url)
        began = time.monotonic()
        with swap({"*": "p"}, fallback=0.3) as swapped, record() as run:
            assert (await CALLS[way](gpt)).strip() == "re: hi"
            first = time.monotonic() - began
            assert (await CALLS[way](gpt)).strip() == "re: hi"
    assert first < 2
    assert swapped.fallbacks == {"p": 2}
    assert [(call.model, call.art, call.delivered) for call in run.calls] == [
        ("p", True, False),
        ("gpt-4o", False, True),
        ("gpt-4o", False, True),  # a server that is away is not asked again at once
    ]
    assert run.calls[0].error is not None
    assert run.calls[0].error.infrastructure
    assert run.error is None


def test_without_fallback_the_error_comes_out(gpt: ChatOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    with dead_server() as url:
        policy = ChatART(model="p", base_url=f"{url}/v1", max_retries=0)
        with swap({"*": policy}), pytest.raises(openai.APIConnectionError):
            gpt.invoke("hi")


def test_an_error_of_the_policy_falls_back_but_the_server_is_asked_again(gpt: ChatOpenAI, stub: OpenAIStub) -> None:
    with swap({"*": "p"}, fallback=5) as swapped:
        with pytest.raises(openai.APIStatusError):  # the app's own model refuses it, too
            gpt.invoke("!overflow")
        assert gpt.invoke("hi").response_metadata["model_name"] == "p@7"
    assert swapped.fallbacks == {"p": 1}
    assert [request.body["model"] for request in stub.log] == ["p", "gpt-4o", "p"]


@pytest.mark.parametrize("server", [dead_server, hanging_server])
def test_fallbacks_of_langchain(gpt: ChatOpenAI, server: Callable[..., Any]) -> None:
    with server() as url:
        policy = ChatART(model="p", base_url=f"{url}/v1", timeout=0.3, max_retries=0)
        graph = one_node(policy.with_fallbacks([gpt]))
        began = time.monotonic()
        with record() as run:
            assert graph.invoke(ask("hi"))["messages"][-1].text == "re: hi"
    assert time.monotonic() - began < 2
    assert [(call.model, call.art, call.delivered) for call in run.calls] == [
        ("p", True, False),
        ("gpt-4o", False, True),
    ]


# -- the whole process ------------------------------------------------------------------------------------------------


def test_swap_all_reaches_every_thread(
    gpt: ChatOpenAI, stub: OpenAIStub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: BaseChatModel.__dict__.get(name) for name in ENTRY_POINTS}
    stop = swap_all({"say": "p", "never": "q"})
    try:
        with pytest.raises(RuntimeError, match="already"):
            swap_all({"*": "x"})
        with ThreadPoolExecutor(1) as pool:
            pool.submit(one_node(gpt).invoke, ask("hi")).result()
        with swap({"*": "block"}):
            gpt.invoke("hi")
        gpt.invoke("hi")
        monkeypatch.delenv("OPENAI_API_BASE")
        ChatOpenAI(model="gpt-4o")
    finally:
        stop()
    stop()
    assert [request.body["model"] for request in stub.log] == ["p", "block", "gpt-4o"]
    assert "no call fitted 'never'" in caplog.text
    assert "ChatOpenAI openai:gpt-4o outside any node: no key" in caplog.text
    assert {name: BaseChatModel.__dict__.get(name) for name in ENTRY_POINTS} == before


def test_a_fallback_in_the_whole_process(gpt: ChatOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    with dead_server() as url:
        monkeypatch.setenv("LANGGRAPH_ART_URL", url)
        stop = swap_all({"*": "p"}, fallback=1)
        try:
            assert gpt.invoke("hi").response_metadata["model_name"] == "gpt-4o@7"
        finally:
            stop()
