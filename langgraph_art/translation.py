"""A call of any provider's chat model, said in the terms of OpenAI's chat API, which the server speaks.

Invariant: what the app itself set about sampling, tools and output is kept. What is of its provider only (address, key,
time-outs, retries, defaults of the provider) is not, and options without a counterpart are named, never just dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.utils.function_calling import convert_to_openai_tool

_KEPT = frozenset(
    {"temperature", "top_p", "max_tokens", "stop", "n", "seed", "presence_penalty", "frequency_penalty"}
    | {"logit_bias", "logprobs", "top_logprobs", "reasoning_effort", "extra_body"}
)
"""Settings of a model that a call of a policy has too."""
_KEPT_OF_A_CALL = _KEPT | {
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning", "stream", "stream_usage"),
    *("ls_structured_output_format", "structured_output_format"),
}
_OTHER_NAMES = {
    "stop_sequences": "stop",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "effort": "reasoning_effort",
}
_OF_THE_PROVIDER = frozenset({"model", "model_name", "timeout", "use_responses_api", "cache_control", "service_tier"})
"""Options of a call that say where and how, not what; their absence changes no answer."""
_CHANGES_ANSWERS = frozenset({"thinking", "mcp_servers", "safety_settings", "context_management", "output_config"})
"""Settings of a model that have no counterpart, but change what the app gets."""
_OBJECT = ("callbacks", "tags", "metadata", "verbose", "name", "disable_streaming", "streaming", "custom_get_token_ids")
_PROVIDERS = {"azure": "azure_openai", "amazon_bedrock": "bedrock"}
"""Providers that `init_chat_model` calls by another name than traces do."""


def names_of(model: BaseChatModel, kwargs: Mapping[str, Any]) -> list[str]:
    """The names by which an app knows this model: ``openai:gpt-4o`` and ``gpt-4o``, the full one first.

    Args:
        model: any chat model.
        kwargs: of the call, which may name another model.
    """
    params = model._get_ls_params(**{key: kwargs[key] for key in ("model",) if key in kwargs})
    name = params.get("ls_model_name") or getattr(model, "deployment_name", None) or ""
    provider = params.get("ls_provider", "")
    return [f"{_PROVIDERS.get(provider, provider)}:{name}", str(name), f"{provider}:{name}"]


def object_settings(model: BaseChatModel) -> dict[str, Any]:
    """What the app hung on the model object itself, such as callbacks and tags, as fields for a copy of a `ChatART`."""
    kept = {name: getattr(model, name) for name in _OBJECT if name in model.model_fields_set and hasattr(model, name)}
    if model.output_version in ("v0", "v1"):  # any other is of OpenAI's Responses API
        kept["output_version"] = model.output_version
    return kept


def call_settings(model: BaseChatModel, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings of the model and arguments of the call, as arguments for a call of a `ChatART`.

    Args:
        model: the app's model, of any provider.
        kwargs: what the call was given, bound arguments included, in the provider's own form: tools of ``bind_tools``,
            the format of ``with_structured_output``.

    Returns:
        The arguments, and the names of those that have no counterpart.

    Raises:
        ValueError: tools in a form that neither OpenAI, Anthropic nor Bedrock knows.
    """
    wanted, left_out = _own_settings(model)
    for name, value in kwargs.items():
        name = _OTHER_NAMES.get(name, name)
        if name in ("output_config", "output_format"):
            wanted |= _response_format(value)
        elif name == "top_k":
            wanted["extra_body"] = {**wanted.get("extra_body", {}), "top_k": value}
        elif name == "extra_body":
            wanted["extra_body"] = {**wanted.get("extra_body", {}), **(value or {})}
        elif name in _KEPT_OF_A_CALL:
            wanted[name] = value
        elif name not in _OF_THE_PROVIDER and value is not None:
            left_out.append(name)
    if wanted.get("tools"):
        wanted["tools"], dropped = _tools(wanted["tools"], model)
        left_out += dropped
    if "tool_choice" in wanted:
        wanted |= _tool_choice(wanted.pop("tool_choice"))
    return wanted, left_out


def _own_settings(model: BaseChatModel) -> tuple[dict[str, Any], list[str]]:
    wanted: dict[str, Any] = {}
    left_out = []
    for name in model.model_fields_set:
        value, target = getattr(model, name, None), _OTHER_NAMES.get(name, name)
        if value is None:
            continue
        if target == "max_tokens" and value == (model.profile or {}).get("max_output_tokens"):
            continue  # `ChatAnthropic` fills in its model's own limit, which is nothing that the app asked for
        if target == "model_kwargs":
            wanted = {_OTHER_NAMES.get(key, key): item for key, item in value.items()} | wanted
        elif target == "top_k":
            wanted["extra_body"] = {**wanted.get("extra_body", {}), "top_k": value}
        elif target == "extra_body":
            wanted["extra_body"] = {**wanted.get("extra_body", {}), **value}
        elif target in _KEPT:
            wanted[target] = value
        elif target in _CHANGES_ANSWERS:
            left_out.append(name)
    for name in sorted(wanted.keys() - _KEPT_OF_A_CALL):
        del wanted[name]
        left_out.append(name)
    return wanted, left_out


def _tools(tools: list[Any], model: BaseChatModel) -> tuple[list[dict[str, Any]], list[str]]:
    """Tools in OpenAI's form, and the names of those that only the provider could run."""
    kept, dropped = [], []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "function", "custom", "object") or (kind == "custom" and "input_schema" not in tool):
            dropped.append(f"tool {tool.get('name') or kind}")
            continue
        try:
            kept.append(convert_to_openai_tool(tool))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"swap: the tools of {type(model).__name__} are in a form of its provider's own that cannot be "
                f"translated ({error}). Build this node's model as ChatART, or leave the node out of policies={{...}}."
            ) from error
    return kept, dropped


def _tool_choice(choice: Any) -> dict[str, Any]:
    """The choice in OpenAI's form. Anthropic's also says whether calls may be parallel; Bedrock's kind is its key."""
    if not isinstance(choice, dict):
        if choice in (None, "auto", "none", "required") or isinstance(choice, bool):
            return {"tool_choice": choice}
        return {"tool_choice": "required" if choice == "any" else _named(str(choice))}
    wanted: dict[str, Any] = {}
    if len(choice) == 1 and (kind := next(iter(choice))) in ("auto", "any", "tool"):
        choice = {"type": kind, **choice[kind]}
    if "disable_parallel_tool_use" in choice:
        wanted["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    kind = choice.get("type")
    if kind in ("auto", "none"):
        return wanted | {"tool_choice": kind}
    if kind == "any":
        return wanted | {"tool_choice": "required"}
    return wanted | {"tool_choice": _named(choice["name"]) if "name" in choice else choice}


def _named(tool: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool}}


def _response_format(config: Any) -> dict[str, Any]:
    """Anthropic's structured output in OpenAI's form."""
    wanted = config.get("format", config) if isinstance(config, dict) else {}
    if wanted.get("type") != "json_schema":
        return {}
    schema = {"name": wanted["schema"].get("title") or "answer", "schema": wanted["schema"], "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
