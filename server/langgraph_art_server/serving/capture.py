"""Reads prompt ids, sampled ids and logprobs out of vLLM's answers, and takes out what the caller did not ask for.

Invariant: what is recorded is what the engine said, never computed again from text. If ids, logprobs and usage do not
agree, the call is kept but marked untrainable, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from langgraph_art.protocol import RecordedCall
from langgraph_art_server.serving.adapters import Target

_SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
)
# A value other than these changes the distribution in a way that the trainer does not reproduce.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "thinking_token_budget": (None,),
    "use_beam_search": (None, False),
    "repetition_detection": (None,),
    "vllm_xargs": (None, {}),
}
_LOWEST_TEMPERATURE = 0.01
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling from the model's plain distribution: what a request means that does not say."""


@dataclass(frozen=True)
class CallHeader:
    """Who makes a call, from its request headers."""

    call_id: str
    attempt: int
    run_id: str | None
    group_id: str | None
    node: str | None
    recorded: bool = True
    """Whether the client lets the call be recorded."""

    @property
    def pin(self) -> str | None:
        """What ties the call to a version: its group, else its run."""
        return self.group_id or self.run_id


@dataclass
class _Choice:
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Capture:
    """Collects one call from its answer, whole or chunk by chunk.

    Args:
        header: Who makes the call.
        body: The request as the client sent it.
        target: What its model name meant.
        strict_tools: Whether the engine holds every tool call to a grammar, whatever the request says.
        processed_logprobs: Whether the engine's logprobs are those of the distribution that was sampled from.
    """

    def __init__(
        self,
        header: CallHeader,
        body: dict[str, Any],
        target: Target,
        *,
        strict_tools: bool = False,
        processed_logprobs: bool = True,
    ) -> None:
        self.header = header
        self._body = body
        self._target = target
        self._strict_tools = strict_tools
        self._processed_logprobs = processed_logprobs
        self._wants_logprobs = bool(body.get("logprobs"))
        self._wants_ids = bool(body.get("return_token_ids"))
        self._wants_reasoning = body.get("include_reasoning") is not False
        self._wants_usage = not body.get("stream") or bool((body.get("stream_options") or {}).get("include_usage"))
        self._prompt_ids: list[int] = []
        self._choices: dict[int, _Choice] = {}
        self._usage: dict[str, Any] = {}
        self._created_at = datetime.now(UTC)

    def request(self, engine_model: str, max_tokens: int) -> dict[str, Any]:
        """The request for the engine: the client's, plus what recording needs."""
        request = {
            **self._body,
            "model": engine_model,
            "logprobs": True,
            "return_token_ids": True,
            # Without it vLLM withholds ids and logprobs of a reasoning model.
            "include_reasoning": True,
        }
        if request.get("max_tokens") is None and request.get("max_completion_tokens") is None:
            request["max_completion_tokens"] = max_tokens
        # Said, not left to defaults that a user's own engine may have from the model's files.
        request.update({name: value for name, value in _PLAIN.items() if request.get(name) is None})
        if self._body.get("stream"):
            request["stream_options"] = {**(self._body.get("stream_options") or {}), "include_usage": True}
        return request

    def take(self, part: dict[str, Any]) -> bool:
        """Record a whole answer or a chunk and strip it in place for the client.

        Returns:
            Whether anything is left to send.
        """
        usage = part.get("usage")
        if usage:
            self._usage = usage
        if part.get("prompt_token_ids"):
            self._prompt_ids = part["prompt_token_ids"]
        if not self._wants_ids:
            part.pop("prompt_token_ids", None)
        if self._target.name is not None:
            part["model"] = self._target.name
        for choice in part.get("choices", []):
            self._take_choice(choice)
        if usage and not part["choices"] and not self._wants_usage:
            return False
        if not self._wants_usage:
            part.pop("usage", None)
        return True

    def _take_choice(self, choice: dict[str, Any]) -> None:
        kept = self._choices.setdefault(choice["index"], _Choice())
        kept.sampled_ids += choice.get("token_ids") or []
        kept.logprobs += [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or []]
        kept.finish_reason = choice.get("finish_reason") or kept.finish_reason
        if not self._wants_reasoning:
            (choice.get("message") or choice.get("delta") or {}).pop("reasoning", None)
        if not self._wants_ids:
            choice.pop("token_ids", None)
        if not self._wants_logprobs:
            choice["logprobs"] = None

    @property
    def finished(self) -> bool:
        """Whether every choice that began has ended."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())

    def records(self, *, failed: bool = False) -> list[RecordedCall]:
        """The call as the store keeps it, one record for each choice."""
        status: Literal["complete", "abandoned", "failed"]
        status = "failed" if failed else "complete" if self.finished else "abandoned"
        counts = len(self._prompt_ids), sum(len(choice.sampled_ids) for choice in self._choices.values())
        agrees = counts == (self._usage.get("prompt_tokens"), self._usage.get("completion_tokens"))
        return [
            RecordedCall(
                call_id=self.header.call_id,
                attempt=self.header.attempt,
                choice=index,
                run_id=self.header.run_id,
                node=self.header.node,
                model=str(self._body.get("model")),
                policy=self._target.policy,
                version=self._target.version,
                status=status,
                finish_reason=choice.finish_reason,
                sampling={key: self._body[key] for key in _SAMPLING_KEYS if self._body.get(key) is not None},
                constrained=self._constrained,
                untrainable=self._untrainable(index, choice, status, agrees=agrees),
                prompt_ids=self._prompt_ids,
                sampled_ids=choice.sampled_ids,
                logprobs=choice.logprobs,
                created_at=self._created_at,
            )
            for index, choice in (self._choices or {0: _Choice()}).items()
        ]

    @property
    def _constrained(self) -> bool:
        body = self._body
        tool_choice = body.get("tool_choice")
        response_format = body.get("response_format") or {}
        tools = [] if tool_choice == "none" else body.get("tools") or []
        return (
            tool_choice not in (None, "none", "auto")
            or response_format.get("type", "text") != "text"
            or bool(body.get("structured_outputs"))
            or any((tool.get("function") or {}).get("strict") for tool in tools)
            # vLLM limits the number of calls by a grammar, too.
            or (bool(tools) and (self._strict_tools or body.get("parallel_tool_calls") is False))
        )

    def _untrainable(self, index: int, choice: _Choice, status: str, *, agrees: bool) -> str | None:
        if self._target.policy is None:
            return "base_model"
        if status != "complete":
            return status
        if index > 0:
            return "unused_choice"
        if not self._prompt_ids or not choice.sampled_ids:
            return "no_ids"
        if not agrees or len(choice.sampled_ids) != len(choice.logprobs):
            return "ids_disagree"
        temperature = self._body.get("temperature")
        # Below this vLLM samples at another temperature than the request says.
        if temperature is not None and temperature < _LOWEST_TEMPERATURE:
            return "greedy"
        if not self._processed_logprobs and temperature not in (None, 1):
            return "raw_logprobs"
        for key, neutral in _NEUTRAL.items():
            if self._body.get(key) not in neutral:
                return "altered_distribution"
        # Last, because training on such calls is a choice, and then it must be all that is wrong with them.
        return "constrained" if self._constrained else None
