"""What only the server knows about the model: how many tokens a text has, and how many the context holds.

Invariant: counts are those of the engine's tokenizer and chat template, so they equal what a call would use. Nothing
is asked before somebody reads it, and an unknown context length is no error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import openai
from langchain_core.language_models import ModelProfile

log = logging.getLogger(__name__)

_PROFILE_TIMEOUT = 3.0  # seconds: reading a property must not hang on a server that is away


def token_ids(client: openai.OpenAI, model: str, text: str) -> list[int]:
    """Token ids of a text on its own, without special tokens."""
    answer = _tokenize(client, {"model": model, "prompt": text, "add_special_tokens": False})
    return [int(token) for token in answer["tokens"]]


def prompt_length(client: openai.OpenAI, request: Mapping[str, Any]) -> int:
    """Tokens of the prompt that the chat template makes of a request, as the SDK takes it.

    Some templates refuse a part of a conversation, such as one that begins with an answer, and `trim_messages` counts
    such parts. Their text is counted then, which leaves out a few tokens of markup for each message.
    """
    if not request["messages"]:
        return 0
    body = {key: request[key] for key in ("model", "messages", "tools") if key in request}
    if (options := (request.get("extra_body") or {}).get("chat_template_kwargs")) is not None:
        body["chat_template_kwargs"] = options
    try:
        return int(_tokenize(client, body)["count"])
    except openai.BadRequestError:
        parts = [*body["messages"], *body.get("tools", [])]
        return len(token_ids(client, body["model"], "\n".join(json.dumps(part) for part in parts)))


def _tokenize(client: openai.OpenAI, body: Mapping[str, Any]) -> dict[str, Any]:
    # vLLM has it beside /v1, and so has the gateway.
    url = str(client.base_url).rstrip("/").removesuffix("/v1") + "/tokenize"
    answer: object = client.post(url, cast_to=object, body=body)
    if not isinstance(answer, dict) or "count" not in answer:
        raise TypeError(
            f"{url} answered {str(answer)[:200]!r}, not a count of tokens: is the server a langgraph-art one?"
        )
    return answer


_context_lengths: dict[tuple[str, str], int] = {}
"""Known context lengths by the server's URL and the model's name; a server keeps its own as long as it runs."""


def context_length(client: openai.OpenAI, model: str) -> int | None:
    """Tokens that the model's context holds, prompt and answer together; ``None`` if the server does not say."""
    url = str(client.base_url)
    if (url, model) not in _context_lengths:
        try:
            listed = client.with_options(timeout=_PROFILE_TIMEOUT, max_retries=0).models.list().data
        except openai.OpenAIError as error:
            log.info("the context length of %s is unknown, %s did not answer: %s", model, url, error)
            return None
        for entry in listed:
            if (length := getattr(entry, "max_model_len", None)) is not None:
                _context_lengths[url, entry.id] = int(length)
    return _context_lengths.get((url, model))


class ServerProfile(dict[str, Any]):
    """A model profile that asks the server for ``max_input_tokens`` when it is first read.

    Args:
        known: all else that it says.
        ask: gives the number, or ``None`` while it is not known.
    """

    def __init__(self, known: ModelProfile, ask: Callable[[], int | None]) -> None:
        super().__init__(known, max_input_tokens=None)
        self._ask = ask

    def __getitem__(self, key: str) -> Any:
        if key == "max_input_tokens" and super().__getitem__(key) is None:
            self[key] = self._ask()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`."""
        if key not in self:
            return default
        return self[key]

    def __iter__(self) -> Iterator[str]:
        # Makes dict(profile) and {**profile} read the values one by one, instead of copying the table.
        return super().__iter__()

    def items(self) -> Any:
        """As `dict.items`."""
        return dict(self).items()

    def values(self) -> Any:
        """As `dict.values`."""
        return dict(self).values()

    def copy(self) -> dict[str, Any]:
        """A plain dict of what is known now."""
        return dict(self)
