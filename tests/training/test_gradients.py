"""Tree passes against separate passes in float64: loss, measures and every LoRA gradient, for every objective."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.attention import TREE_ATTENTION
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.objective import reinforcement
from langgraph_art_server.training.passes import accumulate_gradients, entry_logprobs
from langgraph_art_server.training.plan import plan_update
from langgraph_art_server.training.task import PolicyTask, TaskCall, TaskGroup
from langgraph_art_server.training.tree import Pack, TreeCall, build_packs

from .conftest import VOCABULARY, tiny_llama
from .reference import Pair, assert_same_gradients, reference_loss
from .tasks import LORA, call, group

EXAMPLES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}

ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)
temperatures = st.sampled_from([0.6, 1.0, 1.7])


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


# What other policies say about a call: functions of its behaviour logprobs, for packs and reference alike.


def old_of(call: TreeCall) -> list[float]:
    return [0.8 * logprob - 0.4 for logprob in call.logprobs]


def reference_of(call: TreeCall) -> list[float]:
    return [0.7 * logprob - 1.0 for logprob in call.logprobs]


def accumulate(
    pair: Pair, packs: Sequence[Pack], config: TrainConfig, *, stepped: bool = False
) -> tuple[float, dict[str, Tensor]]:
    pair.tree.set_adapter(LORA, pair.weights)
    return accumulate_gradients(
        pair.tree,
        packs,
        lambda sampled, entries: reinforcement(sampled, entries, config),
        lambda: None,
        old=[0.8 * pack.entry_logprobs - 0.4 for pack in packs] if stepped else None,
        reference=[0.7 * pack.entry_logprobs - 1.0 for pack in packs] if config.kl else None,
        entropy_gradient=bool(config.entropy),
    )


@st.composite
def tree_calls(draw: st.DrawFn) -> list[TreeCall]:
    """Calls that share prefixes and answers; behaviour logprobs around what a random model gives."""
    calls: list[TreeCall] = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(ids)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            prompt = earlier.prompt_ids + draw(st.sampled_from([[], earlier.sampled_ids, [9]]))
        sampled = draw(ids)
        logprobs, teacher = ([draw(st.floats(-6, -1)) for _ in sampled] for _ in range(2))
        advantage, weight = draw(st.sampled_from([-1.3, -0.2, 0.0, 0.4, 2.0])), draw(st.floats(0.01, 1))
        calls.append(TreeCall(prompt, sampled, logprobs, draw(temperatures), advantage, weight, teacher))
    return calls


@st.composite
def options(draw: st.DrawFn) -> dict[str, object]:
    """Everything in an objective but surrogate and correction."""
    return {
        "epsilon_low": draw(st.sampled_from([None, 0.1, 0.6])),
        "epsilon_high": draw(st.sampled_from([None, 0.05, 1.5])),
        "kl": draw(st.sampled_from([0.0, 0.3])),
        "entropy": draw(st.sampled_from([0.0, 0.2])),
        "correction_limit": draw(st.sampled_from([None, 1.4, 30.0])),
        **draw(st.sampled_from([{}, {"teacher": "t", "distill": 0.7}])),
    }


@pytest.mark.parametrize("surrogate", ["clip", "sequence_clip", "cispo", "reinforce"])
@pytest.mark.parametrize("correction", [None, "token_truncation", "token_mask", "sequence_mask", "geometric_mask"])
@settings(max_examples=3, **EXAMPLES)
@given(
    calls=tree_calls(),
    chosen=options(),
    stepped=st.booleans(),
    budget=st.sampled_from([1, 9, 1000]),
)
def test_every_objective_equals_separate_passes(
    pair: Pair,
    surrogate: str,
    correction: str | None,
    calls: list[TreeCall],
    chosen: dict[str, object],
    stepped: bool,
    budget: int,
) -> None:
    if surrogate == "reinforce" or not stepped:
        chosen |= {"epsilon_low": None, "epsilon_high": None}
    if correction is None:
        chosen["correction_limit"] = None
    config = TrainConfig(surrogate=surrogate, correction=correction, minibatches=2 if stepped else 1, **chosen)
    pair.plain.zero_grad()
    loss, wanted = reference_loss(pair, calls, config, old=old_of if stepped else None, reference=reference_of)
    loss.backward()
    actual, measures = accumulate(pair, build_packs(calls, budget), config, stepped=stepped)
    assert actual == pytest.approx(loss.item(), rel=1e-10, abs=1e-12)
    assert_same_gradients(pair.tree_gradients(), pair.plain_gradients())
    assert measures.keys() == wanted.keys()
    for name, values in wanted.items():
        assert sorted(measures[name].tolist()) == pytest.approx(sorted(values), rel=1e-9, abs=1e-12), name


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
                calls.append(call(history, sampled, logprobs=logprobs, temperature=draw(temperatures)))
                history = draw(
                    st.sampled_from([prompt, history + sampled, history + sampled + [4, 5], [*history[:-1], 9, 9]])
                )
            runs.append((draw(st.sampled_from([0.0, 0.25, 1.0])), calls))
        groups.append(group(*runs))
    return groups


def weighted(groups: list[TaskGroup], config: TrainConfig) -> list[TreeCall]:
    """The calls of the groups with weight and advantage by definition; scale "group"."""
    runs = []
    for task_group in groups:
        rewards = [run.reward for run in task_group.runs]
        if len(set(rewards)) == 1:
            continue
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        scored = [((run.reward - mean) / (deviation + 1e-4), run.calls) for run in task_group.runs if run.calls]
        if any(advantage for advantage, _ in scored):
            runs += scored
    tokens = [sum(len(task_call.sampled_ids) for task_call in calls) for _, calls in runs]
    weights = {
        "run": [1 / (len(runs) * count) for count in tokens],
        "token": [1 / sum(tokens)] * len(runs) if runs else [],
        "constant": [1 / (len(runs) * 7)] * len(runs) if runs else [],
    }[config.weight]
    return [
        TreeCall(c.prompt_ids, c.sampled_ids, c.logprobs, c.temperature, advantage, weight)
        for (advantage, calls), weight in zip(runs, weights, strict=True)
        for c in calls
    ]


@settings(max_examples=12, **EXAMPLES)
@given(
    groups=task_groups(),
    budget=st.sampled_from([1, 6, 20, 1000]),
    config=st.sampled_from(
        [TrainConfig(), TrainConfig(weight="token"), TrainConfig(weight="constant", constant_tokens=7)]
    ),
)
def test_submission_equals_separate_passes(
    pair: Pair, groups: list[TaskGroup], budget: int, config: TrainConfig
) -> None:
    calls = weighted(groups, config)
    plan = plan_update(policy(groups), config, vocabulary=VOCABULARY, token_budget=budget)
    assert bool(plan.packs) == bool(calls)
    if not calls:
        return
    pair.plain.zero_grad()
    loss, _ = reference_loss(pair, calls, config, old=None, reference=None)
    loss.backward()
    actual, _ = accumulate(pair, plan.packs, config)
    assert actual == pytest.approx(loss.item(), rel=1e-10, abs=1e-12)
    assert_same_gradients(pair.tree_gradients(), pair.plain_gradients())


def policy(groups: list[TaskGroup]) -> PolicyTask:
    return PolicyTask(policy="p", lora=LORA, parent=0, parent_dir=None, version=1, out_dir="unused", groups=groups)


def test_long_tree_in_one_pack_and_in_many(pair: Pair) -> None:
    """Over several attention blocks and head chunks."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    system = tokens(40)
    calls = []
    for _ in range(3):
        prompt = system + tokens(50)
        for index in range(4):
            first = tokens(20)
            calls.append(TreeCall(prompt, first, [-3.0] * 20, 1.0, index - 1.5, 0.1))
            calls.append(TreeCall(prompt + first + tokens(9), tokens(25), [-3.0] * 25, 0.8, index - 1.5, 0.05))
    config = TrainConfig(surrogate="sequence_clip")
    pair.plain.zero_grad()
    reference_loss(pair, calls, config, old=None, reference=None)[0].backward()
    wanted = {name: gradient.clone() for name, gradient in pair.plain_gradients().items()}
    sizes = set()
    for budget in (1, 400, 100_000):
        packs = build_packs(calls, budget)
        sizes.add(len(packs))
        accumulate(pair, packs, config)
        assert_same_gradients(pair.tree_gradients(), wanted)
    assert len(sizes) == 3


