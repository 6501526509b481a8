"""A server with a real, small instruct model, for the standard tests of chat models.

Invariant: the model is the one that the demo trains, and the server is started as users start it, with one option for
tests: a tool call, once begun, follows the tool's schema, which so small a model does not by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from langgraph_art import EmbeddedServer

PROFILE = ("--tool-strict-level", "parameter")


@pytest.fixture(scope="session")
def instruct_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """The bundled SmolLM2-135M-Instruct, with the policies ``desk`` and ``spare``."""
    with EmbeddedServer(
        port=0,
        data_dir=tmp_path_factory.mktemp("instruct"),
        policies=["desk", "spare"],
        engine_args=PROFILE,
        progress=False,
    ) as running:
        yield running
