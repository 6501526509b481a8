"""What is recorded of an answer, and what of it the client sees."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langgraph_art_server.serving.adapters import Target
from langgraph_art_server.serving.capture import CallHeader, Capture

HEADER = CallHeader(call_id="c1", attempt=1, run_id="r1", group_id="g1", node="plan|model")
TARGET = Target("desk", 3)
IDS, LOGPROBS = [7, 8, 9], [-0.1, -0.2, -0.3]


def answer(ids: list[int] = IDS, logprobs: list[float] = LOGPROBS, usage: int | None = None) -> dict[str, Any]:
    return {
        "model": "desk@3",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi"},
                "logprobs": {"content": [{"token": "x", "logprob": value} for value in logprobs]},
                "token_ids": ids,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": len(ids) if usage is None else usage},
    }


def chunks(cuts: list[int]) -> list[dict[str, Any]]:
    bounds = [0, *sorted(cuts), len(IDS)]
    parts = [
        {
            "model": "desk@3",
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": "x"},
                    "logprobs": {"content": [{"token": "x", "logprob": value} for value in LOGPROBS[start:end]]},
                    "token_ids": IDS[start:end],
                    "finish_reason": "stop" if end == len(IDS) and start != end else None,
                }
            ],
        }
        for start, end in itertools.pairwise(bounds)
        if start != end
    ]
    parts[0]["prompt_token_ids"] = [1, 2]
    return [*parts, {"model": "desk@3", "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}]


def capture(body: dict[str, Any] | None = None, target: Target = TARGET) -> Capture:
    return Capture(HEADER, {"model": "desk", **(body or {})}, target)


@given(st.lists(st.integers(1, 2), max_size=2, unique=True))
def test_a_stream_is_recorded_like_a_whole_answer(cuts: list[int]) -> None:
    whole, streamed = capture(), capture({"stream": True})
    whole.take(answer())
    sent = [part for part in chunks(cuts) if streamed.take(part)]
    (first,), (second,) = whole.records(), streamed.records()
    assert second.model_copy(update={"created_at": first.created_at}) == first
    assert (first.prompt_ids, first.sampled_ids, first.logprobs) == ([1, 2], IDS, LOGPROBS)
    assert (first.call_id, first.attempt, first.node, first.policy, first.version) == ("c1", 1, "plan|model", "desk", 3)
    assert first.status == "complete"
    assert first.untrainable is None
    assert all(part["choices"] for part in sent), "the usage chunk was not asked for"


def test_the_client_gets_what_it_asked_for_and_nothing_more() -> None:
    plain = answer()
    capture().take(plain)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None
    assert plain["usage"]["completion_tokens"] == 3
    asked = answer()
    capture({"logprobs": True, "return_token_ids": True}).take(asked)
    assert asked == answer()
    usage = chunks([])[-1]
    assert capture({"stream": True, "stream_options": {"include_usage": True}}).take(usage)
    assert usage["usage"]["completion_tokens"] == 3


def test_reasoning_that_the_client_declined_is_taken_out() -> None:
    part = answer()
    part["choices"][0]["message"]["reasoning"] = "hm"
    kept = copy.deepcopy(part)
    capture({"include_reasoning": False}).take(part)
    assert "reasoning" not in part["choices"][0]["message"]
    capture().take(kept)
    assert kept["choices"][0]["message"]["reasoning"] == "hm"


def test_version_zero_is_named_although_the_base_model_answers() -> None:
    part = answer() | {"model": "smollm2"}
    capture(target=Target("desk", 0)).take(part)
    assert part["model"] == "desk@0"


def test_the_request_keeps_what_the_client_set() -> None:
    body = {"model": "desk", "messages": [], "temperature": 0.3, "max_tokens": 9, "include_reasoning": False}
    before = copy.deepcopy(body)
    request = Capture(HEADER, body, TARGET).request("desk@3", max_tokens=99)
    assert request["temperature"] == 0.3
    assert request["max_tokens"] == 9
    assert "max_completion_tokens" not in request
    assert request["include_reasoning"] is True
    assert body == before
    assert capture().request("desk@3", max_tokens=99)["max_completion_tokens"] == 99


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"temperature": 0}, "greedy"),
        ({"temperature": 0.005}, "greedy"),
        ({"use_beam_search": True}, "altered_distribution"),
        ({"temperature": 0.5}, None),
        ({"top_p": 0.9}, "altered_distribution"),
        ({"top_p": 1}, None),
        ({"top_k": 5}, "altered_distribution"),
        ({"top_k": -1}, None),
        ({"min_p": 0.1}, "altered_distribution"),
        ({"frequency_penalty": 0.5}, "altered_distribution"),
        ({"repetition_penalty": 1.1}, "altered_distribution"),
        ({"logit_bias": {"3": 1}}, "altered_distribution"),
        ({"response_format": {"type": "json_object"}}, "constrained"),
        ({"response_format": {"type": "json_object"}, "temperature": 0}, "greedy"),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"regex": "a+"}}, "constrained"),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "auto"}, None),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, "constrained"),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "function"}}, "constrained"),
        ({"tools": [{"function": {"name": "f", "strict": True}}]}, "constrained"),
        ({"tools": [{"function": {"name": "f"}}], "parallel_tool_calls": True}, None),
        ({"tools": [{"function": {"name": "f"}}], "parallel_tool_calls": False}, "constrained"),
        ({"tools": [{"function": {"name": "f", "strict": True}}], "tool_choice": "none"}, None),
        ({"parallel_tool_calls": False}, None),
        ({"stop": ["x"]}, None),
    ],
)
def test_what_cannot_be_trained_says_why(body: dict[str, Any], reason: str | None) -> None:
    call = capture(body)
    call.take(answer())
    assert call.records()[0].untrainable == reason


def test_an_engine_that_holds_tool_calls_to_a_grammar() -> None:
    for tools, reason in (([], None), ([{"function": {"name": "f"}}], "constrained")):
        call = Capture(HEADER, {"model": "desk", "tools": tools}, TARGET, strict_tools=True)
        call.take(answer())
        assert call.records()[0].untrainable == reason


def test_ids_logprobs_and_usage_must_agree() -> None:
    without_usage, other_prompt = answer(), answer()
    del without_usage["usage"]
    other_prompt["usage"]["prompt_tokens"] = 3
    for part in (answer(logprobs=LOGPROBS[:2]), answer(usage=4), without_usage, other_prompt):
        call = capture()
        call.take(part)
        assert call.records()[0].untrainable == "ids_disagree"
    call = capture()
    call.take(answer(ids=[], logprobs=[]))
    assert call.records()[0].untrainable == "no_ids"


def test_an_abandoned_stream_keeps_what_was_sampled() -> None:
    call = capture({"stream": True})
    call.take(chunks([1])[0])
    (record,) = call.records()
    assert (record.status, record.untrainable, record.sampled_ids) == ("abandoned", "abandoned", IDS[:1])
    (never_began,) = capture().records()
    assert (never_began.status, never_began.sampled_ids) == ("abandoned", [])


def test_choices_beyond_the_first_are_not_trained() -> None:
    part = answer(usage=6)
    part["choices"].append(copy.deepcopy(part["choices"][0]) | {"index": 1})
    call = capture({"n": 2})
    call.take(part)
    assert [record.untrainable for record in call.records()] == [None, "unused_choice"]


def test_the_base_model_is_recorded_but_not_trained() -> None:
    call = capture(target=Target(None, None))
    call.take(answer() | {"model": "smollm2"})
    assert call.records()[0].untrainable == "base_model"
