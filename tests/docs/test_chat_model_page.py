"""The code of docs/chat-model.md runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..client.openai_stub import OpenAIStub

PAGE = (Path(__file__).parents[2] / "docs" / "chat-model.md").read_text()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    server = OpenAIStub()
    server.start()
    monkeypatch.setenv("LANGGRAPH_ART_URL", server.url)
    yield server
    server.stop()


def test_the_blocks_run_in_order(stub: OpenAIStub, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "chat_model_page"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "chat-model.md", "exec"), names)
    assert capsys.readouterr().out.strip() == "re: Where is the Nile?"
    assert names["whole"]["raw"].usage_metadata["output_tokens"] > 0
    assert len(stub.log) == 4
