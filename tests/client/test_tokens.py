"""Token counts and the context length come from the server, when they are asked for."""

from __future__ import annotations

import copy
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages

from langgraph_art import tokens
from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record

from .openai_stub import CONTEXT, OpenAIStub

AWAY = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_context_lengths", {})


def weather(city: str) -> str:
    """Weather of a city."""
    return city


def test_counts_are_the_servers(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGGRAPH_ART_API_KEY", "k")
    llm = ChatART(model="desk", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert llm.get_num_tokens("one two three") == 3
    assert llm.get_token_ids("one two three") == [3, 3, 5]
    assert stub.asked[0] == {"model": "desk", "prompt": "one two three", "add_special_tokens": False}
    messages = [SystemMessage("a b"), HumanMessage("c")]
    assert llm.get_num_tokens_from_messages(messages) == 4
    assert stub.asked[-1] == {
        "model": "desk",
        "messages": [{"role": "system", "content": "a b"}, {"role": "user", "content": "c"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert llm.get_num_tokens_from_messages(messages, tools=[weather]) == 5
    assert llm.get_num_tokens_from_messages([]) == 0
    assert ChatART(model="desk", custom_get_token_ids=lambda text: [1]).get_num_tokens("one two") == 1
    assert stub.log == []


def test_trim_messages(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    history = [SystemMessage("be kind")]
    for turn in range(6):
        history += [HumanMessage(f"question {turn} please"), AIMessage(f"answer {turn}")]
    for strategy in ("last", "first"):
        kept = trim_messages(history, max_tokens=14, token_counter=llm, strategy=strategy, include_system=False)
        assert llm.get_num_tokens_from_messages(kept) <= 14
        assert 1 < len(kept) < len(history)
    kept = trim_messages(history, max_tokens=14, token_counter=llm, include_system=True, start_on="human")
    assert [message.text for message in kept] == ["be kind", "question 5 please", "answer 5"]


def test_counting_is_no_call_of_a_recording(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    with record() as run:
        llm.get_num_tokens_from_messages([HumanMessage("hi")])
        llm.get_num_tokens("hi")
    assert run.calls == []


def test_a_server_that_is_away(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", base_url=AWAY, max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        llm.get_num_tokens("hi")
    assert llm.profile is not None
    assert llm.profile.get("max_input_tokens") is None
    assert dict(llm.profile)["max_input_tokens"] is None


def test_the_profile_asks_when_it_is_read_and_once(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", max_tokens=100)
    again = ChatART(**llm.__dict__)
    bounded = llm.bind_tools([weather])
    assert stub.asked == []
    for model in (llm, again, bounded.bound, ChatART(model="desk", max_tokens=100), copy.deepcopy(llm)):
        profile: Any = model.profile
        assert profile["max_input_tokens"] == CONTEXT - 100
        assert profile.get("max_input_tokens") == CONTEXT - 100
    assert stub.asked == ["models"]
    assert dict(profile) == {**profile} == profile.copy() == dict(profile.items())
    assert CONTEXT - 100 in profile.values()
    assert profile.get("no_such_key", 1) == 1
    assert profile["structured_output"] is False
    assert ChatART(model="unknown").profile == {**profile, "max_input_tokens": None}


@pytest.mark.parametrize(
    "read", [dict, lambda profile: {**profile}, lambda profile: profile.copy(), lambda profile: dict(profile.items())]
)
def test_a_profile_that_is_read_as_a_whole_asks_too(stub: OpenAIStub, read: Any) -> None:
    assert read(ChatART(model="desk").profile)["max_input_tokens"] == CONTEXT
    assert CONTEXT in ChatART(model="desk").profile.values()


def test_the_users_profile_stays(stub: OpenAIStub) -> None:
    assert ChatART(model="desk", profile={"max_input_tokens": 5}).profile == {"max_input_tokens": 5}
    assert stub.asked == []
