"""The tree pass against separate passes, in float64: a plain loop over calls with full logits and PEFT's own layers."""

from __future__ import annotations

import copy
import statistics

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.attention import TREE_ATTENTION
from langgraph_art_server.training.loss import pack_loss
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.plan import plan_update
from langgraph_art_server.training.step import accumulate_gradients
from langgraph_art_server.training.task import PolicyTask, TaskCall, TaskGroup
from langgraph_art_server.training.tree import TreeCall, build_tree

from .conftest import VOCABULARY, exact, random_weights, tiny_llama
from .tasks import LORA, call, group


class Pair:
    """The same model and adapter twice: as the trainer computes it, and as transformers and PEFT do."""

    def __init__(self) -> None:
        self.tree = PolicyModel(exact(tiny_llama(attention=TREE_ATTENTION)))
        self.tree.set_adapter(LORA, None)
        self.weights = random_weights(self.tree)
        plain = exact(tiny_llama(attention="sdpa"))
        self.plain = peft.get_peft_model(plain, self.tree.adapter_config(LORA))
        peft.set_peft_model_state_dict(self.plain, copy.deepcopy(self.weights))

    def plain_logprobs(self, task_call: TaskCall | TreeCall) -> tuple[Tensor, Tensor]:
        """[T] logprobs of the sampled ids and [T] entropies."""
        sampled = torch.tensor(task_call.sampled_ids)
        logits = self.plain(torch.tensor([task_call.prompt_ids + task_call.sampled_ids])).logits[0]
        before = len(task_call.prompt_ids) - 1
        log_p = torch.log_softmax(logits[before : before + len(sampled)] / task_call.temperature, -1)
        return log_p[torch.arange(len(sampled)), sampled], -(log_p.exp() * log_p).sum(-1)

    def plain_gradients(self) -> dict[str, Tensor]:
        return {
            name.replace(".default.", "."): parameter.grad
            for name, parameter in self.plain.named_parameters()
            if parameter.requires_grad
        }

    def tree_gradients(
        self, groups: list[TaskGroup], config: TrainConfig, budget: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        plan = plan_update(policy(groups), config, vocabulary=VOCABULARY, token_budget=budget)
        self.tree.set_adapter(LORA, self.weights)
        metrics = accumulate_gradients(self.tree, plan, lambda: None)
        return {name: parameter.grad for name, parameter in self.tree.parameters.items()}, metrics


def policy(groups: list[TaskGroup]) -> PolicyTask:
    return PolicyTask(policy="p", lora=LORA, parent=0, parent_dir=None, version=1, out_dir="unused", groups=groups)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@st.composite
def task_groups(draw: st.DrawFn) -> list[TaskGroup]:
    """Groups of two to four runs of none to three calls, with histories that grow and answers that agree."""
    system = draw(ids)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = system + draw(ids)
        runs = []
        for _ in range(draw(st.integers(2, 4))):
            calls: list[TaskCall] = []
            history = prompt
            for _ in range(draw(st.integers(0, 3))):
                sampled = draw(ids)
                logprobs = [draw(st.floats(-4, -0.1)) for _ in sampled]
                calls.append(
                    call(history, sampled, logprobs=logprobs, temperature=draw(st.sampled_from([0.6, 1.0, 1.7])))
                )
                history = draw(
                    st.sampled_from([prompt, history + sampled, history + sampled + [4, 5], [*history[:-1], 9, 9]])
                )
            runs.append((draw(st.sampled_from([0.0, 0.25, 1.0])), calls))
        groups.append(group(*runs))
    return groups


def reference(pair: Pair, groups: list[TaskGroup]) -> dict[str, float] | None:
    """Loss, its gradients (left in ``pair.plain``) and metrics by definition, one call at a time; scale "group"."""
    runs = []
    for task_group in groups:
        rewards = [run.reward for run in task_group.runs]
        if len(set(rewards)) == 1:
            continue
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        scored = [((run.reward - mean) / (deviation + 1e-4), run.calls) for run in task_group.runs if run.calls]
        if any(advantage for advantage, _ in scored):
            runs += scored
    pair.plain.zero_grad()
    if not runs:
        return None
    loss = torch.zeros((), dtype=torch.float64)
    entropies, logprobs, behaviour = [], [], []
    for advantage, calls in runs:
        tokens = sum(len(task_call.sampled_ids) for task_call in calls)
        for task_call in calls:
            logprob, entropy = pair.plain_logprobs(task_call)
            loss = loss - (advantage / (len(runs) * tokens) * torch.exp(logprob - logprob.detach())).sum()
            if advantage:
                logprobs += logprob.tolist()
                entropies += entropy.tolist()
                behaviour += task_call.logprobs
    loss.backward()
    ratios = torch.tensor(logprobs, dtype=torch.float64) - torch.tensor(behaviour, dtype=torch.float64)
    return {
        "loss": loss.item(),
        "entropy": statistics.fmean(entropies),
        "logprob": statistics.fmean(logprobs),
        "mismatch_kl": float((ratios.exp() - 1 - ratios).mean()),
        "mismatch_max": float(ratios.abs().max()),
    }


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-12 * max(largest, 1e-3), msg=name)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(groups=task_groups(), budget=st.sampled_from([1, 6, 20, 1000]))
def test_tree_equals_separate_passes(pair: Pair, groups: list[TaskGroup], budget: int) -> None:
    expected = reference(pair, groups)
    plan = plan_update(policy(groups), TrainConfig(), vocabulary=VOCABULARY, token_budget=budget)
    assert bool(plan.packs) == (expected is not None)
    if expected is None:
        return
    gradients, metrics = pair.tree_gradients(groups, TrainConfig(), budget)
    assert_same_gradients(gradients, pair.plain_gradients())
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-10, abs=1e-12)


