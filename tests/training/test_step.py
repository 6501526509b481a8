from __future__ import annotations

from pathlib import Path

import pytest
import torch

from langgraph_art.protocol import LoraConfig, TrainConfig
from langgraph_art_server.training.checkpoint import read_checkpoint
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.plan import plan_update
from langgraph_art_server.training.step import BETAS, EPSILON, accumulate_gradients, run_task
from langgraph_art_server.training.task import PolicyTask, TaskGroup, Trained, TrainTask

from .conftest import VOCABULARY
from .tasks import LORA, call, group, policy_task, train_task

PROMPT = [1, 4, 9]


def run(model: PolicyModel, task: TrainTask) -> Trained:
    return run_task(model, task, token_budget=64, on_progress=lambda done, total: None)


def groups_of(seed: int) -> list[TaskGroup]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    return [group(*[(reward, [call(PROMPT, tokens(4))]) for reward in (0.0, 0.5, 1.0)]) for _ in range(2)]


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
        plan = plan_update(policy_task(groups_of(seed), tmp_path), config, vocabulary=VOCABULARY, token_budget=64)
        optimizer.zero_grad()
        accumulate_gradients(model, plan, lambda: None)
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
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert [(update.policy, update.version) for update in trained.updates] == [("a", 1), ("flat", 3), ("b", 1)]
    assert trained.skipped == {"group:no_signal": 1}
    total = progress[0][1]
    assert total > 2
    assert progress == [(done, total) for done in range(total + 1)]

    a, _, b = pair(tmp_path / "alone")
    for task in (b, a):
        run_task(model, train_task(task), token_budget=8, on_progress=lambda done, total: None)
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
