from __future__ import annotations

from collections.abc import Iterator

import pytest

from .openai_stub import OpenAIStub


@pytest.fixture(scope="session")
def running_stub() -> Iterator[OpenAIStub]:
    stub = OpenAIStub()
    stub.start()
    yield stub
    stub.stop()


@pytest.fixture
def stub(running_stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> OpenAIStub:
    """The stub server with an empty log; `ChatART` finds it by itself."""
    running_stub.log.clear()
    running_stub.asked.clear()
    monkeypatch.setenv("LANGGRAPH_ART_URL", running_stub.url)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_BASE", raising=False)
    monkeypatch.delenv("LANGGRAPH_ART_API_KEY", raising=False)
    return running_stub
