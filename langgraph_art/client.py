"""The HTTP client of a langgraph-art server, in a blocking and an async form.

Invariant: each operation is written once, as a coroutine over a small link to the server. The blocking form gives it a
link that never suspends, so its coroutines run from start to end in one step and no event loop is needed. Every request
may be sent again without harm (submissions carry an idempotency key), so lost connections and 503 are retried; what the
server refuses (4xx) is not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import quote

import httpx
import tenacity
from pydantic import TypeAdapter, ValidationError

from langgraph_art.errors import ArtError, ServerRefused, ServerUnreachable, TrainingFailed
from langgraph_art.protocol import (
    PROTOCOL_VERSION,
    CreatePolicy,
    DeletedRun,
    Job,
    LoraConfig,
    Policy,
    RecordedCall,
    ServerInfo,
    SftConfig,
    SftSubmission,
    Submission,
    TrainConfig,
    TrainResult,
)
from langgraph_art.runs import RunGroup
from langgraph_art.settings import ClientSettings, is_loopback
from langgraph_art.submissions import make_submission
from langgraph_art.warm_up import Example, make_sft

T = TypeVar("T")
OnProgress = Callable[[Job], object]
"""Called with the job each time the server reports on it; the return value is ignored."""

_log = logging.getLogger(__name__)
_RETRIED_STATUS = {502, 503, 504}
_FIRST_CONTACT_PATIENCE = 2.0  # a server that never answered is more likely misspelt than restarting
_ENDED = ("finished", "failed")
_FIRST_PAUSE = 0.1  # seconds before a lost event stream is opened again; doubles up to 5
_EVENT_SILENCE = 60.0  # the server sends a comment every few seconds, so this long means a dead connection


# -- the link to the server -------------------------------------------------------------------------------------------


class _Link(Protocol):
    async def send(self, method: str, path: str, body: str | None) -> httpx.Response: ...
    def stream(self, path: str) -> AbstractAsyncContextManager[tuple[httpx.Response, AsyncIterator[str]]]: ...
    async def sleep(self, seconds: float) -> None: ...
    async def close(self) -> None: ...


_EVENT_TIMEOUT = httpx.Timeout(_EVENT_SILENCE, connect=10.0)


class _AsyncLink:
    def __init__(self, options: dict[str, Any]) -> None:
        self._http = httpx.AsyncClient(**options)

    async def send(self, method: str, path: str, body: str | None) -> httpx.Response:
        return await self._http.request(method, path, content=body)

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[str]]]:
        async with self._http.stream("GET", path, timeout=_EVENT_TIMEOUT) as response:
            yield response, response.aiter_lines()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self._http.aclose()


class _BlockingLink:
    """Coroutines that never suspend."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._http = httpx.Client(**options)

    async def send(self, method: str, path: str, body: str | None) -> httpx.Response:
        return self._http.request(method, path, content=body)

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[str]]]:
        async def lines() -> AsyncIterator[str]:
            for line in response.iter_lines():
                yield line

        with self._http.stream("GET", path, timeout=_EVENT_TIMEOUT) as response:
            yield response, lines()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        self._http.close()


