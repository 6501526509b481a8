"""`ChatART` is `ChatOpenAI` with correlated calls: what differs, and that nothing else does."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import warnings
from typing import Any

import openai
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import ModelConnectionError
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage
from langchain_core.runnables import ConfigurableField, RunnableConfig
from pydantic import BaseModel, SecretStr, ValidationError

from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record

from .graphs import graph_of, said
from .openai_stub import OpenAIStub

RUN, CALL = "x-langgraph-art-run", "x-langgraph-art-call"


class Verdict(BaseModel):
    """A verdict."""

    good: bool


def weather(city: str) -> str:
    """Weather of a city."""
    return city


# -- address and key --------------------------------------------------------------------------------------------------


def test_the_users_openai_key_and_url_are_never_used(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("OPENAI_API_BASE", "http://127.0.0.1:9/v1")
    ChatART(model="desk").invoke("hi")
    assert "sk-secret" not in str(stub.log[0].headers)


def test_address_and_key_from_environment_and_arguments(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGGRAPH_ART_API_KEY", "from-env")
    llm = ChatART(model="desk")
    llm.invoke("hi")
    ChatART(model="desk", api_key=SecretStr("own")).invoke("hi")
    assert [request.headers["authorization"] for request in stub.log] == ["Bearer from-env", "Bearer own"]
    assert "from-env" not in repr(llm)
    monkeypatch.setenv("LANGGRAPH_ART_URL", "http://127.0.0.1:9/")
    assert ChatART(model="desk").openai_api_base == "http://127.0.0.1:9/v1"
    assert ChatART(model="desk", base_url=f"{stub.url}/v1").invoke("hi").content == "re: hi"
    monkeypatch.setenv("LANGGRAPH_ART_URL", "localhost:7373")
    with pytest.raises(ValidationError, match="must start with http"):
        ChatART(model="desk")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "the name of a policy"),
        ({"model": "desk", "cache": True}, "cannot be trained on"),
        ({"model": "desk", "use_responses_api": True}, "chat completions only"),
    ],
)
def test_what_would_lose_calls_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ChatART(**arguments)


# -- correlation ------------------------------------------------------------------------------------------------------


def test_users_headers_stay(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", default_headers={"x-app": "a"}, model_kwargs={"extra_headers": {"x-team": "b"}})
    with record() as run:
        llm.invoke("hi")
        ChatART(model="desk").invoke("hi", extra_headers={"x-once": "c"})
    first, second = (request.headers for request in stub.log)
    assert (first["x-app"], first["x-team"], first[RUN]) == ("a", "b", run.run_id)
    assert (second["x-once"], second[CALL]) == ("c", run.calls[1].call_id)


async def test_sdk_retries_keep_the_call_id(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", max_retries=2)
    with record() as run:
        llm.invoke("!flaky 1")
        await llm.ainvoke("!flaky 2")
        list(llm.stream("!flaky 3"))
    assert len(run.calls) == 3
    expected = [(call.call_id, attempt) for call in run.calls for attempt in (0, 1)]
    assert [(request.call, request.attempt) for request in stub.log] == expected
    assert all(call.delivered for call in run.calls)


def test_every_way_to_call_sends_langchains_run_id(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    seen: list[str] = []

    async def asynchronously() -> None:
        await llm.ainvoke("b")
        [chunk async for chunk in llm.astream("d")]
        [event async for event in llm.astream_events("e", version="v2")]
        await llm.abatch(["f", "g"])

    with record() as run:
        llm.invoke("a")
        list(llm.stream("c"))
        asyncio.run(asynchronously())
        llm.bind_tools([weather]).invoke("h")
        llm.with_structured_output(Verdict).invoke('!json {"good": true}')
        list(llm.with_structured_output(Verdict).stream('!json {"good": true}'))
        llm.with_fallbacks([llm]).invoke("i")
        llm.model_copy(update={"temperature": 0.5}).invoke("j")
    seen = [request.call or "" for request in stub.log]
    assert sorted(seen) == sorted(call.call_id for call in run.calls)
    assert len(set(seen)) == 12
    assert all(call.delivered and call.art and call.version == "desk@7" for call in run.calls)


# -- event loops ------------------------------------------------------------------------------------------------------


def test_one_model_in_many_event_loops(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", max_retries=0)
    for _ in range(3):
        assert asyncio.run(llm.ainvoke("hi")).content == "re: hi"
        assert asyncio.run(ChatART(model="desk", max_retries=0).ainvoke("hi")).content == "re: hi"
    assert len(llm.root_async_client._client._clients) <= 2  # the last loop's, and one other test's


def test_a_loop_that_ends_closes_its_connections(stub: OpenAIStub) -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(ChatART(model="desk").ainvoke("hi"))
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


async def test_connections_are_shared_and_closing_one_loops_leaves_others(stub: OpenAIStub) -> None:
    one, other = ChatART(model="desk"), ChatART(model="desk")
    await one.ainvoke("hi")
    assert one.root_async_client._client is other.root_async_client._client
    await one.root_async_client.close()
    assert (await other.ainvoke("hi")).content == "re: hi"
    with ThreadLoop() as elsewhere:
        assert elsewhere.run(one.ainvoke("hi")).content == "re: hi"
        assert (await one.ainvoke("hi")).content == "re: hi"
        assert elsewhere.run(one.ainvoke("hi")).content == "re: hi"


class ThreadLoop:
    """A second event loop that stays open, in a thread of its own."""

    def __enter__(self) -> ThreadLoop:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        return self

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def __exit__(self, *_: object) -> None:
        self.run(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


async def test_the_users_own_async_client_is_kept(stub: OpenAIStub) -> None:
    own = openai.DefaultAsyncHttpxClient(headers={"x-own": "1"})
    await ChatART(model="desk", http_async_client=own).ainvoke("hi")
    assert stub.log[0].headers["x-own"] == "1"
    await own.aclose()


async def test_socket_options_and_proxies_reach_the_async_client(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", http_socket_options=[(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)])
    assert (await llm.ainvoke("hi")).content == "re: hi"
    proxied = ChatART(model="desk", base_url="http://nowhere.invalid/v1", openai_proxy=stub.url)
    assert (await proxied.ainvoke("through the proxy")).content == "re: through the proxy"


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["2", "[1, 2]", '"text"', "[]", "true"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_tool_arguments_that_are_no_object(stub: OpenAIStub, arguments: str, streaming: bool) -> None:
    llm = ChatART(model="desk", streaming=streaming).bind_tools([weather])
    with record() as run:
        answer = await llm.ainvoke(f"!tool weather {arguments}")
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls == []
    (invalid,) = answer.invalid_tool_calls
    assert (invalid["name"], invalid["args"]) == ("weather", arguments)
    assert run.calls[0].delivered
    follow_up = [("user", "hi"), answer, ("user", "again")]
    await ChatART(model="desk").ainvoke(follow_up)
    assert stub.log[-1].body["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(("arguments", "args"), [('{"city": "Rome"}', {"city": "Rome"}), ("null", {}), ("", {})])
def test_good_tool_arguments_are_left_alone(stub: OpenAIStub, arguments: str, args: dict[str, Any]) -> None:
    answer = ChatART(model="desk").bind_tools([weather]).invoke(f"!tool weather {arguments}")
    assert [call["args"] for call in answer.tool_calls] == [args]
    assert answer.invalid_tool_calls == []


def test_usage_comes_with_streams(stub: OpenAIStub) -> None:
    chunks = list(ChatART(model="desk").stream("one two"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == 3
    assert total.response_metadata["model_name"] == "desk@7"


def test_answers_never_come_from_a_cache(stub: OpenAIStub) -> None:
    set_llm_cache(InMemoryCache())
    try:
        for _ in range(2):
            ChatART(model="desk").invoke("hi")
    finally:
        set_llm_cache(None)
    assert len(stub.log) == 2


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_sampling_is_overridden_in_that_recording_only(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", temperature=0.2, max_tokens=50, extra_body={"top_k": 5, "priority": 1, "min_p": 0.1})
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": None, "max_tokens": 7}
    llm.invoke("before")
    with record(sampling=sampling):
        llm.invoke("inside")
        list(llm.stream("inside", temperature=0.9))
        with record():
            llm.invoke("a recording of its own")
    llm.invoke("after")
    before, inside, streamed, own, after = (request.body for request in stub.log)
    names = ("temperature", "top_p", "top_k", "min_p", "max_completion_tokens", "priority")
    app = (0.2, None, 5, 0.1, 50, 1)
    assert [tuple(body.get(name) for name in names) for body in (before, own, after)] == [app] * 3
    assert [tuple(body.get(name) for name in names) for body in (inside, streamed)] == [(1.0, 1.0, -1, None, 7, 1)] * 2
    assert llm.extra_body == {"top_k": 5, "priority": 1, "min_p": 0.1}


# -- proxies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"http_socket_options": ()}])
async def test_no_proxy_stands_before_a_server_on_this_machine(
    stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    llm = ChatART(model="desk", max_retries=0, **options)
    assert llm.invoke("hi").content == "re: hi"
    assert (await llm.ainvoke("hi")).content == "re: hi"
    with pytest.raises(openai.APIConnectionError):
        ChatART(model="desk", max_retries=0, openai_proxy="http://127.0.0.1:9").invoke("an explicit proxy is used")


async def test_other_servers_are_reached_through_the_proxy(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, stub.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    llm = ChatART(model="desk", max_retries=0, base_url="http://gpu-box.invalid:7373/v1")
    assert llm.invoke("hi").content == "re: hi", "the stub takes the proxy's place"
    assert (await llm.ainvoke("hi")).content == "re: hi"


# -- configuration ----------------------------------------------------------------------------------------------------


async def test_configurable_fields_rebuild_the_model(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", temperature=0.1).configurable_fields(
        temperature=ConfigurableField(id="temperature"), model_name=ConfigurableField(id="model")
    )
    config: RunnableConfig = {"configurable": {"temperature": 0.9, "model": "other"}}
    with record() as run:
        llm.with_config(config).invoke("hi")
        await llm.ainvoke("hi", config)
    bodies = [(request.body["model"], request.body["temperature"]) for request in stub.log]
    assert bodies == [("other", 0.9)] * 2
    assert [(call.model, call.art) for call in run.calls] == [("other", True)] * 2


def test_building_twice_from_its_own_fields_changes_nothing(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    again = ChatART(**llm.__dict__)
    assert again.model_dump() == llm.model_dump()
    assert again.invoke("hi").content == "re: hi"


def test_no_warnings_when_built_and_called(stub: OpenAIStub) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with record():
            ChatART(model="desk").invoke("hi")


async def test_an_error_of_the_connection_names_the_server() -> None:
    """It stays the SDK's and LangChain's, so retries and fallbacks know it."""
    url = "http://127.0.0.1:9/v1"
    llm = ChatART(model="desk", base_url=url, max_retries=0)
    graph = graph_of(plan=lambda state: {"messages": [llm.invoke(state["messages"])]})
    errors = []
    for call in (
        lambda: graph.invoke(said("hi")),
        lambda: llm.invoke("hi"),
        lambda: list(llm.stream("hi")),
        lambda: llm.model_copy(update={"streaming": True}).invoke("hi"),
    ):
        with pytest.raises(openai.APIConnectionError) as caught:
            call()
        errors.append(caught.value)
    with pytest.raises(openai.APIConnectionError) as caught:
        await llm.ainvoke("hi")
    errors.append(caught.value)
    with pytest.raises(openai.APIConnectionError) as caught:
        _ = [chunk async for chunk in llm.astream("hi")]
    errors.append(caught.value)
    for error in errors:
        assert isinstance(error, ModelConnectionError)
        assert str(error).startswith(f"Connection error: no answer from the langgraph-art server at {url}. Start it")
        assert str(error).count(url) == 1
        assert "`langgraph-art serve`" in str(error)
        assert "`langgraph-art doctor`" in str(error)
