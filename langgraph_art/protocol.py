"""The wire schema between client and server: every request, answer and header is defined here, once.

Invariant: the client ships structure and rewards, never token arrays. The server recorded the tokens where they were
made and joins them by call id. The server package imports this module; this module imports neither package.
"""

from __future__ import annotations

import math
from collections import Counter
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PROTOCOL_VERSION = 1
"""Raised when a change here would make an older peer misread a message."""

HEADER_RUN = "x-langgraph-art-run"
"""Request: id of the graph run that makes the call."""
HEADER_GROUP = "x-langgraph-art-group"
"""Request: id of the run's group; a group is pinned to one version of each policy as a whole."""
HEADER_CALL = "x-langgraph-art-call"
"""Request: id of the node call; the key that joins the server's tokens with the client's structure."""
HEADER_NODE = "x-langgraph-art-node"
"""Request: percent-encoded node path of the call, for error messages and for calls that no run claims."""
HEADER_RETRY = "x-stainless-retry-count"
"""Request: the OpenAI SDK's own retry counter; (call id, attempt) is the key of a recorded call."""
HEADER_VERSION = "x-langgraph-art-version"
"""Answer: the policy version that sampled it, such as ``researcher@12``; absent for the base model."""

PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A policy's name: letters, digits, dot, dash, underscore; no ``@``, which separates the version."""


class Message(BaseModel):
    """Base of all wire messages: unknown fields are refused, so that a misspelt option never does nothing."""

    model_config = ConfigDict(extra="forbid")


# -- policies ---------------------------------------------------------------------------------------------------------


class LoraConfig(Message):
    """Shape of a policy's adapter. Fixed for the life of the policy."""

    rank: int = Field(default=16, ge=1, le=512)
    """LoRA rank r."""
    alpha: float = Field(default=32.0, gt=0)
    """LoRA scale: the update is multiplied by ``alpha / rank``."""
    seed: int = 0
    """Seed of the random half (A) of the untrained adapter; B starts at zero, so version 0 equals the base model."""


class CreatePolicy(Message):
    """Body of ``POST /api/policies``. Creating a policy that exists with the same ``lora`` is a no-op."""

    name: PolicyName
    lora: LoraConfig = LoraConfig()


class PolicyVersion(Message):
    """One version of a policy. Numbers only increase and are never reused."""

    version: int
    parent: int | None
    """The version this one was trained from; ``None`` for version 0, the untrained start."""
    job_id: str | None
    """The job that trained it; ``None`` for version 0."""
    created_at: datetime
    serving: bool
    """Whether the engine has loaded it at least once, so that it can be asked for by ``name@version``."""


class Policy(Message):
    """A trainable LoRA adapter on the server's base model."""

    name: PolicyName
    lora: LoraConfig
    version: int
    """The version that the plain name means now."""
    versions: list[PolicyVersion]


# -- training ---------------------------------------------------------------------------------------------------------


