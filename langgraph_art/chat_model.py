"""`ChatART`: LangChain's `ChatOpenAI`, talking to the langgraph-art server, with every call correlated.

Invariant: each request carries the LangChain run id of its call, also when the SDK repeats it, and nothing else about
`ChatOpenAI` changes, except where it would lose a call: answers from a cache, the Responses API, one async client for
all event loops, tool arguments that are JSON but no object.
"""

from __future__ import annotations

import json
import os
from typing import Any

import openai
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, InvalidToolCall
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call
from langchain_core.outputs import ChatResult
from langchain_openai import ChatOpenAI
from pydantic import model_validator

from langgraph_art.async_http import direct_client, per_loop_client
from langgraph_art.recording import SAMPLING_PARAMETERS, calling, current_call
from langgraph_art.settings import ClientSettings, is_loopback

_NO_KEY = "not-needed"
"""Sent if no key is set: the SDK demands one, and the user's OpenAI key must never go to another server."""


class ChatART(ChatOpenAI):
    """Chat model whose calls the langgraph-art server answers and records, token by token.

    Setup:
        Start a server (``langgraph-art serve --model ...``). Where it is not on this machine's port 7373, set
        ``LANGGRAPH_ART_URL`` and, if it wants a key, ``LANGGRAPH_ART_API_KEY``.

    Key init args:
        model: name of a policy (``researcher``), one version of it (``researcher@12``), or the base model. Required.
        base_url: the server's gateway, ending in ``/v1``. Default: ``LANGGRAPH_ART_URL`` + ``/v1``.
        api_key: default: ``LANGGRAPH_ART_API_KEY``. ``OPENAI_API_KEY`` is not read.
        temperature, max_tokens, timeout, max_retries, ...: as of `ChatOpenAI`.

    Instantiate:
        .. code-block:: python

            from langgraph_art import ChatART

            llm = ChatART(model="researcher", temperature=0.7)

    Invoke:
        .. code-block:: python

            llm.invoke("Where is the Nile?").content

    Tools, structured output, streaming, async, retries and fallbacks are `ChatOpenAI`'s own. ``usage_metadata`` comes
    with streams too. ``response_metadata["model_name"]`` is the version that answered, such as ``researcher@12``. Tool
    calls whose arguments are JSON but no object are in ``invalid_tool_calls``.

    Raises:
        ValueError: no ``model``; or ``cache`` or ``use_responses_api`` is switched on, with which calls could not be
            recorded.
    """

    @model_validator(mode="before")
    @classmethod
    def _art_defaults(cls, values: Any) -> Any:
        """Fill in the server's address, and refuse what would lose calls."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if not (values.get("model") or values.get("model_name")):
            raise ValueError('ChatART needs model=..., the name of a policy such as ChatART(model="researcher")')
        if values.get("cache"):
            raise ValueError("ChatART(cache=...): an answer from a cache cannot be trained on; leave cache out")
        if values.get("use_responses_api"):
            raise ValueError("ChatART(use_responses_api=True): the server records chat completions only; leave it out")
        values |= {"cache": False, "use_responses_api": False}
        if values.get("stream_usage") is None:
            values["stream_usage"] = True
        if "LANGCHAIN_OPENAI_STREAM_CHUNK_TIMEOUT_S" not in os.environ:
            # A stream may wait for an update of the policy before its first chunk; the read timeout still holds.
            values.setdefault("stream_chunk_timeout", None)
        settings = ClientSettings()
        if not (values.get("base_url") or values.get("openai_api_base")):
            values.pop("base_url", None)
            values["openai_api_base"] = settings.openai_url
        if values.get("api_key") is None and values.get("openai_api_key") is None:
            values.pop("api_key", None)
            values["openai_api_key"] = settings.api_key or _NO_KEY
        return values

    @model_validator(mode="after")
    def _art_http_clients(self) -> ChatART:
        """One async connection pool for each event loop, and no proxy to this machine, unless the user brought clients.

        An explicit proxy stays; ``HTTP_PROXY`` and the like cannot lead to a server on the loopback interface.
        """
        local = is_loopback(self.openai_api_base or "")
        if self.root_client is not None and local and self.http_client is None and not self.http_socket_options:
            self.root_client = self.root_client.with_options(http_client=direct_client())
            self.client = self.root_client.chat.completions
        if self.root_async_client is not None and (self.http_async_client is None or self.openai_proxy):
            options = self.http_socket_options
            http_client = per_loop_client(
                self.openai_proxy, None if options is None else tuple(options), trust_env=not local
            )
            self.root_async_client = self.root_async_client.with_options(http_client=http_client)
            self.async_client = self.root_async_client.chat.completions
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """False: LangChain loads only classes that it knows, so a dump could not be read back."""
        return False

    @property
    def _llm_type(self) -> str:
        return "langgraph-art"

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # The last place that has the run manager in every case: `_stream` gets none.
        with calling(run_manager):
            return super()._generate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs)

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with calling(run_manager):
            return await super()._agenerate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs)

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        call = current_call()
        if call.recorder is not None:
            call.recorder.sent(call.call_id)
            _override_sampling(payload, call.recorder.sampling)
        payload["extra_headers"] = {**(payload.get("extra_headers") or {}), **call.headers()}
        return payload

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        response, invalid = _without_invalid_tool_calls(response)
        result = super()._create_chat_result(response, generation_info)
        for index, calls in invalid.items():
            message = result.generations[index].message
            if isinstance(message, AIMessage):
                message.invalid_tool_calls.extend(calls)
        return result


def _override_sampling(payload: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Put the recording's sampling parameters in the place of the app's, wherever the app has set them."""
    extra = {**(payload.pop("extra_body", None) or {})}
    for name, value in sampling.items():
        names = ("max_tokens", "max_completion_tokens") if name == "max_tokens" else (name,)
        for key in names:
            payload.pop(key, None)
            extra.pop(key, None)
        if value is not None:
            (payload if name in SAMPLING_PARAMETERS else extra)[names[-1]] = value
    if extra:
        payload["extra_body"] = extra


def _without_invalid_tool_calls(response: Any) -> tuple[Any, dict[int, list[InvalidToolCall]]]:
    """The response without tool calls whose arguments are JSON but no object, and these calls by choice.

    `ChatOpenAI` would raise on them, which kills the graph over something that small models do all the time.
    """
    invalid: dict[int, list[InvalidToolCall]] = {}
    for index, choice in enumerate(getattr(response, "choices", None) or []):
        for call in choice.message.tool_calls or []:
            arguments = call.function.arguments if call.type == "function" else None
            if arguments and not _langchain_takes(arguments):
                error = f"Tool {call.function.name!r}: arguments must be a JSON object, got {arguments}"
                invalid.setdefault(index, []).append(make_invalid_tool_call(call.model_dump(), error))
    if not invalid:
        return response, invalid
    response = response.model_copy(deep=True)
    for index, calls in invalid.items():
        message, ids = response.choices[index].message, {call["id"] for call in calls}
        message.tool_calls = [call for call in message.tool_calls if call.id not in ids]
    return response, invalid


def _langchain_takes(arguments: str) -> bool:
    """Whether LangChain handles these arguments itself: objects, ``null`` (no arguments), and what is no JSON."""
    try:
        parsed = json.loads(arguments, strict=False)
    except ValueError:
        return True
    return parsed is None or isinstance(parsed, dict)
