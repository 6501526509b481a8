"""Swapping the chat models of an app that is not edited: inside the block, policies answer in their place.

Invariant: nothing of the app changes, neither its graph nor its model objects. The swap sits where every chat model of
LangChain begins a call (``generate``, ``stream`` and their async forms), so it reaches a model wherever the app holds
it: in closures, globals, methods, chains, bindings of compiled graphs, or made anew inside a node. It holds for its own
context only, and with the last block the process is as it was before the first.

The call is made by a `ChatART` instead of the app's object, so it looks like any other call of a policy: to callbacks,
to the recording, to the server.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from langgraph_art import failures
from langgraph_art.chat_model import ChatART
from langgraph_art.node_calls import namespace_of, node_path
from langgraph_art.node_paths import matches
from langgraph_art.patching import Patch
from langgraph_art.translation import call_settings, names_of, object_settings
from langgraph_art.unattributed import caller, noting_lines

log = logging.getLogger(__name__)

_NO_KEY = "no-key-needed-while-swapped"
_RETRY_SECONDS = 30.0
"""How long a policy's server that did not answer is left alone where calls fall back."""


@contextmanager
def swap(policies: Mapping[str, str | ChatART | None], *, fallback: float | None = None) -> Iterator[Swap]:
    """Let policies answer in the place of an app's own chat models, without editing the app.

    Reaches every LangChain chat model that is called inside the block: built before or inside it, by ``ChatOpenAI``,
    ``ChatAnthropic``, ``init_chat_model`` or ``create_agent("openai:...")``, with tools, structured output and streams.
    The app's own sampling settings, tools, callbacks and tags are kept; address, key, time-outs and retries are those
    of the policy. Models can be built without their provider's key inside the block. Swaps may be nested (the innermost
    counts) and run concurrently; calls outside the block's context are not touched.

    Args:
        policies: which model calls to swap: a node's name, path or any stretch of it (``agent``, ``planner|model``), or
            the name of the app's model (``gpt-4o``, ``anthropic:claude-sonnet-4-5``), to the name of a policy. Parts
            may be shell patterns (``draft*``, ``openai:*``, ``*``). The first key that fits counts. A `ChatART` as the
            value sets more than the name; ``None`` leaves the call to the app's own model.
        fallback: seconds that a policy may take to answer before the app's own model answers instead; of a stream, to
            begin and to go on, though one that has begun and breaks off is an error. Any error of a policy has the same
            effect, and a server that is away is not asked again for half a minute. For production: by default an error
            is an error, as training needs it.

    Yields:
        What was swapped and what could not be; when the block ends, the latter becomes a warning.

    Raises:
        ValueError: no policies, or ``fallback`` is not positive.
    """
    swapping = _new(policies, fallback)
    outer = _active.get()
    with _redirected, noting_lines:
        _open.add(swapping)
        _active.set(swapping)
        try:
            yield swapping
        finally:
            # Set, not reset by token: a block inside an async generator may end in another context than it began in.
            _active.set(outer)
            _open.discard(swapping)
    if problems := swapping.problems():
        warnings.warn("swap: " + "; ".join(problems), stacklevel=3)


def swap_all(policies: Mapping[str, str | ChatART | None], *, fallback: float | None = None) -> Callable[[], None]:
    """As `swap`, in all threads and event loops of this process from now on; for services, called once at start-up.

    Where a call is inside a `swap` block, that one counts.

    Args:
        policies: as of `swap`.
        fallback: as of `swap`.

    Returns:
        A function that ends it, and logs what could not be swapped. It is called by itself when the process exits.

    Raises:
        RuntimeError: it is on already.
        ValueError: as `swap`.
    """
    global _everywhere
    swapping = _new(policies, fallback)
    with _starting:
        if _everywhere is not None:
            raise RuntimeError("swap_all: models are swapped already; call what it returned first")
        _everywhere = swapping
        _open.add(swapping)
        _redirected.__enter__()

    def stop() -> None:
        global _everywhere
        with _starting:
            if _everywhere is not swapping:
                return
            _everywhere = None
            _open.discard(swapping)
            _redirected.__exit__()
        atexit.unregister(stop)
        for problem in swapping.problems():
            log.warning("swap_all: %s", problem)

    atexit.register(stop)
    return stop


