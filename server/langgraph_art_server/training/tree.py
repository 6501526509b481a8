"""The token tree: calls merged wherever their token ids share an exact prefix, laid out as flat arrays.

Invariant: a token's ancestors in the tree are exactly the tokens before it in every call that contains it. Calls are
told apart by token ids only, so any divergence forks, and computing the tree equals computing each call on its own.
The last sampled token of a call predicts nothing, so it is a target but no node (unless another call continues it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TreeCall:
    """A call to train on. Needs at least one prompt token and one sampled token."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    """Behaviour logprob of each sampled id."""
    temperature: float
    advantage: float
    weight: float = 1.0
    """Of each of its sampled tokens."""
    teacher_logprobs: list[float] | None = None
    """A teacher's logprob of each sampled id; ``None`` without distillation."""

    @property
    def path(self) -> list[int]:
        """The tokens that must go through the model."""
        return self.prompt_ids + self.sampled_ids[:-1]


@dataclass(frozen=True)
class Pack:
    """One forward pass: a forest of N tokens in depth-first order, and what is predicted where.

    Three levels keep repeated work out. A *row* is a distribution: R distinct (node, temperature) pairs. A *target* is
    a probability in it: S distinct (row, token) pairs, ordered by row. An *entry* is a sampled token of one call: E of
    them, pointing at their target.
    """

    token_ids: Tensor
    """int64 [N]."""
    positions: Tensor
    """int64 [N]: depth, the number of ancestors."""
    parents: Tensor
    """int64 [N]: index of the token before, -1 for a root."""
    ends: Tensor
    """int64 [N]: end (exclusive) of the token's subtree. ``j`` is an ancestor of ``i``, or ``i``, iff
    ``j <= i < ends[j]``."""
    row_nodes: Tensor
    """int64 [R]: the token whose hidden state makes the distribution."""
    row_temperatures: Tensor
    """float64 [R]."""
    target_rows: Tensor
    """int64 [S]."""
    target_tokens: Tensor
    """int64 [S]."""
    entry_targets: Tensor
    """int64 [E]."""
    entry_calls: Tensor
    """int64 [E]: index of the call in this pack, from 0, ascending; all entries of a call are in one pack."""
    entry_advantages: Tensor
    """float64 [E]."""
    entry_weights: Tensor
    """float64 [E]."""
    entry_logprobs: Tensor
    """float64 [E]: behaviour logprobs."""
    entry_teacher: Tensor
    """float64 [E]: the teacher's logprobs; NaN where there is none."""

    def __len__(self) -> int:
        """Number of tokens computed."""
        return len(self.token_ids)

    def to(self, device: torch.device) -> Pack:
        """Returns the pack with its tensors on ``device``."""
        return Pack(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def build_packs(calls: Sequence[TreeCall], token_budget: int) -> list[Pack]:
    """Splits calls into packs of about ``token_budget`` tokens, counted after merging.

    Calls are taken in the order of their token ids, which is depth-first order of their common tree, so that calls
    with a long common prefix land together. A pack whose longest call is over half the budget may grow to twice that
    call instead, and to twice the budget at most: starting another pack would compute most of it again. A call that is
    longer than that is alone with what it contains.

    Args:
        calls: Calls of one policy, over all groups.
        token_budget: Tokens per pack, at least 1. No pack holds more than twice as many, unless its longest call does.

    Returns:
        The packs. They depend on the calls and the budget only, not on the order of the calls with different tokens.
    """
    packs: list[list[TreeCall]] = []
    size = longest = 0
    previous: list[int] = []
    for call in sorted(calls, key=lambda call: call.path):
        path = call.path
        new = len(path) - _common_prefix(previous, path)
        deepest = max(longest, len(path))
        if not packs or size + new > max(token_budget, deepest, 2 * min(token_budget, deepest)):
            packs.append([])
            size, longest, new = 0, 0, len(path)
        packs[-1].append(call)
        size, longest, previous = size + new, max(longest, len(path)), path
    return [build_tree(pack) for pack in packs]


def build_tree(calls: Sequence[TreeCall]) -> Pack:
    """Merges calls into one pack, whatever its size."""
    token_ids: list[int] = []
    parents: list[int] = []
    ends: list[int] = []
    open_nodes: list[int] = []  # nodes of the path that the previous call took, root first
    previous: list[int] = []
    sampled: list[tuple[int, float, int]] = []  # node, temperature, token of each entry
    ordered = sorted(calls, key=lambda call: call.path)
    for call in ordered:
        path = call.path
        shared = _common_prefix(previous, path)
        _close(open_nodes, shared, ends, len(token_ids))
        for token in path[shared:]:
            parents.append(open_nodes[-1] if open_nodes else -1)
            open_nodes.append(len(token_ids))
            token_ids.append(token)
            ends.append(0)
        nodes = open_nodes[len(call.prompt_ids) - 1 :]
        sampled += [(node, call.temperature, token) for node, token in zip(nodes, call.sampled_ids, strict=True)]
        previous = path
    _close(open_nodes, 0, ends, len(token_ids))
    rows = {key: index for index, key in enumerate(sorted({entry[:2] for entry in sampled}))}
    targets = {key: index for index, key in enumerate(sorted(set(sampled)))}
    return Pack(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(list(_depths(parents))),
        parents=torch.tensor(parents),
        ends=torch.tensor(ends),
        row_nodes=torch.tensor([node for node, _ in rows]),
        row_temperatures=torch.tensor([temperature for _, temperature in rows], dtype=torch.float64),
        target_rows=torch.tensor([rows[node, temperature] for node, temperature, _ in targets]),
        target_tokens=torch.tensor([token for _, _, token in targets]),
        entry_targets=torch.tensor([targets[entry] for entry in sampled]),
        entry_calls=torch.tensor([index for index, call in enumerate(ordered) for _ in call.sampled_ids]),
        entry_advantages=_per_token(ordered, lambda call: [call.advantage] * len(call.sampled_ids)),
        entry_weights=_per_token(ordered, lambda call: [call.weight] * len(call.sampled_ids)),
        entry_logprobs=_per_token(ordered, lambda call: call.logprobs),
        entry_teacher=_per_token(ordered, _teacher),
    )


def _per_token(calls: Sequence[TreeCall], values: Callable[[TreeCall], list[float]]) -> Tensor:
    """float64 [E]: what ``values`` gives for each call, one value for each of its sampled tokens."""
    per_token: list[float] = []
    for call in calls:
        of_call = values(call)
        if len(of_call) != len(call.sampled_ids):
            raise ValueError(f"a call of {len(call.sampled_ids)} sampled tokens has {len(of_call)} logprobs")
        per_token += of_call
    return torch.tensor(per_token, dtype=torch.float64)


def _teacher(call: TreeCall) -> list[float]:
    return [math.nan] * len(call.sampled_ids) if call.teacher_logprobs is None else call.teacher_logprobs


def _close(open_nodes: list[int], depth: int, ends: list[int], end: int) -> None:
    """Ends the subtrees of all open nodes below ``depth``."""
    for node in open_nodes[depth:]:
        ends[node] = end
    del open_nodes[depth:]


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by halving: list slices compare at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _depths(parents: list[int]) -> Iterator[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        yield depths[-1]
