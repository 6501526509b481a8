"""Where the server is and how to reach it, from arguments or the environment.

Invariant: an explicit argument beats the environment variable, which beats the default.
"""

from __future__ import annotations

from ipaddress import ip_address

import httpx
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class ClientSettings(BaseSettings):
    """Connection to the server; each field is also an environment variable, such as ``LANGGRAPH_ART_URL``."""

    model_config = SettingsConfigDict(env_prefix="LANGGRAPH_ART_", env_ignore_empty=True, extra="ignore")

    url: str = "http://127.0.0.1:7373"
    """Root URL of the server, without ``/v1``."""
    api_key: SecretStr | None = None
    """Sent as a bearer token. Needed only if the server was started with one."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds to wait for an answer of the server's own API (``/api/...``)."""

    @field_validator("url")
    @classmethod
    def _root(cls, value: str) -> str:
        url = value.strip().rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"LANGGRAPH_ART_URL must start with http:// or https://, got {value!r}")
        return url

    @property
    def openai_url(self) -> str:
        """URL of the OpenAI-compatible gateway, as `ChatART` and any other OpenAI client want it."""
        return f"{self.url}/v1"


def is_loopback(url: str) -> bool:
    """Whether the URL's host is this machine's loopback interface, to which no proxy can lead."""
    host = httpx.URL(url).host
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")
