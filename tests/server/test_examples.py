"""Examples to tokens, with a real tokenizer and the template that the server ships, behind the engine's route."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from langgraph_art.protocol import ChatExample
from langgraph_art_server.models import BUNDLED, find_model
from langgraph_art_server.serving.families import family_of
from langgraph_art_server.training.examples import ChatTokenizer, recorded_answers
from langgraph_art_server.training.task import SftSequence

from .records import recorded
from .rooms import AttachedEngine
from .stub_engine import StubEngine, serving

MODEL = find_model(BUNDLED)
END = "<|im_end|>"
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is the capital of Peru?"}
LIMA = {"role": "assistant", "content": "Lima, naïvely put: 利马 🇵🇪"}
MORE = {"role": "user", "content": "And of Chile?"}
SANTIAGO = {"role": "assistant", "content": "Santiago"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"city": "Lima"}}},
    ],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL.directory)
    return made


def served_template() -> str:
    path = family_of(MODEL).chat_template
    assert path is not None
    return path.read_text()


def render(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, Any]], *, generate: bool, **options: Any
) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=generate, return_dict=False, **options
    )
    return ids


@asynccontextmanager
async def tokenizing(
    tokenizer: PreTrainedTokenizerBase, template: str, tmp_path: Path, max_model_len: int = 512
) -> AsyncIterator[ChatTokenizer]:
    """The tokenizer of examples on an engine that only tokenizes."""
    app = FastAPI()

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        body = await request.json()
        if "prompt" in body:
            return JSONResponse({"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False)})
        assert not any("weight" in message for message in body["messages"]), "vLLM is told of no weights"
        if body["messages"][0]["role"] == "nobody":
            return JSONResponse({"error": {"message": "unknown role"}}, status_code=400)
        generate, tools = body["add_generation_prompt"], body.get("tools")
        return JSONResponse({"tokens": render(tokenizer, template, body["messages"], generate=generate, tools=tools)})

    stub = StubEngine(max_model_len=max_model_len)
    async with serving(app) as stub.url:
        engine = AttachedEngine(stub, MODEL)
        try:
            yield ChatTokenizer(engine)
        finally:
            await engine.stop()


async def sequences(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, *examples: ChatExample, template: str = "", **options: Any
) -> tuple[list[SftSequence], dict[str, int]]:
    skipped: Counter[str] = Counter()
    async with tokenizing(tokenizer, template or served_template(), tmp_path, **options) as chat:
        return await chat.sequences(examples, skipped), dict(skipped)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("before", [[USER], [SYSTEM, USER], [SYSTEM, USER, SANTIAGO | {"weight": 0}, MORE]])
async def test_the_answer_is_exactly_what_the_assistant_says_and_its_end_token(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    before: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> None:
    example = ChatExample(messages=[*before, LIMA], tools=tools)
    (sequence,), skipped = await sequences(tokenizer, tmp_path, example)
    assert skipped == {}
    # By the texts: the answer and the end token, no template around it, no newline behind.
    assert tokenizer.decode(sequence.answer_ids) == LIMA["content"] + END
    # By the tokens: what the policy is given when it is asked, and what is left of the whole conversation.
    template = served_template()
    assert sequence.prompt_ids == render(tokenizer, template, before, generate=True, tools=tools)
    whole = render(tokenizer, template, example.messages, generate=False, tools=tools)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert sequence.prompt_ids + sequence.answer_ids + newline == whole


async def test_every_answer_of_a_conversation_is_an_example_with_its_history(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    messages = [USER, LIMA, MORE, SANTIAGO]
    found, skipped = await sequences(tokenizer, tmp_path, ChatExample(messages=messages))
    assert [tokenizer.decode(sequence.answer_ids) for sequence in found] == [
        f"{LIMA['content']}{END}",
        f"{SANTIAGO['content']}{END}",
    ]
    first, second = found
    history = first.prompt_ids + first.answer_ids
    assert second.prompt_ids[: len(history)] == history, "so the token tree computes it once"
    weighted = [USER, LIMA | {"weight": 0}, MORE, SANTIAGO | {"weight": 1}]
    assert await sequences(tokenizer, tmp_path, ChatExample(messages=weighted)) == ([second], {})
    assert skipped == {}


async def test_tool_calls_are_answers(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (sequence,), _ = await sequences(tokenizer, tmp_path, ChatExample(messages=[USER, CALL], tools=TOOLS))
    said = tokenizer.decode(sequence.answer_ids)
    assert said.startswith("<tool_call>\n")
    assert '"arguments": {"city": "Lima"}' in said
    assert said.endswith(f"</tool_call>{END}")
    assert "look_up" in tokenizer.decode(sequence.prompt_ids), "the tools are in the prompt"


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "template", "reason"),
    [
        ([LIMA], "", "no_prompt"),
        ([{"role": "nobody", "content": "x"}, LIMA], "", "refused_by_template"),
        ([USER, LIMA], THINKS, "prompt_is_no_prefix"),
        ([USER, LIMA], ENDLESS, "no_end_token"),
        ([USER, {"role": "assistant", "content": f"say {END} and go on"}], "", "end_token_inside"),
        ([USER, {"role": "assistant", "content": "again " * 600}], "", "too_long"),
    ],
)
async def test_what_does_not_add_up_is_counted_with_its_reason(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, messages: list[dict[str, Any]], template: str, reason: str
) -> None:
    good = ChatExample(messages=[USER, SANTIAGO])
    expected = [] if template else [SANTIAGO["content"] + END]
    examples = [ChatExample(messages=messages)] + ([] if template else [good])
    found, skipped = await sequences(tokenizer, tmp_path, *examples, template=template)
    assert [tokenizer.decode(sequence.answer_ids) for sequence in found] == expected
    assert skipped == {f"example:{reason}": 1}


def test_an_example_needs_something_to_learn() -> None:
    for messages in ([USER], [USER, LIMA | {"weight": 0}]):
        with pytest.raises(ValueError, match="no message to learn"):
            ChatExample(messages=messages)


def test_recorded_answers_are_the_sampled_tokens() -> None:
    records = {
        "good": [recorded("good")],
        "retried": [recorded("retried", sampled_ids=[9, 9]), recorded("retried", attempt=1, sampled_ids=[6, 7])],
        "choices": [recorded("choices", choice=1, sampled_ids=[9, 9]), recorded("choices")],
        # No distribution to follow, but fine to imitate.
        "greedy": [recorded("greedy", untrainable="greedy")],
        "base": [recorded("base", policy=None, version=None, untrainable="base_model")],
        "odd base": [recorded("odd base", untrainable="base_model", logprobs=[-1.0])],
        "odd": [recorded("odd", untrainable="ids_disagree")],
        "half": [recorded("half", status="abandoned", untrainable="abandoned")],
    }
    skipped: Counter[str] = Counter()
    found = recorded_answers([*records, "unknown"], records, skipped)
    assert [sequence.answer_ids for sequence in found] == [[4, 5], [6, 7], [4, 5], [4, 5], [4, 5]]
    assert {tuple(sequence.prompt_ids) for sequence in found} == {(1, 2, 3)}
    assert skipped == {"example:ids_disagree": 2, "example:abandoned": 1, "example:not_recorded": 1}
