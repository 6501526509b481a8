"""The CPU LoRA product equals vLLM's own operators and the plain formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_art_server.serving.cpu_lora import apply_lora, group_rows

# Importing vLLM takes longer than the tests.
pytestmark = pytest.mark.slow

SLOTS, RANK, IN, WIDTHS = 3, 4, 10, (6, 3)


@settings(deadline=None, max_examples=50)
@given(slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=12), seed=st.integers(0, 100))
def test_equals_vllms_operators_for_any_mix_of_adapters(slots: list[int], seed: int) -> None:
    pytest.importorskip("vllm.lora.punica_wrapper.punica_cpu", reason="only the CPU build of vLLM has it")
    from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink

    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor(slots)
    inputs = torch.randn(len(slots), IN, generator=generator)
    before = torch.randn(len(slots), sum(WIDTHS), generator=generator)
    a = tuple(torch.randn(SLOTS, 1, RANK, IN, generator=generator) for _ in WIDTHS)
    b = tuple(torch.randn(SLOTS, 1, width, RANK, generator=generator) for width in WIDTHS)

    output = before.clone()
    apply_lora(output, inputs, a, b, 2.0, WIDTHS, group_rows(index))

    has_adapter = index >= 0
    expected, start = before.clone(), 0
    for a_slice, b_slice, width in zip(a, b, WIDTHS, strict=True):
        rows, which = inputs[has_adapter], index[has_adapter]
        if len(which):
            shrunk = torch.zeros(len(which), RANK)
            bgmv_shrink(rows, a_slice, shrunk, which, 2.0)
            part = expected[has_adapter]
            bgmv_expand_slice(shrunk, b_slice, part, which, start, width, add_inputs=True)
            expected[has_adapter] = part
        start += width
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_rows_without_an_adapter_stay_as_they_are() -> None:
    assert group_rows(torch.tensor([-1, -1])) == []
    ((slot, rows),) = group_rows(torch.tensor([-1, 2, 2]))
    assert slot == 2
    assert rows is not None
    assert rows.tolist() == [1, 2]
    assert group_rows(torch.tensor([1, 1])) == [(1, None)]


def test_a_padded_base_layer_gets_the_columns_of_the_adapter_only() -> None:
    output = torch.zeros(2, 8)
    a, b = torch.ones(1, 1, RANK, IN), torch.ones(1, 1, 5, RANK)
    apply_lora(output, torch.ones(2, IN), (a,), (b,), 1.0, (8,), group_rows(torch.tensor([0, 0])))
    assert output[:, :5].eq(RANK * IN).all()
    assert output[:, 5:].eq(0).all()
