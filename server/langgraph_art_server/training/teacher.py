"""Asks a teacher, a larger model that any vLLM serves, how likely it finds the tokens that our policies sampled.

Invariant: token ids are sent and never text, so the answer is about exactly the tokens that were sampled. That has a
meaning only if both models number their tokens alike, which is checked before a teacher is first used. A teacher that
does not answer makes the job fail after a bounded time; the queue goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import tenacity
from pydantic import SecretStr

from langgraph_art.settings import is_loopback
from langgraph_art_server.config import TeacherAddress
from langgraph_art_server.errors import Unavailable
from langgraph_art_server.serving.engine import Engine
from langgraph_art_server.training.task import TaskCall

CONCURRENCY = 16
"""Calls that a teacher is asked about at once; vLLM batches them."""
PATIENCE = 60.0
"""Seconds over which a request that found no answer is sent again."""
ANSWER_TIMEOUT = 600.0
"""Seconds that one answer may take: a large teacher may have a queue."""
_NEVER = -9999.0
"""What vLLM writes for a logprob of minus infinity."""
_PROBE = (
    "The quick brown fox; naïve café, 速い狐, быстрая лиса 🦊\n\tdef f(x):\n        return x ** 2 + 3.14159  # ok\n"
)
_PROBED_IDS = 512


class TeacherFailed(Exception):
    """A teacher cannot be used; the message says which, why, and what to do."""


class Teacher:
    """One teacher.

    Args:
        address: Where it is.
        api_key: Sent as bearer token, if it wants one. Never logged.
        engine: Our engine, whose tokens the teacher's are compared with.
        patience: Seconds over which a request is repeated when no answer comes.
    """

    def __init__(
        self, address: TeacherAddress, api_key: SecretStr | None, engine: Engine, *, patience: float = PATIENCE
    ) -> None:
        self._address = address
        self._engine = engine
        self._patience = patience
        self._model = address.model
        self._max_model_len: int | None = None
        self._http = httpx.AsyncClient(
            base_url=address.url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key.get_secret_value()}"},
            timeout=httpx.Timeout(ANSWER_TIMEOUT, connect=10.0),
            # No proxy between us and our own machine, whatever the environment says.
            trust_env=not is_loopback(address.url),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def score(self, calls: Sequence[TaskCall], skipped: Counter[str]) -> None:
        """Fills ``teacher_logprobs`` of calls: the teacher's logprob of each sampled id, given all tokens before it.

        vLLM reports it at temperature 1 whatever is asked, so calls that were sampled at another temperature are left
        without, and counted as ``teacher:other_temperature``; those that the teacher's context cannot hold as
        ``teacher:too_long``. A token to which the teacher gives no probability at all has no finite divergence: it is
        left out as NaN and counted as ``teacher:impossible_token``.

        Args:
            calls: Calls to fill.
            skipped: Counts what was left without.

        Raises:
            TeacherFailed: It does not answer, refuses, or numbers its tokens otherwise than our base model.
        """
        if self._max_model_len is None:
            await self._check()
        assert self._max_model_len is not None
        limit = asyncio.Semaphore(CONCURRENCY)

        async def fill(call: TaskCall) -> None:
            async with limit:
                call.teacher_logprobs = await self._logprobs(call)

        asked = []
        for call in calls:
            if call.temperature != 1.0:
                skipped["teacher:other_temperature"] += 1
            elif len(call.prompt_ids) + len(call.sampled_ids) >= self._max_model_len:  # it must sample one more
                skipped["teacher:too_long"] += 1
            elif call.prompt_ids and call.sampled_ids:
                asked.append(call)
        try:
            async with asyncio.TaskGroup() as group:
                for call in asked:
                    group.create_task(fill(call))
        except ExceptionGroup as failures:  # each of its own call, and one tells it all
            raise failures.exceptions[0] from failures
        impossible = sum(math.isnan(value) for call in asked for value in call.teacher_logprobs or [])
        if impossible:
            skipped["teacher:impossible_token"] += impossible

    async def _logprobs(self, call: TaskCall) -> list[float]:
        ids = call.prompt_ids + call.sampled_ids
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = await self._ask("/v1/completions", body)
        try:
            listed = answer["choices"][0]["prompt_logprobs"][len(call.prompt_ids) :]
            values = [position[str(token)]["logprob"] for position, token in zip(listed, call.sampled_ids, strict=True)]
            logprobs = [math.nan if value is None or value <= _NEVER else float(value) for value in values]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._failed(
                "answered without the logprobs of our tokens; it must be a vLLM server that allows prompt_logprobs"
            ) from error
        if any(value > 1e-3 for value in logprobs):
            raise self._failed("reports logits where logprobs belong: start it without --logprobs-mode")
        return logprobs

    async def _check(self) -> None:
        """Finds the teacher's model and makes sure that it numbers tokens as our base model does."""
        cards = (await self._ask("/v1/models", None))["data"]
        names = [str(card["id"]) for card in cards]
        if self._model is None:
            if len(names) != 1:
                raise self._failed(f"serves {', '.join(names)}: say which with --teacher NAME=URL,model=MODEL")
            self._model = names[0]
        elif self._model not in names:
            raise self._failed(f"does not serve {self._model!r}; it serves {', '.join(names)}")
        await self._compare("/tokenize", {"prompt": _PROBE, "add_special_tokens": False}, "tokens")
        size = int(self._engine.model.text_config["vocab_size"])
        ids = sorted({place * size // _PROBED_IDS for place in range(_PROBED_IDS)})
        for start in range(0, len(ids), 32):  # within any context length
            await self._compare("/detokenize", {"tokens": ids[start : start + 32]}, "prompt")
        card = cards[names.index(self._model)]
        self._max_model_len = int(card.get("max_model_len") or self._engine.max_model_len)

    async def _compare(self, path: str, question: dict[str, Any], answer: str) -> None:
        try:
            ours = await self._engine.http.post(path, json={"model": self._engine.served_name, **question})
        except httpx.TransportError as error:
            raise Unavailable("the engine went away while its tokens were compared", retry_after=5) from error
        ours.raise_for_status()
        try:
            theirs = await self._ask(path, {"model": self._model, **question})
        except _Refused as error:
            raise self._failed(
                f"cannot tell its tokens ({error}); a teacher needs the vocabulary of {self._engine.model.name}"
            ) from error
        if theirs.get(answer) != ours.json()[answer]:
            raise self._failed(
                f"has another vocabulary than the base model {self._engine.model.name}, so it cannot judge its tokens: "
                "take a teacher of the same model family"
            )

    async def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(httpx.TransportError)
            | tenacity.retry_if_result(lambda answer: answer.status_code >= 500 or answer.status_code == 429),
            wait=tenacity.wait_random_exponential(multiplier=0.25, max=5.0),
            stop=tenacity.stop_after_delay(self._patience),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome is not None else None,
        )
        try:
            answer: httpx.Response = await retrying(
                self._http.request, "GET" if body is None else "POST", path, json=body
            )
        except httpx.TransportError as error:
            raise self._failed(
                f"does not answer ({str(error) or type(error).__name__}). Start it and submit again: a failed job is "
                "queued again by the same submission"
            ) from error
        if answer.status_code in (401, 403):
            raise self._failed(
                f"refuses us (status {answer.status_code}): set its key in LANGGRAPH_ART_SERVER_TEACHER_API_KEYS"
            )
        if not answer.is_success:
            raise _Refused(
                f"teacher {self._address.name!r} answered {path} with status {answer.status_code}: {answer.text[:300]}"
            )
        content: dict[str, Any] = answer.json()
        return content

    def _failed(self, what: str) -> TeacherFailed:
        return TeacherFailed(f"teacher {self._address.name!r} at {self._address.url} {what}")


class _Refused(TeacherFailed):
    """It answered with an error."""
