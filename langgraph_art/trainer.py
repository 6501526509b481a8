"""The training loop: rollouts, rewards, updates, made only of pieces that a user can call alone.

Invariant: each run is kept in ``groups`` as soon as it is finished (and written, with ``out_dir``, before the update
begins), and a step's log once the step is done, so whatever ends the training, Ctrl-C included, loses no finished run.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from langgraph_art.client import AsyncClient
from langgraph_art.embedded import EmbeddedServer
from langgraph_art.errors import EmptyDataset, NoCallsRecorded, ServerUnreachable, TrainingFailed
from langgraph_art.history import Evaluation, StepLog, TrainHistory
from langgraph_art.loops import blocking
from langgraph_art.progress import TrainView
from langgraph_art.protocol import LoraConfig, TrainConfig, TrainResult
from langgraph_art.report import summarize, write_summary
from langgraph_art.rewards import AnyReward
from langgraph_art.rollouts import TRAINING_SAMPLING, OnRun, arollout
from langgraph_art.runs import GraphRun, RunGroup, save_runs


class Trainer:
    """Trains the policies that a graph calls, by the rewards of its runs.

    Args:
        graph: as in `arollout`: a compiled graph, or a function that makes one for each run.
        inputs: task inputs to train on. Each step takes the next ``inputs_per_step`` of them, in shuffled epochs.
        reward: scores finished runs, as in `arollout`.
        policies: policies to train, created on the server if they do not exist; or a mapping from their names to the
            shapes of their adapters (a shape brings its own seed, and must be that of a policy that exists). An update
            changes every policy whose calls are in its runs; a ``learning_rate`` by policy, or ``nodes``, choose some.
        url: root of the server; default: ``LANGGRAPH_ART_URL``. The graph's ChatART models must point there too.
        server: an embedded server instead, started if it does not run, and then stopped by :meth:`close`.
        runs_per_input: runs in each group.
        inputs_per_step: groups in each step.
        config: how to train; default: ``TrainConfig()``.
        concurrency: runs in flight at once.
        sampling: as in `arollout`; the trainer computes the plain distribution, so leave it unless you know why.
        on_error: as in `arollout`.
        timeout: seconds that one run may take.
        seed: seed of the order of the inputs, and of the adapters of policies that are created.
        out_dir: directory for ``runs/step-0001.jsonl`` and so on (a step's runs, before its update), ``history.jsonl``
            and ``summary.json``. If it holds a history already, that is continued. Default: nothing is written.
        on_step: called with each step's log; may be async.
        progress: show progress.

    Use it in a ``with`` (or ``async with``) block, or call :meth:`close`, if it has an embedded server.

    Attributes:
        history: the steps so far, also after an error or Ctrl-C.
        groups: the groups of the step in hand (after it, of the last step): the runs that are finished and scored, also
            after an error or Ctrl-C, when groups may be short of runs. ``client.train(trainer.groups)`` trains on them;
            sent with the same config, an update that the server has made already is not made again.
    """

    def __init__(
        self,
        graph: Any,
        inputs: Iterable[Any],
        reward: AnyReward,
        *,
        policies: Sequence[str] | Mapping[str, LoraConfig],
        url: str | None = None,
        server: EmbeddedServer | None = None,
        runs_per_input: int = 8,
        inputs_per_step: int = 8,
        config: TrainConfig | None = None,
        concurrency: int = 32,
        sampling: Mapping[str, Any] | None = TRAINING_SAMPLING,
        on_error: float | None = None,
        timeout: float | None = None,
        seed: int = 0,
        out_dir: Path | str | None = None,
        on_step: Callable[[StepLog], Awaitable[object] | object] | None = None,
        progress: bool = True,
    ) -> None:
        self.graph = graph
        self.inputs = list(inputs)
        self.reward = reward
        self.policies = [policies] if isinstance(policies, str) else list(policies)
        self._shapes = policies if isinstance(policies, Mapping) else {}
        self.server = server
        self.runs_per_input = runs_per_input
        self.inputs_per_step = inputs_per_step
        self.config = config or TrainConfig()
        self.concurrency = concurrency
        self.sampling = sampling
        self.on_error = on_error
        self.timeout = timeout
        self.seed = seed
        self.out_dir = Path(out_dir) if out_dir is not None else None
        self.on_step = on_step
        self.progress = progress
        self.history = TrainHistory()
        self.groups: list[RunGroup] = []
        self._url = url
        self._started_server = False
        if not self.inputs:
            raise EmptyDataset("There are no inputs to train on. Give a list with at least one input of the graph.")
        if not self.policies:
            raise ValueError('policies is empty: name the policy to train, as in ChatART(model="<policy>")')
        if isinstance(self.config.learning_rate, dict) and {*self.config.learning_rate} != {*self.policies}:
            raise ValueError(
                f"learning_rate is for {sorted(self.config.learning_rate)}, but the policies to train are "
                f"{sorted(self.policies)}: a policy without one would not train"
            )
        if unknown := sorted(self.config.kl_reference.keys() - {*self.policies}):
            raise ValueError(f"kl_reference names {unknown}, but the policies to train are {sorted(self.policies)}")
        if url is not None and server is not None:
            raise ValueError("give either url= or server=, not both: an embedded server has its own address")
        for name, value in (("runs_per_input", runs_per_input), ("inputs_per_step", inputs_per_step)):
            if value < (2 if name == "runs_per_input" else 1):
                raise ValueError(f"{name} is {value}: advantages need two runs of an input, and a step one input")
        if self.out_dir is not None and (self.out_dir / "history.jsonl").exists():
            self.history = TrainHistory.load(self.out_dir / "history.jsonl")
        self._next_input = _epochs(self.inputs, seed, skip=len(self.history.steps) * inputs_per_step)

    async def afit(self, steps: int) -> TrainHistory:
        """Train for some steps. ``fit`` is the blocking form.

        Args:
            steps: updates to make, each on ``inputs_per_step`` groups of ``runs_per_input`` runs.

        Returns:
            The history, earlier calls included.

        Raises:
            ServerUnreachable, ServerRefused, ServerStartFailed: the server is down, refuses, or cannot start.
            RewardError, RolloutFailed, NoCallsRecorded: as in `arollout`.
            TrainingFailed: the update failed, or nothing in it could be trained on; the policies keep their versions.
                Or the update is made, but the engine has failed and cannot serve it.

        Whatever is raised, ``groups`` has the finished runs of that step.
        """
        async with self._connected() as client:
            with TrainView(steps, shown=self.progress) as view:
                for number in range(len(self.history.steps) + 1, len(self.history.steps) + 1 + steps):
                    started = time.monotonic()
                    inputs = [next(self._next_input) for _ in range(self.inputs_per_step)]
                    with self._kept(number, view.rollout(len(inputs) * self.runs_per_input)) as on_run:
                        groups = self.groups = await self._rollout(
                            inputs, self.runs_per_input, self.reward, self.sampling, on_run
                        )
                    seconds = _phases(groups, time.monotonic() - started)
                    self._check_called(groups)
                    result = await client.train(groups, config=self.config, on_progress=view.update)
                    self._check_trained(result, client.url)
                    total = time.monotonic() - started
                    log = StepLog.of(number, groups, result, seconds=seconds, total_seconds=total)
                    self._keep(log)
                    view.step(log)
                    if self.on_step is not None and inspect.isawaitable(answer := self.on_step(log)):
                        await answer
        return self.history

    async def aevaluate(
        self, inputs: Iterable[Any], *, n: int = 1, temperature: float = 0.0, reward: AnyReward | None = None
    ) -> Evaluation:
        """Measure the policies as they are served now; nothing is trained. ``evaluate`` is the blocking form.

        Args:
            inputs: task inputs, held out from training.
            n: runs for each input.
            temperature: sampling temperature; 0 takes the most probable token.
            reward: another measure than the training reward, such as a stricter one.

        Raises:
            As :meth:`afit`.
        """
        async with self._connected():
            sampling = {"temperature": temperature, "top_p": 1.0}
            return Evaluation.of(await self._rollout(inputs, n, reward or self.reward, sampling, self.progress))

    fit = blocking(afit)
    evaluate = blocking(aevaluate)

    def close(self) -> None:
        """Stop the embedded server, if this trainer started it."""
        if self.server is not None and self._started_server:
            self.server.stop()
            self._started_server = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # -- pieces of the loop -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncClient]:
        """A client of a server that is ready and has the policies."""
        if self.server is not None and not self.server.running:
            self._started_server = True
            await self.server.astart()
        async with AsyncClient(self.server.url if self.server is not None else self._url) as client:
            while (info := await client.info()).engine == "starting":
                await asyncio.sleep(1.0)
            if info.engine not in ("ready", "idle"):
                reason = f"\n{info.engine_error}" if info.engine_error else ""
                raise ServerUnreachable(
                    f"The engine of the server at {client.url} is {info.engine}. Restart the server.{reason}"
                )
            for policy in self.policies:
                if policy in self._shapes or policy not in info.policies:
                    await client.policies.create(policy, self._shapes.get(policy) or LoraConfig(seed=self.seed))
            yield client

    async def _rollout(
        self,
        inputs: Iterable[Any],
        n: int,
        reward: AnyReward,
        sampling: Mapping[str, Any] | None,
        progress: bool | OnRun,
    ) -> list[RunGroup]:
        return await arollout(
            self.graph,
            inputs,
            n=n,
            reward=reward,
            concurrency=self.concurrency,
            sampling=sampling,
            timeout=self.timeout,
            on_error=self.on_error,
            progress=progress,
        )

    @contextmanager
    def _kept(self, step: int, show: OnRun) -> Iterator[OnRun]:
        """Keep the runs that are finished, and write them when the block ends, in whatever way it ends."""
        groups: dict[str, RunGroup] = {}
        self.groups = []

        def on_run(run: GraphRun, done: int, total: int) -> None:
            assert run.group_id is not None  # a rollout gives one
            if run.group_id not in groups:
                groups[run.group_id] = RunGroup(group_id=run.group_id, runs=[])
                self.groups.append(groups[run.group_id])
            groups[run.group_id].runs.append(run)
            show(run, done, total)

        try:
            yield on_run
        finally:
            runs = [run for group in groups.values() for run in group.runs]
            if self.out_dir is not None and runs:
                folder = self.out_dir / "runs"
                folder.mkdir(parents=True, exist_ok=True)
                # Added: an interrupted attempt at this step may have left runs there.
                save_runs(folder / f"step-{step:04}.jsonl", runs, append=True)

    def _check_called(self, groups: Sequence[RunGroup]) -> None:
        calls = [call for group in groups for run in group.runs for call in run.calls if call.art]
        called = {call.version.partition("@")[0] for call in calls if call.version is not None}
        if not called and (failed := [call for call in calls if call.error is not None]):
            error = failed[0].error
            assert error is not None
            raise NoCallsRecorded(
                f"No call of a policy was answered. The first one, at node {failed[0].node!r}, failed: "
                f"{error.type}: {error.message}",
                groups=groups,
            )
        if not called & set(self.policies):
            raise NoCallsRecorded(
                f"No run called a policy of {self.policies}; their ChatART calls asked for "
                f"{sorted({call.model for call in calls})}. Use the same name in ChatART(model=...) and policies=.",
                groups=groups,
            )

    def _check_trained(self, result: TrainResult, url: str) -> None:
        """A step without signal is no error; one that no policy can learn from, nor from the next, is."""
        if result.updates:
            return
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(result.skipped.items()))
        advice = [f"{warning}." for warning in result.warnings]
        advice += [text.format(url=url) for reason, text in _ADVICE.items() if reason in result.skipped]
        raise TrainingFailed(
            f"The server found nothing to train on in this step. Skipped: {counts or 'nothing'}. "
            f"{' '.join([*advice, 'docs/design.md explains the reasons.'])} The runs are in trainer.groups."
        )

    def _keep(self, log: StepLog) -> None:
        self.history.steps.append(log)
        if self.out_dir is not None:
            self.out_dir.mkdir(parents=True, exist_ok=True)
            self.history.save(self.out_dir / "history.jsonl")
            write_summary(self.out_dir / "summary.json", summarize(self.history, seed=self.seed))


_ADVICE = {
    "call:not_recorded": "call:not_recorded: the graph's ChatART calls another server than {url}; set its base_url or "
    "LANGGRAPH_ART_URL to {url}, before the graph is built.",
    "call:altered_distribution": "call:altered_distribution: leave sampling=TRAINING_SAMPLING, and take settings such "
    "as allowed_token_ids out of the graph's ChatART.",
    "call:greedy": "call:greedy: train at temperature 1.",
    "call:constrained": "call:constrained: train without a forced tool choice, a grammar or strict output, or with "
    'TrainConfig(constrained="train").',
    "call:truncated": "call:truncated: raise max_tokens, or leave truncated='train'.",
    "call:base_model": "call:base_model: call a policy by its name, not the base model.",
    "call:stale_version": "call:stale_version: call the policy by its plain name, not policy@version, or allow older "
    "versions with TrainConfig(max_staleness=...).",
}


def _epochs(inputs: Sequence[Any], seed: int, skip: int) -> Iterator[Any]:
    """The inputs again and again, each time in another order."""
    order = random.Random(seed)
    position = 0
    while True:
        for item in order.sample(inputs, len(inputs)):
            position += 1
            if position > skip:
                yield item


def _phases(groups: Sequence[RunGroup], elapsed: float) -> dict[str, float]:
    """Split a rollout's time: until the last run had ended, and what scoring added after that."""
    ends = [run.ended_at for group in groups for run in group.runs if run.ended_at is not None]
    reward = min(elapsed, max(0.0, (datetime.now(UTC) - max(ends)).total_seconds()))
    return {"rollout": elapsed - reward, "reward": reward}
