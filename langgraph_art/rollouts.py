"""Rollouts: several recorded, scored runs of a graph for each input, concurrently.

Invariant: every input gives one whole group of ``n`` runs, whatever happened to them. A run that failed for reasons
outside the policy stays in its group without a reward; any other is scored. No finished run is lost by an error of
this package: the error carries the groups.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, TypeAlias

from langchain_core.runnables import RunnableConfig

from langgraph_art.errors import (
    CarriesGroups,
    EmptyDataset,
    NoCallsRecorded,
    RewardError,
    RolloutFailed,
    ServerRefused,
)
from langgraph_art.loops import blocking, give_threads
from langgraph_art.progress import rollout_bar
from langgraph_art.recording import record
from langgraph_art.rewards import AnyReward, BadReward, GroupReward, evaluate, set_reward
from langgraph_art.runs import GraphRun, RunGroup
from langgraph_art.unattributed import unattributed_calls

_log = logging.getLogger(__name__)

OnRun: TypeAlias = Callable[[GraphRun, int, int], object]
"""Called after each run with the run (scored), the number of runs done, and of all runs."""

_ALTERING = (
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "bad_words",
    "ignore_eos",
)
TRAINING_SAMPLING: Mapping[str, Any] = MappingProxyType({"temperature": 1.0, "top_p": 1.0} | dict.fromkeys(_ALTERING))
"""Sampling for training: the plain distribution of the policy, which is what the trainer computes. ``None`` removes a
setting of the graph's own, with which its calls could not be trained on."""

_THREADS_PER_RUN = 4  # parallel branches of synchronous nodes, and the reward callback
_SETUP_ERRORS = {"model_not_found", "invalid_api_key"}


async def arollout(
    graph: Any,
    inputs: Iterable[Any],
    *,
    n: int = 8,
    reward: AnyReward | None = None,
    concurrency: int = 32,
    sampling: Mapping[str, Any] | None = TRAINING_SAMPLING,
    timeout: float | None = None,
    config: RunnableConfig | None = None,
    on_error: float | None = None,
    progress: bool | OnRun = True,
) -> list[RunGroup]:
    """Run a graph ``n`` times for each input. ``rollout`` is the blocking form.

    Args:
        graph: a compiled graph or any other Runnable, or a function without arguments that makes one, called for each
            run. Synchronous nodes run in threads, so they run concurrently too; the running event loop gets a larger
            default executor for that.
        inputs: task inputs; each run gets its own deep copy.
        n: runs for each input.
        reward: scores each run as soon as it has ended; sync (run in a thread) or async. It returns a number, named
            parts whose sum is the reward, or a `Score` that also rewards nodes. A `GroupReward`, such as `Judge`,
            scores the runs of a group together when all have ended. A run for which it raises, or returns no finite
            number, keeps ``reward_error`` instead, and a warning counts them. Without one, runs keep no reward: see
            :func:`ascore`.
        concurrency: runs in flight at once, their scoring included.
        sampling: parameters that replace the graph's own for calls through ChatART; ``None`` leaves those alone.
        timeout: seconds that one run may take; more is an infrastructure error. A synchronous node cannot be
            interrupted: its run ends, its thread goes on until the node returns.
        config: passed to each run. Each run gets a ``thread_id`` of its own, so graphs with a checkpointer work.
        on_error: fixed reward of runs that failed in a way a policy can cause (recursion limit, parsing, context
            overflow, tool errors). Default: the reward callback gets them, with ``run.error``.
        progress: show a bar, or a function that is called after each run.

    Returns:
        One group for each input, in the order of the inputs, with ``n`` runs each.

    Raises:
        EmptyDataset: there are no inputs.
        RewardError: the reward raised for every run, returned no finite number, or rewarded nodes that the runs did
            not call. All runs were finished first; they are in ``groups`` of the error.
        RolloutFailed: every run failed for reasons outside the policy; ``groups`` has them.
        NoCallsRecorded: no run made a call through ChatART; ``groups`` has all runs.
        ServerRefused: the server does not know the model that a node asked for, or refuses the API key. The other runs
            are ended; ``groups`` has those that were finished and scored before.
        ValueError: an argument is out of range, or would have no effect.
    """
    items = list(inputs)
    _check_arguments(items, n, concurrency, reward, on_error, config)
    give_threads(_THREADS_PER_RUN * concurrency)
    slots = asyncio.Semaphore(concurrency)
    pending: list[tuple[str, list[asyncio.Task[GraphRun]]]] = []
    total = len(items) * n
    done = 0

    async def one(item: Any, group_id: str, report: OnRun | None) -> GraphRun:
        nonlocal done
        async with slots:
            run = await _run_once(graph, item, group_id, sampling, timeout, config)
            if reward is not None and not isinstance(reward, GroupReward):
                await _score([run], reward, on_error)
        done += 1
        if report is not None:
            report(run, done, total)
        return run

    with ExitStack() as stack:
        report = stack.enter_context(rollout_bar(total)) if progress is True else progress or None
        try:
            async with asyncio.TaskGroup() as tasks:
                for item in items:
                    group_id = _new_id()
                    pending.append((group_id, [tasks.create_task(one(item, group_id, report)) for _ in range(n)]))
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            if isinstance(first, CarriesGroups):
                first.groups = [group for group in _finished(pending) if group.runs]
            raise first from first.__cause__
    groups = _finished(pending)
    _check_runs(groups)
    if isinstance(reward, GroupReward):
        await _score_all([group.runs for group in groups], reward, on_error, slots)
    if reward is not None:
        _report_problems(groups)
    return groups


