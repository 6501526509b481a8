"""`ChatART`: LangChain's `ChatOpenAI`, talking to the langgraph-art server, with every call correlated.

Invariant: each request carries the LangChain run id of its call, also when the SDK repeats it, and nothing else about
`ChatOpenAI` changes, except where it would lose a call or take the server for OpenAI's: `messages`,
`structured_output`, `events`, `tokens` and `async_http` each mend one of these.
"""

from __future__ import annotations

import copy
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Literal, cast

import openai
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import ModelAPIError
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models._compat_bridge import achunks_to_events, chunks_to_events
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableSequence
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.utils import LC_ID_PREFIX
from langchain_openai import ChatOpenAI
from pydantic import model_validator

from langgraph_art import tokens
from langgraph_art.async_http import direct_client, per_loop_client
from langgraph_art.events import mended
from langgraph_art.messages import keep_reasoning, prepare, require_choices, without_invalid_tool_calls
from langgraph_art.recorder import calling, current_call
from langgraph_art.recording import SAMPLING_PARAMETERS
from langgraph_art.settings import ClientSettings, is_loopback
from langgraph_art.structured_output import attach_parsed, into, is_model, structured

_NO_KEY = "not-needed"
"""Sent if no key is set: the SDK demands one, and the user's OpenAI key must never go to another server."""
_PROVIDER = "langgraph-art"
_RESPONSES_ONLY = ("use_responses_api", "use_previous_response_id", "include", "truncation", "context_management")
_CLIENTS = {"client", "async_client", "root_client", "root_async_client"}
_USERS_CLIENTS = {"http_client", "http_async_client"}


