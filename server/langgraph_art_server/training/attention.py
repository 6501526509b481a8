"""Attention over a token tree: each token sees its ancestors and itself, nothing else.

The depth-first order falls into segments: runs of tokens without a fork between them. All that a segment's tokens can
be seen by is the segment itself and what descends from it, which is one stretch of that order, so on the CPU each
segment is one call of the causal flash kernel, and what a token gets from the segments above it is merged by
log-sum-exp. A sliding window shorter than a call puts a mask on each segment. On CUDA FlexAttention gets the same tree
as a block mask. Invariant: without such a window no masked pair is computed beyond the kernels' own blocks and nothing
of the size tokens x tokens exists; with one, :func:`visibility` says for both devices who sees whom.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

TREE_ATTENTION = "langgraph_art_tree"
"""Value of ``attn_implementation`` for models that are to compute token trees."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def visibility(
    positions: Tensor, ends: Tensor, window: int | None
) -> Callable[[object, object, Tensor, Tensor], Tensor]:
    """Makes the function that says which tokens see which, in the form that FlexAttention asks for.

    Args:
        positions: int64 [N], depth of each token, in depth-first order.
        ends: int64 [N], end (exclusive) of each token's subtree.
        window: Number of latest tokens, itself included, that a token sees; ``None`` for all.

    Returns:
        A function of batch and head (unused) and the indices of queries and keys, which broadcast.
    """

    def visible(_batch: object, _head: object, query: Tensor, key: Tensor) -> Tensor:
        ancestor = (key <= query) & (query < ends[key])
        return ancestor if window is None else ancestor & (positions[query] - positions[key] < window)

    return visible


class Tree:
    """The shape of one pack as attention needs it; made once for all layers.

    Args:
        positions: int64 [N], depth of each token, in depth-first order.
        ends: int64 [N], end (exclusive) of each token's subtree.
        keep: Whether layers are computed twice, so that the second time can reuse the first one's attention.
    """

    def __init__(self, positions: Tensor, ends: Tensor, *, keep: bool = False) -> None:
        self._positions, self._ends = positions, ends
        self._depth = int(positions.max()) + 1
        # A token is its predecessor's only child exactly if their subtrees end together.
        starts = [0, *(torch.nonzero(ends[1:] != ends[:-1])[:, 0] + 1).tolist()]
        self._segments = list(zip(starts, [*starts[1:], len(ends)], ends[starts].tolist(), strict=True))
        self._windowed: dict[int, list[Segment]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}
        self.keep = keep
        self.kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        """By layer, output and log-sum-exp: small next to what they cost."""

    def segments(self, window: int | None, dtype: torch.dtype) -> list[Segment]:
        """The tree cut at its forks, in depth-first order; masks in ``dtype``."""
        if window is None or window >= self._depth:
            return [(*bounds, None, None) for bounds in self._segments]
        if window not in self._windowed:
            visible = visibility(self._positions, self._ends, window)
            index = torch.arange(len(self._ends))
            self._windowed[window] = []
            for start, stop, end in self._segments:
                seen = visible(None, None, index[start:end, None], index[None, start:stop])
                mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
                self._windowed[window].append((start, stop, end, mask[None, None], ~seen.any(-1)))
        return self._windowed[window]

    def block_mask(self, window: int | None) -> BlockMask:
        """The tree for FlexAttention."""
        if window is not None and window >= self._depth:
            window = None
        if window not in self._block_masks:
            size, device = len(self._ends), self._ends.device
            visible = visibility(self._positions, self._ends, window)
            # Compiled, because it would make several tensors of tokens x tokens otherwise.
            self._block_masks[window] = create_block_mask(
                visible, None, None, size, size, device=str(device), _compile=device.type == "cuda"
            )
        return self._block_masks[window]


Segment = tuple[int, int, int, Tensor | None, Tensor | None]
"""Start of its tokens, their stop, end of its subtree; with a window also the mask [1, 1, end - start, stop - start] to
add to the scores, and which queries [end - start] see none of its tokens."""

_NOTHING = -1e30
"""Log-sum-exp over no keys. Finite, because two of them are subtracted from each other."""


