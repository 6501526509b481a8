"""A vLLM server that the user runs: looked at before it is trusted, watched, never started or stopped.

Invariant: it serves only if it allows adapters at run time and has the base model that is trained here. What it does
differently from a managed one (its logprobs, its limits) is asked for, not assumed. Checkpoints are loaded by path, so
it must see the server's data directory under the same path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import httpx

from langgraph_art_server.config import ServerSettings
from langgraph_art_server.device import Device
from langgraph_art_server.errors import Unavailable
from langgraph_art_server.models import BaseModel
from langgraph_art_server.serving.engine import Engine

log = logging.getLogger(__name__)

_LOOK = 5.0
"""Seconds between two looks at whether it still answers."""


class ExternalEngine(Engine):
    """A user's own vLLM.

    Args:
        settings: ``engine_url`` and ``engine_api_key`` say where it is; ``start_timeout`` how long it may be away.
        model: The base model that is trained here; it must serve the same.
        device: Where this server trains.
    """

    def __init__(self, settings: ServerSettings, model: BaseModel, device: Device) -> None:
        super().__init__(model, device, settings.max_model_len or model.context_length)
        self._url = str(settings.engine_url).rstrip("/").removesuffix("/v1")
        key = settings.engine_api_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
        self._timeout = settings.start_timeout
        self._limit = settings.max_model_len
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look at it and go on watching; returns at once."""
        self._watcher = asyncio.create_task(self._watch(), name="engine")

    async def stop(self) -> None:
        """Stop watching. The user's server goes on."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._disconnect()
        self._become("stopped")

    async def _watch(self) -> None:
        while True:
            self.phase = f"waiting for the vLLM server at {self._url}"
            begun = time.monotonic()
            await self._connect(self._url, self._headers)
            try:
                while not (models := await self._models()):
                    if time.monotonic() - begun > self._timeout:
                        raise Unavailable(f"no vLLM server answers at {self._url}", code="engine_failed")
                    await asyncio.sleep(0.5)
                await self._look(models)
                await self.on_ready()
            except Unavailable as error:
                self.error = error.message
                self._become("failed")
                log.error("%s", self.error)
                return
            except httpx.TransportError:
                continue
            self.error = None
            self._become("ready")
            log.info("engine ready: vLLM at %s", self._url)
            while await self._answers():
                await asyncio.sleep(_LOOK)
            log.warning("the vLLM server at %s does not answer any more; calls wait for it", self._url)
            self._become("starting")

    async def _models(self) -> list[dict[str, Any]]:
        try:
            answer = await self.http.get("/v1/models", timeout=10.0)
        except httpx.TransportError:
            return []
        if answer.status_code in (401, 403):
            raise Unavailable(
                f"the vLLM server at {self._url} wants an API key: set LANGGRAPH_ART_SERVER_ENGINE_API_KEY",
                code="engine_failed",
            )
        if answer.status_code != 200:
            return []
        cards: list[dict[str, Any]] = answer.json()["data"]
        return [card for card in cards if not card.get("parent")]

    async def _look(self, models: list[dict[str, Any]]) -> None:
        """Learn its names, limits and logprobs.

        Raises:
            Unavailable: It cannot be used; the message says what to start it with.
        """
        named = [card for card in models if self.model.name in (card["id"], str(card.get("root")).rpartition("/")[2])]
        card = (named or models)[0]
        self.served_name = card["id"]
        limit = card.get("max_model_len")
        if limit is not None:
            self.max_model_len = min(limit, self._limit or limit)
        # A path that cannot exist: a server that takes adapters says so, one that does not has no such endpoint.
        refusal = await self.http.post(
            "/v1/load_lora_adapter", json={"lora_name": "langgraph-art-probe", "lora_path": "/nonexistent/probe"}
        )
        if refusal.status_code == 404 and "probe" not in refusal.text:
            raise Unavailable(
                f"the vLLM server at {self._url} takes no adapters at run time: start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
                code="engine_failed",
            )
        await self._compare_vocabulary()
        self.processed_logprobs = await self._logprobs_are_processed()
        if not self.processed_logprobs:
            log.warning(
                "the vLLM server at %s reports raw logprobs: calls at another temperature than 1 cannot be trained on. "
                "Start it with --logprobs-mode processed_logprobs",
                self._url,
            )

    async def _compare_vocabulary(self) -> None:
        """Refuse a server of another model: ids beyond its vocabulary would be the first thing to differ."""
        size = int(self.model.config.get("vocab_size") or 0)
        last, beyond = [
            await self.http.post(
                "/v1/completions", json={"model": self.served_name, "prompt": [token], "max_tokens": 1}, timeout=60.0
            )
            for token in (size - 1, size)
        ]
        if size and (last.status_code != 200 or beyond.status_code == 200):
            raise Unavailable(
                f"the vLLM server at {self._url} serves {self.served_name!r}, whose vocabulary is not that of "
                f"{self.model.name!r} ({size} tokens), which is trained here: start both with the same model",
                code="engine_failed",
            )

    async def _logprobs_are_processed(self) -> bool:
        """Whether a higher temperature flattens the reported logprobs, as it flattens the distribution."""
        tops = []
        for temperature in (1.0, 4.0):
            answer = await self.http.post(
                "/v1/completions",
                json={
                    "model": self.served_name,
                    "prompt": [1],
                    "max_tokens": 1,
                    "temperature": temperature,
                    "top_p": 1,
                    "logprobs": 1,
                },
                timeout=60.0,
            )
            if answer.status_code != 200:
                raise Unavailable(
                    f"the vLLM server at {self._url} gives no logprobs: {answer.text[:300]}", code="engine_failed"
                )
            tops.append(max(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0].values()))
        return bool(abs(tops[0] - tops[1]) > 1e-3)
