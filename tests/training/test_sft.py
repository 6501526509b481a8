"""Fine-tuning on the tiny model: the loss against transformers' own, what is learned, and what comes after."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from langgraph_art.protocol import SftConfig
from langgraph_art_server.training.checkpoint import read_checkpoint
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.sft import epochs, run_sft
from langgraph_art_server.training.task import BackOff, Lineage, SftSequence, SftTask, Trained

from .conftest import VOCABULARY, tiny_llama
from .tasks import LORA

EXAMPLES = [
    SftSequence(prompt_ids=[1, 4, 9], answer_ids=[7, 3, 2]),
    SftSequence(prompt_ids=[1, 4, 9, 7, 3, 2, 11, 12], answer_ids=[20, 2]),  # the next turn of the first
    SftSequence(prompt_ids=[1, 5], answer_ids=[8, 2]),
]


def task(root: Path, *, config: SftConfig, examples: list[SftSequence] = EXAMPLES, parent: int = 0) -> SftTask:
    policy = Lineage(
        policy="p",
        lora=LORA,
        parent=parent,
        parent_dir=str(root / str(parent)) if parent else None,
        version=parent + 1,
        out_dir=str(root / str(parent + 1)),
    )
    return SftTask(task_id="t", config=config, policy=policy, examples=examples)


def run(model: PolicyModel, task: SftTask, *, token_budget: int = 64) -> Trained:
    done = run_sft(model, task, token_budget=token_budget, checkpointing=False, on_progress=lambda done, total: None)
    assert isinstance(done, Trained)
    return done


def mean_loss(examples: list[SftSequence]) -> float:
    """Mean negative log-likelihood of the answers' tokens under the base model, by transformers."""
    base = tiny_llama(attention="sdpa")
    losses = []
    for example in examples:
        ids = torch.tensor([example.prompt_ids + example.answer_ids])
        with torch.no_grad():
            log_p = torch.log_softmax(base(ids).logits[0].double(), -1)
        place = len(example.prompt_ids) - 1
        losses += [-float(log_p[place + number, token]) for number, token in enumerate(example.answer_ids)]
    return sum(losses) / len(losses)


def test_the_loss_is_the_mean_over_the_answers_tokens(model: PolicyModel, tmp_path: Path) -> None:
    for budget, root in ((64, tmp_path / "one pack"), (4, tmp_path / "many")):
        (update,) = run(model, task(root, config=SftConfig(batch_size=3)), token_budget=budget).updates
        assert update.losses == [pytest.approx(mean_loss(EXAMPLES), abs=1e-5)]
    (update,) = run(model, task(tmp_path / "batches", config=SftConfig(batch_size=1, learning_rate=1e-9))).updates
    in_order = epochs(EXAMPLES, SftConfig(batch_size=1))
    assert update.losses == [pytest.approx(mean_loss(batch), abs=1e-5) for batch in in_order]


def test_what_is_taught_becomes_likely_and_is_written_as_a_version(model: PolicyModel, tmp_path: Path) -> None:
    config = SftConfig(epochs=30, batch_size=2, learning_rate=1e-2, schedule="cosine", warmup_steps=3)
    progress: list[tuple[int, int]] = []
    trained = run_sft(
        model,
        task(tmp_path, config=config),
        token_budget=64,
        checkpointing=False,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert isinstance(trained, Trained)
    (update,) = trained.updates
    assert (update.version, update.calls, update.trained_tokens, len(update.losses)) == (1, 3, 7, 60)
    assert update.losses[0] > 2
    assert max(update.losses[-2:]) < 0.5
    assert update.metrics["loss_before"] == update.losses[0]
    assert update.metrics["loss"] == update.losses[-1]
    assert update.metrics["learning_rate"] < 1e-3, "the schedule ends with the fine-tuning"
    assert progress == [(done, 60) for done in range(61)]
    assert trained.run_ids == {"p": []}
    written = read_checkpoint(tmp_path / "1")
    assert written.optimizer == {}
    assert (written.state.step, written.state.config) == (0, config)


def test_it_goes_on_from_its_parent(model: PolicyModel, tmp_path: Path) -> None:
    config = SftConfig(epochs=10, batch_size=3, learning_rate=1e-2)
    (first,) = run(model, task(tmp_path, config=config)).updates
    (second,) = run(model, task(tmp_path, config=config, parent=1)).updates
    assert (second.parent, second.version) == (1, 2)
    assert second.losses[0] < first.losses[-1] < first.losses[0]


def test_the_same_task_gives_the_same_bytes(model: PolicyModel, tmp_path: Path) -> None:
    config = SftConfig(epochs=2, batch_size=2, learning_rate=1e-2)
    for name in ("a", "b"):
        run(model, task(tmp_path / name, config=config))
    for path in (tmp_path / "a" / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / "1" / path.name).read_bytes()


def test_an_epoch_holds_every_example_once_in_an_order_of_the_seed() -> None:
    examples = [SftSequence(prompt_ids=[1], answer_ids=[number]) for number in range(20)]
    batches = epochs(examples, SftConfig(epochs=3, batch_size=8))
    assert [len(batch) for batch in batches] == [8, 8, 4] * 3
    orders = [[example.answer_ids[0] for batch in batches[at : at + 3] for example in batch] for at in (0, 3, 6)]
    assert all(Counter(order) == Counter(range(20)) for order in orders)
    assert orders[0] != orders[1] != list(range(20))
    assert epochs(examples, SftConfig(epochs=3, batch_size=8)) == batches
    assert epochs(examples, SftConfig(epochs=3, batch_size=8, seed=1)) != batches


def test_examples_that_cannot_be_learned_are_counted(model: PolicyModel, tmp_path: Path) -> None:
    bad = [
        SftSequence(prompt_ids=[1], answer_ids=[]),
        SftSequence(prompt_ids=[], answer_ids=[2]),
        SftSequence(prompt_ids=[VOCABULARY], answer_ids=[2]),
    ]
    trained = run(model, task(tmp_path, config=SftConfig(), examples=[*EXAMPLES, *bad]))
    assert trained.skipped == {"example:no_tokens": 2, "example:bad_ids": 1}
    assert trained.updates[0].calls == 3
    with pytest.raises(ValueError, match=r"no example is left.*policy p on \(1 example:bad_ids, 2 example:no_tokens\)"):
        run(model, task(tmp_path / "none", config=SftConfig(), examples=bad))
    assert not (tmp_path / "none").exists()


def test_out_of_memory_asks_for_a_smaller_plan(
    model: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(pack: object) -> None:
        raise torch.OutOfMemoryError("told to fail")

    monkeypatch.setattr(model, "hidden", full)
    done = run_sft(
        model,
        task(tmp_path, config=SftConfig()),
        token_budget=64,
        checkpointing=True,
        on_progress=lambda done, total: None,
    )
    assert done == BackOff(task_id="t", token_budget=32, checkpointing=True)
    assert list(tmp_path.iterdir()) == []
