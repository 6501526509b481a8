"""What to try when memory runs out in the middle of an update: a smaller packing plan instead of a failed job.

Invariant: the plan that follows is a function of the plan that failed, so a retry of the job takes the same way down;
the server stores each plan with the job before it is tried.
"""

from __future__ import annotations

from langgraph_art_server.training.task import BackOff


def smaller_plan(
    task_id: str, token_budget: int, checkpointing: bool, *, longest: int, error: BaseException
) -> BackOff:
    """Gradient checkpointing first, then half the tokens per pack, as long as that makes packs smaller.

    Args:
        task_id: The task that ran out of memory.
        token_budget: Tokens per pack of the plan that failed.
        checkpointing: Whether it computed activations again in the backward pass.
        longest: Tokens of the longest call, which no pack can be smaller than.
        error: What was raised.

    Raises:
        MemoryError: If packs cannot be smaller.
    """
    if not checkpointing:
        return BackOff(task_id=task_id, token_budget=token_budget, checkpointing=True)
    if token_budget > 1 and 2 * token_budget > longest:  # packs hold up to twice the budget, see build_packs
        return BackOff(task_id=task_id, token_budget=token_budget // 2, checkpointing=True)
    raise MemoryError(
        f"memory ran out although each pass held one call only, and activations were computed again in the backward "
        f"pass: the longest call has {longest} tokens. Train shorter calls, or free memory ({error})"
    ) from error
