"""Makes vLLM's LoRA layers fast on CPU: one matrix product for each adapter instead of a gather for each token.

vLLM's CPU build copies both adapter matrices of every token before it multiplies, the vocabulary-sized ones included.
Sorting the batch by adapter first does the same arithmetic with plain products. Loaded into the engine with
``--worker-extension-cls``.

Invariant: the result equals vLLM's own up to float rounding, whatever mix of adapters a batch holds.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Groups = list[tuple[int, "torch.Tensor | None"]]
"""For each adapter slot in the batch the rows that use it; ``None`` means all rows."""


class WorkerExtension:
    """What vLLM mixes into its worker. Importing this module is what matters."""


def group_rows(slots: torch.Tensor) -> Groups:
    """Rows of a batch by adapter slot.

    Args:
        slots: int tensor [rows]; -1 for rows without an adapter.
    """
    present = torch.unique(slots).tolist()
    if len(present) == 1:
        return [] if present[0] < 0 else [(present[0], None)]
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in present if slot >= 0]


def apply_lora(
    output: torch.Tensor,
    inputs: torch.Tensor,
    a_stacked: tuple[torch.Tensor, ...],
    b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    widths: tuple[int, ...],
    groups: Groups,
) -> None:
    """Add ``scale * inputs @ A.T @ B.T`` to ``output`` in place, slice by slice, with each row's own adapter.

    Args:
        output: [rows, sum(widths)].
        inputs: [rows, in].
        a_stacked: for each slice [slots, 1, rank, in].
        b_stacked: for each slice [slots, 1, width, rank].
        scale: factor on the update.
        widths: width of each slice of ``output``.
        groups: from :func:`group_rows`.
    """
    output = output.view(-1, output.shape[-1])
    inputs = inputs.view(-1, inputs.shape[-1])
    for slot, rows in groups:
        selected = inputs if rows is None else inputs[rows]
        # All slices read the same input, so their A matrices are one product.
        matrices = [a[slot].reshape(-1, a.shape[-1]) for a in a_stacked]
        shrunk = (selected.to(matrices[0].dtype) @ torch.cat(matrices).T).split([len(a) for a in matrices], dim=1)
        start = 0
        for hidden, b_all, width in zip(shrunk, b_stacked, widths, strict=True):
            b = b_all[slot].reshape(-1, b_all.shape[-1])
            # The base layer may be padded to more columns than the adapter has.
            columns = min(width, b.shape[0])
            target = output[:, start : start + columns]
            if rows is None and target.dtype == hidden.dtype:
                target.addmm_(hidden, b[:columns].T, alpha=scale)
            else:
                update = (hidden @ b[:columns].T).to(output.dtype)
                everyone = torch.arange(len(target), device=target.device) if rows is None else rows
                target.index_add_(0, everyone, update, alpha=scale)
            start += width


_update_metadata = PunicaWrapperCPU.update_metadata


def _update_metadata_and_group(self: Any, *args: Any, **kwargs: Any) -> None:
    _update_metadata(self, *args, **kwargs)
    self.token_groups = group_rows(self.token_lora_indices)
    self.sampler_groups = group_rows(self.sampler_indices)


def _add_lora_linear(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    apply_lora(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, self.token_groups)


def _add_lora_logits(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: torch.Tensor,
    lora_b_stacked: torch.Tensor,
    scale: float,
    **_: Any,
) -> None:
    apply_lora(y, x, (lora_a_stacked,), (lora_b_stacked,), scale, (y.shape[-1],), self.sampler_groups)


PunicaWrapperCPU.update_metadata = _update_metadata_and_group  # type: ignore[method-assign]
PunicaWrapperCPU.add_lora_linear = _add_lora_linear  # type: ignore[method-assign]
PunicaWrapperCPU.add_lora_logits = _add_lora_logits  # type: ignore[method-assign]
