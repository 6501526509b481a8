"""Event loops: async code called from blocking code, and enough threads for blocking code called from async code.

Invariant: the blocking form of a function does what its async form does, in a script and inside a running loop (a
notebook), and Ctrl-C cancels it and waits until its tasks have ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, int] = weakref.WeakKeyDictionary()


def give_threads(count: int) -> None:
    """Make sure that the running loop's default executor has ``count`` threads, started when needed.

    Synchronous nodes run there under ``ainvoke``. The default of six threads on two cores would let six of them run at
    once, whatever the concurrency asked for. A larger executor stays with the loop; the loop closes it.
    """
    loop = asyncio.get_running_loop()
    if _threads.get(loop, 0) < count:
        loop.set_default_executor(ThreadPoolExecutor(count, thread_name_prefix="langgraph-art"))
        _threads[loop] = count


def blocking(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The blocking form of an async function; its name loses the leading ``a``."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return (_run_in_thread if _inside_a_loop() else _run)(function(*args, **kwargs))

    run.__name__ = function.__name__.removeprefix("a")
    run.__qualname__ = function.__qualname__.removesuffix(function.__name__) + run.__name__
    return run


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        try:
            return runner.run(coroutine)
        finally:
            # Closing a loop waits for its threads. A node that hangs in one (its run has timed out) must not hang us.
            runner.get_loop().set_default_executor(ThreadPoolExecutor(1))


def _run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on a loop of its own, because the caller blocks the running one."""
    caller = asyncio.current_task()
    cancel: Callable[[], object] = coroutine.close

    async def cancellable() -> T:
        nonlocal cancel
        task = asyncio.current_task()
        assert task is not None  # a runner runs tasks
        cancel = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        return await coroutine

    with ThreadPoolExecutor(1, thread_name_prefix="langgraph-art-loop") as thread:
        result = thread.submit(contextvars.copy_context().run, _run, cancellable())
        try:
            # Under asyncio.run, Ctrl-C does not raise here: it asks for the cancellation of the task that we block.
            while not wait([result], timeout=0.2).done:
                if caller is not None and caller.cancelling():
                    cancel()
                    break
        except KeyboardInterrupt:
            cancel()
            raise
        return result.result()
