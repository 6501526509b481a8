"""Attention over a token tree: each token sees its ancestors and itself, nothing else.

The depth-first order is cut into blocks. All that the tokens of a block can see is the path to its first token and the
block itself, so each block attends to those few keys under a small mask. This is exact wherever the cuts are, and the
work grows with the depth of the tree, not with the size of the pack. Invariant: this is the only place that knows how
the tree becomes attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

TREE_ATTENTION = "langgraph_art_tree"
"""Value of ``attn_implementation`` for models that are to compute token trees."""

BLOCK_TOKENS = 128
"""Usual length of a block. Shorter ones waste less on masked pairs, longer ones call the kernel less often."""


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of a tree in depth-first order and what they can see."""

    start: int
    stop: int
    keys: Tensor
    """int64 [K]: the path to the first token, then the tokens of the block."""
    mask: Tensor
    """[1, 1, stop - start, K]: 0 where the key is an ancestor of the token or the token itself, else -inf."""


def tree_blocks(positions: Tensor, ends: Tensor, dtype: torch.dtype, block_tokens: int = BLOCK_TOKENS) -> list[Block]:
    """Cuts a tree into blocks of about ``block_tokens`` tokens, preferably where it is shallow.

    Args:
        positions: int64 [N], depth of each token, in depth-first order.
        ends: int64 [N], end (exclusive) of each token's subtree.
        dtype: Type of the queries.
        block_tokens: Blocks are between half and one and a half times as long; the last may be shorter.
    """
    depths = positions.tolist()
    index = torch.arange(len(depths), device=ends.device)
    blocks = []
    start = 0
    while start < len(depths):
        stop = len(depths)
        if stop - start > block_tokens:
            cuts = range(start + max(1, block_tokens // 2), min(stop, start + block_tokens * 3 // 2 + 1))
            stop = min(cuts, key=lambda cut: (depths[cut], -cut))
        keys = index[:stop][ends[:stop] > start]
        queries = index[start:stop, None]
        visible = (keys <= queries) & (queries < ends[keys])
        # Additive, because the kernels would turn a boolean mask into this once more for every layer.
        mask = torch.zeros(visible.shape, dtype=dtype, device=ends.device).masked_fill_(~visible, -torch.inf)
        blocks.append(Block(start, stop, keys, mask[None, None]))
        start = stop
    return blocks


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    tree: list[Block],
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attends over a tree, in the form in which ``transformers`` calls attention.

    Args:
        module: The attention layer. Dropout is off: the result must not depend on chance.
        query: [1, heads, N, dim].
        key: [1, key heads, N, dim], each shared by ``heads / key heads`` queries.
        value: As ``key``.
        attention_mask: Unused; the blocks carry their masks.
        tree: What :func:`tree_blocks` made; reaches this through the model as a keyword argument.
        scaling: Factor on the scores; ``None`` means ``dim ** -0.5``.

    Returns:
        [1, N, heads, dim], and ``None`` in the place of attention weights.
    """
    repeats = query.shape[1] // key.shape[1]
    outputs = [
        nn.functional.scaled_dot_product_attention(
            query[:, :, block.start : block.stop],
            key.index_select(2, block.keys).repeat_interleave(repeats, dim=1),
            value.index_select(2, block.keys).repeat_interleave(repeats, dim=1),
            attn_mask=block.mask,
            scale=scaling,
        ).transpose(1, 2)
        for block in tree
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(TREE_ATTENTION, tree_attention)
