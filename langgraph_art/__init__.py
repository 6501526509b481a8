"""Train LangGraph agents: swap the chat model, and every call of a graph run is recorded, scored and learned from."""

from langgraph_art.chat_model import ChatART
from langgraph_art.client import AsyncClient, Client
from langgraph_art.embedded import EmbeddedServer
from langgraph_art.protocol import TrainConfig
from langgraph_art.recording import record
from langgraph_art.rollout import arollout, rollout
from langgraph_art.runs import GraphRun, NodeCall, RunGroup, load_runs, save_runs
from langgraph_art.trainer import Trainer

__all__ = [
    "AsyncClient",
    "ChatART",
    "Client",
    "EmbeddedServer",
    "GraphRun",
    "NodeCall",
    "RunGroup",
    "TrainConfig",
    "Trainer",
    "arollout",
    "load_runs",
    "record",
    "rollout",
    "save_runs",
]
