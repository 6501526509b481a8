"""Updates of policies: steps, minibatches, reference, metrics, and what happens when memory runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from langgraph_art.protocol import LoraConfig, TrainConfig
from langgraph_art_server.training.checkpoint import read_checkpoint
from langgraph_art_server.training.minibatches import take_steps
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.objective import reinforcement
from langgraph_art_server.training.optimizer import BETAS, EPSILON, Optimizer
from langgraph_art_server.training.passes import accumulate_gradients, entry_logprobs
from langgraph_art_server.training.plan import plan_update
from langgraph_art_server.training.step import run_task
from langgraph_art_server.training.task import BackOff, PolicyTask, TaskGroup, Trained, TrainTask
from langgraph_art_server.training.tree import Pack, TreeCall

from .conftest import VOCABULARY
from .reference import Pair, reference_loss
from .tasks import LORA, call, group, policy_task, train_task

PROMPT = [1, 4, 9]


def run(model: PolicyModel, task: TrainTask, token_budget: int = 64) -> Trained:
    result = run_task(model, task, token_budget=token_budget, checkpointing=False, on_progress=lambda done, total: None)
    assert isinstance(result, Trained)
    return result


def groups_of(seed: int, logprob: float = -1.0) -> list[TaskGroup]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    return [
        group(*[(reward, [call(PROMPT, tokens(4), logprobs=[logprob] * 4)]) for reward in (0.0, 0.5, 1.0)])
        for _ in range(2)
    ]


def logprob(model: PolicyModel, root: Path, version: int, sampled: list[int]) -> list[float]:
    weights = read_checkpoint(root / f"p-{version}").weights if version else None
    model.set_adapter(LORA, weights)
    task = policy_task([group((1.0, [call(PROMPT, sampled)]), (0.0, []))], root)
    (pack,) = plan_update(task, TrainConfig(), vocabulary=VOCABULARY, token_budget=64).packs
    logits = model.head(model.hidden(pack)[pack.row_nodes])
    return torch.log_softmax(logits, -1)[range(len(sampled)), sampled].tolist()


def test_learning_raises_the_rewarded_and_lowers_the_punished(model: PolicyModel, tmp_path: Path) -> None:
    good, bad = [7], [8]
    start = [logprob(model, tmp_path, 0, answer)[0] for answer in (good, bad)]
    for version in range(20):
        runs = [
            (reward, [call(PROMPT, answer, logprobs=logprob(model, tmp_path, version, answer))])
            for reward, answer in ((1.0, good), (0.0, bad))
        ]
        task = policy_task([group(*runs)], tmp_path, parent=version)
        trained = run(model, train_task(task, config=TrainConfig(learning_rate=3e-3)))
        (update,) = trained.updates
        assert (update.parent, update.version) == (version, version + 1)
        # The behaviour logprobs are the model's own, so a mismatch would be an error in either pass.
        assert update.metrics["mismatch_max"] < 1e-5
        assert update.metrics["step"] == version + 1
    end = [logprob(model, tmp_path, 20, answer)[0] for answer in (good, bad)]
    assert end[0] > start[0] + 1
    assert end[1] < start[1] - 1


def test_resumed_equals_uninterrupted_bit_for_bit(model: PolicyModel, tmp_path: Path) -> None:
    """Against a plain loop that keeps weights and optimizer in memory and never writes anything."""
    config = TrainConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.05)
    model.set_adapter(LORA, None)
    parameters = list(model.parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=BETAS, eps=EPSILON, weight_decay=0.1)
    for seed in range(4):
        (packs,) = plan_update(
            policy_task(groups_of(seed), tmp_path), config, vocabulary=VOCABULARY, token_budget=64
        ).minibatches
        optimizer.zero_grad()
        accumulate_gradients(
            model, packs, lambda sampled, entries: reinforcement(sampled, entries, config), lambda: None
        )
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        assert norm > 0.05, "clipping must take part"
        optimizer.step()
    wanted = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}

    for seed in range(4):
        run(model, train_task(policy_task(groups_of(seed), tmp_path, parent=seed), config=config))
    written = read_checkpoint(tmp_path / "p-4")
    assert written.state.step == 4
    assert all(torch.equal(wanted[name], written.weights[name]) for name in wanted)


def test_no_signal_takes_no_step(model: PolicyModel, tmp_path: Path) -> None:
    flat = [group(*[(0.1, [call(PROMPT, [5])])] * 3)]
    (update,) = run(model, train_task(policy_task(flat, tmp_path, parent=6))).updates
    assert (update.parent, update.version, update.runs, update.computed_tokens) == (6, 6, 0, 0)
    assert list(tmp_path.iterdir()) == []
    assert "loss" not in update.metrics


def test_policies_of_one_task_do_not_touch_each_other(model: PolicyModel, tmp_path: Path) -> None:
    def pair(root: Path) -> list[PolicyTask]:
        wide = LoraConfig(rank=6, alpha=6, seed=1)
        return [
            policy_task(groups_of(0), root, policy="a"),
            policy_task([group(*[(1.0, [call(PROMPT, [5])])] * 2)], root, policy="flat", parent=3),
            policy_task(groups_of(1), root, policy="b", lora=wide),
        ]

    progress: list[tuple[int, int]] = []
    trained = run_task(
        model,
        train_task(*pair(tmp_path / "together")),
        token_budget=8,
        checkpointing=False,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert isinstance(trained, Trained)
    assert [(update.policy, update.version) for update in trained.updates] == [("a", 1), ("flat", 3), ("b", 1)]
    assert trained.skipped == {"group:no_signal": 1}
    total = progress[0][1]
    assert total > 2
    assert progress == [(done, total) for done in range(total + 1)]

    a, _, b = pair(tmp_path / "alone")
    for task in (b, a):
        run(model, train_task(task), token_budget=8)
    for name in ("a-1", "b-1"):
        together = read_checkpoint(tmp_path / "together" / name)
        alone = read_checkpoint(tmp_path / "alone" / name)
        assert all(torch.equal(together.weights[key], alone.weights[key]) for key in alone.weights)


def test_gradient_that_is_not_finite_writes_nothing(model: PolicyModel, tmp_path: Path) -> None:
    run(model, train_task(policy_task(groups_of(0), tmp_path)))
    with torch.no_grad():
        model.base.get_input_embeddings().weight[PROMPT[0]] = torch.nan
    with pytest.raises(FloatingPointError, match="gradient of policy p is not finite"):
        run(model, train_task(policy_task(groups_of(1), tmp_path, parent=1)))
    assert [path.name for path in tmp_path.iterdir()] == ["p-1"]


def test_parent_that_is_not_the_task_s(model: PolicyModel, tmp_path: Path) -> None:
    run(model, train_task(policy_task(groups_of(0), tmp_path)))
    task = policy_task(groups_of(0), tmp_path, parent=1)
    for change in ({"policy": "q"}, {"parent": 2}, {"lora": LoraConfig(rank=3, alpha=7, seed=5)}):
        with pytest.raises(ValueError, match="parent's checkpoint does not belong to the task"):
            run(model, train_task(task.model_copy(update=change)))
    with pytest.raises(ValueError, match="p@1 has no checkpoint directory"):
        run(model, train_task(task.model_copy(update={"parent_dir": None})))


def four_groups() -> list[TaskGroup]:
    return [*groups_of(0), *groups_of(1)]


def test_minibatches_equal_a_plain_loop(tmp_path: Path) -> None:
    """Two steps, in float64 and with PEFT's layers: old logprobs from before the first, KL to the base model."""
    pair = Pair()
    config = TrainConfig(
        surrogate="clip", epsilon_low=0.05, epsilon_high=0.1, minibatches=2, kl=0.2, entropy=0.05, scale="none",
        correction="token_truncation", learning_rate=0.05, max_grad_norm=0.5, weight_decay=0.1,
    )  # fmt: skip
    halves = [groups_of(seed, logprob=-4.0) for seed in (0, 1)]
    plan = plan_update(policy_task(halves[0] + halves[1], tmp_path), config, vocabulary=VOCABULARY, token_budget=12)
    assert [len(packs) > 1 for packs in plan.minibatches] == [True, True]

    calls = []  # the calls of each minibatch, by definition: A = r - 0.5, w = 1 / (runs * tokens)
    for half in halves:
        runs = [run for task_group in half for run in task_group.runs]
        calls.append(
            [
                TreeCall(one.prompt_ids, one.sampled_ids, one.logprobs, 1.0, run.reward - 0.5, 1 / (len(runs) * 4))
                for run in runs
                for one in run.calls
            ]
        )
    every = [one for half in calls for one in half]

    def logprobs() -> dict[str, list[float]]:
        return {str(one.sampled_ids): pair.plain_logprobs(one)[0].tolist() for one in every}

    with pair.plain.disable_adapter():
        base = logprobs()
    old = logprobs()
    parameters = pair.plain_parameters()
    adamw = torch.optim.AdamW(parameters.values(), lr=0.05, betas=BETAS, eps=EPSILON, weight_decay=0.1)
    losses, norms, measured = [], [], []
    for half in calls:
        adamw.zero_grad()
        loss, measures = reference_loss(
            pair,
            half,
            config,
            old=lambda one: old[str(one.sampled_ids)],
            reference=lambda one: base[str(one.sampled_ids)],
        )
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)))
        measured.append(measures)
        adamw.step()

    pair.tree.set_adapter(LORA, None)
    reference = entry_logprobs(pair.tree, plan.packs, lambda: None)
    pair.tree.set_adapter(LORA, pair.weights)
    optimizer = Optimizer(pair.tree.parameters, config, "p", None)
    metrics = take_steps(pair.tree, plan, config, optimizer, lambda: None, reference=reference)
    for name, parameter in parameters.items():
        torch.testing.assert_close(pair.tree.parameters[name], parameter, rtol=1e-7, atol=1e-9, msg=name)
    assert metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-8)
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-8)
    assert metrics["step"] == 2
    for name in measured[0]:
        values = measured[0][name] + measured[1][name]
        assert metrics[name] == pytest.approx(sum(values) / len(values), rel=1e-7), name
    assert metrics["mismatch_max"] == pytest.approx(max(m for half in measured for m in half["mismatch_mean"]))
    assert metrics["clip_low"] + metrics["clip_high"] > 0
    assert 0 < metrics["correction_share"] < 1


