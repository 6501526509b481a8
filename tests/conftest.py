"""What all tests share: one real server with a tiny random model for every test that needs an engine.

Invariant: a test that needs the real engine counts as slow, so `-m "not slow"` is the fast set.
"""

from __future__ import annotations

import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from langgraph_art import Client, EmbeddedServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with SmolLM2's tokenizer. Some tokens are far more probable than others."""
    from langgraph_art_server.models import BUNDLED, find_model

    from .models import random_llama

    directory = tmp_path_factory.mktemp("models") / "tiny"
    model = random_llama(
        seed=0,
        # The usual 0.02 would make all 49,152 tokens about equally probable, and no behaviour could be rewarded.
        head_std=0.35,
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        max_position_embeddings=1024,
        # Tied, every token would predict itself.
        tie_word_embeddings=False,
    )
    model.save_pretrained(directory)
    bundled = find_model(BUNDLED).directory
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def teacher_port() -> int:
    """Where the server looks for its teacher ``local``, which serves a model ``tiny``; a test may listen there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, teacher_port: int) -> Iterator[EmbeddedServer]:
    """A real server, shared by all tests; use a policy of your own (the fixture ``policy``)."""
    data_dir = tmp_path_factory.mktemp("server")
    with EmbeddedServer(
        str(tiny_model),
        port=0,
        data_dir=data_dir,
        max_model_len=256,
        tool_parser="hermes",
        progress=False,
        teacher=f"local=http://127.0.0.1:{teacher_port},model=tiny",
    ) as running:
        yield running


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[Client]:
    with Client(server.url) as connected:
        yield connected


@pytest.fixture
def policy(client: Client) -> str:
    """The name of a policy that no other test uses."""
    return client.policies.create(f"p-{uuid.uuid4().hex[:8]}").name