def test_long_tree_in_one_pack_and_in_many(pair: Pair) -> None:
    """Over several attention blocks and head chunks."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    system = tokens(40)
    groups = []
    for _ in range(3):
        prompt = system + tokens(50)
        runs = []
        for index in range(4):
            first = tokens(20)
            runs.append(
                (index / 3, [call(prompt, first), call(prompt + first + tokens(9), tokens(25), temperature=0.8)])
            )
        groups.append(group(*runs))
    expected = reference(pair, groups)
    assert expected is not None
    wanted = {name: gradient.clone() for name, gradient in pair.plain_gradients().items()}
    sizes = set()
    for budget in (1, 400, 100_000):
        sizes.add(len(plan_update(policy(groups), TrainConfig(), vocabulary=VOCABULARY, token_budget=budget).packs))
        gradients, metrics = pair.tree_gradients(groups, TrainConfig(), budget)
        assert_same_gradients(gradients, wanted)
        assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=1e-10)
    assert len(sizes) == 3


def test_gradient_is_not_trivially_equal(pair: Pair) -> None:
    """The comparison can fail: a call under the wrong temperature, or one token off, is seen."""
    right = [group((1.0, [call([1, 2], [3, 4], temperature=0.6)]), (0.0, [call([1, 2], [5, 6])]))]
    reference(pair, right)
    wanted = {name: gradient.clone() for name, gradient in pair.plain_gradients().items()}
    for wrong in (
        [group((1.0, [call([1, 2], [3, 4], temperature=1.0)]), (0.0, [call([1, 2], [5, 6])]))],
        [group((1.0, [call([1, 2, 3], [4], temperature=0.6)]), (0.0, [call([1, 2], [5, 6])]))],
    ):
        gradients, _ = pair.tree_gradients(wrong, TrainConfig(), 1000)
        with pytest.raises(AssertionError):
            assert_same_gradients(gradients, wanted)


@pytest.mark.parametrize("chunk_rows", [1, 3, 1000])
def test_loss_by_autograd_over_full_logits(chunk_rows: int) -> None:
    """The head's hand-written gradient equals autograd's, whatever the chunks; duplicates and temperatures included."""
    generator = torch.Generator().manual_seed(2)
    calls = [
        TreeCall([1, 2], [3, 4, 5], [-1.0] * 3, 1.0, 0.3),
        TreeCall([1, 2], [3, 4, 5], [-1.0] * 3, 1.0, -0.1),
        TreeCall([1, 2], [3, 9], [-1.0] * 2, 0.5, 0.7),
        TreeCall([1, 2, 3, 4, 6], [9], [-1.0], 1.5, -0.9),
    ]
    pack = build_tree(calls)
    head = nn.Linear(8, 12).double().requires_grad_(False)
    hidden = torch.randn(len(pack), 8, generator=generator, dtype=torch.float64).requires_grad_()
    result = pack_loss(hidden, head, pack, chunk_rows=chunk_rows)

    log_p = torch.log_softmax(head(hidden)[pack.row_nodes] / pack.row_temperatures[:, None], -1)
    logprobs = log_p[pack.target_rows, pack.target_tokens][pack.entry_targets]
    loss = -(pack.entry_coefficients * torch.exp(logprobs - logprobs.detach())).sum()
    (gradient,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(result.gradient, gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(result.logprobs, logprobs.detach(), rtol=1e-12, atol=0)
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)


def test_never_more_logits_than_a_chunk(pair: Pair) -> None:
    sizes: list[int] = []
    handle = pair.tree.head.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[0]))
    calls = [TreeCall([1, 2], [3, 4, index], [-1.0] * 3, 1.0, 0.1) for index in range(9)]
    pack = build_tree([*calls, TreeCall([7] * 300, [8], [-1.0], 1.0, 0.1)])
    pair.tree.set_adapter(LORA, pair.weights)
    pack_loss(pair.tree.hidden(pack), pair.tree.head, pack, chunk_rows=2)
    handle.remove()
    assert sizes == [2, 2]  # four rows: after [1, 2], after 3, after 4, after the 300


def test_float32_and_bfloat16_bases_agree_with_float64(pair: Pair) -> None:
    groups = [group((1.0, [call([1, 2, 7], [3, 4, 9])]), (0.0, [call([1, 2, 7], [5, 6, 3])]))]
    wanted, _ = pair.tree_gradients(groups, TrainConfig(), 1000)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        model = PolicyModel(tiny_llama(attention=TREE_ATTENTION, dtype=dtype))
        model.set_adapter(LORA, pair.weights)
        plan = plan_update(policy(groups), TrainConfig(), vocabulary=VOCABULARY, token_budget=1000)
        accumulate_gradients(model, plan, lambda: None)
        for name, parameter in model.parameters.items():
            assert parameter.dtype == torch.float32
            error = (parameter.grad.double() - wanted[name]).norm() / wanted[name].norm()
            assert error < tolerance, name