class TrainConfig(Message):
    """How one submission updates its policies. Formulas: ``docs/training.md``."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """AdamW step size. LoRA wants about ten times that of full fine-tuning (https://thinkingmachines.ai/blog/lora/)."""
    scale: Literal["none", "group", "batch"] = "group"
    """What the centred reward is divided by: nothing, or the group's or the batch's standard deviation."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this Euclidean norm, for each policy."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""


class CallClaim(Message):
    """A node call that a run claims as its own."""

    call_id: str
    node: str
    """Node path, such as ``planner|model``."""
    delivered: bool
    """Whether the answer reached the graph. Only such calls train."""


class RunSubmission(Message):
    """A scored graph run: its reward and the calls it made, without tokens."""

    run_id: str
    reward: float
    calls: list[CallClaim]

    @field_validator("reward")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError(f"reward must be a finite number, got {value}")
        return value


class GroupSubmission(Message):
    """Runs of the same task input; advantages are relative inside it."""

    group_id: str
    runs: list[RunSubmission]


class Submission(Message):
    """Body of ``POST /api/submissions``: a batch of groups for one update of every policy whose calls it holds."""

    idempotency_key: str = Field(min_length=1, max_length=128)
    """The same key with the same body returns the first job; with another body it is refused (409)."""
    groups: list[GroupSubmission] = Field(min_length=1)
    """Run ids and call ids are unique over all groups."""
    config: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        runs = [run for group in self.groups for run in group.runs]
        run_ids = [run.run_id for run in runs]
        call_ids = [claim.call_id for run in runs for claim in run.calls]
        for kind, ids in (("run", run_ids), ("call", call_ids)):
            item, count = max(Counter(ids).items(), key=lambda entry: entry[1], default=("", 0))
            if count > 1:
                raise ValueError(f"{kind} {item} is in the submission {count} times; submit each {kind} once")
        return self


class PolicyUpdate(Message):
    """What a job did to one policy."""

    policy: PolicyName
    parent: int
    version: int
    """The new version; equals ``parent`` if nothing carried signal and no step was taken."""
    runs: int
    """Runs with signal: the ones the loss averages over."""
    calls: int
    """Calls trained on."""
    trained_tokens: int
    """Sampled tokens trained on, each counted once for every call that sampled it."""
    computed_tokens: int
    """Tokens that went through the model, after merging shared prefixes."""
    metrics: dict[str, float]
    """``loss``, ``grad_norm``, ``mismatch_kl`` and others; see ``docs/training.md``."""


class TrainResult(Message):
    """Everything that happened to a submission. What was not trained is counted by its reason."""

    updates: list[PolicyUpdate]
    skipped: dict[str, int]
    """Count by reason, such as ``group:no_signal``, ``call:not_delivered``, ``call:not_recorded``."""
    seconds: dict[str, float]
    """Time by phase: ``queue``, ``join``, ``train``, ``load``."""


JobState = Literal["queued", "running", "trained", "finished", "failed"]
"""``trained``: committed, not yet loaded into the engine. ``finished``: serving. Only ``failed`` trained nothing."""


class Job(Message):
    """The server's record of a submission."""

    id: str
    idempotency_key: str
    state: JobState
    created_at: datetime
    done: int = 0
    """Packs computed so far."""
    total: int = 0
    """Packs to compute; 0 until known."""
    result: TrainResult | None = None
    error: str | None = None


# -- recorded calls ---------------------------------------------------------------------------------------------------


class RecordedCall(Message):
    """A call as the gateway recorded it, exact to the token. Answer of ``GET /api/runs/{run_id}/calls``."""

    call_id: str
    attempt: int
    """0 for the first try; the OpenAI SDK counts its own retries of one call."""
    choice: int
    """Index of the answer; above 0 only with ``n > 1``, and then never trained."""
    run_id: str | None
    node: str | None
    model: str
    """The name that the client asked for."""
    policy: str | None
    """The policy it resolved to; ``None`` for the base model."""
    version: int | None
    status: Literal["complete", "abandoned", "failed"]
    """``abandoned``: the client went away before the end; the tokens up to then are kept."""
    finish_reason: str | None
    sampling: dict[str, object]
    """The sampling parameters that the request set. One that is absent had the engine's default: ``temperature`` 1,
    ``top_p`` 1."""
    constrained: bool
    """Whether a grammar or a forced tool choice shaped the distribution."""
    untrainable: str | None
    """Why this call cannot be trained on, or ``None``."""
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    """Behaviour logprob of each sampled id, natural log, of the distribution it was sampled from."""
    created_at: datetime


# -- server -----------------------------------------------------------------------------------------------------------


class ServerInfo(Message):
    """Answer of ``GET /api/info``."""

    version: str
    """Version of the langgraph-art distribution that runs the server."""
    protocol: int
    base_model: str
    """Name under which the base model itself can be called."""
    max_model_len: int
    """Context length in tokens, prompt and answer together."""
    device: Literal["cpu", "cuda"]
    engine: Literal["starting", "ready", "failed", "stopped"]
    engine_error: str | None = None
    """Last log lines of the engine if it failed."""
    policies: list[PolicyName]


class ErrorBody(Message):
    """Inner object of an error, in OpenAI's form: ``{"error": {...}}``."""

    message: str
    type: str
    code: str | None = None
    param: str | None = None