class ChatART(ChatOpenAI):
    """Chat model whose calls the langgraph-art server answers and records, token by token.

    A drop-in for `ChatOpenAI`: constructor arguments, methods and results are the same, unless stated here.

    Setup:
        Start a server (``langgraph-art serve --model ...``). Where it is not on this machine's port 7373, set
        ``LANGGRAPH_ART_URL`` and, if it wants a key, ``LANGGRAPH_ART_API_KEY``.

    Key init args:
        model: name of a policy (``researcher``), one version of it (``researcher@12``), or the base model. Required.
        base_url: the server's gateway, ending in ``/v1``. Default: ``LANGGRAPH_ART_URL`` + ``/v1``.
        api_key: default: ``LANGGRAPH_ART_API_KEY``. ``OPENAI_API_KEY`` is not read.
        temperature, max_tokens, timeout, max_retries, ...: as of `ChatOpenAI`. No rule of OpenAI's model names holds:
            a policy called ``gpt-5`` keeps its temperature.
        extra_body: what vLLM takes beyond OpenAI's API, such as ``{"top_k": 20}``.

    Instantiate:
        .. code-block:: python

            from langgraph_art import ChatART

            llm = ChatART(model="researcher", temperature=0.7)

    Invoke:
        .. code-block:: python

            llm.invoke("Where is the Nile?").content

    Stream:
        .. code-block:: python

            for chunk in llm.stream("Where is the Nile?"):
                print(chunk.text, end="")

    Async:
        .. code-block:: python

            await llm.ainvoke("Where is the Nile?")

        One object works in any number of event loops.

    Tool calling:
        .. code-block:: python

            def weather(city: str) -> str:
                '''Weather of a city.'''
                return "sunny"

            llm.bind_tools([weather]).invoke("How is the weather in Rome?").tool_calls

        Calls whose arguments are JSON but no object are in ``invalid_tool_calls``. Function tools only.

    Structured output:
        .. code-block:: python

            from pydantic import BaseModel

            class Verdict(BaseModel):
                good: bool

            llm.with_structured_output(Verdict).invoke("Is the Nile a river?")

        All methods of `ChatOpenAI` work. An answer that is cut at ``max_tokens`` or does not fit raises LangChain's
        `OutputParserException`; with ``include_raw=True`` it is in ``parsing_error`` and the answer in ``raw``.

    Reasoning:
        What a reasoning model thinks is in ``additional_kwargs["reasoning_content"]`` and a block of
        ``content_blocks``, and it is sent back to the model with the next turn.

    Token usage:
        ``usage_metadata``, with streams too. `get_num_tokens` and `get_num_tokens_from_messages` ask the server, which
        has the tokenizer and the chat template; so do `trim_messages` and others that take the model as a counter.
        ``profile["max_input_tokens"]`` is what the server's context holds, less ``max_tokens``.

    Response metadata:
        ``response_metadata["model_name"]`` is the version that answered, such as ``researcher@12``.

    Raises:
        ValueError: no ``model``; or ``cache`` is set, from which an answer could not be trained on; or an argument
            that only OpenAI's Responses API has.
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
        responses = [name for name in _RESPONSES_ONLY if values.get(name)]
        if values.get("output_version") == "responses/v1":
            responses.append("output_version='responses/v1'")
        if responses:
            raise ValueError(
                f"ChatART: {', '.join(responses)} is of OpenAI's Responses API, the server records chat completions "
                "only; leave it out"
            )
        values |= {"cache": False, "use_responses_api": False}
        if isinstance(values.get("profile"), tokens.ServerProfile):  # built again from its own fields
            del values["profile"]
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

    @model_validator(mode="before")
    @classmethod
    def validate_temperature(cls, values: dict[str, Any]) -> Any:
        """Take the place of `ChatOpenAI`'s rule, by which models of some names have no temperature."""
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

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Where the key comes from, for traces, which must not show it."""
        return {"openai_api_key": "LANGGRAPH_ART_API_KEY"}

    # -- what an app asks of a model ----------------------------------------------------------------------------------

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: list[Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """As `ChatOpenAI.with_structured_output`, but what cannot be parsed is the parser's error, and never lost.

        Args:
            schema: pydantic class, `TypedDict`, JSON schema or OpenAI tool; may be ``None`` with ``json_mode``.
            method: ``json_schema`` and ``json_mode`` constrain the answer by a grammar, ``function_calling`` forces a
                tool call.
            include_raw: return a dict of ``raw``, ``parsed`` and ``parsing_error``.
            strict: passed on with the schema.
            tools: tools that the model may call instead, with ``json_schema``.
            **kwargs: bound to the call.

        Raises:
            OutputParserException: when called: the answer was cut at the token limit, or does not fit the schema.
        """
        # Without its name, as ChatOpenAI does otherwise for models called gpt-4.
        nameless = self.model_copy(update={"model_name": ""})
        chain = super(ChatART, nameless).with_structured_output(
            schema, method=method, strict=strict, tools=tools, **kwargs
        )
        bound, *parsers = cast("RunnableSequence[Any, Any]", chain).steps
        if method == "json_schema" and is_model(schema):
            parsers[-1] = into(schema)
        model = self.bind(**cast("Any", bound).kwargs)
        return structured(model, RunnableSequence(*parsers), include_raw=include_raw)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text on its own, from the server. Blocks."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return tokens.token_ids(self._sync_client(), self.model_name, text)

    def get_num_tokens_from_messages(
        self,
        messages: Sequence[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
        **_: Any,
    ) -> int:
        """Tokens of the prompt that the server makes of these messages and tools. Blocks."""
        payload = self._vllm_payload(list(messages), tools=[convert_to_openai_tool(tool) for tool in tools or []])
        return tokens.prompt_length(self._sync_client(), payload)

    def _sync_client(self) -> openai.OpenAI:
        self._ensure_sync_client_available()
        return cast("openai.OpenAI", self.root_client)

    def _resolve_model_profile(self) -> ModelProfile | None:
        # No structured_output: agents would then constrain every answer by a grammar, and no tool would be called.
        known = ModelProfile(text_inputs=True, text_outputs=True, structured_output=False)
        return cast("ModelProfile", tokens.ServerProfile(known, self._max_input_tokens))

    def _max_input_tokens(self) -> int | None:
        if self.root_client is None:  # the key comes from a coroutine, and reading a profile cannot wait
            return None
        length = tokens.context_length(self.root_client, self.model_name)
        return None if length is None else max(length - (self.max_tokens or 0), 1)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return {**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": _PROVIDER}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ChatART:
        """A model built anew of the same arguments; HTTP clients that the user brought are shared."""
        arguments = self._arguments()
        shared = {name: arguments.pop(name) for name in _USERS_CLIENTS & arguments.keys()}
        return type(self)(**copy.deepcopy(arguments, memo), **shared)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its arguments, the key included: connections stay behind."""
        return _build, (type(self), self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields_set - _CLIENTS - {"profile"}}

    # -- one call -----------------------------------------------------------------------------------------------------

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # The last place that has the run manager in every case: `_stream` gets none.
        with calling(run_manager), _naming_server(self.openai_api_base):
            result = super()._generate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs)
        return _with_parsed(result, kwargs)

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with calling(run_manager), _naming_server(self.openai_api_base):
            result = await super()._agenerate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs)
        return _with_parsed(result, kwargs)

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        texts: list[str] = []
        with _naming_server(self.openai_api_base):
            for chunk in super()._stream(*args, **kwargs):
                texts.append(chunk.text)
                yield chunk
        yield from _after_stream(texts, kwargs)

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        texts: list[str] = []
        # Closed at once if the consumer stops, so that the engine does, too.
        async with aclosing(cast("AsyncGenerator[ChatGenerationChunk]", super()._astream(*args, **kwargs))) as chunks:
            with _naming_server(self.openai_api_base):
                async for chunk in chunks:
                    texts.append(chunk.text)
                    yield chunk
        for chunk in _after_stream(texts, kwargs):
            yield chunk

    def _stream_chat_model_events(
        self, messages: list[BaseMessage], *, run_manager: CallbackManagerForLLMRun, **kwargs: Any
    ) -> Iterator[Any]:
        chunks = self._stream(messages, run_manager=run_manager, **kwargs)
        return map(mended, chunks_to_events(chunks, message_id=f"{LC_ID_PREFIX}-{run_manager.run_id}"))

    async def _astream_chat_model_events(
        self, messages: list[BaseMessage], *, run_manager: AsyncCallbackManagerForLLMRun, **kwargs: Any
    ) -> AsyncIterator[Any]:
        chunks = self._astream(messages, run_manager=run_manager, **kwargs)
        async for event in achunks_to_events(chunks, message_id=f"{LC_ID_PREFIX}-{run_manager.run_id}"):
            yield mended(event)

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload = self._vllm_payload(self._convert_input(input_).to_messages(), stop=stop, **kwargs)
        call = current_call()
        if call.recorder is not None:
            call.recorder.sent(call.call_id)
            override_sampling(payload, call.recorder.sampling)
        payload["extra_headers"] = {**(payload.get("extra_headers") or {}), **call.headers()}
        return payload

    def _vllm_payload(self, messages: list[BaseMessage], **kwargs: Any) -> dict[str, Any]:
        # Not ChatOpenAI's own: that one would send other roles for policies called o1 and the like.
        payload = super(ChatOpenAI, self)._get_request_payload(messages, **kwargs)
        if "max_tokens" in payload:
            payload["max_completion_tokens"] = payload.pop("max_tokens")
        prepare(payload, messages)
        return payload

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        require_choices(response)
        whole, invalid = without_invalid_tool_calls(response)
        result = super()._create_chat_result(whole, generation_info)
        for index, generation in enumerate(result.generations):
            message = generation.message
            keep_reasoning(message, whole.choices[index].message)
            message.response_metadata["model_provider"] = _PROVIDER
            if index in invalid and isinstance(message, AIMessage):
                message.invalid_tool_calls.extend(invalid[index])
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        require_choices(chunk)
        generation = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if generation is not None and chunk["choices"]:
            keep_reasoning(generation.message, chunk["choices"][0]["delta"])
            generation.message.response_metadata["model_provider"] = _PROVIDER
        return generation