@dataclass(frozen=True)
class Missed:
    """Calls that a swap did not reach, or not whole."""

    model: str
    """Class and name of the model, such as ``ChatOpenAI openai:gpt-4o``."""
    node: str
    """Node path; empty outside any node."""
    reason: str


class Swap(BaseCallbackHandler):
    """What a swap did, and what it could not do.

    Attributes:
        swapped: number of swapped calls, by node path, the app's model and the policy.
        missed: number of calls that were not swapped, or lost an option, by what and why.
        fallbacks: number of calls that the app's own model had to answer, by the policy's name.
    """

    run_inline = True
    # It only looks at model calls: those that it sees were not made by a policy.
    ignore_chain = ignore_retriever = ignore_agent = ignore_retry = ignore_custom_event = True

    def __init__(self, policies: Mapping[str, str | ChatART | None], fallback: float | None) -> None:
        self.swapped: Counter[tuple[str, str, str]] = Counter()
        self.missed: Counter[Missed] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.falls_back = fallback is not None
        self._models = {key: _model_of(value, fallback) for key, value in policies.items()}
        self._unused = set(policies)
        self._away_until = 0.0
        self._lock = threading.Lock()

    def problems(self) -> list[str]:
        """What a user should know, one sentence each: calls that were missed, and keys that fitted none."""
        found = [
            f"{count} call{'s' * (count > 1)} of {missed.model} {_at(missed.node)}: {missed.reason}"
            for missed, count in self.missed.items()
        ]
        if self._unused:
            seen = sorted({name for node, model, _ in self.swapped for name in (node, model) if name})
            keys = ", ".join(repr(key) for key in self._models if key in self._unused)
            found.append(f"no call fitted {keys} (swapped were: {', '.join(seen) or 'none'})")
        return found

    def key_for(self, node: str, names: list[str]) -> str | None:
        """The first key that fits a call."""
        return next(
            (key for key in self._models if any(fnmatchcase(n, key) for n in names) or (node and matches(node, key))),
            None,
        )

    def call_for(self, model: BaseChatModel, node: str, kwargs: Mapping[str, Any]) -> _Call | None:
        """The call to make in the place of the app's; ``None`` to let that one be."""
        names = names_of(model, kwargs)
        key = self.key_for(node, names)
        if key is None:
            self._miss(_title(model, names), node, "no key of policies={...} fits it")
            return None
        self._unused.discard(key)
        policy = self._models[key]
        if policy is None:
            return None
        if time.monotonic() < self._away_until:
            self.note_fallback(policy.model_name)
            return None
        try:
            settings, left_out = call_settings(model, kwargs)
        except ValueError as error:
            if not self.falls_back:
                raise
            self._miss(_title(model, names), node, str(error))
            return None
        if policy.extra_body and "extra_body" in settings:
            settings["extra_body"] = {**policy.extra_body, **settings["extra_body"]}
        with self._lock:
            self.swapped[node, names[0], policy.model_name] += 1
        if settings.get("tools") and settings.get("response_format"):
            reason = "it asks for tools and a response_format at once; the engine's grammar then lets it call no tool"
            self._miss(_title(model, names), node, reason)
        for option in left_out:
            self._miss(_title(model, names), node, f"{option} has no counterpart and was left out")
        return _Call(self, policy.model_copy(update=object_settings(model)), settings)

    def failed(self, error: Exception, policy: str) -> bool:
        """Whether the app's own model takes over after this error of a policy."""
        if self.falls_back:
            if failures.infrastructure(error):
                self._away_until = time.monotonic() + _RETRY_SECONDS
            self.note_fallback(policy)
        return self.falls_back

    def note_fallback(self, policy: str) -> None:
        """Count a call that the app's own model answers because the policy cannot."""
        with self._lock:
            self.fallbacks[policy] += 1

    def lost(self, model: BaseChatModel, kwargs: Mapping[str, Any]) -> None:
        """Note a call that was made outside the context of every swap, for example in a plain thread."""
        reason = (
            f"called at {caller()} outside the context of the block, as in a plain thread; if it is the graph's, "
            "start the thread with contextvars.copy_context().run"
        )
        self._miss(_title(model, names_of(model, kwargs)), "", reason)

    def _miss(self, model: str, node: str, reason: str) -> None:
        with self._lock:
            self.missed[Missed(model, node, reason)] += 1

    # -- what LangChain reports ---------------------------------------------------------------------------------------

    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: Any,
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        invocation_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A chat model is called; if a key fits and it is not ours, its class went past LangChain's entry points."""
        if (invocation_params or {}).get("_type") != "langgraph-art":
            self._passed(
                serialized, metadata or {}, "its class has entry points of its own that do not lead through LangChain's"
            )

    def on_llm_start(
        self,
        serialized: dict[str, Any] | None,
        prompts: Any,
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A completion model is called, which takes no messages."""
        self._passed(serialized, metadata or {}, "it is a completion model, and only chat models can be swapped")

    def _passed(self, serialized: dict[str, Any] | None, metadata: dict[str, Any], reason: str) -> None:
        name, node = str(metadata.get("ls_model_name") or ""), node_path(namespace_of(metadata))
        full = f"{metadata.get('ls_provider')}:{name}"
        key = self.key_for(node, [full, name])
        if key is not None and self._models[key] is not None and not self.falls_back:
            kind = (serialized or {}).get("id") or ["a model"]
            self._miss(f"{kind[-1]} {full}", node, reason)


@dataclass(frozen=True)
class _Call:
    """The call that is made in the place of the app's."""

    swap: Swap
    model: ChatART
    settings: dict[str, Any]

    def arguments(self, stop: list[str] | None) -> dict[str, Any]:
        """Keyword arguments; the app's stop strings come from the call or else from its model."""
        return self.settings if stop is None else {**self.settings, "stop": stop}


# -- the entry points of all chat models ------------------------------------------------------------------------------


def _begin(model: BaseChatModel, config: Mapping[str, Any], kwargs: Mapping[str, Any]) -> _Call | None:
    """The call to make in the place of this one."""
    if isinstance(model, ChatART):
        return None
    callbacks = config.get("callbacks")
    node = _node(config)
    swapping = _current(callbacks)
    if swapping is not None:
        return swapping.call_for(model, node, kwargs)
    if not node and not callbacks and _active.get() is None:
        for other in tuple(_open):
            other.lost(model, kwargs)
    return None


def _current(callbacks: Any) -> Swap | None:
    """The swap of this context; where a thread has none of its own, that which came along with the callbacks."""
    found = _active.get()
    if found is None:
        handlers = callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ())
        found = next((handler for handler in handlers if isinstance(handler, Swap)), None)
    return found if found in _open else _everywhere


