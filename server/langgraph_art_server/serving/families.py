"""What vLLM must be told about a model family: tool parser, reasoning parser, chat template.

Invariant: a guess is printed at start and can be overridden; an unknown family gets no parser rather than a wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from langgraph_art_server.models import BaseModel

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Family:
    """Names as vLLM knows them; ``None`` leaves the feature off or, for the template, to the model."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: Path | None = None


# First match wins: (text in the model's name, its model_type, what to use). An empty text matches every name.
_FAMILIES: list[tuple[str, str, Family]] = [
    ("smollm2", "llama", Family("hermes", chat_template=_TEMPLATES / "smollm2.jinja")),
    ("smollm3", "smollm3", Family("hermes")),
    ("deepseek-r1-distill", "", Family(reasoning_parser="deepseek_r1")),
    ("hermes", "", Family("hermes")),
    ("qwen3-coder", "", Family("qwen3_coder")),
    ("qwq", "qwen2", Family("hermes", "deepseek_r1")),
    ("qwen2.5", "qwen2", Family("hermes")),
    ("instruct-2507", "qwen3", Family("hermes")),
    ("", "qwen3", Family("hermes", "qwen3")),
    ("instruct-2507", "qwen3_moe", Family("hermes")),
    ("", "qwen3_moe", Family("hermes", "qwen3")),
    ("llama-3", "llama", Family("llama3_json")),
    ("", "llama4", Family("llama4_pythonic")),
    ("", "mistral", Family("mistral")),
    ("", "ministral", Family("mistral")),
    ("", "granite", Family("granite")),
    ("functiongemma", "", Family("functiongemma")),
    ("", "phi4mini", Family("phi4_mini_json")),
    ("", "gpt_oss", Family("openai", "openai_gptoss")),
    ("", "olmo3", Family("olmo3")),
]


def family_of(model: BaseModel) -> Family:
    """The family of a model, by its name and ``model_type``."""
    name, model_type = model.name.lower(), model.config.get("model_type", "")
    for text, kind, family in _FAMILIES:
        if text in name and kind in ("", model_type):
            return family
    return Family()