def _build(kind: type[ChatART], arguments: dict[str, Any]) -> ChatART:
    return kind(**arguments)


@contextmanager
def _naming_server(url: str | None) -> Iterator[None]:
    """The SDK says "Connection error." and no more; its error goes on as it is, and says where and what to do."""
    try:
        yield
    except openai.APIConnectionError as error:
        if "langgraph-art" not in error.message:  # a stream may be read inside a call
            error.message = (
                f"{error.message.rstrip('.')}: no answer from the langgraph-art server at {url}. Start it with "
                "`langgraph-art serve`, or set base_url or LANGGRAPH_ART_URL; `langgraph-art doctor` says more."
            )
            error.args = (error.message,)
        raise


def _with_parsed(result: ChatResult, kwargs: dict[str, Any]) -> ChatResult:
    for generation in result.generations:
        if "parsed" not in generation.message.additional_kwargs:
            attach_parsed(generation.message, generation.text, kwargs.get("response_format"))
    return result


def _after_stream(texts: list[str], kwargs: dict[str, Any]) -> Iterator[ChatGenerationChunk]:
    if not texts:
        raise ModelAPIError("the server's answer is no stream of a chat completion: check base_url")
    message = AIMessageChunk(content="")
    if attach_parsed(message, "".join(texts), kwargs.get("response_format")):
        yield ChatGenerationChunk(message=message)


def override_sampling(payload: dict[str, Any], sampling: dict[str, Any]) -> None:
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
