"""`ChatART` in everything that LangChain builds around a chat model."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from typing import Any

import openai
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField
from langchain_core.tracers.context import collect_runs
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record

from .openai_stub import OpenAIStub


def weather(city: str) -> str:
    """Weather of a city."""
    return city


# -- runnables --------------------------------------------------------------------------------------------------------


def test_with_retry_is_two_calls_of_which_one_is_delivered(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", max_retries=0).with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    with pytest.raises(openai.InternalServerError), record() as run:
        llm.invoke("!500")
    assert [call.delivered for call in run.calls] == [False, False]
    assert len({request.call for request in stub.log}) == 2


async def test_with_fallbacks(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", base_url="http://127.0.0.1:9/v1", max_retries=0).with_fallbacks(
        [ChatART(model="spare")]
    )
    with record() as run:
        assert llm.invoke("hi").content == "re: hi"
        assert (await llm.ainvoke("hi")).content == "re: hi"
        assert "".join(chunk.text for chunk in llm.stream("hi")).strip() == "re: hi"
    assert [(call.model, call.delivered) for call in run.calls] == [("desk", False), ("spare", True)] * 3


async def test_configurable_alternatives(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk").configurable_alternatives(
        ConfigurableField(id="llm"),
        default_key="desk",
        spare=ChatART(model="spare"),
        other=lambda: ChatART(model="other"),
    )
    llm.invoke("a")
    await llm.with_config(configurable={"llm": "spare"}).ainvoke("b")
    list(llm.stream("c", {"configurable": {"llm": "other"}}))
    assert [request.body["model"] for request in stub.log] == ["desk", "spare", "other"]


def test_configurable_fields_keep_tools_and_parser(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", callbacks=[]).configurable_fields(model_name=ConfigurableField(id="model"))
    llm.with_config(configurable={"model": "spare"}).invoke("a")
    llm.bind(tools=[]).with_config(configurable={"model": "third"}).invoke("b")
    assert [request.body["model"] for request in stub.log] == ["spare", "third"]


def test_a_rate_limiter_limits(stub: OpenAIStub) -> None:
    limiter = InMemoryRateLimiter(requests_per_second=20, check_every_n_seconds=0.01, max_bucket_size=1)
    llm = ChatART(model="desk", rate_limiter=limiter)
    begun = time.monotonic()
    llm.batch(["a", "b", "c", "d"])
    assert time.monotonic() - begun > 0.1
    assert len(stub.log) == 4


async def test_batches(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", max_retries=0)
    with record() as run:
        answers = llm.batch(["a", "!422", "c"], return_exceptions=True)
        more = await llm.abatch(["d", "e"], config={"max_concurrency": 1})
        whole = llm.generate([[HumanMessage("f")], [HumanMessage("g")]])
    assert isinstance(answers[1], openai.APIStatusError)
    assert [answer.text for answer in (answers[0], answers[2], *more)] == ["re: a", "re: c", "re: d", "re: e"]
    assert [generation[0].text for generation in whole.generations] == ["re: f", "re: g"]
    assert sorted(request.call or "" for request in stub.log) == sorted(call.call_id for call in run.calls)
    assert len({call.call_id for call in run.calls}) == 7


@pytest.mark.parametrize("disable_streaming", [True, "tool_calling"])
def test_disable_streaming(stub: OpenAIStub, disable_streaming: Any) -> None:
    llm = ChatART(model="desk", disable_streaming=disable_streaming).bind_tools([weather])
    (chunk,) = [chunk for chunk in llm.stream("hi") if chunk.content]
    assert chunk.content == "re: hi"
    assert not stub.log[0].body.get("stream")


# -- events -----------------------------------------------------------------------------------------------------------


async def test_events_v2(stub: OpenAIStub) -> None:
    events = [event async for event in ChatART(model="desk").astream_events("one two", version="v2")]
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds[-1]) == ("on_chat_model_start", "on_chat_model_end")
    assert kinds.count("on_chat_model_stream") >= 3
    assert events[-1]["data"]["output"].usage_metadata["output_tokens"] == 3


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_events_v3(stub: OpenAIStub, asynchronous: bool) -> None:
    llm = ChatART(model="desk").bind_tools([weather])
    with record() as run, warnings.catch_warnings(action="ignore"):  # v3 is in beta
        if asynchronous:
            stream = await llm.astream_events('!tool weather {"city": "Rome"}', version="v3")
            message: AIMessage = await stream
        else:
            message = llm.stream_events('!tool weather {"city": "Rome"}', version="v3").output
    assert message.tool_calls[0]["args"] == {"city": "Rome"}
    assert message.response_metadata["model_name"] == "desk@7"
    assert (run.calls[0].delivered, run.calls[0].version) == (True, "desk@7")
    assert message.usage_metadata is not None


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_events_v3_of_arguments_that_are_no_object(stub: OpenAIStub, asynchronous: bool) -> None:
    llm = ChatART(model="desk").bind_tools([weather])
    with record() as run, warnings.catch_warnings(action="ignore"):
        if asynchronous:
            message: AIMessage = await (await llm.astream_events("!tool weather [1, 2]", version="v3"))
        else:
            message = llm.stream_events("!tool weather [1, 2]", version="v3").output
    assert message.tool_calls == []
    assert [(call["name"], call["args"]) for call in message.invalid_tool_calls] == [("weather", "[1, 2]")]
    assert message.id == f"lc_run--{run.calls[0].call_id}"
    assert run.calls[0].delivered


async def test_events_v3_of_no_arguments(stub: OpenAIStub) -> None:
    with warnings.catch_warnings(action="ignore"):
        message = ChatART(model="desk").bind_tools([weather]).stream_events("!tool weather null", version="v3").output
    assert message.tool_calls[0]["args"] == {}


# -- the object itself ------------------------------------------------------------------------------------------------


def test_every_argument_of_chatopenai_is_taken(stub: OpenAIStub) -> None:
    """Each field reaches the request as it does with `ChatOpenAI`."""
    arguments: dict[str, Any] = {
        "temperature": 0.4,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1},
        "stop": ["x"],
        "max_tokens": 9,
        "n": 1,
        "reasoning_effort": "low",
        "verbosity": "low",
        "store": False,
        "service_tier": "auto",
        "prompt_cache_options": {"a": 1},
        "model_kwargs": {"user": "u"},
        "extra_body": {"top_k": 4},
        "default_query": {"q": "1"},
        "organization": "o",
        "timeout": 30,
        "include_response_headers": True,
        "tags": ["t"],
        "metadata": {"m": 1},
        "verbose": False,
        "name": "named",
    }
    with warnings.catch_warnings(action="ignore"):
        ours = ChatART(model="desk", **arguments)
        theirs = ChatOpenAI(model="desk", base_url=f"{stub.url}/v1", api_key=SecretStr("k"), **arguments)
    models: list[BaseChatModel] = [ours, theirs]
    answers = [model.invoke("hi") for model in models]
    assert stub.log[0].body == stub.log[1].body
    assert stub.log[0].headers["openai-organization"] == "o"
    assert answers[0].content == answers[1].content
    assert answers[0].response_metadata.keys() == answers[1].response_metadata.keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda llm: pickle.loads(pickle.dumps(llm))])
def test_copies(stub: OpenAIStub, copied: Any) -> None:
    llm = ChatART(model="desk", temperature=0.3, api_key=SecretStr("secret"), extra_body={"top_k": 3})
    twin = copied(llm)
    assert twin.model_dump() == llm.model_dump()
    twin.extra_body["top_k"] = 4
    twin.invoke("hi")
    llm.invoke("hi")
    assert [(request.body["top_k"], request.headers["authorization"]) for request in stub.log] == [
        (4, "Bearer secret"),
        (3, "Bearer secret"),
    ]
    chain = copied(llm.bind_tools([weather]))
    chain.invoke("hi")
    assert stub.log[-1].body["tools"][0]["function"]["name"] == "weather"


def test_a_deep_copy_shares_the_users_client(stub: OpenAIStub) -> None:
    own = openai.DefaultHttpxClient(headers={"x-own": "1"})
    copy.deepcopy(ChatART(model="desk", http_client=own)).invoke("hi")
    assert stub.log[0].headers["x-own"] == "1"
    own.close()


def test_what_traces_see(stub: OpenAIStub) -> None:
    with collect_runs() as traced:
        ChatART(model="desk", temperature=0.4, api_key=SecretStr("secret")).invoke("hi")
    (run,) = traced.traced_runs
    metadata = run.extra["metadata"]
    assert (metadata["ls_provider"], metadata["ls_model_name"], metadata["ls_temperature"]) == (
        "langgraph-art",
        "desk",
        0.4,
    )
    assert "secret" not in str(run.serialized) + str(run.extra)