def test_gradient_is_not_trivially_equal(pair: Pair) -> None:
    """The comparison can fail: a call under the wrong temperature, or one token off, is seen."""
    config = TrainConfig()
    right = TreeCall([1, 2], [3, 4], [-1.0] * 2, 0.6, 1.0)
    pair.plain.zero_grad()
    reference_loss(pair, [right], config, old=None, reference=None)[0].backward()
    wanted = {name: gradient.clone() for name, gradient in pair.plain_gradients().items()}
    for wrong in (TreeCall([1, 2], [3, 4], [-1.0] * 2, 1.0, 1.0), TreeCall([1, 2, 3], [4], [-1.0], 0.6, 1.0)):
        accumulate(pair, build_packs([wrong], 1000), config)
        with pytest.raises(AssertionError):
            assert_same_gradients(pair.tree_gradients(), wanted)


def test_pass_without_gradients_reads_the_same_logprobs(pair: Pair) -> None:
    calls = [TreeCall([1, 2, 7], [3, 4, last], [-1.0] * 3, 0.6, 1.0) for last in (5, 6)]
    pair.tree.set_adapter(LORA, pair.weights)
    packs = build_packs(calls, 1)
    logprobs = entry_logprobs(pair.tree, packs, lambda: None)
    wanted = [pair.plain_logprobs(one)[0].detach() for one in calls]
    torch.testing.assert_close(torch.cat(logprobs), torch.cat(wanted), rtol=1e-12, atol=1e-12)
    assert all(gradient is None for gradient in pair.tree_gradients().values())


def test_float32_and_bfloat16_bases_agree_with_float64(pair: Pair) -> None:
    calls = [
        TreeCall([1, 2, 7], [3, 4, 9], [-1.0] * 3, 1.0, 1.0),
        TreeCall([1, 2, 7], [5, 6, 3], [-1.0] * 3, 1.0, -1.0),
    ]
    packs = build_packs(calls, 1000)
    config = TrainConfig(entropy=0.1)
    accumulate(pair, packs, config)
    wanted = {name: gradient.clone() for name, gradient in pair.tree_gradients().items()}
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        model = PolicyModel(tiny_llama(attention=TREE_ATTENTION, dtype=dtype))
        model.set_adapter(LORA, pair.weights)
        accumulate_gradients(
            model,
            packs,
            lambda sampled, entries: reinforcement(sampled, entries, config),
            lambda: None,
            entropy_gradient=True,
        )
        for name, parameter in model.parameters.items():
            assert parameter.dtype == torch.float32
            error = (parameter.grad.double() - wanted[name]).norm() / wanted[name].norm()
            assert error < tolerance, name
