"""Supervised fine-tuning of a policy: the likelihood of given answers, over the same token trees as RL.

The loss of a step is the mean of ``-logp`` over the tokens of its batch, at temperature 1, in nats. Invariant: a
fine-tuning is one job and one new version, so nothing of it is resumed: its optimizer starts from zero, its order comes
from the seed, and the version it leaves has no optimizer state, which would be of another objective's gradients.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from langgraph_art.protocol import PolicyUpdate, SftConfig, TrainConfig
from langgraph_art_server.training.back_off import smaller_plan
from langgraph_art_server.training.checkpoint import Checkpoint, TrainerState, read_parent, write_checkpoint
from langgraph_art_server.training.memory import is_out_of_memory
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.objective import likelihood
from langgraph_art_server.training.optimizer import Optimizer
from langgraph_art_server.training.passes import accumulate_gradients
from langgraph_art_server.training.task import BackOff, SftSequence, SftTask, Trained
from langgraph_art_server.training.tree import Pack, TreeCall, build_packs


def run_sft(
    model: PolicyModel,
    task: SftTask,
    *,
    token_budget: int,
    checkpointing: bool,
    on_progress: Callable[[int, int], None],
) -> Trained | BackOff:
    """Fine-tunes a policy and writes its new version.

    Args:
        model: The base model; its adapter is replaced and ends up as the new version.
        task: What to learn. ``out_dir`` must not exist.
        token_budget: Tokens per pack.
        checkpointing: Whether activations are computed again in the backward pass.
        on_progress: Called with (packs done, packs in all): first with 0 done, then after each pack.

    Returns:
        The update: its ``calls`` are the answers and ``trained_tokens`` their tokens, each once; ``computed_tokens`` is
        over all epochs. Or, if memory ran out, the packing plan to try the task with again.

    Raises:
        ValueError: If no example can be learned, or the task contradicts the parent's checkpoint.
        FloatingPointError: If a gradient is not finite.
        OSError: If a checkpoint cannot be read or written.
        MemoryError: If memory runs out with the smallest plan too.
    """
    skipped: Counter[str] = Counter()
    examples = _usable(task.examples, model.vocabulary, skipped)
    if not examples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise ValueError(f"no example is left to fine-tune policy {task.policy.policy} on ({reasons})")
    parent = read_parent(task.policy)
    model.checkpointing = checkpointing
    model.set_adapter(task.policy.lora, parent.weights if parent else None)
    batches = [_packs(batch, token_budget) for batch in epochs(examples, task.config)]
    optimizer = Optimizer(model.parameters, _optimizer_config(task.config, len(batches)), task.policy.policy, None)
    total, done = sum(len(packs) for packs in batches), 0

    def pack_done() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    on_progress(0, total)
    losses: list[float] = []
    metrics: dict[str, float] = {}
    try:
        for packs in batches:
            losses.append(accumulate_gradients(model, packs, likelihood, pack_done)[0])
            metrics = optimizer.step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        longest = max(len(example.prompt_ids) + len(example.answer_ids) - 1 for example in examples)
        return smaller_plan(task.task_id, token_budget, checkpointing, longest=longest, error=error)
    metrics |= {"loss": losses[-1], "loss_before": losses[0]}
    state = TrainerState(
        policy=task.policy.policy,
        version=task.policy.version,
        parent=task.policy.parent,
        step=0,
        lora=task.policy.lora,
        config=task.config,
    )
    write_checkpoint(
        Path(task.policy.out_dir), Checkpoint(dict(model.parameters), {}, state), model.adapter_config(task.policy.lora)
    )
    update = PolicyUpdate(
        policy=task.policy.policy,
        parent=task.policy.parent,
        version=task.policy.version,
        runs=0,
        calls=len(examples),
        trained_tokens=sum(len(example.answer_ids) for example in examples),
        computed_tokens=sum(len(pack) for packs in batches for pack in packs),
        metrics=metrics | {"token_budget": float(token_budget), "gradient_checkpointing": float(checkpointing)},
        losses=losses,
    )
    return Trained(task_id=task.task_id, updates=[update], run_ids={update.policy: []}, skipped=dict(skipped))


def epochs(examples: list[SftSequence], config: SftConfig) -> list[list[SftSequence]]:
    """The batches of all epochs, in order: in each epoch every example once, in an order of its own."""
    order = random.Random(config.seed)
    batches = []
    for _ in range(config.epochs):
        shuffled = order.sample(examples, len(examples))
        batches += [shuffled[start : start + config.batch_size] for start in range(0, len(shuffled), config.batch_size)]
    return batches


def _packs(batch: list[SftSequence], token_budget: int) -> list[Pack]:
    weight = 1 / sum(len(example.answer_ids) for example in batch)
    calls = [
        TreeCall(
            prompt_ids=example.prompt_ids,
            sampled_ids=example.answer_ids,
            logprobs=[0.0] * len(example.answer_ids),  # there is no behaviour to compare with
            temperature=1.0,
            advantage=1.0,
            weight=weight,
        )
        for example in batch
    ]
    return build_packs(calls, token_budget)


def _usable(examples: list[SftSequence], vocabulary: int, skipped: Counter[str]) -> list[SftSequence]:
    usable = []
    for example in examples:
        if not example.prompt_ids or not example.answer_ids:
            skipped["example:no_tokens"] += 1
        elif not all(0 <= token < vocabulary for token in example.prompt_ids + example.answer_ids):
            skipped["example:bad_ids"] += 1
        else:
            usable.append(example)
    return usable


def _optimizer_config(config: SftConfig, steps: int) -> TrainConfig:
    return TrainConfig(
        learning_rate=config.learning_rate,
        schedule=config.schedule,
        warmup_steps=config.warmup_steps,
        schedule_steps=steps if config.schedule != "constant" else None,
        max_grad_norm=config.max_grad_norm,
        weight_decay=config.weight_decay,
    )
