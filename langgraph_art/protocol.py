"""The wire schema between client and server: every request, answer and header is defined here, once.

Invariant: the client ships structure and rewards, never token arrays. The server recorded the tokens where they were
made and joins them by call id. The server package imports this module; this module imports neither package.
"""

from __future__ import annotations

import math
from collections import Counter
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveFloat, field_validator, model_validator

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
HEADER_RECORD = "x-langgraph-art-record"
"""Request: ``none`` if nothing of the call is to be recorded. It cannot be trained on, then."""
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
    targets: list[str] | None = Field(default=None, min_length=1)
    """Linear layers that get an adapter, such as ``["q_proj", "v_proj"]``. Default: all that the engine serves."""
    seed: int = 0
    """Seed of the random half (A) of the untrained adapter; B starts at zero, so version 0 equals the base model."""

    @field_validator("targets")
    @classmethod
    def _in_order(cls, value: list[str] | None) -> list[str] | None:
        return None if value is None else sorted(set(value))


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
    """How one submission updates its policies. Formulas: ``docs/training.md``.

    Options that would do nothing are refused.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    # -- surrogate
    surrogate: Literal["clip", "sequence_clip", "cispo", "reinforce"] = "clip"
    """What stands for the policy gradient. They have the same gradient where the ratio is 1, so with one minibatch."""
    epsilon_low: float | None = Field(default=None, gt=0, lt=1)
    """How far the ratio may fall below 1 before it is clipped. Default: 0.2 (``clip``), 3e-4 (``sequence_clip``), no
    limit (``cispo``). Refused with one minibatch, whose ratio is exactly 1."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """How far it may rise above 1. Default: 0.2 (``clip``), 4e-4 (``sequence_clip``), 4 (``cispo``)."""
    weight: Literal["run", "token", "constant"] = "run"
    """What a trained token weighs: every run the same, every token the same (DAPO), or a constant (Dr. GRPO)."""
    constant_tokens: int | None = Field(default=None, ge=1)
    """With ``weight="constant"``: tokens of a full run, by which every run's sum is divided."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per submission, each on its share of whole groups."""

    # -- advantages and credit
    scale: Literal["none", "group", "batch"] = "group"
    """What the centred reward is divided by: nothing, or the group's or the batch's standard deviation."""
    nodes: list[str] | None = Field(default=None, min_length=1)
    """Nodes to train, by name, path or pattern (``planner``, ``planner|model``, ``draft*``). Default: all."""
    node_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Factor on the weight of a node's tokens, by name, path or pattern. Where several match, the longest counts; where
    none does, it is 1."""
    node_advantage: float = Field(default=0.0, ge=0)
    """Lambda: a call's advantage is the run's plus this times its node's, which is the node reward less its mean over
    the runs of the group that have one; ``scale`` does not divide it."""
    agent_wise: bool = False
    """Normalise the graph reward for each node over the runs that called it (Dr. MAS)."""

    # -- regularisers
    kl: float = Field(default=0.0, ge=0)
    """Coefficient of the KL divergence to the reference. The estimator's gradient is that of the reverse KL."""
    kl_reference: dict[PolicyName, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Version to stay close to, by policy; a policy that is not named stays close to the base model."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus; below 0 it is a penalty."""
    teacher: str | None = None
    """Name of a teacher that the server was started with: adds the KL to it on the sampled tokens (distillation)."""
    distill: float = Field(default=1.0, gt=0)
    """Coefficient of the KL to the teacher."""

    # -- which calls
    correction: Literal["token_truncation", "token_mask", "sequence_mask", "geometric_mask"] | None = None
    """What is done about the difference between the sampler's and the trainer's probabilities."""
    correction_limit: float | None = Field(default=None, gt=1)
    """Ratio at which the correction acts. Default: 2; 1.01 for ``geometric_mask``."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions that a call may lie behind the one being trained; above 0 the correction defaults to
    ``token_truncation``."""
    truncated: Literal["train", "skip"] = "train"
    """Whether calls whose answer was cut at the token limit train."""
    constrained: Literal["train", "skip"] = "skip"
    """Whether calls sampled under a grammar or a forced tool choice train; the trainer sees another distribution."""

    # -- optimizer
    learning_rate: PositiveFloat | dict[PolicyName, PositiveFloat] = 1e-4
    """AdamW step size, for all policies or by policy; a policy that is not named then does not train. LoRA wants about
    ten times that of full fine-tuning (https://thinkingmachines.ai/blog/lora/)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over ``schedule_steps``, after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    schedule_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the whole training, counted from version 0 or the last supervised fine-tuning; needed by
    ``linear`` and ``cosine``."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this Euclidean norm, for each policy."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""

    @classmethod
    def preset(cls, name: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"], **changes: Any) -> Self:
        """Makes the configuration of a published method.

        | preset | surrogate | weight | scale | paper |
        |---|---|---|---|---|
        | ``grpo`` | ``clip`` | ``run`` | ``group`` | https://arxiv.org/abs/2402.03300 |
        | ``dapo`` | ``clip``, upper limit 0.28 | ``token`` | ``group`` | https://arxiv.org/abs/2503.14476 |
        | ``dr_grpo`` | ``clip`` | ``constant`` | ``none`` | https://arxiv.org/abs/2503.20783 |
        | ``gspo`` | ``sequence_clip`` | ``run`` | ``group`` | https://arxiv.org/abs/2507.18071 |
        | ``cispo`` | ``cispo`` | ``token`` | ``group`` | https://arxiv.org/abs/2506.13585 |

        Args:
            name: The method.
            **changes: Options beside or instead of the preset's. ``dr_grpo`` needs ``constant_tokens``.

        Raises:
            ValueError: If the name is unknown or the options contradict each other.
        """
        if name not in _PRESETS:
            raise ValueError(f"there is no preset {name!r}; there are {', '.join(_PRESETS)}")
        options = _PRESETS[name] | changes
        if name == "dapo" and options.get("minibatches", 1) > 1:
            options = {"epsilon_high": 0.28} | options
        return cls(**options)

    @model_validator(mode="after")
    def _options_that_do_nothing(self) -> Self:
        if self.max_staleness and self.correction is None:
            self.correction = "token_truncation"
        epsilon = "epsilon_low" if self.epsilon_low is not None else "epsilon_high"
        limits = self.epsilon_low is not None or self.epsilon_high is not None
        decays = self.schedule != "constant"
        for nothing, problem in (
            (
                limits and self.minibatches == 1,
                f"{epsilon} has no effect with minibatches=1: one step has a ratio of exactly 1, which is never "
                "clipped; leave it out, or set minibatches",
            ),
            (
                limits and self.surrogate == "reinforce",
                f"{epsilon} has no effect with surrogate='reinforce', which has no ratio",
            ),
            (
                self.weight == "constant" and self.constant_tokens is None,
                "weight='constant' needs constant_tokens, the tokens of a full run, such as its token limit",
            ),
            (
                self.weight != "constant" and self.constant_tokens is not None,
                f"constant_tokens has no effect with weight={self.weight!r}; set weight='constant'",
            ),
            (bool(self.kl_reference) and not self.kl, "kl_reference has no effect without kl"),
            (self.teacher is None and self.distill != 1.0, "distill has no effect without teacher"),
            (
                self.correction is None and self.correction_limit is not None,
                "correction_limit has no effect without correction",
            ),
            (
                decays and self.schedule_steps is None,
                f"schedule={self.schedule!r} needs schedule_steps, the optimizer steps of the whole training",
            ),
            (
                not decays and self.schedule_steps is not None,
                "schedule_steps has no effect with schedule='constant'",
            ),
            (
                self.schedule_steps is not None and self.warmup_steps >= self.schedule_steps,
                f"warmup_steps={self.warmup_steps} leaves no step of schedule_steps={self.schedule_steps}",
            ),
        ):
            if nothing:
                raise ValueError(problem)
        return self


_PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"surrogate": "clip", "weight": "run", "scale": "group"},
    "dapo": {"surrogate": "clip", "weight": "token", "scale": "group"},
    "dr_grpo": {"surrogate": "clip", "weight": "constant", "scale": "none"},
    "gspo": {"surrogate": "sequence_clip", "weight": "run", "scale": "group"},
    "cispo": {"surrogate": "cispo", "weight": "token", "scale": "group"},
}


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
    node_rewards: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Mean reward of the run at each node path, beside the graph's; used with ``TrainConfig.node_advantage``."""
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


class SftConfig(Message):
    """How supervised fine-tuning changes a policy: ``docs/warm-up.md``. Defaults as in QLoRA, whose adapters cover all
    linear layers too (https://arxiv.org/abs/2305.14314, appendix B.2)."""

    learning_rate: float = Field(default=2e-4, gt=0)
    """AdamW step size."""
    epochs: int = Field(default=1, ge=1)
    """How often each example is seen."""
    batch_size: int = Field(default=16, ge=1)
    """Examples in each optimizer step. Their order is shuffled in each epoch, by ``seed``."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the steps of this fine-tuning, after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    max_grad_norm: float = Field(default=0.3, gt=0)
    """Gradients are clipped to this Euclidean norm."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    seed: int = 0
    """Seed of the order of the examples."""


class RecordedExample(Message):
    """A call that the server recorded: its answer is learned, token by token as it was sampled."""

    call_id: str
    run_id: str | None = None
    """The run that it comes from, so that the example goes when the run is deleted."""


class ChatExample(Message):
    """A conversation in OpenAI's chat format. The server makes tokens of it, as it would for a call."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """As in a chat completion. Every assistant message is learned, except those with ``"weight": 0``."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the model was offered, as in a chat completion."""
    run_id: str | None = None
    """As in :class:`RecordedExample`."""

    @model_validator(mode="after")
    def _teaches(self) -> Self:
        if not any(message.get("role") == "assistant" and message.get("weight", 1) for message in self.messages):
            raise ValueError('no message to learn: an example needs one with "role": "assistant", not of "weight": 0')
        return self


class SftSubmission(Message):
    """Body of ``POST /api/sft``: examples to fine-tune one policy on. Answered by a :class:`Job`, like a submission."""

    idempotency_key: str = Field(min_length=1, max_length=128)
    """As in :class:`Submission`; the two share one space of keys."""
    policy: PolicyName
    examples: list[RecordedExample | ChatExample] = Field(min_length=1)
    config: SftConfig = SftConfig()


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
    losses: list[float] = Field(default_factory=list)
    """Supervised fine-tuning only: the loss before each optimizer step, in nats per token."""


class TrainResult(Message):
    """Everything that happened to a submission. What was not trained is counted by its reason."""

    updates: list[PolicyUpdate]
    skipped: dict[str, int]
    """Count by reason, such as ``group:no_signal``, ``call:not_delivered``, ``call:not_recorded``."""
    warnings: list[str] = Field(default_factory=list)
    """Options that had no effect on this submission, in words; counted in ``skipped`` as ``option:...``."""
    seconds: dict[str, float]
    """Time by phase: ``queue``, ``join``, ``train``, ``load``."""


JobState = Literal["queued", "running", "trained", "finished", "failed"]
"""``trained``: committed, not yet loaded into the engine. ``finished``: serving. Only ``failed`` trained nothing."""


class Job(Message):
    """The server's record of a submission."""

    id: str
    kind: Literal["train", "sft"] = "train"
    """``sft``: supervised fine-tuning."""
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


class DeletedRun(Message):
    """What was deleted of a run, and what remains. Answer of ``DELETE /api/runs/{run_id}``."""

    run_id: str
    calls: int
    """Records of calls that were deleted: token ids, logprobs, sampling. Attempts and choices count one by one."""
    pins: int
    """Pins of the run's own that were deleted. A group's pin names no run, and stays for the others."""
    jobs: int
    """Ended jobs from whose stored submission the run was taken: its reward and its calls' ids and nodes."""
    trained_into: list[str]
    """Versions whose weights learned from the run, such as ``researcher@12``. They stay as they are, and so does this
    note, which holds the run's id and no content."""


class CallStoreInfo(Message):
    """How much is recorded. Answer of ``GET /api/calls``."""

    calls: int
    """Records of calls; attempts and choices count one by one."""
    unclaimed: int
    """Those of them that no submission has claimed yet. They are deleted when they are old enough."""
    expired: int
    """Unclaimed ones that were deleted for their age since the server started."""
    bytes: int
    """Size of the whole database on disk: calls, prompts, jobs and policies."""


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
    engine: Literal["starting", "ready", "idle", "failed", "stopped"]
    """``idle``: put to rest for want of calls; the next one wakes it."""
    engine_phase: str | None = None
    """What the engine is doing while it starts, such as ``loading the weights``."""
    engine_error: str | None = None
    """Last log lines of the engine if it failed."""
    policies: list[PolicyName]


class ErrorBody(Message):
    """Inner object of an error, in OpenAI's form: ``{"error": {...}}``."""

    message: str
    type: str
    code: str | None = None
    param: str | None = None