def test_kl_to_a_version(model: PolicyModel, tmp_path: Path) -> None:
    """The reference is what ``reference_dir`` says, by default the base model; and it is not trained."""
    run(model, train_task(policy_task(groups_of(0), tmp_path), config=TrainConfig(learning_rate=0.02)))
    run(model, train_task(policy_task(groups_of(1), tmp_path, parent=1), config=TrainConfig(learning_rate=0.02)))
    config = TrainConfig(kl=0.1)
    kls = {}
    for name, reference in (("base", None), ("p-1", "p-1"), ("p-2", "p-2")):
        task = policy_task(groups_of(2), tmp_path, parent=2)
        task.reference_dir = reference and str(tmp_path / reference)
        task.out_dir = str(tmp_path / f"with-{name}")
        (update,) = run(model, train_task(task, config=config)).updates
        kls[name] = update.metrics["kl"]
    assert kls["base"] > kls["p-1"] > 1e-6
    assert kls["p-2"] == pytest.approx(0, abs=1e-12), "the parent itself"


def test_what_is_always_reported(model: PolicyModel, tmp_path: Path) -> None:
    (update,) = run(model, train_task(policy_task(four_groups(), tmp_path))).updates
    always = {
        "loss", "entropy", "logprob", "mismatch_mean", "mismatch_max", "mismatch_kl", "grad_norm", "learning_rate",
        "step", "reward_mean", "reward_std", "advantage_mean", "advantage_std", "token_budget",
        "gradient_checkpointing",
    }  # fmt: skip
    assert update.metrics.keys() == always
    config = TrainConfig(minibatches=2, kl=0.1, correction="geometric_mask")
    (update,) = run(model, train_task(policy_task(four_groups(), tmp_path, policy="q"), config=config)).updates
    assert update.metrics.keys() == always | {"clip_low", "clip_high", "kl", "correction_share"}


