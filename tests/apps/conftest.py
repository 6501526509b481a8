from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ..client.openai_stub import OpenAIStub


@pytest.fixture(scope="session")
def running_stubs() -> Iterator[tuple[OpenAIStub, OpenAIStub]]:
    stubs = OpenAIStub(), OpenAIStub()
    for stub in stubs:
        stub.start()
    yield stubs
    for stub in stubs:
        stub.stop()


@pytest.fixture
def stub(running_stubs: tuple[OpenAIStub, OpenAIStub], monkeypatch: pytest.MonkeyPatch) -> OpenAIStub:
    """The server of the policies, with an empty log."""
    running_stubs[0].log.clear()
    monkeypatch.setenv("LANGGRAPH_ART_URL", running_stubs[0].url)
    return running_stubs[0]


@pytest.fixture
def provider(running_stubs: tuple[OpenAIStub, OpenAIStub], monkeypatch: pytest.MonkeyPatch) -> OpenAIStub:
    """What the apps take for OpenAI, with an empty log."""
    running_stubs[1].log.clear()
    monkeypatch.setenv("OPENAI_API_BASE", f"{running_stubs[1].url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "the-apps-own-key")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the-apps-own-key")
    return running_stubs[1]


@pytest.fixture
def app(provider: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports an app of this folder anew, as it is, outside any swap."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parent / f"{name}.py"
        assert "langgraph_art" not in path.read_text()
        spec = importlib.util.spec_from_file_location(f"app_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load
