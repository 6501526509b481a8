"""``langgraph-art serve``: flags to server settings, one to one.

Invariant: only flags that were given are passed on, so that the environment and the defaults of the server's settings
decide about all others. The server package is imported when the command runs, because the client works without it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from langgraph_art.errors import ArtError


def serve(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ENGINE_ARGS]...", help="After --: raw arguments for vLLM.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Base model: a local directory, a Hugging Face repository, or smollm2-135m-instruct."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Policy to create if it does not exist; repeatable.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; set an API key before leaving 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default 7373, 0 picks a free one.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory of the database, checkpoints and logs; one server at a time.")
    ] = None,
    keep_unclaimed_hours: Annotated[
        float | None, typer.Option(help="Hours after which recorded calls go that no submission claims; default 168.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context length in tokens, prompt and answer.")] = None,
    max_lora_rank: Annotated[int | None, typer.Option(help="Largest adapter rank that can be served.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Calls that the engine computes at once.")] = None,
    default_max_tokens: Annotated[int | None, typer.Option(help="Answer limit for requests that name none.")] = None,
    kv_cache_gb: Annotated[int | None, typer.Option(help="CPU only: GiB for the key-value cache.")] = None,
    token_budget: Annotated[int | None, typer.Option(help="Tokens in one forward pass of the trainer.")] = None,
    trainer_quantization: Annotated[
        str | None, typer.Option(help="4bit or 8bit: pack the trainer's copy of the base model with bitsandbytes.")
    ] = None,
    teacher: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL[,model=MODEL]", help="vLLM server of a larger model to distil from; repeatable."
        ),
    ] = None,
    tool_parser: Annotated[str | None, typer.Option(help="vLLM tool-call parser; default: by model family.")] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="vLLM reasoning parser; default: by model family.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="File with a Jinja chat template; default: by model family, else the model's.")
    ] = None,
    start_timeout: Annotated[float | None, typer.Option(help="Seconds until the engine must have answered.")] = None,
    idle_timeout: Annotated[
        float | None, typer.Option(help="Seconds without a call until the engine rests; the next call wakes it.")
    ] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="A vLLM server of your own to use; its key: LANGGRAPH_ART_SERVER_ENGINE_API_KEY.")
    ] = None,
    gpu_sharing: Annotated[
        str | None, typer.Option(help="CUDA, one GPU: split (default) or sleep, the engine sleeping during updates.")
    ] = None,
    train_gpu: Annotated[int | None, typer.Option(help="CUDA: index of a GPU for the trainer alone.")] = None,
) -> None:
    """Serve a base model and its policies: OpenAI-compatible gateway, call store, trainer.

    Every option can also be set as LANGGRAPH_ART_SERVER_<NAME>; keys only so, to keep them out of process lists:
    LANGGRAPH_ART_SERVER_API_KEY, and LANGGRAPH_ART_SERVER_TEACHER_API_KEYS='{"NAME": "KEY"}'.
    """
    if arguments and "--" not in sys.argv:
        raise ArtError(
            f"Unexpected argument {arguments[0]!r}. Name the model with --model; vLLM's arguments follow --."
        )
    for package in ("langgraph_art_server", "fastapi", "torch"):
        if importlib.util.find_spec(package) is None:
            raise ArtError(
                f"The server is not installed here ({package} is missing). Install it with pip install "
                "'langgraph-art[server-cuda]' (NVIDIA GPU) or 'langgraph-art[server-cpu]'; see docs/install.md."
            )
    from pydantic import ValidationError

    from langgraph_art_server.config import ServerSettings
    from langgraph_art_server.main import serve as run

    given: dict[str, Any] = {
        "model": model,
        "policies": policy or None,
        "host": host,
        "port": port,
        "data_dir": data_dir,
        "keep_unclaimed_hours": keep_unclaimed_hours,
        "device": device,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_lora_rank": max_lora_rank,
        "max_concurrency": max_concurrency,
        "default_max_tokens": default_max_tokens,
        "kv_cache_gb": kv_cache_gb,
        "token_budget": token_budget,
        "trainer_quantization": trainer_quantization,
        "teachers": teacher or None,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "chat_template": chat_template,
        "start_timeout": start_timeout,
        "idle_timeout": idle_timeout,
        "engine_url": engine_url,
        "gpu_sharing": gpu_sharing,
        "train_gpu": train_gpu,
        "engine_args": arguments or None,
    }
    try:
        settings = ServerSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ArtError("; ".join(f"{_flag(e['loc'], e['input'])}: {e['msg']}" for e in error.errors())) from error
    run(settings)


def _flag(place: tuple[int | str, ...], given: Any) -> str:
    """The flag behind a setting; of one that may be repeated, with the value that is wrong."""
    name = str(place[0]) if place else ""
    repeated = {"policies": "policy", "teachers": "teacher"}.get(name)
    return f"--{name.replace('_', '-')}" if repeated is None else f"--{repeated} {given!r}"
