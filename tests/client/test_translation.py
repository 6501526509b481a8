from __future__ import annotations

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_openai import AzureChatOpenAI, ChatOpenAI
from pydantic import Field

from langgraph_art.translation import call_settings, names_of, object_settings

NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


class Other(FakeListChatModel):
    """A model of a provider that names its settings in its own way."""

    responses: list[str] = Field(default_factory=lambda: ["x"])
    model: str = "other-1"
    max_output_tokens: int | None = None
    top_k: int | None = None
    safety_settings: dict[str, Any] | None = None


def settings(**kwargs: Any) -> dict[str, Any]:
    return call_settings(Other(), kwargs)[0]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", {"tool_choice": "auto"}),
        ("none", {"tool_choice": "none"}),
        ("any", {"tool_choice": "required"}),
        ("f", {"tool_choice": NAMED}),
        (NAMED, {"tool_choice": NAMED}),
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": NAMED}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"any": {}}, {"tool_choice": "required"}),
        ({"tool": {"name": "f"}}, {"tool_choice": NAMED}),
    ],
)
def test_tool_choice(choice: Any, expected: dict[str, Any]) -> None:
    assert settings(tool_choice=choice) == expected


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
        {"name": "f", "description": "d", "input_schema": SCHEMA},
        {"type": "custom", "name": "f", "description": "d", "input_schema": SCHEMA, "cache_control": {}},
        {"toolSpec": {"name": "f", "description": "d", "inputSchema": {"json": SCHEMA}}},
    ],
)
def test_tools(tool: dict[str, Any]) -> None:
    (translated,) = settings(tools=[tool])["tools"]
    assert translated == {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_anthropics_structured_output(name: str) -> None:
    schema = {"type": "json_schema", "schema": {**SCHEMA, "title": "Point"}}
    wanted = settings(**{name: schema if name == "output_format" else {"format": schema, "effort": "low"}})
    assert wanted["response_format"]["json_schema"] == {"name": "Point", "schema": schema["schema"], "strict": True}


def test_settings_of_a_model_under_other_names() -> None:
    model = Other(max_output_tokens=9, top_k=4, safety_settings={"a": 1})
    wanted, left_out = call_settings(model, {"stop_sequences": ["x"], "extra_body": {"min_p": 0.1}, "betas": ["b"]})
    assert wanted == {"max_tokens": 9, "stop": ["x"], "extra_body": {"top_k": 4, "min_p": 0.1}}
    assert sorted(left_out) == ["betas", "safety_settings"]


def test_the_call_beats_the_model_which_beats_its_defaults() -> None:
    model = ChatOpenAI(model="gpt-4o", api_key="k", temperature=0.5, seed=1, model_kwargs={"user": "u"})
    wanted, left_out = call_settings(model, {"temperature": 0.1, "model": "gpt-5", "timeout": 3})
    assert wanted == {"temperature": 0.1, "seed": 1}
    assert left_out == ["user"]
    assert call_settings(ChatOpenAI(model="gpt-4o", api_key="k"), {})[0] == {}
    assert call_settings(ChatAnthropic(model="claude-sonnet-4-5", api_key="k"), {}) == ({}, [])


def test_names() -> None:
    azure = AzureChatOpenAI(
        azure_deployment="mine", api_version="2024-10-21", azure_endpoint="https://a.example", api_key="k"
    )
    assert names_of(azure, {}) == ["azure_openai:mine", "mine", "azure:mine"]
    assert names_of(Other(), {})[:2] == ["other:other-1", "other-1"]
    assert names_of(ChatOpenAI(model="a", api_key="k"), {"model": "b"})[:2] == ["openai:b", "b"]


def test_what_would_switch_to_another_api_stays_behind() -> None:
    model = ChatOpenAI(model="gpt-4o", api_key="k", output_version="responses/v1", tags=["t"], streaming=True)
    assert object_settings(model) == {"tags": ["t"], "streaming": True} | {
        name: getattr(model, name) for name in ("metadata",) if name in model.model_fields_set
    }
