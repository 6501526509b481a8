"""Train LangGraph agents: swap the chat model, and every call of a graph run is recorded, scored and learned from.

Names are imported when they are first used (PEP 562): LangChain takes seconds to import, and neither the command line
nor the server, which only needs the wire schema, should wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langgraph_art.chat_model import ChatART
    from langgraph_art.client import AsyncClient, Client
    from langgraph_art.embedded import EmbeddedServer
    from langgraph_art.errors import ArtError
    from langgraph_art.history import Evaluation, StepLog, TrainHistory
    from langgraph_art.protocol import LoraConfig, TrainConfig
    from langgraph_art.recording import record
    from langgraph_art.rollouts import arollout, ascore, rollout, score
    from langgraph_art.runs import GraphRun, NodeCall, RunError, RunGroup, attach_tokens, load_runs, save_runs
    from langgraph_art.trainer import Trainer

_HOMES = {
    "ArtError": "errors",
    "AsyncClient": "client",
    "ChatART": "chat_model",
    "Client": "client",
    "EmbeddedServer": "embedded",
    "Evaluation": "history",
    "GraphRun": "runs",
    "LoraConfig": "protocol",
    "NodeCall": "runs",
    "RunError": "runs",
    "RunGroup": "runs",
    "StepLog": "history",
    "TrainConfig": "protocol",
    "TrainHistory": "history",
    "Trainer": "trainer",
    "arollout": "rollouts",
    "ascore": "rollouts",
    "attach_tokens": "runs",
    "load_runs": "runs",
    "record": "recording",
    "rollout": "rollouts",
    "save_runs": "runs",
    "score": "rollouts",
}
__all__ = [
    "ArtError",
    "AsyncClient",
    "ChatART",
    "Client",
    "EmbeddedServer",
    "Evaluation",
    "GraphRun",
    "LoraConfig",
    "NodeCall",
    "RunError",
    "RunGroup",
    "StepLog",
    "TrainConfig",
    "TrainHistory",
    "Trainer",
    "arollout",
    "ascore",
    "attach_tokens",
    "load_runs",
    "record",
    "rollout",
    "save_runs",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