async def ascore(
    groups: Sequence[RunGroup], reward: AnyReward, *, on_error: float | None = None, concurrency: int = 32
) -> None:
    """Score the runs of groups in place, replacing rewards they have. ``score`` is the blocking form.

    Runs with an infrastructure error are not scored.

    Args:
        groups: for example ``groups`` of a RewardError, or groups of saved runs.
        reward: as in :func:`arollout`.
        on_error: as in :func:`arollout`.
        concurrency: callbacks in flight at once.

    Raises:
        RewardError: it raised for every run, after all were tried.
    """
    give_threads(concurrency)
    together = [group.runs for group in groups]
    if not isinstance(reward, GroupReward):
        together = [[run] for runs in together for run in runs]
    await _score_all(together, reward, on_error, asyncio.Semaphore(concurrency))
    _report_problems(groups)


def _finished(pending: Iterable[tuple[str, list[asyncio.Task[GraphRun]]]]) -> list[RunGroup]:
    """The runs whose tasks came to their end, in the groups of all."""
    return [
        RunGroup(group_id=group_id, runs=[t.result() for t in row if not t.cancelled() and t.exception() is None])
        for group_id, row in pending
    ]


rollout = blocking(arollout)
score = blocking(ascore)


# -- one run ----------------------------------------------------------------------------------------------------------


async def _run_once(
    graph: Any,
    item: Any,
    group_id: str,
    sampling: Mapping[str, Any] | None,
    timeout: float | None,
    config: RunnableConfig | None,
) -> GraphRun:
    run_id = _new_id()
    own: RunnableConfig = {**(config or {})}
    own["configurable"] = {**own.get("configurable", {}), "thread_id": run_id}
    runnable = graph if _is_runnable(graph) else graph()
    if inspect.isawaitable(runnable):
        runnable = await runnable
    given = copy.deepcopy(item)
    run: GraphRun | None = None
    try:
        with record(run_id=run_id, group_id=group_id, sampling=sampling) as run:
            run.output = await _invoke(runnable, given, own, timeout)
    except Exception as error:
        if run is None:  # record() refused its arguments
            raise
        code = getattr(error, "code", None)
        if code in _SETUP_ERRORS:  # no run can succeed, so the rollout ends here
            status = getattr(error, "status_code", None)
            raise ServerRefused(f"{_where(run)}: {error}", status=status, code=code) from error
    run.input = item  # as it was, should the graph have changed its own copy
    return run


def _is_runnable(graph: Any) -> bool:
    return hasattr(graph, "ainvoke") or hasattr(graph, "invoke")


async def _invoke(runnable: Any, given: Any, config: RunnableConfig, timeout: float | None) -> Any:
    try:
        async with asyncio.timeout(timeout) as limit:
            if hasattr(runnable, "ainvoke"):
                return await runnable.ainvoke(given, config)
            return await asyncio.to_thread(runnable.invoke, given, config)
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"the run took longer than its timeout of {timeout:g} s") from error
        raise


def _where(run: GraphRun) -> str:
    node = run.error.node if run.error is not None else None
    return f"Run {run.run_id}, node {node!r}" if node else f"Run {run.run_id}"


def _new_id() -> str:
    return str(uuid.uuid4())


# -- scoring ----------------------------------------------------------------------------------------------------------