def _node(config: Mapping[str, Any]) -> str:
    """The node path, wherever LangGraph or LangChain has put it: nodes that are chains have no context of their own."""
    own, inherited = config.get("metadata"), getattr(config.get("callbacks"), "metadata", None)
    context = (var_child_runnable_config.get() or {}).get("metadata")
    return next(
        (path for metadata in (own, inherited, context) if (path := node_path(namespace_of(metadata or {})))), ""
    )


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(
        self: BaseChatModel,
        messages: Any,
        stop: list[str] | None = None,
        callbacks: Any = None,
        *,
        tags: Any = None,
        metadata: Any = None,
        run_name: Any = None,
        run_id: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = {"callbacks": callbacks, "tags": tags, "metadata": metadata, "run_name": run_name}
        call = _begin(self, given, kwargs)
        if call is not None:
            try:
                return call.model.generate(messages, **given, run_id=run_id, **call.arguments(stop))
            except Exception as error:
                if not call.swap.failed(error, call.model.model_name):
                    raise
                run_id = None  # taken by the call that failed
        return original(self, messages, stop, **given, run_id=run_id, **kwargs)

    return generate


def _agenerate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def agenerate(
        self: BaseChatModel,
        messages: Any,
        stop: list[str] | None = None,
        callbacks: Any = None,
        *,
        tags: Any = None,
        metadata: Any = None,
        run_name: Any = None,
        run_id: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = {"callbacks": callbacks, "tags": tags, "metadata": metadata, "run_name": run_name}
        call = _begin(self, given, kwargs)
        if call is not None:
            try:
                return await call.model.agenerate(messages, **given, run_id=run_id, **call.arguments(stop))
            except Exception as error:
                if not call.swap.failed(error, call.model.model_name):
                    raise
                run_id = None
        return await original(self, messages, stop, **given, run_id=run_id, **kwargs)

    return agenerate


def _stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stream(
        self: BaseChatModel, input: Any, config: Any = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        call = _begin(self, ensure_config(config), kwargs)
        if call is not None:
            begun = False
            try:
                for chunk in call.model.stream(input, config, **call.arguments(stop)):
                    begun = True
                    yield chunk
                return
            except Exception as error:
                if begun or not call.swap.failed(error, call.model.model_name):
                    raise
                config = _without_id(config)
        yield from original(self, input, config, stop=stop, **kwargs)

    return stream


def _astream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def astream(
        self: BaseChatModel, input: Any, config: Any = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        call = _begin(self, ensure_config(config), kwargs)
        if call is not None:
            begun = False
            try:
                answer = cast("AsyncGenerator[Any]", call.model.astream(input, config, **call.arguments(stop)))
                async with aclosing(answer) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except Exception as error:
                if begun or not call.swap.failed(error, call.model.model_name):
                    raise
                config = _without_id(config)
        async with aclosing(original(self, input, config, stop=stop, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    return astream


def _events(original: Callable[..., Any]) -> Callable[..., Any]:
    """``stream_events`` and ``astream_events``: version 3 has a way of its own, the others go through ``stream``."""

    @functools.wraps(original)
    def events(self: BaseChatModel, input: Any, config: Any = None, *, version: str = "v2", **kwargs: Any) -> Any:
        stop = kwargs.pop("stop", None)
        call = _begin(self, ensure_config(config), kwargs) if version == "v3" else None
        if call is None:
            return original(self, input, config, version=version, stop=stop, **kwargs)
        return getattr(call.model, original.__name__)(input, config, version="v3", **call.arguments(stop))

    return events


def _init(original: Callable[..., None]) -> Callable[..., None]:
    """Building a model, which wants a key of its provider even if no call will ever go there."""

    @functools.wraps(original)
    def __init__(self: BaseChatModel, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception:
            keys = _missing_keys(type(self), kwargs) if _current(None) is not None else {}
            if not keys:
                raise
            original(self, *args, **{**kwargs, **keys})

    return __init__


def _missing_keys(kind: type[BaseChatModel], given: Mapping[str, Any]) -> dict[str, str]:
    fields = {name: field.alias or name for name, field in kind.model_fields.items() if name.endswith("api_key")}
    return {alias: _NO_KEY for name, alias in fields.items() if not (given.get(name) or given.get(alias))}


_redirected = Patch(
    BaseChatModel,
    {
        "generate": _generate,
        "agenerate": _agenerate,
        "stream": _stream,
        "astream": _astream,
        "stream_events": _events,
        "astream_events": _events,
        "__init__": _init,
    },
)


def _new(policies: Mapping[str, str | ChatART | None], fallback: float | None) -> Swap:
    if not policies:
        raise ValueError('swap: no policies given. Name what to swap, such as swap({"agent": "researcher"})')
    if fallback is not None and fallback <= 0:
        raise ValueError(f"swap(fallback={fallback}): the seconds to wait must be positive")
    return Swap(policies, fallback)


def _model_of(policy: str | ChatART | None, fallback: float | None) -> ChatART | None:
    model = ChatART(model_name=policy) if isinstance(policy, str) else policy
    if model is None or fallback is None:
        return model
    blocking = model.root_client.with_options(timeout=fallback, max_retries=0)
    waiting = model.root_async_client.with_options(timeout=fallback, max_retries=0)
    clients = {"root_client": blocking, "client": blocking.chat.completions}
    clients |= {"root_async_client": waiting, "async_client": waiting.chat.completions}
    return model.model_copy(update={**clients, "request_timeout": fallback, "max_retries": 0})


def _title(model: BaseChatModel, names: list[str]) -> str:
    return f"{type(model).__name__} {names[0]}"


def _at(node: str) -> str:
    return f"at node {node!r}" if node else "outside any node"


def _without_id(config: Any) -> Any:
    """The config without the run id that the failed call has used."""
    return config and {key: value for key, value in config.items() if key != "run_id"}


_active: ContextVar[Swap | None] = ContextVar("langgraph_art_swap", default=None)
_open: set[Swap] = set()
_everywhere: Swap | None = None
_starting = threading.Lock()


class _Here:
    """What LangChain takes for a context variable: the swap of a context, or that of the whole process."""

    def get(self) -> Swap | None:
        return _active.get() or _everywhere


register_configure_hook(cast("ContextVar[Any]", _Here()), inheritable=True)
