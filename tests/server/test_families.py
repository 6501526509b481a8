"""What is chosen for a model, and our template for the bundled one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langgraph_art_server.models import BUNDLED, BaseModel
from langgraph_art_server.serving.families import Family, family_of

ORIGINAL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template that SmolLM2-Instruct ships."""


def model(name: str, model_type: str) -> BaseModel:
    return BaseModel(name, Path(name), {"model_type": model_type, "max_position_embeddings": 64})


@pytest.mark.parametrize(
    ("name", "model_type", "parsers"),
    [
        (BUNDLED, "llama", ("hermes", None)),
        ("Qwen3-4B", "qwen3", ("hermes", "qwen3")),
        ("Qwen3-4B-Instruct-2507", "qwen3", ("hermes", None)),
        ("Qwen2.5-7B-Instruct", "qwen2", ("hermes", None)),
        ("Llama-3.2-1B-Instruct", "llama", ("llama3_json", None)),
        ("something-new", "unheard_of", (None, None)),
    ],
)
def test_parsers_by_family(name: str, model_type: str, parsers: tuple[str | None, str | None]) -> None:
    family = family_of(model(name, model_type))
    assert (family.tool_parser, family.reasoning_parser) == parsers


@pytest.mark.slow
def test_every_parser_is_one_that_vllm_knows() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from langgraph_art_server.serving.families import _FAMILIES

    tools = set(ToolParserManager.list_registered())
    reasoning = set(ReasoningParserManager.list_registered())
    for _, _, family in _FAMILIES:
        assert family.tool_parser is None or family.tool_parser in tools
        assert family.reasoning_parser is None or family.reasoning_parser in reasoning


def render(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps  # as transformers has it: Jinja's own escapes HTML
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **variables)


def ours() -> str:
    template = family_of(model(BUNDLED, "llama")).chat_template
    assert template is not None
    return template.read_text()


turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)}),
    min_size=1,
    max_size=6,
)


@given(turns)
def test_without_tools_our_template_is_the_models_own(messages: list[dict[str, Any]]) -> None:
    assert render(ours(), messages) == render(ORIGINAL, messages)


def test_tools_and_their_results_are_rendered() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    text = render(
        ours(),
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "content": "2"},
        ],
        tools=[_Attributes(tool) for tool in tools],
    )
    assert '"name": "add"' in text.split("<|im_end|>")[0]
    assert text.count('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>') == 2
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>" in text


class _Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_an_unknown_family_gets_nothing_rather_than_something_wrong() -> None:
    assert family_of(model("x", "y")) == Family()