def test_progress_counts_every_pass(model: PolicyModel, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    run_task(
        model,
        train_task(policy_task(four_groups(), tmp_path), config=TrainConfig(minibatches=2, kl=0.1)),
        token_budget=8,
        checkpointing=False,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    total = progress[0][1]
    assert total % 3 == 0, "old, reference and gradient"
    assert progress == [(done, total) for done in range(total + 1)]


class _SmallMemory:
    """Lets a model run out of memory, as its allocator says it, when a pack has more tokens than fit."""

    def __init__(self, model: PolicyModel, monkeypatch: pytest.MonkeyPatch, *, tokens: int, checkpointed: int) -> None:
        hidden = model.hidden

        def checked(pack: Pack) -> Tensor:
            if len(pack) > (checkpointed if model.checkpointing else tokens):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return hidden(pack)

        monkeypatch.setattr(model, "hidden", checked)


def back_off(model: PolicyModel, task: TrainTask) -> tuple[Trained, list[tuple[int, bool]]]:
    """Does what the server does: try again with each plan that comes back."""
    budget, checkpointing = 64, False
    tried = []
    while True:
        tried.append((budget, checkpointing))
        result = run_task(
            model, task, token_budget=budget, checkpointing=checkpointing, on_progress=lambda done, total: None
        )
        if isinstance(result, Trained):
            return result, tried
        assert isinstance(result, BackOff)
        assert result.task_id == task.task_id
        budget, checkpointing = result.token_budget, result.checkpointing


def test_less_memory_gives_smaller_packs_not_a_failed_job(
    model: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(minibatches=2)
    plain = train_task(policy_task(four_groups(), tmp_path, policy="plain"), config=config)
    run_task(model, plain, token_budget=8, checkpointing=True, on_progress=lambda done, total: None)
    _SmallMemory(model, monkeypatch, tokens=10, checkpointed=12)
    trained, tried = back_off(model, train_task(policy_task(four_groups(), tmp_path), config=config))
    assert tried == [(64, False), (64, True), (32, True), (16, True), (8, True)]
    metrics = trained.updates[0].metrics
    assert (metrics["token_budget"], metrics["gradient_checkpointing"]) == (8, 1)
    written, wanted = (read_checkpoint(tmp_path / name).weights for name in ("p-1", "plain-1"))
    assert all(torch.equal(wanted[name], written[name]) for name in wanted)


def test_memory_that_is_too_small_for_one_call(
    model: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _SmallMemory(model, monkeypatch, tokens=1, checkpointed=5)
    with pytest.raises(MemoryError, match="the longest call has 6 tokens"):
        back_off(model, train_task(policy_task(groups_of(0), tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    model: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(pack: Pack) -> Any:
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")

    monkeypatch.setattr(model, "hidden", broken)
    with pytest.raises(RuntimeError, match="size of tensor"):
        run(model, train_task(policy_task(groups_of(0), tmp_path)))
