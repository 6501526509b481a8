"""Calls of the server without LangChain, by the OpenAI SDK or any HTTP client, as node calls like all others.

Invariant: to callbacks such a call looks like one of a chat model, so it is recorded at its node, traced and streamed;
to the server it carries the same headers. It is delivered if its block ends without an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from langchain_core.callbacks import CallbackManager
from langchain_core.messages import AIMessage, convert_to_messages
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables.config import ensure_config
from openai.types.chat import ChatCompletion

from langgraph_art.chat_model import ChatART, override_sampling
from langgraph_art.recorder import calling, current_call


class SdkCall:
    """One call that is being made.

    Attributes:
        headers: correlation headers, for any HTTP client.
        request: keyword arguments for the SDK's ``chat.completions.create``: what was given, ``extra_headers``, and the
            sampling parameters of the recording in the place of one's own.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        call = current_call()
        if call.recorder is not None:
            call.recorder.sent(call.call_id)
            override_sampling(request, call.recorder.sampling)
        self.headers = call.headers()
        self.request = {**request, "extra_headers": {**(request.get("extra_headers") or {}), **self.headers}}
        self._generations: list[ChatGeneration] = []

    def answer(self, answer: Any) -> None:
        """Keep what the model said, for the recording and for traces.

        Args:
            answer: the SDK's ``ChatCompletion``, the same as a dict, or the text, for example of a stream.
        """
        if isinstance(answer, str):
            self._generations = [ChatGeneration(message=AIMessage(answer))]
            return
        completion = ChatCompletion.model_validate(answer) if isinstance(answer, dict) else answer
        result = _reader()._create_chat_result(completion)
        self._generations = result.generations[:1]
        for generation in self._generations:
            about = {**(result.llm_output or {}), **(generation.generation_info or {})}
            generation.message.response_metadata = {**about, **generation.message.response_metadata}


@contextmanager
def node_call(*, model: str, messages: Sequence[Any], **options: Any) -> Iterator[SdkCall]:
    """Make a call of the server without LangChain a node call of the current run.

    For use inside a node, sync or async. The client's ``base_url`` is the server's, ending in ``/v1``.

    .. code-block:: python

        with node_call(model="researcher", messages=[{"role": "user", "content": "Hi"}]) as call:
            answer = client.chat.completions.create(**call.request)  # or: await client...
            call.answer(answer)

    Args:
        model: name of a policy, as of `ChatART`.
        messages: as the SDK takes them.
        **options: of ``chat.completions.create``, such as ``temperature`` and ``tools``.

    Yields:
        The call, with its request and headers.
    """
    config = ensure_config()
    manager = CallbackManager.configure(
        config.get("callbacks"),
        inheritable_tags=config.get("tags"),
        inheritable_metadata={
            **(config.get("metadata") or {}),
            **{"ls_provider": "langgraph-art", "ls_model_name": model, "ls_model_type": "chat"},
        },
    )
    request = {"model": model, "messages": messages, **options}
    (run,) = manager.on_chat_model_start(
        {"id": ["langgraph_art", "node_call"], "name": "node_call"},
        [convert_to_messages(messages)],
        invocation_params={**options, "model": model, "_type": "langgraph-art"},
        name="node_call",
    )
    with calling(run):
        call = SdkCall(request)
        try:
            yield call
        except BaseException as error:
            run.on_llm_error(error)
            raise
        run.on_llm_end(LLMResult(generations=[[*call._generations]]))


@lru_cache
def _reader() -> ChatART:
    """Turns the server's answers into LangChain's messages."""
    return ChatART(model_name="any")