def _run(operation: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a :class:`_BlockingLink` to its end."""
    try:
        operation.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a blocking link must not suspend")


# -- the operations, once ---------------------------------------------------------------------------------------------


class _Core:
    """All operations over one link."""

    def __init__(
        self, link: Callable[[dict[str, Any]], _Link], url: str | None, api_key: str | None, patience: float
    ) -> None:
        try:
            settings = ClientSettings(url=url) if url else ClientSettings()
        except ValidationError as error:
            raise ArtError("; ".join(str(problem["msg"]) for problem in error.errors())) from error
        self.url = settings.url
        key = api_key or (settings.api_key.get_secret_value() if settings.api_key else None)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        options = {"base_url": self.url, "headers": headers, "timeout": settings.timeout}
        # No proxy between us and our own machine, whatever the environment says.
        self._link = link({**options, "trust_env": not is_loopback(self.url)})
        self._patience = patience
        self._reached = False
        self._warned: set[str] = set()

    async def close(self) -> None:
        await self._link.close()

    async def info(self) -> ServerInfo:
        info = await self._ask("GET", "/api/info", ServerInfo)
        if info.protocol != PROTOCOL_VERSION:
            raise ServerRefused(
                f"The server at {self.url} (version {info.version}) speaks protocol {info.protocol}, this client "
                f"protocol {PROTOCOL_VERSION}. Install the same version of langgraph-art on both sides.",
                status=None,
                code="protocol_mismatch",
            )
        return info

    async def policies(self) -> list[Policy]:
        return await self._ask("GET", "/api/policies", list[Policy])

    async def policy(self, name: str) -> Policy:
        return await self._ask("GET", f"/api/policies/{_segment(name)}", Policy)

    async def create_policy(self, name: str, lora: LoraConfig | None) -> Policy:
        try:
            body = CreatePolicy(name=name, lora=lora or LoraConfig())
        except ValidationError as error:
            raise ArtError(
                f"{name!r} is no policy name: use up to 64 letters, digits, '.', '_' or '-', and begin with a letter "
                "or a digit."
            ) from error
        return await self._ask("POST", "/api/policies", Policy, body.model_dump_json())

    async def calls(self, run_id: str) -> list[RecordedCall]:
        return await self._ask("GET", f"/api/runs/{_segment(run_id)}/calls", list[RecordedCall])

    async def delete_run(self, run_id: str) -> DeletedRun:
        return await self._ask("DELETE", f"/api/runs/{_segment(run_id)}", DeletedRun)

    async def job(self, job_id: str) -> Job:
        return await self._ask("GET", f"/api/jobs/{_segment(job_id)}", Job)

    async def submit(self, submission: Submission | SftSubmission, left_out: dict[str, int]) -> Job:
        for reason, count in left_out.items():
            _log.warning("%d %ss are not submitted (%s)", count, reason.partition(":")[0], reason)
        path = "/api/sft" if isinstance(submission, SftSubmission) else "/api/submissions"
        return await self._ask("POST", path, Job, submission.model_dump_json())

    async def wait(self, job_id: str, on_progress: OnProgress | None) -> Job:
        # The stream is for promptness only. When it drops or ends early, the job itself is asked for, which also
        # decides, with its own retries, whether the server is gone.
        pause = _FIRST_PAUSE
        warned: set[str] = set()
        while True:
            job = await self.job(job_id)
            if on_progress is not None:
                on_progress(job)
            if job.state in _ENDED:
                return job
            await self._check_serving(job, warned)
            try:
                async with self._link.stream(f"/api/jobs/{_segment(job_id)}/events") as (response, lines):
                    while response.is_success and job.state not in _ENDED:
                        line = await anext(lines)
                        if line.startswith("data:"):
                            job, pause = self._parse(line.removeprefix("data:"), Job), _FIRST_PAUSE
                            if on_progress is not None and job.state not in _ENDED:
                                on_progress(job)
                        if line.startswith(("data:", ":")):  # comments too: an engine may fail without a new report
                            await self._check_serving(job, warned)
            except (httpx.TransportError, StopAsyncIteration) as error:
                _log.info("lost the event stream of job %s (%r), resuming", job_id, error)
            if job.state not in _ENDED:
                await self._link.sleep(pause)
                pause = min(2 * pause, 5.0)

    async def _check_serving(self, job: Job, warned: set[str]) -> None:
        """Say, once for each reason, why a committed job is not serving; give up if its engine cannot come back."""
        if job.state != "trained" or not job.error:
            return
        if job.error not in warned:
            warned.add(job.error)
            _log.warning("job %s is trained but not serving yet: %s", job.id, job.error)
        info = await self.info()
        if info.engine == "failed":
            raise TrainingFailed(
                f"Job {job.id} is trained but not serving: {job.error}. The engine of the server at {self.url} has "
                f"failed{f' ({info.engine_error})' if info.engine_error else ''}: restart the server, which will serve "
                "it; do not submit again."
            )

    async def train(
        self, submission: Submission | SftSubmission, left_out: dict[str, int], on_progress: OnProgress | None
    ) -> TrainResult:
        job = await self.wait((await self.submit(submission, left_out)).id, on_progress)
        if job.state == "failed" or job.result is None:
            reason = job.error or "the server gave no reason; see its log"
            again = "sft again with the same examples" if job.kind == "sft" else "train again with the same groups"
            raise TrainingFailed(
                f"Job {job.id} failed and trained nothing: {reason}\nCall client.{again} once the cause is mended."
            )
        for warning in job.result.warnings:
            if warning not in self._warned:  # once, not at every step of a training
                self._warned.add(warning)
                _log.warning("job %s: %s", job.id, warning)
        return job.result.model_copy(update={"skipped": {**job.result.skipped, **left_out}})

    async def _ask(self, method: str, path: str, answer: type[T], body: str | None = None) -> T:
        started = time.monotonic()

        def left() -> float:
            patience = self._patience if self._reached else min(self._patience, _FIRST_CONTACT_PATIENCE)
            return max(0.0, patience - (time.monotonic() - started))

        def say_once(state: tenacity.RetryCallState) -> None:
            if state.attempt_number == 1 and left() > _FIRST_CONTACT_PATIENCE:
                outcome = state.outcome
                away = outcome is None or outcome.failed
                why = "does not answer" if away else "is busy or restarting"
                _log.warning("the server at %s %s; waiting for it, %.0f s at most", self.url, why, left())

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(httpx.TransportError)
            | tenacity.retry_if_result(lambda response: response.status_code in _RETRIED_STATUS),
            wait=lambda state: min(_wait_seconds(state), left()),
            stop=lambda state: left() == 0.0,
            before_sleep=say_once,
            sleep=self._link.sleep,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome is not None else None,
        )
        try:
            response: httpx.Response = await retrying(self._send, method, path, body)
        except httpx.TransportError as error:
            raise ServerUnreachable(
                f"No answer from the langgraph-art server at {self.url} ({error or type(error).__name__}). "
                "Start it with `langgraph-art serve`, or give its address as url= or in LANGGRAPH_ART_URL."
            ) from error
        if not response.is_success:
            raise self._refusal(response)
        return self._parse(response.text, answer)

    async def _send(self, method: str, path: str, body: str | None) -> httpx.Response:
        response = await self._link.send(method, path, body)
        self._reached = True
        return response

    def _parse(self, text: str, answer: type[T]) -> T:
        try:
            return TypeAdapter(answer).validate_json(text)
        except ValidationError as error:
            raise ServerRefused(
                f"{self.url} answered something that is no langgraph-art answer. Is this the right address, and "
                f"are both sides of the same version? It began with: {text[:80]!r}",
                status=None,
                code="bad_answer",
            ) from error

    def _refusal(self, response: httpx.Response) -> ServerRefused:
        code: str | None = None
        try:
            error = response.json()["error"]
            message, code = str(error["message"]), error.get("code")
        except (ValueError, KeyError, TypeError, AttributeError):
            message = f"{self.url} answered with status {response.status_code}: {response.text[:200]!r}"
        return ServerRefused(message, status=response.status_code, code=code)


_backoff = tenacity.wait_random_exponential(multiplier=0.25, max=5.0)


def _wait_seconds(state: tenacity.RetryCallState) -> float:
    """What the server asks for in ``Retry-After`` (at most a minute), else a growing random time."""
    if state.outcome is not None and not state.outcome.failed:
        asked = state.outcome.result().headers.get("retry-after", "")
        if asked.isdigit():
            return min(float(asked), 60.0)
    return _backoff(state)


def _segment(name: str) -> str:
    return quote(name, safe="")


# -- the two public forms ---------------------------------------------------------------------------------------------


class Client:
    """Blocking client of a langgraph-art server. Close it, or use it in a ``with`` block.

    Args:
        url: root of the server, such as ``http://127.0.0.1:7373``; default: ``LANGGRAPH_ART_URL``, then that address.
        api_key: default: ``LANGGRAPH_ART_API_KEY``; only needed if the server was started with one.
        patience: seconds over which a request is repeated while the server is unreachable or busy (503). A server that
            has never answered this client gets 2 seconds at most.

    Every method raises ServerUnreachable if no answer comes, and ServerRefused if the answer is an error.

    Attributes:
        policies: list, look at and create policies.
        url: the server's root.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, patience: float = 60.0) -> None:
        self._core = _Core(_BlockingLink, url, api_key, patience)
        self.url = self._core.url
        self.policies = Policies(self._core)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        _run(self._core.close())

    def info(self) -> ServerInfo:
        """What the server is and whether its engine is ready; checks that both sides speak the same protocol."""
        return _run(self._core.info())

    def submit(
        self, groups: Sequence[RunGroup], *, config: TrainConfig | None = None, idempotency_key: str | None = None
    ) -> Job:
        """Send groups for one update and return at once; arguments and errors as :func:`make_submission`.

        Once this returns, the server has stored the submission durably. Submitting it again gives the same job.
        """
        return _run(
            self._core.submit(*make_submission(groups, config=config, idempotency_key=idempotency_key)),
        )

    def job(self, job_id: str) -> Job:
        """The job as it stands now."""
        return _run(self._core.job(job_id))

    def wait(self, job_id: str, on_progress: OnProgress | None = None) -> Job:
        """Wait until the job is finished or failed, through lost connections and restarts of the server.

        Args:
            job_id: the job's id.
            on_progress: called with the job at every report: ``done`` of ``total`` packs.

        Returns:
            The job, ``finished`` (its new versions serve) or ``failed`` (nothing was trained).

        Raises:
            TrainingFailed: the job is trained, but the server's engine has failed and cannot load it; the server will
                serve it after a restart. While loading is only delayed, the reason is logged as a warning.
        """
        return _run(self._core.wait(job_id, on_progress))

    def train(
        self,
        groups: Sequence[RunGroup],
        *,
        config: TrainConfig | None = None,
        idempotency_key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> TrainResult:
        """Submit groups and wait until the new versions serve: :meth:`submit`, then :meth:`wait`.

        Returns:
            What happened to each policy; ``skipped`` also counts the runs that were left out here.

        Raises:
            TrainingFailed: with the server's reason. A failed job is queued again when the same groups are submitted
                again. Also as in :meth:`wait`.
        """
        submission = make_submission(groups, config=config, idempotency_key=idempotency_key)
        return _run(self._core.train(*submission, on_progress))

    def sft(
        self,
        policy: str,
        examples: Iterable[Example],
        *,
        config: SftConfig | None = None,
        nodes: Sequence[str] | None = None,
        idempotency_key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> TrainResult:
        """Fine-tune a policy on good answers, before RL or between, and wait until the new version serves.

        Arguments and errors are those of `make_sft`; ``on_progress`` as in :meth:`wait`. Runs are best chosen by their
        reward: ``client.sft("desk", [run for run in runs if run.reward > 0.9])``.

        Returns:
            What happened: ``updates[0].losses`` has the loss before each step, ``skipped`` counts what was left out on
            either side, by reason.

        Raises:
            TrainingFailed: with the server's reason; also as in :meth:`wait`.
        """
        submission = make_sft(policy, examples, config=config, nodes=nodes, idempotency_key=idempotency_key)
        return _run(self._core.train(*submission, on_progress))

    def calls(self, run_id: str) -> list[RecordedCall]:
        """The calls that the gateway recorded for a run, exact to the token."""
        return _run(self._core.calls(run_id))

    def delete_run(self, run_id: str) -> DeletedRun:
        """Delete a run from the server: its recorded calls and pins, and its part of the jobs that have ended.

        What a policy learned from it stays in the weights; the answer names those versions. Files of runs are yours:
        `remove_run` takes a run out of one.

        Returns:
            What was deleted; all counts are 0 if the server knows nothing of the run.

        Raises:
            ServerRefused: (409) a call of the run is open, or a job that has not ended is to train it. Wait for it.
        """
        return _run(self._core.delete_run(run_id))


class Policies:
    """The policies of a server, through a :class:`Client`."""

    def __init__(self, core: _Core) -> None:
        self._core = core

    def list(self) -> list[Policy]:
        """Every policy with its versions."""
        return _run(self._core.policies())

    def get(self, name: str) -> Policy:
        """One policy; ServerRefused (404) if there is none of that name."""
        return _run(self._core.policy(name))

    def create(self, name: str, lora: LoraConfig | None = None) -> Policy:
        """Create a policy, or return it if it exists with the same ``lora``.

        Args:
            name: up to 64 letters, digits, dots, dashes, underscores.
            lora: shape of the adapter; default: ``LoraConfig()``.

        Raises:
            ServerRefused: it exists with another shape, or the engine cannot serve that shape.
        """
        return _run(self._core.create_policy(name, lora))


class AsyncClient:
    """Async twin of :class:`Client`: same arguments, methods and errors. It belongs to one event loop."""

    def __init__(self, url: str | None = None, api_key: str | None = None, *, patience: float = 60.0) -> None:
        self._core = _Core(_AsyncLink, url, api_key, patience)
        self.url = self._core.url
        self.policies = AsyncPolicies(self._core)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """As :meth:`Client.close`."""
        await self._core.close()

    async def info(self) -> ServerInfo:
        """As :meth:`Client.info`."""
        return await self._core.info()

    async def submit(
        self, groups: Sequence[RunGroup], *, config: TrainConfig | None = None, idempotency_key: str | None = None
    ) -> Job:
        """As :meth:`Client.submit`."""
        return await self._core.submit(*make_submission(groups, config=config, idempotency_key=idempotency_key))

    async def job(self, job_id: str) -> Job:
        """As :meth:`Client.job`."""
        return await self._core.job(job_id)

    async def wait(self, job_id: str, on_progress: OnProgress | None = None) -> Job:
        """As :meth:`Client.wait`."""
        return await self._core.wait(job_id, on_progress)

    async def train(
        self,
        groups: Sequence[RunGroup],
        *,
        config: TrainConfig | None = None,
        idempotency_key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> TrainResult:
        """As :meth:`Client.train`."""
        submission = make_submission(groups, config=config, idempotency_key=idempotency_key)
        return await self._core.train(*submission, on_progress)

    async def sft(
        self,
        policy: str,
        examples: Iterable[Example],
        *,
        config: SftConfig | None = None,
        nodes: Sequence[str] | None = None,
        idempotency_key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> TrainResult:
        """As :meth:`Client.sft`."""
        submission = make_sft(policy, examples, config=config, nodes=nodes, idempotency_key=idempotency_key)
        return await self._core.train(*submission, on_progress)

    async def calls(self, run_id: str) -> list[RecordedCall]:
        """As :meth:`Client.calls`."""
        return await self._core.calls(run_id)

    async def delete_run(self, run_id: str) -> DeletedRun:
        """As :meth:`Client.delete_run`."""
        return await self._core.delete_run(run_id)


class AsyncPolicies:
    """Async twin of :class:`Policies`."""

    def __init__(self, core: _Core) -> None:
        self._core = core

    async def list(self) -> list[Policy]:
        """As :meth:`Policies.list`."""
        return await self._core.policies()

    async def get(self, name: str) -> Policy:
        """As :meth:`Policies.get`."""
        return await self._core.policy(name)

    async def create(self, name: str, lora: LoraConfig | None = None) -> Policy:
        """As :meth:`Policies.create`."""
        return await self._core.create_policy(name, lora)
