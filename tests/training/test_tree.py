from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_art_server.training.tree import Pack, TreeCall, build_packs, build_tree

ids = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@st.composite
def tree_calls(draw: st.DrawFn) -> list[TreeCall]:
    """Calls over three tokens, so that many share prefixes; some continue others, as a growing history does."""
    calls: list[TreeCall] = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(ids)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            prompt = earlier.prompt_ids + earlier.sampled_ids + draw(st.one_of(st.just([]), ids))
        sampled = draw(ids)
        logprobs = [-float(len(calls)) - index / 100 for index in range(len(sampled))]
        teacher = draw(st.sampled_from([None, [-0.5] * len(sampled)]))
        temperature, advantage, weight = (
            draw(st.sampled_from([0.5, 1.0])),
            draw(st.floats(-1, 1)),
            draw(st.floats(0, 1)),
        )
        calls.append(TreeCall(prompt, sampled, logprobs, temperature, advantage, weight, teacher))
    return calls


def path_of(pack: Pack, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(int(pack.token_ids[node]))
        node = int(pack.parents[node])
    return path[::-1]


Entry = tuple[tuple[int, ...], int, float, float, float, float, float | None]


def entries_of(pack: Pack) -> list[list[Entry]]:
    """What the pack trains, read back through its indices, by call: context, token, temperature, advantage, weight,
    behaviour logprob, teacher's logprob."""
    calls: dict[int, list[Entry]] = {}
    for index, (call, target) in enumerate(zip(pack.entry_calls.tolist(), pack.entry_targets.tolist(), strict=True)):
        row = int(pack.target_rows[target])
        values = (pack.entry_advantages, pack.entry_weights, pack.entry_logprobs, pack.entry_teacher)
        advantage, weight, logprob, teacher = (float(value[index]) for value in values)
        calls.setdefault(call, []).append(
            (
                tuple(path_of(pack, int(pack.row_nodes[row]))),
                int(pack.target_tokens[target]),
                float(pack.row_temperatures[row]),
                advantage,
                weight,
                logprob,
                None if math.isnan(teacher) else teacher,
            )
        )
    assert list(calls) == list(range(len(calls)))
    return list(calls.values())


def entries_wanted(call: TreeCall) -> list[Entry]:
    teacher = call.teacher_logprobs or [None] * len(call.sampled_ids)
    return [
        (
            tuple(call.prompt_ids + call.sampled_ids[:index]),
            call.sampled_ids[index],
            call.temperature,
            call.advantage,
            call.weight,
            call.logprobs[index],
            teacher[index],
        )
        for index in range(len(call.sampled_ids))
    ]


@settings(deadline=None)
@given(tree_calls(), st.integers(1, 40))
def test_packs_hold_each_sampled_token_once(calls: list[TreeCall], budget: int) -> None:
    packs = build_packs(calls, budget)
    found = [entries for pack in packs for entries in entries_of(pack)]
    assert sorted(found, key=repr) == sorted((entries_wanted(call) for call in calls), key=repr)
    for pack in packs:
        contexts = [tuple(path_of(pack, node)) for node in range(len(pack))]
        assert len(set(contexts)) == len(contexts), "a token was computed twice"
        assert pack.positions.tolist() == [len(context) - 1 for context in contexts]
        longest = max(len(context) for context in contexts)
        assert len(pack) <= max(longest, min(2 * budget, 2 * longest), budget)
        # Depth-first: the ancestor relation that ``ends`` encodes is the one that the parents give.
        for node, context in enumerate(contexts):
            ancestors = [j for j in range(node + 1) if node < pack.ends[j]]
            assert tuple(pack.token_ids[ancestors].tolist()) == context
        assert pack.target_rows.tolist() == sorted(pack.target_rows.tolist())


@settings(deadline=None)
@given(tree_calls())
def test_one_pack_computes_each_needed_prefix_once(calls: list[TreeCall]) -> None:
    (pack,) = build_packs(calls, 10_000)
    needed = {tuple(call.path[: end + 1]) for call in calls for end in range(len(call.path))}
    assert len(pack) == len(needed)


def test_siblings_share_their_distribution_and_their_probability() -> None:
    calls = [
        TreeCall([5, 6], [7, 8], [-1.0, -2.0], 1.0, 0.5),
        TreeCall([5, 6], [7, 9], [-1.1, -3.0], 1.0, -0.5),
        TreeCall([5, 6], [7, 8], [-1.2, -2.2], 0.7, 0.25),
    ]
    pack = build_tree(calls)
    assert pack.token_ids.tolist() == [5, 6, 7]  # 8 and 9 predict nothing
    assert pack.parents.tolist() == [-1, 0, 1]
    assert list(zip(pack.row_nodes.tolist(), pack.row_temperatures.tolist(), strict=True)) == [
        (1, 0.7), (1, 1.0), (2, 0.7), (2, 1.0),
    ]  # fmt: skip
    assert list(zip(pack.target_rows.tolist(), pack.target_tokens.tolist(), strict=True)) == [
        (0, 7), (1, 7), (2, 8), (3, 8), (3, 9),
    ]  # fmt: skip
    assert len(pack.entry_targets) == 6


def test_packs_do_not_depend_on_the_order_of_calls() -> None:
    generator = random.Random(3)
    calls = [
        TreeCall([1, 2, first], [second, 4], [-1.0, -1.0], 1.0, first + second / 10)
        for first in range(5)
        for second in range(3)
    ]
    shuffled = generator.sample(calls, len(calls))
    for a, b in zip(build_packs(calls, 9), build_packs(shuffled, 9), strict=True):
        assert all(
            torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
            for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
        )


@pytest.mark.parametrize("field", ["logprobs", "teacher_logprobs"])
def test_lengths_that_do_not_agree(field: str) -> None:
    call = TreeCall([1], [2, 3], [-1.0] * 2, 1.0, 1.0, 1.0, [-1.0] * 2)
    with pytest.raises(ValueError, match="a call of 2 sampled tokens has 1 logprobs"):
        build_tree([dataclasses.replace(call, **{field: [-1.0]})])


def test_call_over_the_budget_takes_its_siblings_along() -> None:
    prompt = list(range(100))
    calls = [TreeCall(prompt, [200 + index, 1, 2], [-1.0] * 3, 1.0, 1.0) for index in range(60)]
    # Two tokens a call after the prompt's 100. A pack ends before it is longer than two whole calls, or two budgets.
    assert [len(pack) for pack in build_packs(calls, 103)] == [204, 116]
    assert [len(pack) for pack in build_packs(calls, 70)] == [140, 140, 140]
    assert [len(pack) for pack in build_packs(calls, 50)] == [102] * 60


@pytest.mark.parametrize("budget", [1, 3, 7, 1000])
def test_duplicate_calls_cost_nothing(budget: int) -> None:
    call = TreeCall([1, 2], [3, 4], [-1.0, -1.0], 1.0, 1.0)
    packs = build_packs([call] * 5, budget)
    assert [len(pack) for pack in packs] == [3]
    assert len(packs[0].entry_targets) == 10
