from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from langgraph_art_server.training.attention import tree_attention, tree_blocks
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
        calls.append(TreeCall(prompt, sampled, logprobs, draw(st.sampled_from([0.5, 1.0])), draw(st.floats(-1, 1))))
    return calls


def path_of(pack: Pack, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(int(pack.token_ids[node]))
        node = int(pack.parents[node])
    return path[::-1]


def entries_of(pack: Pack) -> list[tuple[tuple[int, ...], int, float, float, float]]:
    """What the pack trains, read back through its indices: (context, token, temperature, coefficient, logprob)."""
    entries = []
    for target, coefficient, logprob in zip(
        pack.entry_targets.tolist(), pack.entry_coefficients.tolist(), pack.entry_logprobs.tolist(), strict=True
    ):
        row = int(pack.target_rows[target])
        context = tuple(path_of(pack, int(pack.row_nodes[row])))
        temperature = float(pack.row_temperatures[row])
        entries.append((context, int(pack.target_tokens[target]), temperature, coefficient, logprob))
    return sorted(entries)


def entries_wanted(calls: list[TreeCall]) -> list[tuple[tuple[int, ...], int, float, float, float]]:
    return sorted(
        (tuple(call.prompt_ids + call.sampled_ids[:index]), token, call.temperature, call.coefficient, logprob)
        for call in calls
        for index, (token, logprob) in enumerate(zip(call.sampled_ids, call.logprobs, strict=True))
    )


@given(tree_calls(), st.integers(1, 40))
def test_packs_hold_each_sampled_token_once(calls: list[TreeCall], budget: int) -> None:
    packs = build_packs(calls, budget)
    found = sorted(entry for pack in packs for entry in entries_of(pack))
    assert found == entries_wanted(calls)
    for pack in packs:
        contexts = [tuple(path_of(pack, node)) for node in range(len(pack))]
        assert len(set(contexts)) == len(contexts), "a token was computed twice"
        assert pack.positions.tolist() == [len(context) - 1 for context in contexts]
        longest = max(len(context) for context in contexts)
        assert len(pack) <= max(budget, 2 * longest)
        # Depth-first: the ancestor relation that ``ends`` encodes is the one that the parents give.
        for node, context in enumerate(contexts):
            ancestors = [j for j in range(node + 1) if node < pack.ends[j]]
            assert tuple(pack.token_ids[ancestors].tolist()) == context
        assert pack.target_rows.tolist() == sorted(pack.target_rows.tolist())


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
        assert all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_call_over_the_budget_takes_its_siblings_along() -> None:
    prompt = list(range(100))
    calls = [TreeCall(prompt, [200 + index, 1, 2], [-1.0] * 3, 1.0, 1.0) for index in range(60)]
    # Two tokens a call; a pack ends before it is longer than two whole calls.
    assert [len(pack) for pack in build_packs(calls, 50)] == [204, 116]


@given(tree_calls(), st.integers(1, 12))
def test_attention_by_block_equals_masked_attention(calls: list[TreeCall], block_tokens: int) -> None:
    pack = build_tree(calls)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, len(pack), 3), (1, 2, len(pack), 3), (1, 2, len(pack), 3)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    query, key, value = inputs
    ancestors = torch.tensor([[_is_ancestor(pack, j, i) for j in range(len(pack))] for i in range(len(pack))])
    scores = query @ key.repeat_interleave(2, dim=1).mT * 0.3
    weights = scores.masked_fill(~ancestors, -torch.inf).softmax(-1)
    expected = (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2)

    blocks = tree_blocks(pack.positions, pack.ends, torch.float64, block_tokens)
    assert [block.start for block in blocks] == [0] + [block.stop for block in blocks[:-1]]
    assert blocks[-1].stop == len(pack)
    actual, _ = tree_attention(nn.Identity(), query, key, value, None, tree=blocks, scaling=0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    slope = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(actual, inputs, slope), torch.autograd.grad(expected, inputs, slope), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _is_ancestor(pack: Pack, j: int, i: int) -> bool:
    while i > j:
        i = int(pack.parents[i])
    return i == j


@pytest.mark.parametrize("budget", [1, 3, 7, 1000])
def test_duplicate_calls_cost_nothing(budget: int) -> None:
    call = TreeCall([1, 2], [3, 4], [-1.0, -1.0], 1.0, 1.0)
    packs = build_packs([call] * 5, budget)
    assert [len(pack) for pack in packs] == [3]
    assert len(packs[0].entry_targets) == 10
