"""Exact tokens through vLLM's own parsers of thoughts and tool calls, whole and streamed.

The random model writes what a grammar makes it write, token by token as it likes; the parsers then take it apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk
from transformers import AutoTokenizer

from langgraph_art import ChatART, Client, EmbeddedServer, record
from langgraph_art.protocol import RecordedCall

pytestmark = pytest.mark.engine

CALL = r'<tool_call>\n\{"name": "look", "arguments": \{"topic": "[a-z]{2,4}"\}\}\n</tool_call>'
STREAMING = pytest.mark.parametrize("streaming", [False, True])


@pytest.fixture(scope="module")
def parsing_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """As the shared one, with parsers."""
    with EmbeddedServer(
        str(tiny_model),
        port=0,
        data_dir=tmp_path_factory.mktemp("parsing"),
        policies=["desk"],
        max_model_len=256,
        tool_parser="hermes",
        reasoning_parser="olmo3",
        engine_args=["--structured-outputs-config", json.dumps({"enable_in_reasoning": True})],
        progress=False,
    ) as running:
        yield running


def look(topic: str) -> str:
    """Look a topic up."""
    return topic


def ask(
    server: EmbeddedServer, prompt: str, regex: str, streaming: bool, *, tools: Sequence[Any] = (), shown: bool = True
) -> tuple[Any, RecordedCall]:
    """The answer of one call and its record, which agrees with what the engine told the caller."""
    model = ChatART(
        model="desk",
        base_url=f"{server.url}/v1",
        logprobs=True,
        max_tokens=180,
        extra_body={
            "structured_outputs": {"regex": regex},
            "return_tokens_as_token_ids": True,
            "include_reasoning": shown,
        },
    )
    llm = model.bind_tools(tools) if tools else model
    answer: Any = AIMessageChunk("")
    with record() as run:
        if streaming:
            for chunk in llm.stream(prompt):
                answer += chunk
        else:
            answer = llm.invoke(prompt)
    with Client(server.url) as client:
        (call,) = client.calls(run.run_id)
    told = [part["token"] for part in answer.response_metadata["logprobs"]["content"]]
    assert told == [f"token_id:{token}" for token in call.sampled_ids]
    assert answer.usage_metadata["output_tokens"] == len(call.sampled_ids)
    assert answer.usage_metadata["input_tokens"] == len(call.prompt_ids)
    assert (call.status, call.untrainable) == ("complete", "constrained"), "so ids, logprobs and usage agree"
    return answer, call


@pytest.fixture(scope="module")
def text_of(tiny_model: Path) -> Callable[[RecordedCall], str]:
    """The text of a call's recorded tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return lambda call: str(tokenizer.decode(call.sampled_ids, skip_special_tokens=True))


@STREAMING
@pytest.mark.parametrize("shown", [True, False])
def test_thoughts(
    parsing_server: EmbeddedServer, text_of: Callable[[RecordedCall], str], streaming: bool, shown: bool
) -> None:
    answer, call = ask(parsing_server, "Think.", "<think>[a-z]{3,6}</think>[a-z]{3,6}", streaming, shown=shown)
    thought, _, said = text_of(call).removeprefix("<think>").partition("</think>")
    # Streamed, the parser may keep back an end that could begin a tag; the record has it nevertheless.
    assert said.startswith(answer.content)
    assert len(said) - len(answer.content) <= (len("<think>") if streaming else 0)
    assert answer.additional_kwargs.get("reasoning_content") == (thought if shown else None)


@STREAMING
def test_several_tool_calls_in_one_message(
    parsing_server: EmbeddedServer, text_of: Callable[[RecordedCall], str], streaming: bool
) -> None:
    # The parser takes everything for thoughts until these have ended, in the prompt or in the answer.
    prompt = "Look two things up, thinking is over. </think>"
    answer, call = ask(parsing_server, prompt, f"{CALL}\\n{CALL}", streaming, tools=[look])
    assert [tool["name"] for tool in answer.tool_calls] == ["look", "look"]
    assert [json.dumps(tool["args"]) in text_of(call) for tool in answer.tool_calls] == [True, True]
    assert call.finish_reason == "tool_calls"
