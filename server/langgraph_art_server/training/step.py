"""One update of each policy in a task: forward and backward over its packs, one AdamW step, one new checkpoint.

Invariant: the result depends on the task, the parent's checkpoint, the token budget, the machine and the thread count
only. A policy without signal takes no step: its version stays its parent and nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from langgraph_art.protocol import PolicyUpdate, TrainConfig
from langgraph_art_server.training.checkpoint import Checkpoint, TrainerState, read_checkpoint, write_checkpoint
from langgraph_art_server.training.loss import pack_loss
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.plan import Plan, plan_update
from langgraph_art_server.training.task import PolicyTask, Trained, TrainTask

BETAS = (0.9, 0.99)
"""Decay of AdamW's moments, as in the widely used LoRA GRPO recipes of Unsloth (``adam_beta2 = 0.99``): RL takes tens
to hundreds of steps, over which the usual 0.999 would average gradients of policies long gone."""

EPSILON = 1e-8
"""PyTorch's default. Not smaller: runs that sampled the same tokens with opposite advantages leave a gradient of pure
rounding noise (about 1e-10), which a smaller epsilon would turn into steps of full size."""


def run_task(
    model: PolicyModel, task: TrainTask, *, token_budget: int, on_progress: Callable[[int, int], None]
) -> Trained:
    """Updates every policy of a task.

    Args:
        model: The base model; its adapter is replaced.
        task: What to train. Each ``out_dir`` must not exist.
        token_budget: Tokens per pack.
        on_progress: Called with (packs done, packs in all): first with 0 done, then after each pack.

    Raises:
        ValueError: If the task contradicts itself or a parent's checkpoint.
        FloatingPointError: If a gradient is not finite.
        OSError: If a checkpoint cannot be read or written.
    """
    plans = [
        plan_update(policy, task.config, vocabulary=model.vocabulary, token_budget=token_budget)
        for policy in task.policies
    ]
    total, done = sum(len(plan.packs) for plan in plans), 0

    def pack_done() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    on_progress(0, total)
    updates = [
        update_policy(model, policy, plan, task.config, on_pack=pack_done)
        for policy, plan in zip(task.policies, plans, strict=True)
    ]
    skipped = sum((plan.skipped for plan in plans), Counter[str]())
    run_ids = {policy.policy: plan.run_ids for policy, plan in zip(task.policies, plans, strict=True)}
    return Trained(task_id=task.task_id, updates=updates, run_ids=run_ids, skipped=dict(skipped))


def update_policy(
    model: PolicyModel, task: PolicyTask, plan: Plan, config: TrainConfig, *, on_pack: Callable[[], None]
) -> PolicyUpdate:
    """Takes one step of one policy and writes its new version, if its plan has anything to compute.

    Args:
        model: The base model; its adapter is replaced by this policy's and ends up as the new version.
        task: The policy, its parent and where the new version goes.
        plan: What :func:`plan_update` made of the task.
        config: Learning rate, clipping and weight decay.
        on_pack: Called after each pack.
    """
    metrics = dict(plan.metrics)
    if plan.packs:
        parent = _parent(task)
        model.set_adapter(task.lora, parent.weights if parent else None)
        metrics |= accumulate_gradients(model, plan, on_pack)
        checkpoint, grad_norm = _step(model, task, config, parent)
        metrics |= {"grad_norm": grad_norm, "learning_rate": config.learning_rate, "step": float(checkpoint.state.step)}
        write_checkpoint(Path(task.out_dir), checkpoint, model.adapter_config(task.lora))
    return PolicyUpdate(
        policy=task.policy,
        parent=task.parent,
        version=task.version if plan.packs else task.parent,
        runs=len(plan.run_ids),
        calls=plan.calls,
        trained_tokens=plan.trained_tokens,
        computed_tokens=sum(len(pack) for pack in plan.packs),
        metrics=metrics,
    )


def _parent(task: PolicyTask) -> Checkpoint | None:
    if task.parent_dir is None:
        if task.parent != 0:
            raise ValueError(
                f"{task.policy}@{task.parent} has no checkpoint directory; only version 0 is made from seed"
            )
        return None
    parent = read_checkpoint(Path(task.parent_dir))
    expected, found = (
        (task.policy, task.parent, task.lora),
        (parent.state.policy, parent.state.version, parent.state.lora),
    )
    if expected != found:
        raise ValueError(f"the parent's checkpoint does not belong to the task: expected {expected}, found {found}")
    return parent


def accumulate_gradients(model: PolicyModel, plan: Plan, on_pack: Callable[[], None]) -> dict[str, float]:
    """Adds the gradients of all packs to those of the adapter and returns the metrics of the pass."""
    loss = 0.0
    entry_logprobs: list[Tensor] = []
    entry_entropies: list[Tensor] = []
    for pack in plan.packs:
        placed = pack.to(model.device)
        hidden = model.hidden(placed)
        result = pack_loss(hidden, model.head, placed)
        hidden.backward(result.gradient)
        loss += result.loss
        entry_logprobs.append(result.logprobs)
        entry_entropies.append(result.entropies)
        on_pack()
    logprobs = torch.cat(entry_logprobs)
    log_ratio = logprobs - torch.cat([pack.entry_logprobs for pack in plan.packs])
    return {
        "loss": loss,
        "logprob": float(logprobs.mean()),
        "entropy": float(torch.cat(entry_entropies).mean()),
        # k3 of http://joschu.net/blog/kl-approx.html: unbiased and never negative, as the tokens are the sampler's.
        "mismatch_kl": float((log_ratio.expm1() - log_ratio).mean()),
        "mismatch_max": float(log_ratio.abs().max()),
    }


def _step(
    model: PolicyModel, task: PolicyTask, config: TrainConfig, parent: Checkpoint | None
) -> tuple[Checkpoint, float]:
    """Clips the accumulated gradient and applies it; returns the new version and the norm before clipping."""
    parameters = model.parameters
    grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm))
    if not torch.isfinite(torch.tensor(grad_norm)):
        raise FloatingPointError(
            f"the gradient of policy {task.policy} is not finite ({grad_norm}); nothing was changed"
        )
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=config.learning_rate, betas=BETAS, eps=EPSILON, weight_decay=config.weight_decay
    )
    taken = parent.state.step if parent else 0
    if parent:
        for name, parameter in parameters.items():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(taken)),
                "exp_avg": parent.optimizer[f"{name}.exp_avg"].to(parameter.device),
                "exp_avg_sq": parent.optimizer[f"{name}.exp_avg_sq"].to(parameter.device),
            }
    optimizer.step()
    moments: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            moments[f"{name}.{moment}"] = optimizer.state[parameter][moment]
    state = TrainerState(
        policy=task.policy, version=task.version, parent=task.parent, step=taken + 1, lora=task.lora, config=config
    )
    return Checkpoint(dict(parameters), moments, state), grad_norm
