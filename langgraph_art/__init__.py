"""Train LangGraph agents: swap the chat model, and every call of a graph run is recorded, scored and learned from."""

from langgraph_art.chat_model import ChatART
from langgraph_art.client import AsyncClient, Client
from langgraph_art.embedded import EmbeddedServer
from langgraph_art.errors import ArtError
from langgraph_art.protocol import TrainConfig
from langgraph_art.recording import record
from langgraph_art.rollout import arollout, rollout
from langgraph_art.runs import GraphRun, NodeCall, RunError, RunGroup, attach_tokens, load_runs, save_runs
from langgraph_art.trainer import Trainer

__all__ = [
    "ArtError",
    "AsyncClient",
    "ChatART",
    "Client",
    "EmbeddedServer",
    "GraphRun",
    "NodeCall",
    "RunError",
    "RunGroup",
    "TrainConfig",
    "Trainer",
    "arollout",
    "attach_tokens",
    "load_runs",
    "record",
    "rollout",
    "save_runs",
]
