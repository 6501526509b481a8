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
    from langgraph_art.instrument import record_all
    from langgraph_art.protocol import DeletedRun, LoraConfig, SftConfig, TrainConfig
    from langgraph_art.recording import record
    from langgraph_art.redaction import redact_texts, set_redaction
    from langgraph_art.remote import join_remote
    from langgraph_art.rewards import BadReward, GroupReward, Judge, Score
    from langgraph_art.rollouts import arollout, ascore, rollout, score
    from langgraph_art.runs import (
        GraphRun,
        NodeCall,
        RunError,
        RunGroup,
        RunInterrupt,
        aattach_tokens,
        attach_tokens,
        load_runs,
        remove_run,
        save_runs,
    )
    from langgraph_art.sdk_calls import node_call
    from langgraph_art.swapping import swap, swap_all
    from langgraph_art.trainer import Trainer
    from langgraph_art.unattributed import UnattributedCall, unattributed_calls
    from langgraph_art.warm_up import load_examples

_HOMES = {
    "ArtError": "errors",
    "AsyncClient": "client",
    "BadReward": "rewards",
    "ChatART": "chat_model",
    "Client": "client",
    "DeletedRun": "protocol",
    "EmbeddedServer": "embedded",
    "Evaluation": "history",
    "GraphRun": "runs",
    "GroupReward": "rewards",
    "Judge": "rewards",
    "LoraConfig": "protocol",
    "NodeCall": "runs",
    "RunError": "runs",
    "RunGroup": "runs",
    "RunInterrupt": "runs",
    "Score": "rewards",
    "SftConfig": "protocol",
    "StepLog": "history",
    "TrainConfig": "protocol",
    "TrainHistory": "history",
    "Trainer": "trainer",
    "UnattributedCall": "unattributed",
    "aattach_tokens": "runs",
    "arollout": "rollouts",
    "ascore": "rollouts",
    "attach_tokens": "runs",
    "join_remote": "remote",
    "load_examples": "warm_up",
    "load_runs": "runs",
    "node_call": "sdk_calls",
    "record": "recording",
    "record_all": "instrument",
    "redact_texts": "redaction",
    "remove_run": "runs",
    "rollout": "rollouts",
    "save_runs": "runs",
    "score": "rollouts",
    "set_redaction": "redaction",
    "swap": "swapping",
    "swap_all": "swapping",
    "unattributed_calls": "unattributed",
}
__all__ = [
    "ArtError",
    "AsyncClient",
    "BadReward",
    "ChatART",
    "Client",
    "DeletedRun",
    "EmbeddedServer",
    "Evaluation",
    "GraphRun",
    "GroupReward",
    "Judge",
    "LoraConfig",
    "NodeCall",
    "RunError",
    "RunGroup",
    "RunInterrupt",
    "Score",
    "SftConfig",
    "StepLog",
    "TrainConfig",
    "TrainHistory",
    "Trainer",
    "UnattributedCall",
    "aattach_tokens",
    "arollout",
    "ascore",
    "attach_tokens",
    "join_remote",
    "load_examples",
    "load_runs",
    "node_call",
    "record",
    "record_all",
    "redact_texts",
    "remove_run",
    "rollout",
    "save_runs",
    "score",
    "set_redaction",
    "swap",
    "swap_all",
    "unattributed_calls",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
