from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langgraph_art_server.training.advantages import group_advantages


def test_hand_computed() -> None:
    groups = [[1.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0]]
    assert group_advantages(groups, "none") == [[0.5, -0.5, -0.5, 0.5], [2.0, -1.0, -1.0]]

    first, second = group_advantages(groups, "group")
    deviation = math.sqrt(4 * 0.25 / 3)  # ddof = 1
    assert first == pytest.approx([value / (deviation + 1e-4) for value in (0.5, -0.5, -0.5, 0.5)], rel=1e-12)
    assert second == pytest.approx([value / (math.sqrt(3) + 1e-4) for value in (2, -1, -1)], rel=1e-12)

    # All seven rewards about their common mean 5/7: sum of squares 11 - 25/7 = 52/7.
    first, second = group_advantages(groups, "batch")
    deviation = math.sqrt(52 / 7 / 6)
    assert first == pytest.approx([value / (deviation + 1e-4) for value in (0.5, -0.5, -0.5, 0.5)], rel=1e-12)
    assert second == pytest.approx([value / (deviation + 1e-4) for value in (2, -1, -1)], rel=1e-12)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_float_noise_is_no_signal(scale: str) -> None:
    assert sum([0.1] * 3) / 3 != 0.1, "the example must have a mean that is off by a rounding error"
    noisy = [0.1 + 0.2, 0.3, 0.3]
    equal, near, other = group_advantages([[0.1] * 3, noisy, [0.0, 1.0]], scale)
    assert equal == [0.0, 0.0, 0.0]
    assert near == [0.0, 0.0, 0.0]
    assert other is not None
    assert other[0] < -0.1


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_only_equal_groups_in_batch(scale: str) -> None:
    assert group_advantages([[0.1] * 3, [0.7] * 5], scale) == [[0.0] * 3, [0.0] * 5]


def test_groups_under_two_runs() -> None:
    assert group_advantages([[1.0], [], [1.0, 3.0]], "none") == [None, None, [-1.0, 1.0]]
    # They take no part in the batch's deviation: that of 1 and 3 is sqrt(2).
    *_, values = group_advantages([[100.0], [], [1.0, 3.0]], "batch")
    assert values == pytest.approx([-1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4)])


def test_reward_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match="group 1 has a reward that is not a finite number"):
        group_advantages([[0.0, 1.0], [math.nan, 1.0]], "group")


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6), min_size=1, max_size=4),
    st.sampled_from(["none", "group", "batch"]),
)
def test_centred_and_ordered_as_rewards(groups: list[list[float]], scale: str) -> None:
    for rewards, values in zip(groups, group_advantages(groups, scale), strict=True):
        assert values is not None
        assert math.fsum(values) == pytest.approx(0, abs=1e-5 * max(1, *map(abs, values)))
        ranked = sorted(zip(rewards, values, strict=True))
        assert [value for _, value in ranked] == sorted(values)