class _FlashOverSegments(torch.autograd.Function):
    """Heads that share keys are laid along the kernel's batch dimension: its strides then need no copy of the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tree: Tree,
        layer: nn.Module,
        window: int | None,
        scale: Any,
    ) -> Tensor:
        tokens, key_heads = key.shape[2], key.shape[1]
        query = query[0].unflatten(0, (key_heads, -1)).transpose(0, 1)  # [R, G, N, dim]
        key, value = (x.expand(len(query), -1, -1, -1) for x in (key, value))
        segments = tree.segments(window, query.dtype)
        kept = tree.kept.pop(layer, None)
        if kept is None:
            kept = _forward(query, key, value, segments, scale)
            if tree.keep:
                tree.kept[layer] = kept
        output, total = kept
        ctx.save_for_backward(query, key, value, output, total)
        ctx.segments, ctx.scale = segments, scale
        return output.permute(2, 1, 0, 3).reshape(1, tokens, key_heads * len(query), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        repeats, key_heads, tokens, dim = query.shape
        slope = gradients[0][0].unflatten(1, (key_heads, repeats)).permute(2, 1, 0, 3)
        query_slope = torch.zeros_like(output)
        key_slope = key.new_empty(tokens, key_heads, dim).transpose(0, 1)
        value_slope = torch.empty_like(key_slope)
        for start, stop, end, mask, _ in ctx.segments:
            rows, keys = slice(start, end), slice(start, stop)
            # With the merged output and log-sum-exp the kernel's gradients are this segment's share of the whole.
            for_query, for_key, for_value = _flash_backward(
                *(slope[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys]),
                *(output[:, :, rows], total[:, :, rows], 0.0, mask is None),
                attn_mask=mask,
                scale=ctx.scale,
            )
            query_slope[:, :, rows] += for_query
            torch.sum(for_key, 0, out=key_slope[:, keys])
            torch.sum(for_value, 0, out=value_slope[:, keys])
        query_slope = query_slope.transpose(0, 1).reshape(1, key_heads * repeats, tokens, dim)
        return query_slope, key_slope[None], value_slope[None], None, None, None, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, segments: list[Segment], scale: float | None
) -> tuple[Tensor, Tensor]:
    repeats, key_heads, tokens, dim = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)  # in which parts are merged
    merged = query.new_zeros(tokens, key_heads, repeats, dim, dtype=dtype).permute(2, 1, 0, 3)
    total = query.new_full((repeats, key_heads, tokens), _NOTHING, dtype=dtype)  # log-sum-exp so far
    for start, stop, end, mask, blind in segments:
        rows, keys = slice(start, end), slice(start, stop)
        part, log_sum = _flash(
            query[:, :, rows], key[:, :, keys], value[:, :, keys], 0.0, mask is None, attn_mask=mask, scale=scale
        )
        if blind is not None:
            log_sum.masked_fill_(blind, _NOTHING)  # the kernel says 0
        merged[:, :, rows].lerp_(part.to(dtype), torch.sigmoid(log_sum - total[:, :, rows])[..., None])
        torch.logaddexp(total[:, :, rows], log_sum, out=total[:, :, rows])
    return merged.to(query.dtype), total


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: float | None
) -> Tensor:
    """Attends with FlexAttention: compiled on CUDA; on the CPU interpreted and without gradient, for tests.

    Args:
        query: [1, heads, N, dim].
        key: [1, key heads, N, dim].
        value: As ``key``.
        block_mask: From :meth:`Tree.block_mask`.
        scale: Factor on the scores; ``None`` means ``dim ** -0.5``.

    Returns:
        [1, N, heads, dim].
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats & (repeats - 1):  # the kernels take groups of 1, 2, 4, 8 ... queries per key only
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    flex: Callable[..., Tensor] = _compiled_flex() if query.is_cuda else flex_attention  # type: ignore[assignment]
    return flex(query, key, value, block_mask=block_mask, scale=scale, enable_gqa=True).transpose(1, 2)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    tree: Tree,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attends over a tree, in the form in which ``transformers`` calls attention.

    Args:
        module: The attention layer. Dropout is off: the result must not depend on chance.
        query: [1, heads, N, dim].
        key: [1, key heads, N, dim], each shared by ``heads / key heads`` queries.
        value: As ``key``.
        attention_mask: Unused; the tree says who sees whom.
        tree: Reaches this through the model as a keyword argument.
        scaling: Factor on the scores; ``None`` means ``dim ** -0.5``.
        sliding_window: Number of latest tokens of its call that a token sees; ``None`` for all.

    Returns:
        [1, N, heads, dim], and ``None`` in the place of attention weights.
    """
    if query.is_cuda:
        return flex_tree_attention(query, key, value, tree.block_mask(sliding_window), scaling), None
    output: Tensor = _FlashOverSegments.apply(query, key, value, tree, module, sliding_window, scaling)  # type: ignore[no-untyped-call]
    return output, None


AttentionInterface.register(TREE_ATTENTION, tree_attention)
