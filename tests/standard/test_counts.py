"""Token counts before a call equal what the engine says it used, and the context length is the engine's."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages

from langgraph_art import ChatART, EmbeddedServer


def weather(city: str) -> str:
    """Weather of a city."""
    return city


@pytest.mark.engine
@pytest.mark.parametrize("tools", [[], [weather]])
def test_counts_are_those_of_a_call(instruct_server: EmbeddedServer, tools: list[Any]) -> None:
    llm = ChatART(model="desk", base_url=f"{instruct_server.url}/v1", max_tokens=3)
    history: list[BaseMessage] = [
        SystemMessage("Be kind."),
        HumanMessage("How is the weather in Rome?"),
        AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "1"}]),
        ToolMessage([{"type": "text", "text": "sunny"}, {"type": "text", "text": "dry"}], tool_call_id="1"),
    ]
    answer = llm.bind_tools(tools).invoke(history)
    assert answer.usage_metadata is not None
    counted = llm.get_num_tokens_from_messages(history, tools=tools)
    assert counted == answer.usage_metadata["input_tokens"] > llm.get_num_tokens("How is the weather in Rome?") > 5
    kept = trim_messages(history, max_tokens=counted - 10, token_counter=llm, include_system=True)
    assert isinstance(kept[0], SystemMessage)
    assert len(kept) < len(history) or tools
    profile: Any = llm.profile
    assert profile["max_input_tokens"] == 2048 - 3
