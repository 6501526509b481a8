"""One update of each policy in a task: forward and backward over its packs, AdamW steps, one new checkpoint.

Invariant: the result depends on the task, the parent's checkpoint, the packing plan, the machine and the thread count
only. A policy without signal takes no step: its version stays its parent and nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from langgraph_art.protocol import PolicyUpdate, TrainConfig
from langgraph_art_server.training.back_off import smaller_plan
from langgraph_art_server.training.checkpoint import (
    Checkpoint,
    TrainerState,
    read_checkpoint,
    read_parent,
    write_checkpoint,
)
from langgraph_art_server.training.memory import is_out_of_memory
from langgraph_art_server.training.minibatches import take_steps
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.optimizer import Optimizer
from langgraph_art_server.training.passes import entry_logprobs
from langgraph_art_server.training.plan import Plan, plan_update
from langgraph_art_server.training.task import BackOff, PolicyTask, Trained, TrainTask


def run_task(
    model: PolicyModel,
    task: TrainTask,
    *,
    token_budget: int,
    checkpointing: bool,
    on_progress: Callable[[int, int], None],
) -> Trained | BackOff:
    """Updates every policy of a task.

    Args:
        model: The base model; its adapter is replaced.
        task: What to train. Each ``out_dir`` must not exist.
        token_budget: Tokens per pack.
        checkpointing: Whether activations are computed again in the backward pass.
        on_progress: Called with (passes done, passes in all), a pass being one pack through the model: first with 0
            done, then after each.

    Returns:
        What was trained; or, if memory ran out, the packing plan to try the task with again.

    Raises:
        ValueError: If the task contradicts itself or a checkpoint.
        FloatingPointError: If a gradient is not finite.
        OSError: If a checkpoint cannot be read or written.
        MemoryError: If memory runs out with the smallest plan too.
    """
    plans = [
        plan_update(policy, task.config, vocabulary=model.vocabulary, token_budget=token_budget)
        for policy in task.policies
    ]
    passes = 1 + (task.config.minibatches > 1) + (task.config.kl > 0)
    total, done = passes * sum(len(plan.packs) for plan in plans), 0

    def pack_done() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    on_progress(0, total)
    model.checkpointing = checkpointing
    try:
        updates = [
            update_policy(model, policy, plan, task.config, on_pack=pack_done)
            for policy, plan in zip(task.policies, plans, strict=True)
        ]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        longest = max(int(pack.positions.max()) + 1 for plan in plans for pack in plan.packs)
        return smaller_plan(task.task_id, token_budget, checkpointing, longest=longest, error=error)
    for update in updates:
        if update.version != update.parent:
            update.metrics.update(token_budget=token_budget, gradient_checkpointing=float(checkpointing))
    skipped = sum((plan.skipped for plan in plans), Counter[str]())
    run_ids = {policy.policy: plan.run_ids for policy, plan in zip(task.policies, plans, strict=True)}
    return Trained(task_id=task.task_id, updates=updates, run_ids=run_ids, skipped=dict(skipped))


def update_policy(
    model: PolicyModel, task: PolicyTask, plan: Plan, config: TrainConfig, *, on_pack: Callable[[], None]
) -> PolicyUpdate:
    """Takes the steps of one policy and writes its new version, if its plan has anything to compute.

    Args:
        model: The base model; its adapter is replaced by this policy's and ends up as the new version.
        task: The policy, its parent and where the new version goes.
        plan: What :func:`plan_update` made of the task.
        config: The objective and the optimizer.
        on_pack: Called after each pack, for each pass that it takes.
    """
    metrics = dict(plan.metrics)
    if plan.packs:
        parent = read_parent(task)
        reference = _reference_logprobs(model, task, plan, on_pack) if config.kl else None
        model.set_adapter(task.lora, parent.weights if parent else None)
        optimizer = Optimizer(model.parameters, config, task.policy, parent)
        metrics |= take_steps(model, plan, config, optimizer, on_pack, reference=reference)
        moments, steps = optimizer.state()
        state = TrainerState(
            policy=task.policy, version=task.version, parent=task.parent, step=steps, lora=task.lora, config=config
        )
        checkpoint = Checkpoint(dict(model.parameters), moments, state)
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


def _reference_logprobs(model: PolicyModel, task: PolicyTask, plan: Plan, on_pack: Callable[[], None]) -> list[Tensor]:
    """Logprobs of each pack under the version that the policy is to stay close to."""
    if task.reference_dir is None:
        model.set_adapter(task.lora, None)  # the untrained adapter adds zero: the base model
    else:
        model.set_adapter(task.lora, read_checkpoint(Path(task.reference_dir)).weights)
    return entry_logprobs(model, plan.packs, on_pack)
