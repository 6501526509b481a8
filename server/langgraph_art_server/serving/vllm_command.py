"""How a vLLM process is started: its command line and its environment.

Invariant: it listens on the loopback interface only, since its control endpoints have no guard of their own, and our
own key and settings never reach it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil

from langgraph_art_server.config import ServerSettings
from langgraph_art_server.device import Device, split_gpus
from langgraph_art_server.models import BaseModel
from langgraph_art_server.serving.engine import LIVE_ADAPTERS
from langgraph_art_server.serving.families import Family

_CPU_CONTEXT = 2048


class VllmCommand:
    """Everything that decides how vLLM runs.

    Args:
        settings: Settings of the server.
        model: Base model.
        family: Parsers and chat template.
        device: Where it runs.
    """

    def __init__(self, settings: ServerSettings, model: BaseModel, family: Family, device: Device) -> None:
        self._settings = settings
        self._model = model
        self._family = family
        self._device = device
        self.max_model_len = settings.max_model_len or min(
            model.context_length, _CPU_CONTEXT if device == "cpu" else model.context_length
        )
        """Context length in tokens."""

    def arguments(self, port: int) -> list[str]:
        """The command line of a server that listens on ``port``."""
        settings = self._settings
        dtype = settings.dtype
        if dtype == "auto":
            dtype = "float32" if self._device == "cpu" else "bfloat16"
        arguments: dict[str, str | int | float | Path | None] = {
            "--model": self._model.directory,
            "--served-model-name": self._model.name,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": dtype,
            "--max-model-len": self.max_model_len,
            "--max-num-seqs": settings.max_concurrency,
            "--max-lora-rank": settings.max_lora_rank,
            "--max-loras": 2,
            "--max-cpu-loras": LIVE_ADAPTERS,
            # Behaviour logprobs must be those of the distribution that was sampled from, and that distribution must
            # not depend on defaults hidden in the model's files.
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
            "--chat-template": self.chat_template,
            "--reasoning-parser": self.reasoning_parser,
            "--tool-call-parser": self.tool_parser,
        }
        flags = ["--enable-lora", "--no-enable-log-requests"]
        if self.tool_parser:
            flags.append("--enable-auto-tool-choice")
        if self._device == "cpu":
            # Prefix caching shares whole blocks: the CPU default of 128 tokens would share little of a chat prompt.
            arguments["--block-size"] = 32
            # See VLLM_ENABLE_V1_MULTIPROCESSING below.
            arguments["--distributed-executor-backend"] = "uni"
            arguments["--worker-extension-cls"] = "langgraph_art_server.serving.cpu_lora.WorkerExtension"
        elif settings.train_gpu is None:
            # On one GPU the engine takes its share of the memory, and the trainer needs room beside it; an engine that
            # sleeps during updates gives all of its share back.
            arguments["--gpu-memory-utilization"] = 0.8 if settings.gpu_sharing == "sleep" else 0.45
            if settings.gpu_sharing == "sleep":
                flags.append("--enable-sleep-mode")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
        for name, value in arguments.items():
            if value is not None:
                command += [name, str(value)]
        return command + settings.engine_args

    @property
    def tool_parser(self) -> str | None:
        """Tool-call parser in use."""
        return self._settings.tool_parser or self._family.tool_parser

    @property
    def strict_tools(self) -> bool:
        """Whether vLLM holds every tool call to a grammar: as it was told, or because its parser always does."""
        given = " ".join(self._settings.engine_args).replace("=", " ").split()
        told = "--tool-strict-level" in given[:-1] and given[given.index("--tool-strict-level") + 1] != "auto"
        return told or self.tool_parser in ("glm45", "glm47")

    @property
    def reasoning_parser(self) -> str | None:
        """Reasoning parser in use."""
        return self._settings.reasoning_parser or self._family.reasoning_parser

    @property
    def chat_template(self) -> Path | None:
        """Chat template in use; ``None``: the model's own."""
        if self._settings.chat_template:
            return Path(self._settings.chat_template).expanduser().resolve()
        return self._family.chat_template

    def environment(self) -> dict[str, str]:
        """The environment of the process."""
        environment = {
            **os.environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        # Our own key and settings are none of its business.
        for name in [name for name in environment if name.startswith("LANGGRAPH_ART_") or name == "VLLM_API_KEY"]:
            del environment[name]
        if self._model.directory.exists():
            environment.setdefault("HF_HUB_OFFLINE", "1")
        if self._device == "cpu":
            environment.update(self._cpu_environment())
        elif self._settings.train_gpu is not None:
            visible = split_gpus(self._settings.train_gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
            environment["CUDA_VISIBLE_DEVICES"] = visible[0]
        elif self._settings.gpu_sharing == "sleep":
            # Opens the endpoints that put it to sleep and wake it; they are on the loopback interface only.
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        return environment

    def _cpu_environment(self) -> dict[str, str]:
        physical = psutil.cpu_count(logical=False) or 1
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(self._settings.kv_cache_gb),
            # Lets the worker live within the engine's process: as a process of its own it would be polled for its
            # answers, which costs half a core.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # vLLM would leave a core of a two-core machine idle; the operating system places the threads better.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(min(physical, len(os.sched_getaffinity(0)))),
            # Milliseconds that a waiting thread spins: the trainer wants the cores as well.
            "KMP_BLOCKTIME": "1",
        }
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = " ".join([str(openmp), *os.environ.get("LD_PRELOAD", "").split()])
        return environment

    def describe(self) -> str:
        """The choices in one line, for the start message."""
        return json.dumps(
            {
                "model": self._model.name,
                "device": self._device,
                "max_model_len": self.max_model_len,
                "tool_parser": self.tool_parser,
                "reasoning_parser": self.reasoning_parser,
                "chat_template": self.chat_template.name if self.chat_template else "the model's own",
            }
        )
