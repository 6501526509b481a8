"""Attention over random trees against a dense mask, in float64."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from langgraph_art_server.training.attention import Tree, flex_tree_attention, tree_attention, visibility


def random_tree(seed: int, size: int, fork: float) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, ends, and by brute force who is whose ancestor [N, N]; several roots."""
    choice = random.Random(seed)
    parents: list[int] = []
    path: list[int] = []
    for token in range(size):
        if path and choice.random() < fork:
            del path[choice.randint(0, len(path)) :]
        parents.append(path[-1] if path else -1)
        path.append(token)
    ancestors = torch.eye(size, dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            ancestors[token] |= ancestors[parent]
    ends = torch.tensor([int(ancestors[:, token].nonzero().max()) + 1 for token in range(size)])
    return ancestors.sum(1) - 1, ends, ancestors


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).mT * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(repeats, 1)).transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 90),
    fork=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 2, 5, 30, 1000]),
)
def test_values_and_gradients_of_random_trees(
    seed: int, size: int, fork: float, heads: tuple[int, int], window: int | None
) -> None:
    positions, ends, ancestors = random_tree(seed, size, fork)
    mask = ancestors if window is None else ancestors & (positions[:, None] - positions[None] < window)
    generator = torch.Generator().manual_seed(seed)

    def noise(count: int) -> Tensor:
        # As the layers make them: heads inside tokens in memory.
        return torch.randn(1, size, count, 16, generator=generator, dtype=torch.float64).transpose(1, 2)

    inputs = [noise(heads[0]), noise(heads[1]), noise(heads[1])]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    slope = noise(heads[0]).transpose(1, 2)
    tree = Tree(positions, ends)
    actual, _ = tree_attention(nn.Module(), *inputs, None, tree=tree, scaling=0.3, sliding_window=window)
    expected = dense(*inputs, mask, 0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, slope), torch.autograd.grad(expected, inputs, slope), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("window", "heads"), [(None, (4, 2)), (3, (3, 1)), (1000, (4, 2))])
def test_block_mask_says_the_same(window: int | None, heads: tuple[int, int]) -> None:
    """What CUDA gets, interpreted on the CPU: over several of FlexAttention's blocks of 128."""
    positions, ends, ancestors = random_tree(1, 200, 0.1)
    mask = create_mask(visibility(positions, ends, window), None, None, 200, 200, device="cpu")[0, 0]
    assert torch.equal(mask, ancestors & (positions[:, None] - positions[None] < (window or 1000)))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, count, 200, 16, generator=generator) for count in (heads[0], *heads[1:] * 2))
    tree = Tree(positions, ends)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        by_blocks = flex_tree_attention(query, key, value, tree.block_mask(window), 0.3)
        by_segments, _ = tree_attention(
            nn.Module(), query, key, value, None, tree=tree, scaling=0.3, sliding_window=window
        )
    torch.testing.assert_close(by_blocks, by_segments, rtol=1e-4, atol=1e-5)


def test_segments_are_cut_at_forks_only() -> None:
    """A prompt of three tokens, an answer of two, and one of one that two others continue."""
    ends = torch.tensor([8, 8, 8, 5, 5, 8, 7, 8])
    positions = torch.tensor([0, 1, 2, 3, 4, 3, 4, 4])
    bounds = [segment[:3] for segment in Tree(positions, ends).segments(None, torch.float32)]
    assert bounds == [(0, 3, 8), (3, 5, 5), (5, 6, 8), (6, 7, 7), (7, 8, 8)]
