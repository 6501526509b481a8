"""LangChain's standard unit tests of chat models."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from langgraph_art import ChatART


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatART

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "desk"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return (
            {"LANGGRAPH_ART_URL": "http://gpu-box:7373", "LANGGRAPH_ART_API_KEY": "secret"},
            {"model": "desk"},
            {"openai_api_base": "http://gpu-box:7373/v1", "openai_api_key": "secret", "model_name": "desk"},
        )