async def _score_all(
    together: Sequence[Sequence[GraphRun]], reward: AnyReward, on_error: float | None, slots: asyncio.Semaphore
) -> None:
    async def one(runs: Sequence[GraphRun]) -> None:
        async with slots:
            await _score(runs, reward, on_error)

    async with asyncio.TaskGroup() as tasks:
        for runs in together:
            tasks.create_task(one(runs))


async def _score(runs: Sequence[GraphRun], reward: AnyReward, on_error: float | None) -> None:
    """Set the rewards of runs that are scored together, or mark those for which it fails."""
    for run in runs:
        run.reward = run.reward_error = None
        run.reward_parts, run.node_rewards, run.reward_info = {}, {}, {}
        if run.error is not None and not run.error.infrastructure:
            run.reward = on_error
    scored = [run for run in runs if run.error is None or (on_error is None and not run.error.infrastructure)]
    for run, value in zip(scored, await evaluate(reward, scored), strict=True):
        try:
            if isinstance(value, Exception):
                raise value
            set_reward(run, value)
        except BadReward as error:
            run.reward_error = f"{error}{_own_error(run)}"
        except Exception as error:
            run.reward_error = f"{type(error).__name__}: {error}{_own_error(run)}"


def _own_error(run: GraphRun) -> str:
    return f" (the run itself had failed: {run.error.type}: {run.error.message})" if run.error is not None else ""


def _report_problems(groups: Sequence[RunGroup]) -> None:
    """Warn of runs whose reward failed; if no run at all has a reward, that is an error of the callback."""
    runs = [run for group in groups for run in group.runs]
    marked = [run for run in runs if run.reward_error is not None]
    if not marked:
        return
    said = (
        f"The reward callback failed on {len(marked)} of {len(runs)} runs. {_where(marked[0])}: "
        f"{marked[0].reward_error}. It must return a finite number, a mapping of names to finite numbers, or a Score, "
        "also for runs with run.error (or set on_error=)."
    )
    if all(run.reward is None for run in runs):
        raise RewardError(
            f"{said} The runs are kept in this error's groups: mend the callback and call score(error.groups, reward).",
            groups=groups,
        )
    _log.warning("%s These runs keep reward_error and are left out of their groups.", said)


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_arguments(
    items: Sequence[Any],
    n: int,
    concurrency: int,
    reward: AnyReward | None,
    on_error: float | None,
    config: RunnableConfig | None,
) -> None:
    if not items:
        raise EmptyDataset("There are no inputs to roll out. Give a list with at least one input of the graph.")
    for name, value in (("n", n), ("concurrency", concurrency)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if on_error is not None and (reward is None or not math.isfinite(on_error)):
        why = "it has no effect without reward=" if reward is None else f"it must be finite, got {on_error}"
        raise ValueError(f"on_error: {why}")
    if config is not None and ("run_id" in config or "thread_id" in config.get("configurable", {})):
        raise ValueError("config fixes a run_id or thread_id, but every run needs its own: leave it out")


def _check_runs(groups: Sequence[RunGroup]) -> None:
    runs = [run for group in groups for run in group.runs]
    failed = [run for run in runs if run.error is not None]
    first = f"{_where(failed[0])}: {failed[0].error.type}: {failed[0].error.message}" if failed else ""  # type: ignore[union-attr]
    if all(run.error is not None and run.error.infrastructure for run in runs):
        raise RolloutFailed(
            f"All {len(runs)} runs failed for reasons outside the policy. The first: {first.rstrip('.')}. "
            "Is the server up (`langgraph-art doctor`)? Is the time limit long enough?",
            groups=groups,
        )
    if not any(call.art for run in runs for call in run.calls):
        why = f" ({len(failed)} of them failed; the first: {first})" if failed else ""
        raise NoCallsRecorded(
            f"None of {len(runs)} runs made a call through ChatART{why}, so there is nothing to train. "
            'Replace the chat model of the node to train with ChatART(model="<policy>"). If the calls are made behind '
            "a RemoteGraph, put them into this error's groups with join_remote, then score and train those."
            f"{_lost_calls()}",
            groups=groups,
        )


def _lost_calls() -> str:
    """What is known of calls that no run could claim: a thread pool in a node is the usual reason."""
    lost = unattributed_calls()
    if not lost:
        return ""
    where = f", the first at {lost[0].caller}" if lost[0].caller else ""
    return f" {len(lost)} calls of this process belong to no run{where}: see unattributed_calls()."
