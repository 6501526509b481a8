"""Examples for supervised fine-tuning as tokens: what to answer, and the answer to learn.

Invariant: nothing is guessed from text. A recorded call has the tokens that were sampled. For a conversation the engine
renders the messages with the template that it serves, once up to the answer and once with it; the answer's tokens are
what the second adds to the first, which must be its exact prefix, up to and including the token that ends an answer in
serving. Whatever does not add up so is left out with its reason.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from langgraph_art.protocol import ChatExample, RecordedCall
from langgraph_art_server.errors import Unavailable
from langgraph_art_server.serving.engine import Engine
from langgraph_art_server.training.task import SftSequence

_CONCURRENCY = 16
_INEXACT = {"ids_disagree", "no_ids"}
"""Reasons not to train on a call that hold for learning its answer too. That it was sampled greedily, by another model
or under a grammar does not matter here: there is no behaviour distribution to follow."""


def recorded_answers(
    call_ids: Sequence[str], records: dict[str, list[RecordedCall]], skipped: Counter[str]
) -> list[SftSequence]:
    """The answers of recorded calls, in order, token by token as they were sampled.

    Args:
        call_ids: Calls to learn from.
        records: Recorded calls by call id.
        skipped: Counts what was left out: ``example:not_recorded``, or why the record's tokens cannot be trusted.
    """
    sequences = []
    for call_id in call_ids:
        # An SDK that retries takes the answer of its last attempt; LangChain hands on the first choice.
        choices = [record for record in records.get(call_id, []) if record.choice == 0]
        record = max(choices, key=lambda record: record.attempt, default=None)
        if record is None:
            skipped["example:not_recorded"] += 1
        elif record.status != "complete":
            skipped[f"example:{record.status}"] += 1
        elif record.untrainable in _INEXACT or not _whole(record):
            skipped["example:ids_disagree"] += 1
        else:
            sequences.append(SftSequence(prompt_ids=record.prompt_ids, answer_ids=record.sampled_ids))
    return sequences


def _whole(record: RecordedCall) -> bool:
    """Whether there are tokens that agree; a call of the base model is only marked as that."""
    return bool(record.prompt_ids) and 0 < len(record.sampled_ids) == len(record.logprobs)


class ChatTokenizer:
    """Tokenizes conversations through the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def sequences(self, examples: Sequence[ChatExample], skipped: Counter[str]) -> list[SftSequence]:
        """The answers of conversations, each with its prompt, in order.

        Args:
            examples: Conversations. An assistant message whose ``weight`` is 0 is no answer to learn.
            skipped: Counts what was left out: ``example:no_prompt`` (an answer to nothing),
                ``example:refused_by_template`` (the engine's log says why), ``example:prompt_is_no_prefix`` (the
                template renders the history of an answer otherwise than the prompt that the model is given),
                ``example:no_end_token``, ``example:end_token_inside`` and ``example:too_long``.

        Raises:
            Unavailable: The engine went away.
        """
        ends = await self._end_tokens()
        limit = asyncio.Semaphore(_CONCURRENCY)

        async def limited(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> SftSequence | str:
            async with limit:
                return await self._sequence(messages, tools, ends)

        found = await asyncio.gather(
            *(
                limited(example.messages[: place + 1], example.tools)
                for example in examples
                for place, message in enumerate(example.messages)
                if message.get("role") == "assistant" and message.get("weight", 1)
            )
        )
        skipped.update(reason for reason in found if isinstance(reason, str))
        return [sequence for sequence in found if isinstance(sequence, SftSequence)]

    async def _sequence(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, ends: set[int]
    ) -> SftSequence | str:
        """The last message as an answer to those before it, or the reason why not."""
        plain = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
        if len(plain) == 1:
            return "example:no_prompt"
        prompt = await self._render(plain[:-1], tools, add_generation_prompt=True)
        whole = await self._render(plain, tools, add_generation_prompt=False)
        if prompt is None or whole is None:
            return "example:refused_by_template"
        if whole[: len(prompt)] != prompt:
            return "example:prompt_is_no_prefix"
        answer = whole[len(prompt) :]
        places = [place for place, token in enumerate(answer) if token in ends]
        if not places:
            return "example:no_end_token"
        if len(places) > 1:
            return "example:end_token_inside"
        # Behind it a template may close the turn, with a newline say, which a model that is served never gets to.
        answer = answer[: places[0] + 1]
        if len(prompt) + len(answer) > self._engine.max_model_len:
            return "example:too_long"
        return SftSequence(prompt_ids=prompt, answer_ids=answer)

    async def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> list[int] | None:
        body = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return await self._tokenize(body if tools is None else body | {"tools": tools})

    async def _tokenize(self, body: dict[str, Any]) -> list[int] | None:
        """Token ids, or ``None`` if the engine cannot make any of it."""
        try:
            answer = await self._engine.http.post("/tokenize", json={"model": self._engine.served_name, **body})
        except httpx.TransportError as error:
            raise Unavailable("the engine went away while it tokenized examples", retry_after=5) from error
        if answer.status_code != 200:
            return None
        ids: list[int] = answer.json()["tokens"]
        return ids

    async def _end_tokens(self) -> set[int]:
        """The tokens that end an answer when the engine serves: the tokenizer's, and those of the model's files."""
        directory = self._engine.model.directory
        generation = _read(directory / "generation_config.json") or self._engine.model.config
        listed = generation.get("eos_token_id")
        ends = set(listed if isinstance(listed, list) else [] if listed is None else [listed])
        token = _read(directory / "tokenizer_config.json").get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text:
            ids = await self._tokenize({"prompt": text, "add_special_tokens": False})
            if ids is not None and len(ids) == 1:
                ends.update(ids)
        return ends


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}
